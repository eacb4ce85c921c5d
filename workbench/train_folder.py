"""The folder of one training run: what it is a run of, its metrics, its checkpoints, and what makes it go on where it was.

    run.json            what this is a run of (settings, fingerprints of all inputs) and every session that worked on it
    metrics.jsonl       one step record a line
    tensorboard/        the same for TensorBoard
    step-0000120/       a checkpoint: a drafter that opens anywhere, and training_state.pt
    progress.json       the checkpoint to resume from and where the run was then
    drafter             link to the checkpoint to use: the best on held-out states, else the newest

Notable: a checkpoint appears whole or not at all, progress.json after it, and metrics.jsonl is cut back to it on resuming, so a run that
was killed anywhere continues as if nothing had happened. Only the checkpoints to resume from and to use are kept. Of several processes
only the main one writes.
"""

import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from workbench.drafter import Drafter
from workbench.errors import InputError
from workbench.mapping import VocabMap
from workbench.runs import atomic_file, atomic_folder, check_destination, disk_errors
from workbench.states import States
from workbench.texts import flat
from workbench.train_settings import TrainSettings
from workbench.verifier import Teacher

RECORD, METRICS, PROGRESS, STATE = "run.json", "metrics.jsonl", "progress.json", "training_state.pt"
USE = "drafter"


def identity(
    settings: TrainSettings,
    drafter: Drafter,
    teacher: Teacher,
    vocab_map: VocabMap,
    states: States,
    held_out: States | None,
    only_rows: np.ndarray | None,
) -> dict[str, Any]:
    """What a run is a run of, by content: equal on every machine, whatever the paths."""
    return {
        "kind": "training run",
        "settings": dataclasses.asdict(settings),
        "drafter": _digest(drafter.state_dict()),
        "verifier": _digest({**teacher.norm.state_dict(), "rows": teacher.rows(torch.tensor(vocab_map.ids))}),
        "map": {"fingerprint": vocab_map.fingerprint, "k": vocab_map.k, "v": vocab_map.v},
        "states": _states_digest(states),
        "held_out": _states_digest(held_out) if held_out is not None else None,
        "only_rows": int(only_rows.sum()) if only_rows is not None else None,
    }


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _states_digest(states: States) -> str:
    """sha256 of what an extraction of ours recorded (verifier, texts, taps), else of names and sizes of the files."""
    files = [] if states.record else sorted((str(p.relative_to(states.folder)), p.stat().st_size) for p in states.folder.rglob("*"))
    return hashlib.sha256(json.dumps([states.record, files], sort_keys=True).encode()).hexdigest()


