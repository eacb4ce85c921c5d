"""How much of what the verifier writes the draft vocabulary can express."""

import math
from collections.abc import Iterable

from workbench.accept import coverage_ceiling
from workbench.case import Case
from workbench.checks import check, finding
from workbench.findings import Finding

LEAST = 20  # counted tokens below which a slice says nothing


@check("coverage-low", needs="counts or states")
def coverage(case: Case) -> Iterable[Finding]:
    """Coverage per slice of the counts, or of the supervised tokens of the stored states; the worst slice decides."""
    counted, vocab_map = case.counted, case.map.vocab_map
    if counted is None or vocab_map is None:
        return
    told = {name: row for name, row in zip(counted.slices, counted.values, strict=True) if row.sum() >= LEAST}
    slices = {name: vocab_map.coverage(row) for name, row in told.items()}
    certain = [n for n, c in slices.items() if c + 2 * math.sqrt(c * (1 - c) / told[n].sum()) < 0.9]  # beyond what few tokens leave open
    if not certain:
        return
    worst = min(certain, key=slices.__getitem__)
    total, low = vocab_map.coverage(counted.total), slices[worst]
    title = (
        f"The draft vocabulary covers {low:.1%} of the tokens{f' of slice {worst}' if len(slices) > 1 else ''} (all: {total:.1%}): "
        f"no training lifts acceptance above {low:.2f} there, nor the accept length of 3 drafts above {coverage_ceiling(low, 3):.2f}"
    )
    evidence = {"coverage": total, "slices": slices, "tokens": int(counted.total.sum()), "ceiling": coverage_ceiling(low, 3)}
    yield finding("coverage-low", "error" if low < 0.5 else "warning", title, case.where, **evidence)
