"""Every check over one set of inputs: what was found, the worst first, and what could not be looked at and why.

Notable: inputs are opened once and nothing is written. A file that is itself at fault is a finding where its fault has a code; whatever
else cannot be read is the user's mistake and raises InputError.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.case import Case, Run
from workbench.checkpoint import open_drafter, open_verifier
from workbench.checks import CHECKS, finding
from workbench.checks.faults import FAULTS
from workbench.errors import InputError
from workbench.findings import Finding, verdict, worst_first
from workbench.shards import collector_paused
from workbench.texts import flat

FAMILIES = (
    "files map head config engine taps norms rope coverage embedding labels template states metrics resume replay"  # cheap ones first
)
for _family in FAMILIES.split():
    importlib.import_module(f"workbench.checks.{_family}")
CHECKS.sort(key=lambda check: FAMILIES.split().index(check.name.split(".")[0]))  # whatever was imported first


class Diagnosis:
    """findings, worst first; skipped: {"check", "needs"} of each check that could not run."""

    def __init__(self, findings: Sequence[Finding], skipped: Sequence[Mapping[str, str]]):
        self.findings, self.skipped = worst_first(findings), list(skipped)

    def to_json(self) -> dict[str, Any]:
        """The contract of `workbench doctor --json`."""
        return {"verdict": verdict(self.findings), "findings": [plain(f.to_json()) for f in self.findings], "skipped": self.skipped}

    def unseen(self) -> dict[str, list[str]]:
        """The codes of the faults that were not looked for, by the input that it would take; "in part" where another check looked."""
        lacking = {one["check"]: one["needs"] for one in self.skipped}
        looked = {code for check in CHECKS if check.name not in lacking for code in check.codes}
        found: dict[str, dict[str, None]] = {}
        for check in CHECKS:
            if check.name in lacking:
                codes = [f"{code} (in part)" if code in looked else code for code in check.codes]
                found.setdefault(lacking[check.name], {}).update(dict.fromkeys(codes))
        return {needs: list(codes) for needs, codes in found.items()}


def diagnose(
    drafter: str | Path,
    *,
    verifier: str = "",
    parent: str = "",
    mapping: str = "",
    states: str = "",
    replay: str = "",
    logs: Sequence[str] = (),
    metrics: str = "",
    tokenizer: str = "",
    run: str = "",
    counts: str = "",
) -> Diagnosis:
    """Open what is given and run every check that it allows. InputError when an input is missing or unreadable."""
    found: list[Finding] = []

    def opened(open_it: Any, path: Any, what: str) -> Any:
        """The opened input, or None after a finding where the fault of the file has a name."""
        if not path:
            return None
        try:
            return open_it(path)
        except InputError as error:
            if error.code not in FAULTS:
                raise
            found.append(finding(error.code, "error", str(error), f"{what} {path}"))
            return None

    with collector_paused():
        case_drafter = opened(open_drafter, drafter, "drafter")
        given: dict[str, Any] = {
            "verifier": opened(open_verifier, verifier, "verifier"),
            "parent": opened(open_drafter, parent, "parent"),
            "mapping": opened(_mapping, mapping, "map"),
            "run": opened(read_run, run, "run"),
            "states": opened(_states, states, "states"),
            "tokenizer": opened(_tokenizer, tokenizer, "tokenizer"),
            "logs": [table for path in [*logs, metrics] if (table := opened(_log, path, "log")) is not None],
            "replay": opened(_replay, replay, "replay"),
        }
        if case_drafter is None:
            return Diagnosis(found, [{"check": check.name, "needs": "a drafter that can be read"} for check in CHECKS])
        case = Case(case_drafter, **given)
        if counts:
            case.counts = opened(lambda path: _counts(path, case.v), counts, "counts")
        more, skipped = examine(case)
    return Diagnosis([*found, *more], skipped)


def examine(case: Case) -> tuple[list[Finding], list[dict[str, str]]]:
    """Run the checks over opened inputs: (findings, skipped). A code stands once for each place."""
    found: dict[tuple[str, str], Finding] = {}
    skipped = []
    for check in CHECKS:
        lacking = [need for need in check.needs if not case.has(need)]
        if lacking:
            skipped.append(
                {"check": check.name, "needs": ", ".join(f"--{need.replace(' or ', ' or --').replace('logs', 'log')}" for need in lacking)}
            )
            continue
        try:
            with np.errstate(all="ignore"):  # weights may hold anything
                for one in check.run(case):
                    found.setdefault((one.code, one.where), one)
        except InputError as error:
            if error.code in FAULTS:
                one = finding(error.code, "error", str(error), case.where)
                found.setdefault((one.code, one.where), one)
            else:
                skipped.append({"check": check.name, "needs": f"a readable input: {error}"})
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:  # a config of odd values
            skipped.append(
                {"check": check.name, "needs": f"well-formed input ({type(error).__name__}: {' '.join(str(error).split())[:150]})"}
            )
    return list(found.values()), skipped


# ---- opening


def _mapping(path: str) -> Any:
    from workbench.mapfiles import read_raw

    return read_raw(path)


def _counts(path: str, v: int | None) -> Any:
    from workbench.tokens import Counts

    return Counts.load(path, v)


def _states(path: str) -> Any:
    from workbench.states import read_states

    return read_states(path)


def _tokenizer(path: str) -> str:
    from workbench.tokens import token_tables

    token_tables(path)
    return path


def _replay(path: str) -> str:
    from workbench.replay import read_replay

    read_replay(path)
    return path


def _log(path: str) -> Any:
    from workbench.logs import read_log, read_metrics_text

    if not path.startswith(("http://", "https://")):
        return read_log(path)
    from urllib.request import urlopen

    try:
        with urlopen(path, timeout=10) as reply:
            return read_metrics_text(reply.read(2**24).decode("utf-8", "replace"), path)
    except (OSError, ValueError) as error:
        raise InputError(f"no metrics from {path} ({error}): expected a server's /metrics; start it with metrics enabled") from error


def read_run(path: str) -> Run:
    """A run's settings from YAML or JSON, or from the record in a run folder; InputError for anything else."""
    import yaml

    place = Path(path).expanduser()
    if place.is_dir():
        place = next(
            (place / name for name in ("run.yaml", "run.json", "config.yaml", "train.yaml", "parameters.json") if (place / name).is_file()),
            place / "run.yaml",
        )
    if not place.is_file():
        raise InputError(f"no run file at {place}: expected the settings of a training run as YAML or JSON")
    try:
        text = place.read_text("utf-8")
        settings = yaml.safe_load(text) if len(text) < 2**20 else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(
            f"{place} cannot be read as YAML or JSON ({' '.join(str(error).split())[:150]}): expected a run's settings"
        ) from error
    if not isinstance(settings, dict) or not settings:
        raise InputError(f"{place} holds a {type(settings).__name__}: expected settings by name, as run.yaml of speculators has them")
    return Run(place, flat(settings, whole=("rope_scaling",)))


def plain(value: Any) -> Any:
    """Evidence as JSON takes it: numpy numbers as Python's, what is not finite as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
