"""What a check has to say: one finding, and the verdict over many.

Notable: a finding's code names the cause, its title says it to a person, its evidence holds the numbers (and `suspects`, in the order
in which to look, where the cause is not decided), its remedy is what to do next.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SEVERITIES = ["note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """code, severity (one of SEVERITIES), title, where (file, tensor, run or step), evidence (JSON-able), remedy."""

    code: str
    severity: str
    title: str
    where: str
    evidence: dict[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """The finding as the command line prints it."""
        return asdict(self)


def verdict(findings: Iterable[Finding]) -> str:
    """clean, notes, warnings or errors: the worst that was found."""
    worst = max((SEVERITIES.index(finding.severity) for finding in findings), default=-1)
    return "clean" if worst < 0 else f"{SEVERITIES[worst]}s"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; within one severity in the order found."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
