"""The doctor's checks, one file a family: each a small function from the opened inputs (`case.Case`) to findings.

Notable: a check says which inputs it needs ("a or b" where one of two will do) and which codes it may give; codes, meanings and cures
stand in `faults`. Order is the order of running, cheap ones first.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from workbench.case import Case
from workbench.checks.faults import FAULTS
from workbench.findings import Finding


class Check(NamedTuple):
    """A check: its name, the inputs without which it cannot run, its codes, and the function."""

    name: str
    needs: tuple[str, ...]
    codes: tuple[str, ...]
    run: Callable[[Case], Iterable[Finding]]


CHECKS: list[Check] = []


def check(*codes: str, needs: str = "drafter") -> Callable[[Callable[[Case], Iterable[Finding]]], Callable[[Case], Iterable[Finding]]]:
    """Register a check. needs: inputs, comma-separated, each perhaps "one or another"."""

    def add(run: Callable[[Case], Iterable[Finding]]) -> Callable[[Case], Iterable[Finding]]:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}".replace("_", "-")
        CHECKS.append(Check(name, tuple(n.strip() for n in needs.split(",")), codes, run))
        return run

    return add


def finding(code: str, severity: str, title: str, where: str, /, remedy: str = "", **evidence: Any) -> Finding:
    """A finding whose remedy is the table's unless a nearer one is known."""
    return Finding(code, severity, title, where, evidence, remedy or FAULTS[code].cure.format(code))


def sample(values: Iterable[Any], count: int = 5) -> list[Any]:
    """The first few values as plain Python, for evidence."""
    return [v.item() if hasattr(v, "item") else v for v, _ in zip(values, range(count), strict=False)]