class TrainFolder:
    """A run folder, claimed for this process."""

    def __init__(self, out: Path, identity: Mapping[str, Any], session: Mapping[str, Any]):
        """Start or resume the run that `identity` describes; InputError when `out` holds anything else, or another process works there."""
        self.out = Path(out).expanduser().absolute()
        record = self.out / RECORD
        if not record.is_file():
            if not (self.out.is_dir() and all(_leftover(path) for path in self.out.iterdir())):
                check_destination(self.out)
            with disk_errors(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
        known = _read(record) if record.is_file() else {**identity, "sessions": []}
        _refuse_other_run(self.out, known, identity)
        self._lock = _locked(self.out)
        try:
            self._clean()
            _write_json(record, {**known, "sessions": [*known["sessions"], dict(session)]})
        except BaseException:
            self.close()
            raise

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.out / read_progress(self.out)["last"]

    def save(self, step: int, progress: Mapping[str, Any], write: Callable[[Path], None], use: bool) -> None:
        """Add the checkpoint of `step`, filled by `write`, and what to know when resuming from it; `use` makes it the drafter to use."""
        name = f"step-{step:07d}"
        if not (self.out / name).exists():
            with atomic_folder(self.out / name) as work:
                write(work)
        known = read_progress(self.out)
        _write_json(self.out / PROGRESS, {"last": name, USE: name if use or known is None else known[USE], "progress": dict(progress)})
        self._clean()

    def _clean(self) -> None:
        """Remove what a killed process left and checkpoints that nothing refers to any more; set the link."""
        known = read_progress(self.out) or {}
        for path in self.out.iterdir():
            orphan = path.name.startswith("step-") and path.name not in known.values()
            if orphan or (_leftover(path) and path.name != ".lock"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if known:
            aside = self.out / f".{USE}.partial-link"
            aside.symlink_to(known[USE])
            aside.replace(self.out / USE)

    def refuse_small_disk(self, needed: int) -> None:
        """InputError when fewer bytes are free than two checkpoints take."""
        free = shutil.disk_usage(self.out).free
        if free < needed:
            raise InputError(f"{self.out} needs {needed / 1e9:.2f} GB for two checkpoints, {free / 1e9:.2f} GB are free: free space first")

    def cut(self, lines: int) -> None:
        """Keep the first so many lines of the metrics."""
        path = self.out / METRICS
        whole = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
        if len(whole) < lines:
            raise InputError(f"{path} has {len(whole)} lines, the checkpoint was saved after {lines}: it was cut or replaced; start anew")
        with atomic_file(path, replace=True) as work:
            work.write_text("".join(whole[:lines]), "utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        with disk_errors(self.out / METRICS), open(self.out / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Let others in."""
        self._lock.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The step records of a run folder; a last line that is being written is left out."""
    with open(Path(out) / METRICS, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def summary(out: Path) -> dict[str, Any]:
    """What a run came to: figures of the drafter to use on held-out states, or of the last step where none were given."""
    records, out = read_metrics(out), Path(out)
    steps = [r for r in records if r["phase"] == "train"]
    best = [r for r in records if r["best"]] or steps
    found = best[-1] if best else dict.fromkeys(("loss", "full_acc_k", "cond_acc_k", "accept_length_simulated"))
    busy = sum((r["tokens"] - before) / r["tokens_per_s"] for before, r in zip([0, *(s["tokens"] for s in steps)], steps, strict=False))
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "loss": found["loss"],
        "full_acc": found["full_acc_k"],
        "cond_acc": found["cond_acc_k"],
        "accept_length_simulated": found["accept_length_simulated"],
        "seconds": round(records[-1]["seconds"], 1) if records else 0.0,
        "tokens_per_s": round(steps[-1]["tokens"] / busy, 1) if busy else None,
        "out": str(out),
    }


def read_progress(out: Path) -> dict[str, Any] | None:
    """The checkpoints `last` and `drafter` by name, and the progress at the former; None before the first."""
    path = Path(out) / PROGRESS
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path, replace=True) as work:
        work.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _leftover(path: Path) -> bool:
    """What a killed process may leave behind in a folder of ours."""
    return path.name == ".lock" or (path.name.startswith(".") and ".partial-" in path.name)


def _locked(out: Path) -> TextIO:
    lock = open(out / ".lock", "w")  # noqa: SIM115 - held until the run is closed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InputError(f"another process is training in {out}: wait for it, stop it, or choose another folder") from error
    return lock


def _read(record: Path) -> dict[str, Any]:
    try:
        known = json.loads(record.read_text("utf-8"))
        if isinstance(known["sessions"], list) and known["kind"] == "training run":
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # said below
    raise InputError(f"{record} is not the record of a training run: nothing was written; choose a new folder")


def _refuse_other_run(out: Path, known: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """InputError naming every setting and input in which the run of a folder differs from the one that is asked for."""
    old, new = (flat({k: v for k, v in d.items() if k != "sessions"}) for d in (known, wanted))
    differing = [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in {**old, **new} if old.get(name) != new.get(name)]
    if differing:
        raise InputError(
            f"{out} holds another training run: {'; '.join(differing[:5])}: repeat its command to resume it, or choose a new folder"
        )
