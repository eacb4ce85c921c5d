"""Which row of a head goes where when its vocabulary changes, and what else could be done instead.

Notable: rows travel by token, whatever the positions say. The new rows are in ascending order of their ids, because trainers build the
teacher from t2d, which knows no other order. numpy only; no weights are looked at.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.mapping import VocabMap


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each new row comes from. target: the new map, ascending. source: int64 [K_new], the parent's row or -1."""

    parent: VocabMap
    target: VocabMap

    @cached_property
    def source(self) -> np.ndarray:
        return self.parent.row_of[self.target.ids]

    @property
    def missing(self) -> np.ndarray:
        """Target ids of the rows that must be made, ascending."""
        return self.target.ids[self.source < 0]

    @property
    def shared(self) -> np.ndarray:
        """Target ids of the rows that are carried over, ascending."""
        return self.target.ids[self.source >= 0]

    def counts(self) -> dict[str, int]:
        """Rows in all, carried over (at the same index, at another), and made."""
        kept = int((self.source >= 0).sum())
        same = int((self.source == np.arange(self.target.k)).sum())
        return {
            "rows_total": self.target.k,
            "rows_kept": kept,
            "rows_moved": kept - same,
            "rows_same_position": same,
            "rows_initialised": self.target.k - kept,
        }


def plan(parent: VocabMap, to: VocabMap) -> Plan:
    """The plan for carrying a head from one map to another; InputError when they are not of one target vocabulary or share no token."""
    made = Plan(parent, VocabMap(np.sort(parent.compare(to).b.ids), to.v))
    if not len(made.shared):
        raise InputError(
            f"the two maps (K = {parent.k} and {to.k}) have no token in common: nothing can be carried over; is it the right map?"
        )
    return made


def alternatives(parent: VocabMap, to: VocabMap, counts: np.ndarray | None = None) -> list[dict[str, Any]]:
    """The three ways to serve the new text: keep the old vocabulary, move to the new one, or a full head (expand to V, prune at export).

    Each with rows, rows to make, size relative to the parent's head and, given counts (integer [V] or [slices, V]), its coverage: the
    share of tokens that it can propose at all, which no training can pass.
    """
    full = VocabMap(np.arange(parent.v), parent.v)
    return [
        {
            "name": name,
            "rows": m.k,
            "rows_initialised": m.k - len(parent.compare(m).shared_ids),
            "head_size": m.k / parent.k,
            "coverage": None if counts is None else m.coverage(counts),
        }
        for name, m in (("keep", parent), ("remap", to), ("full", full))
    ]
