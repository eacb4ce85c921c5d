"""Notebook 3 run from top to bottom on the tiny lab: results, page, and two drafters that open."""

import json
from pathlib import Path

from tests.warm_start_case import write_case
from workbench.mapfiles import read_map
from workbench.report import run_notebook

SMALL = {"tokens": 128, "train_tokens": 100, "steps": 2, "step_tokens": 32, "rows": 5, "draft_tokens": 2}


def test_the_tiny_lab(tmp_path: Path) -> None:
    """Status ok, the verdict's four numbers, every figure and table on the page, the remapped and the trained drafter in the run folder."""
    given = write_case(tmp_path / "case")
    result = run_notebook("03_remap_and_train", {**given, **SMALL, "ways": ["naive", "remapped", "keep", "scratch"]}, "", tmp_path / "run")
    assert (result.status, result.error) == ("ok", None)
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(found["verdict"]) == 4
    assert found["results"]["cross_entropy_naive"] > found["results"]["cross_entropy_remapped"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == 5
    assert page.count("<table>") == 6 + 2  # with parameters and provenance
    assert "The worst of" in page
    for name in ("remapped", "drafter"):
        assert read_map(tmp_path / "run" / name) == read_map(given["child"])
