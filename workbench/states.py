"""Folders of stored hidden states: opened whatever their dialect, checked as they are read, written, and held against a verifier.

Notable: no state is read before a sample is asked for. What a folder does not say is assumed by its dialect's convention and listed in
`States.assumed`. Beside the data lies our own record of an extraction (`extraction.json`) where we made it; other tools ignore it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.corpus import Text
from workbench.errors import InputError
from workbench.places import LocalPlace
from workbench.runs import atomic_file, atomic_folder
from workbench.state_files import (
    DIALECTS,
    ArrowFolder,
    Sample,
    TorchFiles,
    check_dialect,
    converted,
    sample_file,
    write_sample,
    write_table,
)

if TYPE_CHECKING:
    from workbench.verifier import Teacher

RECORD = "extraction.json"
NOT_SAMPLES = {"d2t.pt", "t2d.pt", "token_freq.pt", "vocab_mapping.pt"}
OWN_SHARE = 0.05  # below: not this verifier's states; its own are near 1 on its own answers and above 0.3 on plain text


def read_states(folder: str | Path) -> "States":
    """Open a folder of stored states in any dialect; InputError when it holds none or an extraction that never ended."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"no folder of stored states at {folder}: expected one in a dialect of {', '.join(DIALECTS)}")
    record = _read_record(folder) if (folder / RECORD).is_file() else {}
    if (folder / "state.json").is_file() or (folder / "dataset_info.json").is_file():
        return States(folder, ArrowFolder(folder), record)
    files = [p for p in folder.rglob("*") if p.name.endswith((".ckpt", ".ckpt.gz"))]
    files = files or [p for p in folder.rglob("*") if p.name.endswith((".pt", ".pt.gz"))]
    files = sorted((p for p in files if p.name not in NOT_SAMPLES and not p.name.startswith(".")), key=_natural)
    if not files:
        inner = any(folder.glob("hs_*.safetensors"))
        hint = "give the folder above it, which holds the ids and masks" if inner else "neither an arrow data set nor .ckpt or .pt files"
        raise InputError(f"{folder} holds no stored states ({hint}): expected a dialect of {', '.join(DIALECTS)}")
    return States(folder, TorchFiles(files), record)


