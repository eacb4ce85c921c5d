"""The form of a finding, and the verdict over many."""

import pytest

from workbench.findings import SEVERITIES, Finding, verdict, worst_first


def test_verdict_is_the_worst_severity() -> None:
    """clean without findings, else the plural of the worst, whatever their order."""
    one = {severity: Finding("code", severity, "title", "where") for severity in SEVERITIES}
    assert verdict([]) == "clean"
    assert [verdict([one[severity]]) for severity in SEVERITIES] == ["notes", "warnings", "errors"]
    assert verdict([one["note"], one["error"], one["warning"]]) == "errors"


def test_worst_first_keeps_the_order_within_a_severity() -> None:
    """Errors before warnings before notes; equals stay as they were found."""
    found = [Finding(str(i), severity, "", "") for i, severity in enumerate(["note", "error", "warning", "error", "note"])]
    assert [finding.code for finding in worst_first(found)] == ["1", "3", "2", "0", "4"]


def test_json_is_the_contract() -> None:
    """The keys of the command line's JSON, and a finding cannot be changed."""
    finding = Finding("map-missing", "error", "No d2t", "model.safetensors", {"k": 1}, "add it")
    assert list(finding.to_json()) == ["code", "severity", "title", "where", "evidence", "remedy"]
    with pytest.raises(AttributeError):
        finding.code = "x"  # type: ignore[misc]
