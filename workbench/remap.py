"""Carry a drafter to another draft vocabulary: move its head's rows, make the missing ones, leave every other byte as it is.

Notable:
* A head's row means the token that its map gives it, so a new map without moved rows asks every row for another token. Rows here travel by
  token (remap_plan.py): the row of a shared token is copied bit for bit.
* Streaming: tensors pass through in pieces, head rows `initialise.CHUNK` at a time. The dialect and all names stay.
* `remap.json` beside the weights records both maps, the sha256 of the weights and how each missing row was made; `remap_rows.npy` holds the
  parent's row of each new one, -1 where it was made. With both, anyone can prove later which map the head follows.
"""

import json
import platform
import resource
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench import initialise
from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier, write_checkpoint
from workbench.errors import InputError
from workbench.initialise import Rows, chunks
from workbench.lineage import HeadRows, lineage
from workbench.mapfiles import map_from_tensors, read_raw
from workbench.mapping import VocabMap
from workbench.remap_plan import Plan, alternatives, plan
from workbench.runs import atomic_folder, check_destination, sha256_flushed
from workbench.weights import DTYPES, TensorInfo, narrow, stored_pieces

INITS = ("auto", "verifier", "mean", "random", "ridge", "procrustes", "omp", "logit-ls", "stitch")
NEEDS_VERIFIER = ("verifier", "ridge", "procrustes", "omp", "logit-ls", "stitch")
NEEDS_STATES = ("logit-ls", "stitch")
RECORD, SOURCES = "remap.json", "remap_rows.npy"
Progress = Callable[[str], None]


class Method(NamedTuple):
    """How the missing rows are made: the rows, the method's name, why it was chosen, and what the fit found."""

    rows: Rows
    name: str
    reason: str
    details: dict[str, Any]


