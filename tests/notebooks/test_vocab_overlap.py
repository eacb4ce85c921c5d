"""Notebook 1 run from top to bottom: the founding numbers at their real size, and a plain papermill run that shows the same."""

import json
from pathlib import Path

import nbformat
import papermill
import pytest

from tests import overlap_cases

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_vocab_overlap.ipynb"
PLOTLY = "application/vnd.plotly.v1+json"


def figures_of(notebook: Path) -> list[dict]:
    """Every plotly figure among the outputs, in order, without those of live cells."""
    cells = nbformat.read(notebook, as_version=4).cells
    kept = [cell for cell in cells if cell.cell_type == "code" and "interactive" not in cell.metadata.tags]
    return [output.data[PLOTLY] for cell in kept for output in cell.outputs if PLOTLY in output.get("data", {})]


def test_the_founding_pair(tmp_path_factory: pytest.TempPathFactory) -> None:
    """K = 32,000 of V = 163,840: 252 / 25,750 / 6,250 in the results, notebook <= 3 MB, page <= 9 MB, every part there."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), "founding")
    assert json.loads((out / "status.json").read_text())["status"] == "ok"
    found = json.loads((out / "results.json").read_text())
    assert found["results"]["same_position"] == 252
    assert found["results"]["shared"] == 25_750
    assert found["results"]["only_b"] == 6_250
    assert found["verdict"][0]["shown"] == "252 of 32,000"
    assert (out / "01_vocab_overlap.ipynb").stat().st_size <= 3_000_000
    assert (out / "report.html").stat().st_size <= 9_000_000
    page = (out / "report.html").read_text()
    assert len(figures_of(out / "01_vocab_overlap.ipynb")) == page.count('class="plotly-graph-div"') == 5
    assert page.count('class="table" data-search') == 2
    assert "The first 500 of 6,250 rows." in page


def test_plain_papermill_gives_the_same(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Same parameters, no runner of ours, live cells executed too: equal figures, equal results.json."""
    out, parameters = overlap_cases.run_once(tmp_path_factory.getbasetemp(), "small")
    papermill.execute_notebook(
        NOTEBOOK, tmp_path / "plain.ipynb", {**parameters, "out": str(tmp_path)}, progress_bar=False, execution_timeout=300
    )
    assert figures_of(tmp_path / "plain.ipynb") == figures_of(out / "01_vocab_overlap.ipynb")
    assert (tmp_path / "results.json").read_text() == (out / "results.json").read_text()


def test_a_misspelt_parameter_stops_a_plain_papermill_run(tmp_path: Path) -> None:
    """papermill itself only warns; the notebook's first cell raises with the nearest name."""
    with pytest.raises(papermill.exceptions.PapermillExecutionError, match="unknown parameter parnet: did you mean parent"):
        papermill.execute_notebook(NOTEBOOK, tmp_path / "plain.ipynb", {"parnet": "x"}, progress_bar=False, execution_timeout=300)
