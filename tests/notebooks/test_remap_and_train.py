"""Notebook 3 run from top to bottom on the tiny lab: results, page, and two drafters that open."""

import json

import pytest

from tests.page_cases import FIGURES, run_once
from workbench.mapfiles import read_map


def test_the_tiny_lab(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Status ok, the verdict's five numbers, every figure and table on the page, the remapped and the trained drafter in the run folder."""
    folder, given = run_once(tmp_path_factory.getbasetemp(), "03_remap_and_train")
    found = json.loads((folder / "results.json").read_text())
    assert len(found["verdict"]) == 5
    assert found["results"]["cross_entropy_naive"] > found["results"]["cross_entropy_remapped"]
    page = (folder / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == FIGURES["03_remap_and_train"]
    assert page.count("<table>") == 7 + 3  # with words, parameters and provenance
    assert "The worst of" in page
    for name in ("remapped", "drafter"):
        assert read_map(folder / name) == read_map(given["child"])
