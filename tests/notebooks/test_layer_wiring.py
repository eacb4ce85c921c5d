"""Notebook 2 from top to bottom on the tiny lab: replay recorded on the spot, every section on the page."""

import json
from pathlib import Path

from tests.tiny_replay import tiny_replay
from workbench.report import run_notebook


def test_the_tiny_lab(tmp_path: Path) -> None:
    """Status ok, five numbers at the top, four figures, every table, no path in the results."""
    wired = tiny_replay(tmp_path)
    given = {"drafter": str(wired.drafter), "verifier": str(tmp_path / "verifier"), "prompts": str(tmp_path / "prompts.jsonl")}
    result = run_notebook("02_layer_wiring", {**given, "tokens": 300, "rows": 10}, "", tmp_path / "run")
    assert (result.status, result.error) == ("ok", None)
    text = (tmp_path / "run" / "results.json").read_text()
    found = json.loads(text)
    assert [entry["key"] for entry in found["verdict"]] == ["faults", "accept_length", "full_acc_0", "best_reading", "engines_differ"]
    assert found["results"]["combination"] == []
    assert str(tmp_path) not in text
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == 4
    for sentence in ("No other wiring fits better", "No tap reads better elsewhere", "checks ran", "none is under suspicion"):
        assert sentence in page
