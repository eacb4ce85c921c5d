"""The golden replay: the drafter run on a recorded text under every reading of its wiring; only when a recording is given."""

from collections.abc import Iterable

from workbench.case import Case
from workbench.checks import check
from workbench.findings import Finding

CODES = (
    "taps-shifted", "taps-order", "concat-swapped", "label-shift", "norm-teacher", "norm-recycled", "norm-residual", "rope-theta",
    "rope-partial", "rope-layout", "position-shift", "embed-random", "embed-rotated", "feature-scale", "norm-final", "head-row-order",
    "map-absolute", "map-first-k", "doc-leak", "attn-layout",
)  # fmt: skip


@check(*CODES, needs="replay")
def readings(case: Case) -> Iterable[Finding]:
    """What `workbench replay check` finds."""
    from workbench.replay_check import check as held_against

    result = held_against(case.replay, case.where, case.verifier.location if case.verifier is not None else None)
    for found in result["findings"]:
        yield Finding(**found)
