"""Two vocabulary maps looked at together with token counts and token texts: what notebook 1 shows, as numbers.

Notable:
* *parent* is the map that the head was trained with, *child* the map that its labels now follow. A label token x asks for row
  child.row_of[x]; what the head knows in that row is the token parent.ids[row]. The two agree only where both maps have the same token
  in the same row, whatever the sets share.
* Counts and texts are optional. Without counts every token weighs 1 (`weights`), and `unit` says so wherever a share is quoted.
* numpy only; nothing here draws, decodes or compares token texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import numpy as np

from workbench.errors import InputError
from workbench.mapping import Comparison
from workbench.runs import RunFolder
from workbench.texts import TokenTexts, percent

RIGHT, MOVED, NEW, OUTSIDE = range(4)  # what a label token meets in the head; the order in which figures stack them


@dataclass(frozen=True, eq=False)
class Overlap(TokenTexts):
    """A comparison (a = parent, b = child) with what is known about its tokens.

    counts: int64 [slices, V] or None. slices: name of each row of counts. tokens: raw bytes of each id, [V] or shorter, or None.
    special: ids of the tokenizer's special tokens, int64. inputs: where each part was read from.
    """

    comparison: Comparison
    counts: np.ndarray | None = None
    slices: Sequence[str] = ()
    tokens: Sequence[bytes] | None = None
    special: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What a share is a share of."""
        return "token occurrences" if self.counts is not None else "tokens (each counted once)"

    def weights(self, slice: str = "") -> np.ndarray:
        """Occurrences of each token in one slice or ("") in all together, int64 [V]; ones when there are no counts."""
        if slice and slice not in self.slices:
            near = get_close_matches(slice, self.slices, n=1, cutoff=0)
            hint = f"did you mean {near[0]}? known are {', '.join(self.slices)}" if near else "there are no counts, so leave it empty"
            raise InputError(f"unknown slice {slice!r}: {hint}")
        if self.counts is None:
            return np.ones(self.comparison.a.v, dtype=np.int64)
        return self.counts[list(self.slices).index(slice)] if slice else self.counts.sum(axis=0)

    def ranks(self, slice: str = "") -> np.ndarray:
        """Frequency rank of each token, int64 [V], 1 = most frequent; ties by id, as maps are built."""
        ranks = np.empty(self.comparison.a.v, dtype=np.int64)
        ranks[np.argsort(-self.weights(slice), kind="stable")] = np.arange(1, len(ranks) + 1)
        return ranks

    def by_frequency(self, ids: np.ndarray, slice: str = "") -> np.ndarray:
        """The ids, most frequent first."""
        return ids[np.argsort(-self.weights(slice)[ids], kind="stable")]

    @cached_property
    def shared_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Row in the parent and row in the child of each shared token, both int64 [shared], in the order of comparison.shared_ids."""
        ids = self.comparison.shared_ids
        return self.comparison.a.row_of[ids], self.comparison.b.row_of[ids]

    @cached_property
    def label_meets(self) -> np.ndarray:
        """What a label meets in the parent's head, int8 [V]: RIGHT row; another token's row though it has one elsewhere (MOVED); another
        token's row and none of its own (NEW); no label at all because the child has no such token (OUTSIDE)."""
        meets = np.full(self.comparison.a.v, OUTSIDE, dtype=np.int8)
        meets[self.comparison.missing_ids] = NEW
        old, new = self.shared_rows
        meets[self.comparison.shared_ids] = np.where(old == new, RIGHT, MOVED)
        return meets

    def label_shares(self, slice: str = "") -> np.ndarray:
        """Share of the weight that meets each of RIGHT, MOVED, NEW, OUTSIDE, float64 [4]; zeros when nothing was counted."""
        weights = self.weights(slice)
        sums = np.bincount(self.label_meets, weights=weights, minlength=4)
        return sums / max(weights.sum(), 1)

    def wrong_label_share(self, slice: str = "") -> float:
        """Share of the labels (tokens that the child has) that train another token's row."""
        right, moved, new, _ = self.label_shares(slice)
        return float((moved + new) / (right + moved + new)) if right + moved + new else 0.0