def remap(
    drafter: str | Path | DrafterCheckpoint,
    to: str | Path | VocabMap,
    *,
    out: str | Path,
    verifier: str | Path | None = None,
    init: str = "auto",
    states: str | Path | None = None,
    match_norms: bool | None = None,
    counts: np.ndarray | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Write `drafter` with the vocabulary `to` into the new folder `out` and return the report (also remap.json there).

    to: a map, anything that `read_map` reads, or "full" for all V tokens. init: one of INITS; auto says why in `init_reason`.
    states: a folder of stored hidden states of `verifier`, for stitch and logit-ls. match_norms: give made rows the mean norm of the kept
    ones (None: only after ridge, which shrinks rows). counts: token counts, integer [V] or [slices, V], that score the `alternatives` in
    the record. Raises InputError, with nothing written, when something does not fit.
    """
    begun = time.monotonic()
    out = check_destination(Path(out))
    if init not in INITS:
        raise InputError(f"unknown --init {init!r}: expected one of {', '.join(INITS)}")
    parent = drafter if isinstance(drafter, DrafterCheckpoint) else open_drafter(drafter)
    model = open_verifier(verifier) if verifier is not None else None
    head = _movable_head(parent)
    planned = plan(map_from_tensors(*parent.map_raw(), parent.k, parent.v, parent.location), _wanted(to, parent))
    choices = alternatives(planned.parent, planned.target, counts)
    old = HeadRows(parent, "lm_head.weight", planned.parent)
    if model is not None:
        _check_verifier(model, planned, old.width, init)
    method = _method(init, planned, old, model, states, seed, progress)
    if match_norms or (match_norms is None and method.name == "ridge"):
        method = method._replace(
            rows=initialise.match_norms(method.rows, old, planned.shared), details=method.details | {"norms": "matched"}
        )
    with atomic_folder(out) as folder:
        entries = _entries(parent, planned, head, _rows(planned, head, old, method.rows, progress))
        (weights,) = write_checkpoint(folder, entries, _config(parent, planned.target, model))
        progress("checksum of the weights")
        digest = sha256_flushed(weights)
        np.save(folder / SOURCES, planned.source.astype(np.int32))
        record = _record(parent, planned, method, model, out, seed) | {"sha256": digest, "seconds": round(time.monotonic() - begun, 2)}
        record["alternatives"] = choices
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record | {"seconds": round(time.monotonic() - begun, 2), "peak_rss_mb": _peak_rss_mb()}


ALTERNATIVES = {"keep": "the vocabulary it has", "remap": "this one", "full": "every token (--to full)"}


def report_text(r: dict[str, Any]) -> str:
    """The report of `remap` for people."""
    lines = [
        f"rows kept        {r['rows_kept']:,} of {r['rows_total']:,}: {r['rows_moved']:,} moved, {r['rows_same_position']:,} stay in place",
        f"rows made        {r['rows_initialised']:,} by {r['init']}: {r['init_reason']}",
    ]
    lines.append("what to serve instead, and how large its head is:")
    for choice in r["alternatives"]:
        score = "" if choice["coverage"] is None else f", covers {choice['coverage']:.2%}"
        lines.append(
            f"  {ALTERNATIVES[choice['name']]:<24} {choice['rows']:>9,} rows, {choice['head_size']:.2f} x the old head, "
            f"{choice['rows_initialised']:,} made{score}"
        )
    return "\n".join([*lines, f"{r['dialect']} folder in {r['seconds']} s, peak memory {r['peak_rss_mb']:.0f} MB: {r['out']}"])


def initialised_rows(folder: str | Path) -> np.ndarray | None:
    """Mask bool [K] of the rows that a remap made, for a warm-up that trains them alone; None when the folder is no remap's result."""
    path = Path(folder) / SOURCES
    return np.load(path, allow_pickle=False) < 0 if path.is_file() else None


# ---- what is to be done


def _wanted(to: str | Path | VocabMap, parent: DrafterCheckpoint) -> VocabMap:
    """The map to carry over to; a map that does not say its V takes the parent's."""
    if isinstance(to, VocabMap):
        return to
    if str(to) == "full":
        return VocabMap(np.arange(parent.v), parent.v)
    raw = read_raw(to)
    return map_from_tensors(*(raw if raw.t2d is not None or raw.v is not None else raw._replace(v=parent.v)))


def _movable_head(parent: DrafterCheckpoint) -> TensorInfo:
    """The parent's head, or InputError when its rows cannot be moved or made."""
    if "lm_head.weight" not in parent.names:
        raise InputError(
            f"{parent.location} has no lm_head.weight: engines lend it the verifier's, so there is no row to move; give it a head first"
        )
    head = parent.info("lm_head.weight")
    if head.dtype not in ("BF16", "F16", "F32"):
        raise InputError(
            f"{parent.location}: lm_head.weight is {head.dtype}, whose rows mean nothing without their scales: dequantise the drafter first"
        )
    if "lm_head.bias" in parent.names:
        raise InputError(f"{parent.location} has lm_head.bias, which no EAGLE-3 engine applies: fold it away or export the head without it")
    return head


def _check_verifier(model: VerifierCheckpoint, planned: Plan, width: int, init: str) -> None:
    """InputError when the verifier's head cannot serve the plan."""
    info = model.info(model.head)
    if info.dtype not in ("BF16", "F16", "F32"):
        raise InputError(
            f"{model.location}: its head {info.name} is quantised ({info.dtype}): expected a float head; give a dequantised one"
        )
    if info.shape[0] < planned.target.v:
        raise InputError(
            f"{model.location}: its head {info.name} has {info.shape[0]} rows but the map has V = {planned.target.v}: rows are missing, or "
            "it is another verifier; give the one that the map was made for"
        )
    if init == "verifier" and info.shape[1] != width:
        raise InputError(
            f"{model.location}: its head is {info.shape[1]} wide and the drafter's {width}: rows cannot be copied; choose --init ridge"
        )


def _method(
    init: str,
    planned: Plan,
    old: HeadRows,
    model: VerifierCheckpoint | None,
    states: str | Path | None,
    seed: int,
    progress: Progress,
) -> Method:
    """The initialiser asked for, or for auto the one that the inputs allow and the head's lineage calls for."""
    shared, missing = planned.shared, planned.missing
    reason = "asked for"
    if not len(missing):
        return Method(old, "none", "every token of the new map has a row already", {})
    if init == "auto":
        init, reason = _choose(old, model, planned, states)
        progress(f"init {init}: {reason}")
    if init in NEEDS_VERIFIER and model is None:
        raise InputError(f"--init {init} makes rows from the verifier's head: name it with --verifier, or choose mean or random")
    if init in NEEDS_STATES and states is None:
        raise InputError(f"--init {init} needs stored hidden states: name their folder with --states (workbench extract makes one)")
    if model is None:
        return Method(initialise.mean(old, shared) if init == "mean" else initialise.random(old, shared, seed), init, reason, {})
    new = HeadRows(model, model.head)
    if init == "ridge":
        rows, unexplained = initialise.ridge(new, old, shared, progress)
        return Method(rows, init, reason, {"unexplained": unexplained})
    if init in NEEDS_STATES:
        from workbench.state_pairs import paired_states

        pairs = paired_states(old.checkpoint, model, states, progress)
        if init == "stitch":
            fit = initialise.stitch(pairs, new, old, shared, missing)
        else:
            fit = initialise.logit_ls(pairs, new, old, shared, missing, initialise.procrustes(new, old, shared, progress))
        return Method(fit.rows, init, reason, {"tokens": fit.tokens, "penalty": fit.penalty})
    simple: dict[str, Callable[[], Rows]] = {
        "verifier": lambda: new,
        "mean": lambda: initialise.mean(old, shared),
        "random": lambda: initialise.random(old, shared, seed),
        "procrustes": lambda: initialise.procrustes(new, old, shared, progress),
        "omp": lambda: initialise.omp(new, old, shared, progress),
    }
    return Method(simple[init](), init, reason, {})


def _choose(old: HeadRows, model: VerifierCheckpoint | None, planned: Plan, states: str | Path | None) -> tuple[str, str]:
    """The initialiser for `auto`, and why."""
    if model is None:
        return "mean", "no verifier was given, so nothing is known about the missing tokens (--verifier makes them from its head)"
    found = lineage(old, HeadRows(model, model.head), planned.parent)
    if found.verdict in ("tied", "tied-then-trained"):
        return "verifier", f"the head is {found.verdict}: {found.sentence}"
    if states is not None:
        return "stitch", f"the head is {found.verdict} ({found.sentence}), and hidden states are there"
    if len(planned.shared) < old.width:
        return "mean", f"the head is {found.verdict} and only {len(planned.shared)} shared rows of width {old.width} cannot fix a rotation"
    return "procrustes", f"the head is {found.verdict} ({found.sentence}), so verifier rows must be turned into its basis"


# ---- writing


def _entries(parent: DrafterCheckpoint, planned: Plan, head: TensorInfo, rows: Iterator[np.ndarray]) -> Iterator[tuple]:
    """Every tensor of the result for the writer: the head from `rows`, the map anew, all else as it is."""
    names = {name: parent.names.get(name, name) for name in ("d2t", "t2d")}
    for disk, info in parent.tensors.items():
        if disk == head.name:
            yield disk, head.dtype, (planned.target.k, head.shape[1]), rows
        elif disk not in names.values():
            yield disk, info.dtype, info.shape, stored_pieces(parent.place, info)
    if planned.target.k < planned.target.v:  # engines have no place for the map of a full vocabulary
        yield names["d2t"], "I64", (planned.target.k,), [planned.target.d2t]
        yield names["t2d"], "BOOL", (planned.target.v,), [planned.target.t2d]


def _rows(planned: Plan, head: TensorInfo, old: HeadRows, made: Rows, progress: Progress) -> Iterator[np.ndarray]:
    """The new head chunk by chunk as stored bits: kept rows as they are, missing ones from `made`."""
    done = 0
    for ids in chunks(planned.target.ids):
        source = planned.parent.row_of[ids]
        bits = np.empty((len(ids), head.shape[1]), DTYPES[head.dtype].numpy)
        kept, new = ids[source >= 0], ids[source < 0]
        bits[source >= 0] = old.stored(kept)
        if len(new):
            copied = isinstance(made, HeadRows) and made.dtype == head.dtype
            bits[source < 0] = made.stored(new) if copied else narrow(made(new), head.dtype)
        wrong = np.flatnonzero(_not_finite(bits, head.dtype))
        if wrong.size:
            row = int(source[wrong[0]])
            origin = f"row {row} of {old.checkpoint.location}" if row >= 0 else "the row made for it"
            raise InputError(
                f"token {int(ids[wrong[0]])}: {origin} holds NaN or infinity: expected finite rows (speculators replaces a whole head that "
                "holds one NaN); mend it first"
            )
        done += len(ids)
        if done % (8 * len(ids)) == 0 or done == planned.target.k:
            progress(f"head rows written: {done:,} of {planned.target.k:,}")
        yield bits


def _not_finite(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Which rows of stored bits hold NaN or infinity, bool [n]: those with an exponent of all ones."""
    exponent, unsigned = {"BF16": (0x7F80, np.uint16), "F16": (0x7C00, np.uint16), "F32": (0x7F800000, np.uint32)}[dtype]
    return ((bits.view(unsigned) & unsigned(exponent)) == exponent).any(axis=1)


def _config(parent: DrafterCheckpoint, target: VocabMap, model: VerifierCheckpoint | None) -> dict[str, Any]:
    """The parent's config with the new K and, where the dialect names its verifier, the new one."""
    config = json.loads(json.dumps(parent.config)) | {"draft_vocab_size": target.k}
    if model is not None and isinstance(config.get("speculators_config"), dict):
        config["speculators_config"]["verifier"] = {
            "name_or_path": model.location,
            "architectures": model.config.get("architectures") or [],
        }
    return config


def _record(
    parent: DrafterCheckpoint, planned: Plan, method: Method, model: VerifierCheckpoint | None, out: Path, seed: int
) -> dict[str, Any]:
    """What remap.json says, less the checksum and the time."""
    maps = {
        name: {"k": m.k, "v": m.v, "fingerprint": m.fingerprint, "assumption": m.assumption}
        for name, m in (("parent", planned.parent), ("target", planned.target))
    }
    return {
        **planned.counts(),
        "init": method.name,
        "init_reason": method.reason,
        "init_details": method.details,
        "dialect": parent.dialect,
        "out": str(out),
        "drafter": {"location": parent.location, "revision": parent.revision},
        "verifier": {"location": model.location, "revision": model.revision} if model is not None else None,
        "maps": maps,
        "source_rows": SOURCES,
        "seed": seed,
        "versions": {"eagle3-workbench": version("eagle3-workbench"), "numpy": np.__version__, "python": platform.python_version()},
    }


def _peak_rss_mb() -> float:
    """Largest resident memory of this program so far, MB. Linux' getrusage would count what the process was before it became us."""
    status = Path("/proc/self/status")
    if status.is_file():
        return round(int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1)  # macOS counts bytes
