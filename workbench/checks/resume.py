"""What the curves of a training log give away: resumes, schedules, acceptance past its peak."""

from collections.abc import Iterable

from workbench.case import Case
from workbench.checks import check
from workbench.checks.metrics import CURVES, findings_of, training
from workbench.findings import Finding


@check(*CURVES, needs="logs")
def curves(case: Case) -> Iterable[Finding]:
    """Jumps, schedule and peak of each training log."""
    for table in training(case):
        yield from (found for found in findings_of(case, table) if found.code in CURVES)
