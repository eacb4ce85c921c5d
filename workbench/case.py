"""What the doctor is given, opened once, and what follows from it: the map as its rows mean it, head rows, samples of states.

Notable: nothing is read before a check asks. Facts that a fault makes undecidable are None, so that one fault does not pass for another.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint
from workbench.dialects import Setting
from workbench.errors import InputError
from workbench.mapfiles import RawMap
from workbench.mapping import VocabMap, describe_map
from workbench.tokens import Counts

if TYPE_CHECKING:
    from workbench.logtable import LogTable
    from workbench.state_files import Sample
    from workbench.states import States

LARGEST_VOCABULARY = 2**24
FLOATS = ("BF16", "F16", "F32")
SAMPLES, NUMBERS = 1000, 10**8  # of stored states: files looked at, and numbers held, at most


class MapFacts:
    """What two map tensors say of K rows and V ids: `report` of describe_map, `ids` as the rows mean them, `marks` of t2d."""

    def __init__(self, d2t: np.ndarray | None, t2d: np.ndarray | None, k: int | None, v: int | None):
        self.d2t, self.t2d, self.k, self.v = d2t, t2d, k, v
        plain = d2t is not None and d2t.ndim == 1 and len(d2t) and d2t.dtype.kind in "iuf"
        self.t2d_is_mask = t2d is not None and t2d.ndim == 1 and (t2d.dtype.kind == "b" or bool(np.isin(t2d, (0, 1)).all()))
        mask = t2d != 0 if self.t2d_is_mask else None
        self.marks = np.flatnonzero(mask) if mask is not None else None
        self.report = describe_map(d2t if plain else None, mask, k, v)
        self.absolute = self.report["form"] == "absolute"
        self.ids: np.ndarray | None = None
        if plain:
            with np.errstate(invalid="ignore"):
                values = d2t.astype(np.int64)
            self.ids = values if self.absolute else values + np.arange(len(values))

    @cached_property
    def outside(self) -> np.ndarray:
        """Rows whose id is no id of the target vocabulary."""
        return np.flatnonzero((self.ids < 0) | (self.ids >= self.v)) if self.ids is not None and self.v else np.array([], int)

    @cached_property
    def doubled(self) -> np.ndarray:
        """Rows whose id an earlier row has."""
        if self.ids is None:
            return np.array([], int)
        _, first = np.unique(self.ids, return_index=True)
        return np.setdiff1d(np.arange(len(self.ids)), first)

    @cached_property
    def vocab_map(self) -> VocabMap | None:
        """The map, where it is a sound one of this head; a full vocabulary counts as one."""
        if not self.v or self.v > LARGEST_VOCABULARY:
            return None
        if self.ids is None:
            return VocabMap(np.arange(self.k), self.k) if self.k and self.k == self.v else None
        sound = len(self.ids) and not len(self.outside) and not len(self.doubled) and self.k in (None, len(self.ids))
        return VocabMap(self.ids, self.v) if sound else None


def map_facts(drafter: DrafterCheckpoint, v: int | None = None) -> MapFacts:
    """The facts of a drafter's map. v: target vocabulary where the drafter does not say it."""
    try:
        d2t, t2d = drafter.map_raw()
    except InputError:  # eight-bit floats: no numbers at all
        d2t, t2d = None, None
    return MapFacts(d2t, t2d, drafter.k, drafter.v or v)


@dataclass
class Run:
    """A run's settings: {dotted name: value} from YAML or JSON, and where the file lies."""

    path: Path
    settings: Mapping[str, Any]

    def find(self, *names: str) -> Setting | None:
        """The first setting whose last part is one of the names (dashes count as underscores) and that is not null."""
        for name in names:
            for key, value in self.settings.items():
                if key.rpartition(".")[2].replace("-", "_") == name and value is not None:
                    return Setting(value, key)
        return None


@dataclass(eq=False)
class Case:
    """The opened inputs; all but the drafter may be absent. mapping: read but not judged. tokenizer: where it lies."""

    drafter: DrafterCheckpoint
    verifier: VerifierCheckpoint | None = None
    parent: DrafterCheckpoint | None = None
    mapping: RawMap | None = None
    states: "States | None" = None
    counts: Counts | None = None
    tokenizer: str | None = None
    run: Run | None = None
    logs: "list[LogTable]" = field(default_factory=list)
    replay: str | None = None

    def has(self, need: str) -> bool:
        """Whether one of the inputs that a need names ("a or b") is there."""
        return any(bool(getattr(self, name.strip(), None)) for name in need.split(" or "))

    @property
    def where(self) -> str:
        return self.drafter.location

    @cached_property
    def map(self) -> MapFacts:
        return map_facts(self.drafter, self.verifier.vocab if self.verifier else None)

    @property
    def k(self) -> int | None:
        return self.drafter.k

    @property
    def v(self) -> int | None:
        return self.map.v

    def written(self, name: str) -> Setting | None:
        """A setting as the config has it; None where only weights or defaults give one."""
        found = self.drafter.settings.get(name)
        for place in (found, *found.also) if found else ():
            if not place.source.startswith(("weights", "default")):
                return place
        return None

    # ---- states

    @cached_property
    def samples(self) -> "list[Sample]":
        """Stored samples with only their shapes checked: all of a small folder, else evenly spread ones of NUMBERS numbers."""
        found, held, count = [], 0, len(self.states)
        for i in np.unique(np.linspace(0, count - 1, min(count, SAMPLES)).astype(int)):
            found.append(self.states.unchecked(int(i)))
            held += found[-1].taps.numel()
            if held > NUMBERS:
                break
        return found

    @cached_property
    def counted(self) -> Counts | None:
        """Token counts: those given, else of the supervised tokens of the stored states; None where neither fits the vocabulary."""
        if self.counts is not None:
            return self.counts if self.counts.v == self.v else None
        if self.states is None or not self.v or self.v > LARGEST_VOCABULARY:
            return None
        rows: dict[str, np.ndarray] = {}
        for one in self.samples:
            ids = one.ids[one.loss_mask].numpy()
            rows[one.slice] = rows.get(one.slice, 0) + np.bincount(ids[(ids >= 0) & (ids < self.v)], minlength=self.v)
        return Counts(np.stack(list(rows.values())), tuple(rows)) if rows else None

    # ---- special tokens

    @cached_property
    def tokenizer_tables(self) -> dict[str, Any]:
        """`ids`: {piece: id} of special tokens; `roles`: {bos, eos, pad: id}, from the tokenizer's own files."""
        from workbench.tokens import token_tables

        folder = Path(self.tokenizer or "").expanduser()
        folder = folder.parent if folder.is_file() else folder
        added = token_tables(self.tokenizer)["added"]
        pieces = {t["content"]: t["id"] for t in added}
        roles = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            for role in ("bos", "eos", "pad"):
                token = read_json(folder / name).get(f"{role}_token")
                token = token.get("content") if isinstance(token, Mapping) else token
                if isinstance(token, str):
                    roles[role] = pieces.get(token, token_tables(self.tokenizer)["vocab"].get(token))
        return {
            "ids": {t["content"]: t["id"] for t in added if t.get("special")},
            "roles": {r: i for r, i in roles.items() if i is not None},
        }


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (ValueError, OSError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {}


def whole(values: Any) -> list[int]:
    """A config's id or list of ids as a list; nothing for whatever else stands there."""
    return [i for i in (values if isinstance(values, list) else [values]) if type(i) is int]


def numbers(values: Iterable[Any]) -> list[Any]:
    """Values as plain Python numbers."""
    return [value.item() if hasattr(value, "item") else value for value in values]