def summarise(view: Overlap, run: RunFolder, slice: str = "") -> None:
    """The numbers of a comparison into a run's results, the main ones into its verdict, and what a reader must not miss as warnings."""
    c, weights = view.comparison, view.weights(slice)
    for key, value in c.to_json(None if view.counts is None else weights).items():
        run.record(key, value)
    shared, rows, wrong = len(c.shared_ids), min(c.a.k, c.b.k), view.wrong_label_share(slice)
    run.record("same_position", c.same_position, "rows that mean the same token", f"{c.same_position:,} of {rows:,}")
    run.record("shared", shared, "tokens shared", f"{shared:,} of {c.b.k:,}")
    run.record("only_b", c.b.k - shared, "tokens without a row in the parent", f"{c.b.k - shared:,}")
    run.record("wrong_label_share", wrong, "of the labels train another token's row", percent(wrong))
    if view.counts is not None and weights.any():
        text = Path(view.inputs["counts"]).name if view.inputs.get("counts") else "the counts"
        run.record("coverage_b", c.b.coverage(weights), f"of the text of {text} covered by the child", percent(c.b.coverage(weights)))
    if c.same_position < rows:
        run.warn(
            f"Row by row the maps disagree in {rows - c.same_position:,} of {rows:,} rows: a head trained with the parent map must "
            "have its rows moved before it is trained or served with the child map. Matching sizes and shared tokens do not show this."
        )
    for name, vocabulary in (("parent", c.a), ("child", c.b)):
        if vocabulary.assumption:
            run.warn(f"{name} map: {vocabulary.assumption}.")
    silent = view.special[~c.b.t2d[view.special] & (weights[view.special] > 0)]
    if silent.size and view.counts is not None:
        names = ", ".join(view.text(i) for i in silent[:5])
        run.warn(f"Special tokens that occur in the text but have no row in the child: {len(silent)} ({names}). No draft can contain them.")
    if view.counts is None:
        run.warn("No token counts were given: every token counts once, and coverage is not shown.")
    if view.tokens is None:
        run.warn("No tokenizer was given: tokens are shown by id.")


def open_overlap(parent: str = "", child: str = "", counts: str = "", tokenizer: str = "") -> Overlap:
    """Read what an overlap is made of; "" means the lab's map, and the lab's counts and tokenizer when a map is the lab's, else none."""
    from workbench import lab
    from workbench.mapfiles import read_maps
    from workbench.tokens import Counts, special_ids, token_bytes

    if not (parent and child) or lab.holds(parent) or lab.holds(child):
        counts = counts or str(lab.DATA / "counts-successor.npz")
        tokenizer = tokenizer or str(lab.fetch())
    parent, child = parent or str(lab.DATA / "map-parent"), child or str(lab.DATA / "map-child")
    map_a, map_b = read_maps(parent, child)
    known = Counts.load(counts, v=map_a.v) if counts else None
    special = special_ids(tokenizer) if tokenizer else (known.special or []) if known else []
    return Overlap(
        map_a.compare(map_b),
        known.values if known else None,
        known.slices if known else (),
        token_bytes(tokenizer) if tokenizer else None,
        np.array([i for i in special if i < map_a.v], dtype=np.int64),
        {"parent": parent, "child": child, "counts": counts, "tokenizer": tokenizer},
    )


def with_maps(view: Overlap, parent: str, child: str) -> Overlap:
    """The same texts and counts under other maps, which alone are read; everything anew where these are of another V."""
    from workbench.mapfiles import read_maps

    inputs = {**view.inputs, "parent": parent, "child": child}
    a, b = read_maps(parent, child)
    if a.v != view.comparison.a.v or not (inputs["counts"] and inputs["tokenizer"]):
        return open_overlap(**inputs)
    return replace(view, comparison=a.compare(b), inputs=inputs)
