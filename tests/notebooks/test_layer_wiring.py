"""Notebook 2 from top to bottom on the tiny lab: replay recorded on the spot, every section on the page."""

import json

import pytest

from tests.page_cases import FIGURES, run_once


def test_the_tiny_lab(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Status ok, five numbers at the top, four figures, every table, no path in the results."""
    folder, _ = run_once(tmp_path_factory.getbasetemp(), "02_layer_wiring")
    text = (folder / "results.json").read_text()
    found = json.loads(text)
    assert [entry["key"] for entry in found["verdict"]] == ["faults", "accept_length", "full_acc_0", "best_reading", "engines_differ"]
    assert found["results"]["combination"] == []
    assert str(folder.parent) not in text
    page = (folder / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == FIGURES["02_layer_wiring"]
    for sentence in ("No other wiring fits better", "No tap reads better elsewhere", "checks ran", "none is under suspicion"):
        assert sentence in page
