"""The vocabulary map: which target token each row of a reduced head means.

Notable:
* One immutable type, `VocabMap`, holding absolute target ids in row order. Offsets (`d2t`, target id = row + d2t[row]) and the mask
  (`t2d`, bool over V) are derived from it, so the three can never disagree inside the workbench.
* On disk `d2t` is an **offset** for vLLM, SGLang, TensorRT-LLM and every trainer that we know; absolute ids are recognised, by the set of
  ids that t2d marks, and recorded as an assumption. The two readings cannot both fit t2d for K >= 2.
* Two maps are compared by position (rows that mean the same token: what a head's weights feel) and as sets (tokens shared: what people
  usually quote). Sorted maps with 99 % of their tokens in common may agree in 5 % of their rows.
* numpy only; nothing here reads token texts.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.runs import atomic_folder

COVERAGE_LEVELS = (0.90, 0.95, 0.98, 0.99, 0.999)
SAMPLE = 20  # ids quoted in reports


def _ids(values: Iterable[int] = ()) -> np.ndarray:
    array = np.array(list(values) if not isinstance(values, np.ndarray) else values, dtype=np.int64)
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class VocabMap:
    """A draft vocabulary of K tokens inside a target vocabulary of V.

    ids: int64 [K], the target id of each row, unique, in [0, V).
    forced, displaced, filler: ids recorded by `build` (asked for by the caller; pushed out by them; never counted).
    assumption: what had to be assumed on reading, "" when nothing had to.
    """

    ids: np.ndarray
    v: int
    forced: np.ndarray = field(default_factory=_ids)
    displaced: np.ndarray = field(default_factory=_ids)
    filler: np.ndarray = field(default_factory=_ids)
    assumption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _ids(np.array(self.ids)))
        refuse_bad_rows(self.ids, self.ids, self.v, "id")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VocabMap) and self.v == other.v and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def k(self) -> int:
        return len(self.ids)

    @cached_property
    def d2t(self) -> np.ndarray:
        """Offsets, int64 [K]: target id = row + d2t[row]."""
        return _ids(self.ids - np.arange(self.k))

    @cached_property
    def t2d(self) -> np.ndarray:
        """Mask, bool [V]: true where the target token has a row."""
        mask = np.zeros(self.v, dtype=bool)
        mask[self.ids] = True
        mask.setflags(write=False)
        return mask

    @cached_property
    def row_of(self) -> np.ndarray:
        """int64 [V]: the row of each target id, -1 where it has none."""
        rows = np.full(self.v, -1, dtype=np.int64)
        rows[self.ids] = np.arange(self.k)
        rows.setflags(write=False)
        return rows

    @property
    def is_sorted(self) -> bool:
        return bool(np.all(np.diff(self.ids) > 0))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of V and the ids in row order, equal on every machine."""
        return hashlib.sha256(b"%d:" % self.v + self.ids.astype("<i8").tobytes()).hexdigest()

    # ---- making one -------------------------------------------------------------------------------------------------------------

    @classmethod
    def from_offsets(cls, d2t: np.ndarray, v: int) -> "VocabMap":
        """From offsets, integer [K]. InputError lists row, offset and id of every row that is out of range or doubled."""
        d2t = integers(d2t, "d2t")
        ids = np.arange(len(d2t)) + d2t
        refuse_bad_rows(ids, d2t, v, "offset")
        return cls(ids, v)

    @classmethod
    def from_ids(cls, ids: np.ndarray, v: int, assumption: str = "") -> "VocabMap":
        """From absolute target ids in row order, integer [K]."""
        return cls(integers(ids, "the id list"), v, assumption=assumption)

    @classmethod
    def from_t2d(cls, t2d: np.ndarray) -> "VocabMap":
        """From the mask alone, bool [V]: rows are **assumed** to be in ascending id order (all trainers but ModelOpt)."""
        mask = mask_of(t2d)
        return cls(np.flatnonzero(mask), len(mask), assumption="no d2t: rows assumed to be in ascending id order, from t2d alone")

    @classmethod
    def build(cls, counts: np.ndarray, k: int, forced: Iterable[int] = ()) -> "VocabMap":
        """The K most frequent tokens, ascending.

        counts: integer [V], or [slices, V] which are added up. Ties go to the lower id. When fewer than K tokens were ever counted the
        lowest unused ids fill up (`filler`). `forced` ids are always in; what would have been in without them is recorded in `displaced`.
        """
        counts = integers(counts, "counts")
        counts = counts.sum(axis=0) if counts.ndim == 2 else counts
        v = len(counts)
        if counts.size and counts.min() < 0:
            raise InputError(f"counts hold a negative number at id {int(counts.argmin())}: expected how often each of the {v} ids occurs")
        if not 1 <= k <= v:
            raise InputError(f"draft vocabulary size K = {k} does not fit: expected 1 <= K <= V = {v}")
        forced = np.unique(integers(np.array(list(forced), dtype=np.int64), "forced ids"))
        if forced.size and (forced[0] < 0 or forced[-1] >= v):
            raise InputError(f"forced id {int(forced[0] if forced[0] < 0 else forced[-1])} is outside the target vocabulary 0..{v - 1}")
        if forced.size > k:
            raise InputError(f"{forced.size} forced ids do not fit into a draft vocabulary of K = {k}: raise K or force fewer")
        ranked = np.argsort(-counts, kind="stable")  # [V], ties by id because the sort is stable
        plain = ranked[:k]
        free = ranked[~np.isin(ranked, forced)] if forced.size else ranked
        ids = np.sort(np.concatenate([forced, free[: k - forced.size]]))
        unseen = counts[ids] == 0
        return cls(
            ids,
            v,
            forced=_ids(forced),
            displaced=_ids(np.setdiff1d(plain, ids)),
            filler=_ids(np.setdiff1d(ids[unseen], forced)),
        )

    # ---- asking it --------------------------------------------------------------------------------------------------------------

    def coverage(self, counts: np.ndarray) -> float:
        """Share of the counted tokens, integer [V], that the draft vocabulary can express; nan when nothing was counted."""
        counts = counts_for(counts, self.v)
        total = counts.sum()
        return float(counts[self.ids].sum() / total) if total else float("nan")

    def compare(self, other: "VocabMap") -> "Comparison":
        """Compare with the map that is to replace this one (rows by position, tokens as sets)."""
        if self.v != other.v:
            raise InputError(
                f"the two maps belong to different target vocabularies (V = {self.v} and V = {other.v}): "
                "expected two draft vocabularies of one verifier family"
            )
        return Comparison(self, other)

    def write(self, out: Path) -> Path:
        """Write d2t.npy, t2d.npy and map.json into the new folder `out`; equal maps give equal bytes."""
        with atomic_folder(Path(out)) as folder:
            np.save(folder / "d2t.npy", self.d2t)
            np.save(folder / "t2d.npy", self.t2d)
            record = {"k": self.k, "v": self.v, "fingerprint": self.fingerprint}
            record |= {name: getattr(self, name).tolist() for name in ("forced", "displaced", "filler")}
            (folder / "map.json").write_text(json.dumps(record, indent=1) + "\n")
        return Path(out)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Map `a` (the one a head was trained with) against map `b` (the one it is to speak)."""

    a: VocabMap
    b: VocabMap

    @cached_property
    def same_position(self) -> int:
        """Rows that mean the same token in both."""
        k = min(self.a.k, self.b.k)
        return int(np.count_nonzero(self.a.ids[:k] == self.b.ids[:k]))

    @cached_property
    def shared_ids(self) -> np.ndarray:
        """Tokens in both, int64, ascending."""
        return np.flatnonzero(self.a.t2d & self.b.t2d)

    @cached_property
    def lost_ids(self) -> np.ndarray:
        """Tokens of `a` that `b` no longer has, int64, ascending."""
        return np.flatnonzero(self.a.t2d & ~self.b.t2d)

    @cached_property
    def missing_ids(self) -> np.ndarray:
        """Tokens of `b` without a row in `a` (the rows that a remap must initialise), int64, ascending."""
        return np.flatnonzero(self.b.t2d & ~self.a.t2d)

    @cached_property
    def first_divergence(self) -> int | None:
        """The first row that differs (or that only one map has); None when the maps are equal."""
        k = min(self.a.k, self.b.k)
        different = np.flatnonzero(self.a.ids[:k] != self.b.ids[:k])
        if different.size:
            return int(different[0])
        return None if self.a.k == self.b.k else k

    def to_json(self, counts: np.ndarray | None = None) -> dict[str, Any]:
        """The `overlap` contract; the last three fields are null without counts (integer [V] or [slices, V])."""
        if counts is not None:
            counts = counts_for(counts, self.a.v)
        total = int(counts.sum()) if counts is not None else 0
        shared = len(self.shared_ids)
        return {
            "k_a": self.a.k,
            "k_b": self.b.k,
            "v": self.a.v,
            "same_position": self.same_position,
            "shared": shared,
            "only_a": self.a.k - shared,
            "only_b": self.b.k - shared,
            "jaccard": shared / (self.a.k + self.b.k - shared),
            "first_divergence": self.first_divergence,
            "missing_ids_sample": self.missing_ids[:SAMPLE].tolist(),
            "coverage_a": self.a.coverage(counts) if total else None,
            "coverage_b": self.b.coverage(counts) if total else None,
            "missing_mass": float(counts[self.missing_ids].sum() / total) if total else None,
        }


# ---- coverage -------------------------------------------------------------------------------------------------------------------


def coverage_curve(counts: np.ndarray) -> np.ndarray:
    """float64 [V]: entry K-1 is the share of the counted tokens that the K most frequent ones make up."""
    ranked = np.sort(counts_for(counts))[::-1]
    total = ranked.sum()
    return np.cumsum(ranked) / total if total else np.full(len(ranked), np.nan)


def k_needed(counts: np.ndarray, levels: Iterable[float] = COVERAGE_LEVELS) -> dict[float, int]:
    """The smallest K whose most frequent tokens reach each coverage level."""
    ranked = np.sort(counts_for(counts))[::-1]
    reached = np.cumsum(ranked)
    # integers as long as possible: the comparison must not depend on how a division rounds
    return {level: int(np.searchsorted(reached, np.ceil(level * ranked.sum() - 1e-9))) + 1 for level in levels} if ranked.any() else {}


def counts_for(counts: np.ndarray, v: int | None = None) -> np.ndarray:
    """Counts as int64 [V], slices added up; InputError when they belong to another vocabulary."""
    counts = integers(counts, "counts")
    counts = counts.sum(axis=0) if counts.ndim == 2 else counts
    if v is not None and len(counts) != v:
        raise InputError(f"the counts cover {len(counts)} ids but the maps have V = {v}: count with this verifier's own tokenizer")
    return counts


# ---- reading and judging what lies on disk --------------------------------------------------------------------------------------


def describe_map(d2t: np.ndarray | None, t2d: np.ndarray | None, k: int | None, v: int | None) -> dict[str, Any]:
    """What a checkpoint's two map tensors say, without refusing anything: the `mapping` part of `inspect`.

    form: offsets | absolute | t2d only | full (K = V, no or zero offsets) | none. The other fields are None where nothing decides them.
    `ambiguous` is true when both readings of d2t give valid ids and no t2d is there to decide (engines read offsets).
    """
    marks = np.flatnonzero(t2d) if t2d is not None and t2d.ndim == 1 else None
    v = v if v is not None else (t2d.size if t2d is not None else None)
    report: dict[str, Any] = {
        "present": d2t is not None or t2d is not None,
        "form": "none",
        "sorted": None,
        "unique": None,
        "in_range": None,
        "t2d_agrees": None,
        "ambiguous": False,
    }
    if d2t is None or d2t.ndim != 1 or not len(d2t):
        if marks is not None and (k is None or v is None or k < v):
            report |= {"form": "t2d only", "sorted": True, "unique": True, "in_range": True}
        elif k is not None and k == v:
            report["form"] = "full"
        return report
    with np.errstate(invalid="ignore"):  # NaN and infinity become ids far out of range
        values = d2t.real.astype(np.int64)
    readings = {"offsets": values + np.arange(len(values)), "absolute": values}
    distinct = {name: np.unique(ids) for name, ids in readings.items()}
    valid = {name: v is not None and len(ids) == len(values) and ids[0] >= 0 and ids[-1] < v for name, ids in distinct.items()}
    if marks is not None:  # the set of ids that t2d marks decides, else which reading gives valid ids, engines' where both do
        hits = {name: np.isin(ids, marks).sum() for name, ids in distinct.items()}
        absolute = hits["absolute"] > hits["offsets"]
    else:
        absolute = valid["absolute"] and not valid["offsets"]
    report["form"] = "absolute" if absolute else "offsets"
    if v is not None and len(values) == v and not values.any():
        report["form"] = "full"
    name = "absolute" if report["form"] == "absolute" else "offsets"
    ids = distinct[name]
    report["ambiguous"] = marks is None and bool(values.any()) and all(valid.values())
    report["sorted"] = bool(np.all(np.diff(readings[name]) > 0))
    report["unique"] = len(ids) == len(values)
    report["in_range"] = bool(ids[0] >= 0 and ids[-1] < v) if v is not None else None
    report["t2d_agrees"] = bool(np.array_equal(ids, marks)) if marks is not None else None
    return report


def integers(values: np.ndarray, what: str) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise InputError(f"{what} has dtype {values.dtype}, expected integers: a map or count that went through floats has lost exact ids")
    return values.astype(np.int64)


def mask_of(t2d: np.ndarray, where: str = "t2d") -> np.ndarray:
    t2d = np.asarray(t2d)
    if t2d.ndim != 1 or (t2d.dtype != bool and not (t2d.dtype.kind in "iu" and np.isin(t2d, (0, 1)).all())):
        raise InputError(
            f"{where}: t2d has dtype {t2d.dtype} and shape {list(t2d.shape)}, expected a mask: bool [V], true where a token has a row"
        )
    return t2d.astype(bool)


def refuse_bad_rows(ids: np.ndarray, values: np.ndarray, v: int, name: str, where: str = "map") -> None:
    """InputError listing the rows whose id is out of range or doubled, with the value that is stored there."""
    outside = np.flatnonzero((ids < 0) | (ids >= v))
    if outside.size:
        listed = ", ".join(f"row {r} ({name} {values[r]}, id {ids[r]})" for r in outside[:3])
        raise InputError(
            f"{where}: {outside.size} rows point outside the target vocabulary 0..{v - 1}: {listed}; damaged, or for another verifier"
        )
    order = np.argsort(ids, kind="stable")
    repeat = np.flatnonzero(np.diff(ids[order]) == 0)
    if repeat.size:
        listed = ", ".join(f"rows {order[i]} and {order[i + 1]} (id {ids[order[i]]})" for i in repeat[:3])
        raise InputError(f"{where}: {repeat.size} target ids have two rows: {listed}; each token may have one row only")
