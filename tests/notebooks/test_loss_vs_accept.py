"""Notebook 4 from top to bottom: on the tiny lab with a drafter that is decoded with, and on the founding case's numbers alone."""

import json
from pathlib import Path

import pytest

from tests.page_cases import FIGURES, run_once
from workbench.report import run_notebook

FOUNDING = Path(__file__).parents[2] / "notebooks" / "params" / "04_founding_case.yaml"


def test_the_tiny_lab(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Status ok, measured against simulated on the page, what has no input says so."""
    folder, _ = run_once(tmp_path_factory.getbasetemp(), "04_loss_vs_accept")
    found = json.loads((folder / "results.json").read_text())
    assert {"break_even", "best_draft_tokens"} <= found["results"].keys()
    page = (folder / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == FIGURES["04_loss_vs_accept"]
    assert "simulated on the same answers" in page
    assert "give training logs" in page


def test_the_founding_case(tmp_path: Path) -> None:
    """The page says everything that its numbers give away, contradictions first."""
    result = run_notebook("04_loss_vs_accept", {}, FOUNDING, tmp_path / "run")
    assert (result.status, result.error) == ("ok", None)
    page = (tmp_path / "run" / "report.html").read_text()
    for sentence in (
        "5 errors, 6 warnings: the numbers contradict each other, so suspect the data path",
        "loss_0 = 17.80 (first metrics) is worse than guessing, ln 32,000 = 10.37 and null-like",
        "Only 252 of 32,000 rows keep their token, although 25,750 tokens are shared: rows have to move, 6,250 to be made",
        "Accuracy 24.0% of a warm start is in the range of a wiring fault",
        "at the plateau: 1.58 → 1.50",
        "Training predicts accept length 2.72, drafter from scratch has 2",
        "Round costs 2.73 and 2.37 of one setup are 15% apart",
        "Break-even is accept length 2.37 to 2.73: 2.0 and 1.5 lose by drafting",
    ):
        assert sentence in page
    assert page.index("5 errors, 6 warnings") < page.index("is worse than guessing, ln 32,000")
