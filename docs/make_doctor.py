"""Writes docs/doctor.md from the checks' own table: `python docs/make_doctor.py`. A test holds the page equal to it."""

from pathlib import Path

import workbench.doctor  # noqa: F401 - registers every check
from workbench.checks import CHECKS
from workbench.checks.faults import FAULTS

HEAD = """# What the doctor names

`workbench doctor DRAFTER` with whatever else is at hand (`--verifier`, `--parent`, `--mapping`, `--states`, `--replay`, `--log`,
`--metrics`, `--tokenizer`, `--run`, `--counts`) runs every check that these inputs allow and lists the rest under *skipped*. Exit code 0:
no error-level finding, 1: errors, 2: an input that cannot be read. It writes nothing. Capitals in a cure stand for your own paths;
`workbench cure` writes a new folder and leaves the drafter as it is. This page is written from the checks' own table by
`docs/make_doctor.py`.

| code | meaning | found by | needs | cure | seen in |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_line(code) for code in FAULTS)


def _line(code: str) -> str:
    fault = FAULTS[code]
    needs = dict.fromkeys(
        f"{', '.join(n for n in check.needs if n != 'drafter') or 'the drafter'}" for check in CHECKS if code in check.codes
    )
    links = " ".join(f"[{case}](https://github.com/{case.replace('#', '/issues/')})" for case in fault.cases.split())
    cells = (f"`{code}`", fault.meaning, fault.how, "; ".join(needs), fault.cure.format(code), links)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


if __name__ == "__main__":
    (Path(__file__).parent / "doctor.md").write_text(page(), "utf-8")