def _read_record(folder: Path) -> dict[str, Any]:
    """Our own record of a folder; InputError when it is damaged or says that the extraction never ended."""
    record = LocalPlace(folder).json(RECORD)
    count = record.get("samples")
    if not record.get("complete"):
        raise InputError(f"{folder} is half written (an extraction of {count} samples did not end): run the same extraction again")
    kinds = {"lengths": int, "slices": str, "taps": int}
    wrong = [key for key, kind in kinds.items() if not all(type(x) is kind for x in _list(record.get(key, [])))]
    wrong += [key for key in ("lengths", "slices") if len(_list(record.get(key))) != count]
    if wrong:
        raise InputError(f"{folder / RECORD}: {wrong[0]} is damaged: expected one entry a sample; copy the file again, or delete it")
    return record


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _natural(path: Path) -> list[tuple[int, str]]:
    """data_10 behind data_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


class States(Sequence[Sample]):
    """The samples of one folder.

    dialect; a taps of width ht, stored as dtype; post_norm: last states are after the final norm; tap_ids: boundaries of the taps, None
    when nothing records them; record: our own record or {}; assumed: what had to be taken for granted.
    """

    def __init__(self, folder: Path, files: ArrowFolder | TorchFiles, record: Mapping[str, Any]):
        self.folder, self.dialect, self.record, self._files = folder, files.dialect, record, files
        if record and record["samples"] != len(files):  # counted once more, because files get lost
            raise InputError(f"{folder} holds {len(files)} samples, its {RECORD} says {record['samples']}: files were lost or added")
        first = files.read(0, data=False)
        self.a, self.ht = first.taps.shape[1:]
        self.dtype, self.post_norm = first.last.dtype, first.post_norm
        self.tap_ids = tuple(record["taps"]) if record.get("taps") else None
        self.assumed = files.assumed
        if not record:
            norm = "after" if self.post_norm else "before"
            self.assumed += (
                f"last state {norm} the verifier's final norm",
                "loss mask of the token it stands on",
                "taps in drafter's order",
            )
        self._v: int | None = None

    def __len__(self) -> int:
        return len(self._files)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return self.record.get("lengths") or self._files.lengths()

    def require(self, v: int | None = None, ht: int | None = None, a: int | None = None) -> "States":
        """Demand a state width and number of taps (InputError now) and a vocabulary size (InputError when a sample breaks it)."""
        if ht is not None and ht != self.ht:
            raise InputError(f"{self.folder} holds states of width {self.ht}, expected {ht}: states of another verifier", "states-width")
        if a is not None and a != self.a:
            raise InputError(f"{self.folder} holds {self.a} taps, the drafter takes {a}: extract with the drafter's taps", "states-width")
        self._v = v
        return self

    def __getitem__(self, i: int) -> Sample:
        """Sample i, checked: shapes, ids, finite states. InputError says where it fails."""
        sample = self.unchecked(i)
        check_ids(sample, self._v)
        check_finite(sample)
        return sample

    def unchecked(self, i: int) -> Sample:
        """Sample i with only its shapes checked, for those who look for what is wrong with the rest."""
        i = range(len(self))[i]
        sample = self._files.read(i)
        if sample.taps.shape[1:] != (self.a, self.ht) or sample.post_norm != self.post_norm:
            found, first = (
                f"{list(s)} a token, post-norm {p}"
                for s, p in ((sample.taps.shape[1:], sample.post_norm), ((self.a, self.ht), self.post_norm))
            )
            raise InputError(
                f"{sample.place} has taps {found}, the first sample {first}: expected one kind; sort the files apart", "states-width"
            )
        slices = self.record.get("slices")
        return replace(sample, slice=slices[i]) if slices else sample


def check_ids(sample: Sample, v: int | None) -> None:
    """InputError for a token id that is negative or, where the vocabulary size is given, not below it."""
    low, high = (int(x) for x in torch.aminmax(sample.ids))
    if low < 0 or (v is not None and high >= v):
        wrong = low if low < 0 else high
        at, most = int((sample.ids == wrong).nonzero()[0]), "" if v is None else v - 1
        raise InputError(f"{sample.place}: token id {wrong} at position {at} is outside the vocabulary 0..{most}: another tokenizer's ids?")


def check_finite(sample: Sample) -> None:
    """InputError for NaN or infinite states, with their number and the first place."""
    for name, tensor, axes in (("taps", sample.taps, ("token", "tap", "channel")), ("last state", sample.last, ("token", "channel"))):
        if bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):  # no copy of the states
            continue
        bad = (~torch.isfinite(tensor)).nonzero()
        first = ", ".join(f"{axis} {int(at)}" for axis, at in zip(axes, bad[0], strict=True))
        raise InputError(
            f"{sample.place}: {len(bad)} values of the {name} are NaN or infinite, the first at {first}: extract again "
            "(in bfloat16 where float16 overflows)",
            "states-nonfinite",
        )


def own_share(states: States, teacher: "Teacher", tokens: int = 2000) -> tuple[int, float]:
    """(tokens looked at, share of supervised tokens that are the verifier's own argmax) over the first samples, from stored states.

    Near 1 where the answers are this verifier's greedy ones and the states its own; near 0 where the states are another model's.
    """
    states.require(ht=teacher.head.weight.shape[1], v=teacher.head.weight.shape[0])
    seen = own = 0
    for sample in states:
        at = sample.loss_mask[1:].nonzero()[:, 0][: tokens - seen]  # token t+1 supervised, said by the state at t
        for some in at.split(256):  # [256, V] of logits at a time
            last = sample.last[some].to(teacher.head.weight)
            logits = teacher.head(last) if states.post_norm else teacher.logits(last)
            own += int((logits.argmax(-1).cpu() == sample.ids[some + 1]).sum())
        seen += len(at)
        if seen >= tokens:
            break
    return seen, own / max(seen, 1)


def check_verifier(states: States, teacher: "Teacher") -> float:
    """Return the own share, or InputError when the states cannot be this verifier's."""
    seen, share = own_share(states, teacher)
    if seen >= 20 and share < OWN_SHARE:
        raise InputError(
            f"{states.folder}: by its stored states this verifier would have written {share:.1%} of {seen} supervised tokens: states of "
            "another model or layer; extract with this verifier",
            "states-mismatch",
        )
    return share


# ---- writing ------------------------------------------------------------------------------------------------------------------------


def write_states(
    samples: Sequence[Sample],
    out: str | Path,
    dialect: str,
    norm: Callable[[Tensor], Tensor] | None = None,
    record: Mapping[str, Any] | None = None,
    compress: bool = False,
) -> Path:
    """Write samples into the new folder `out` in a dialect; equal samples give equal bytes.

    norm: the verifier's final norm, needed to write pre-norm samples in a dialect that stores post-norm states.
    record: what our own record is to keep beside sizes and slices, such as {"taps": [2, 15, 27]}. compress: gzip torch files.
    """
    check_dialect(dialect)
    texts = []
    with atomic_folder(Path(out)) as work:
        for i, sample in enumerate(samples):
            write_sample(converted(sample, dialect, norm), work / sample_file(i, len(samples), dialect, compress), dialect)
            texts.append(Text(sample.ids.numpy(), sample.loss_mask.numpy(), sample.slice))
        if dialect == "speculators":
            write_table(texts, work)
        write_record(work, {**(record or {}), **sizes(texts), "complete": True})
    return Path(out)


def sizes(texts: Sequence[Text]) -> dict[str, Any]:
    """The part of our record that follows from the samples: how many, how long, which slices."""
    return {"samples": len(texts), "lengths": [len(t.ids) for t in texts], "slices": [t.slice for t in texts]}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write or replace our own record of a folder."""
    with atomic_file(folder / RECORD, replace=True) as work:
        work.write_text(json.dumps(record, indent=1) + "\n")
