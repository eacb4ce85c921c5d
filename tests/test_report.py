"""Runs and their pages: refusals before a kernel, every kind of end leaves status, results and a page, and no kernel stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from workbench import lab, report
from workbench.errors import InputError
from workbench.report import find_notebook, run_notebook

PLOT = "from workbench import figures\nfigures.plot('Seven', 'It is 7.', [figures.trace('bar', x=[1], y=[7])], x='rows')"
SETUP = "from workbench.runs import RunFolder\nrun = RunFolder(out)\nrun.record('k', k, 'the k', str(k))"
PARAMETERS = "k: int = 3  # a number\nids: list = [1]  # a list\nfile: str = ''  # a path\nout: str = ''  # the run folder"


def write_notebook(path: Path, *cells: str) -> Path:
    """A notebook: title, parameters, set-up, a figure, then the given cells; a cell that starts with # is markdown."""
    made = [nbformat.v4.new_markdown_cell("# A title & more\nThe intro."), nbformat.v4.new_code_cell(PARAMETERS)]
    made[1].metadata["tags"] = ["parameters"]
    made += [nbformat.v4.new_code_cell(SETUP), nbformat.v4.new_markdown_cell("## First part"), nbformat.v4.new_code_cell(PLOT)]
    made[2].metadata["tags"] = ["setup"]
    made += [nbformat.v4.new_markdown_cell(c) if c.startswith("#") else nbformat.v4.new_code_cell(c) for c in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


def kernels() -> list[str]:
    """Kernels that this process started and that still run; other tests' helpers (a browser, a fork server) may live on."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "ipykernel" in line]


def load(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


class Good:
    """A run that succeeded, started from a folder of its own with relative paths, a parameter file and single parameters."""

    def __init__(self, folder: Path):
        self.folder, self.said = folder, []
        (folder / "data").write_text("x")
        (folder / "p.yaml").write_text("k: 5\nids: [7]\n")
        script = "from IPython.display import Javascript, display\ndisplay(Javascript('window.bad = 1'))"
        widget = "display({'application/vnd.jupyter.widget-view+json': {'model_id': '7'}, 'text/plain': 'a widget'}, raw=True)"
        write_notebook(folder / "nb.ipynb", "import os\nprint(k + 1, ids, file, os.getcwd())", script, widget)
        self.result = run_notebook(folder / "nb.ipynb", {"ids": "2,4", "file": "./data"}, "p.yaml", Path("out"), self.said.append)
        self.out, self.page = folder / "out", Path(self.result.html).read_text()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Good]:
    """One good run for several tests."""
    before, folder = os.getcwd(), tmp_path_factory.mktemp("good")
    os.chdir(folder)
    try:
        yield Good(folder)
    finally:
        os.chdir(before)


def test_a_run_that_succeeds(good: Good) -> None:
    """Given values reach the kernel typed and absolute, single ones win over the file's; page, results, status and log are there."""
    result = good.result
    assert (result.status, result.exit_code, result.error) == ("ok", 0, None)
    assert result.to_json().keys() == {"notebook", "status", "html", "results", "seconds", "error"}
    assert load(good.out, "status.json")["status"] == "ok"
    assert load(good.out, "results.json")["results"] == {"k": 5}
    assert load(good.out, "parameters.json") == {"k": 5, "ids": [2, 4], "file": str(good.folder / "data")}
    assert f"6 [2, 4] {good.folder / 'data'} {good.folder}" in good.page
    assert "nb: ids = [2, 4] (list)" in good.said
    assert "nb: First part" in good.said
    assert (good.out / "nb.ipynb").stat().st_size < 30_000
    assert not kernels()


def test_a_page_has_its_parts_in_order(good: Good) -> None:
    """Title, verdict, contents, sections with title and sentence as text, parameters with given ones marked, provenance."""
    assert "A title &amp; more" in good.page
    assert '<h4 class="figure-title">Seven</h4>' in good.page
    assert '<p class="sentence">It is 7.</p>' in good.page
    assert "<b>given</b>" in good.page
    order = ["<h1>", 'class="verdict"', "Contents</b>", 'id="First-part"', 'id="parameters"', 'id="provenance"']
    assert [good.page.index(part) for part in order] == sorted(good.page.index(part) for part in order)


def test_a_page_loads_nothing(good: Good) -> None:
    """No address in any src or href, plotly.js once, widgets and scripts of outputs dropped."""
    assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)=["']?(https?:)?//""", good.page)
    assert good.page.count("plotly.js v") == 1
    main = good.page[good.page.index("<main>") : good.page.index("</main>")]
    assert main.count("<script") == 1  # the figure's own
    assert "a widget" not in re.sub(r"<pre>.*?</pre>", "", main, flags=re.DOTALL)  # the folded code names it


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"kk": 1}, "unknown parameter kk: did you mean k"),
        ({"k": "many"}, "parameter k = 'many' is str, expected int"),
        ({"out": "x"}, "--out"),
    ],
)
def test_bad_parameters_stop_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict, said: str
) -> None:
    """No kernel, no folder: the sentence comes first."""
    monkeypatch.setattr(report, "_execute", lambda *_: pytest.fail("a kernel was started"))
    write_notebook(tmp_path / "nb.ipynb")
    with pytest.raises(InputError, match=said):
        run_notebook(tmp_path / "nb.ipynb", parameters, "", tmp_path / "out")
    assert os.listdir(tmp_path) == ["nb.ipynb"]


def test_what_a_path_holds_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter for a verifier, or a folder of neither, is told before a kernel starts; nothing is written."""
    monkeypatch.setattr(report, "_execute", lambda *_: pytest.fail("a kernel was started"))
    drafter = str(lab.DATA / "parent-drafter")
    for notebook, given, said in (
        ("02_layer_wiring", {"drafter": drafter, "verifier": drafter}, "expected its verifier here"),
        ("03_remap_and_train", {"drafter": str(tmp_path)}, "no weights"),
        ("01_vocab_overlap", {"parent": str(tmp_path)}, str(tmp_path)),
    ):
        with pytest.raises(InputError, match=said):
            run_notebook(notebook, given, "", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier run is never overwritten, and a folder has to be named."""
    monkeypatch.setattr(report, "_execute", lambda *_: pytest.fail("a kernel was started"))
    write_notebook(tmp_path / "nb.ipynb")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "status.json").write_text("{}")
    with pytest.raises(InputError, match="already holds files"):
        run_notebook(tmp_path / "nb.ipynb", {}, "", tmp_path / "out")
    (tmp_path / "out" / "status.json").write_text('{"status": "failed"}')
    with pytest.raises(InputError, match="a run that did not end well: nothing was written; choose a new folder or remove"):
        run_notebook(tmp_path / "nb.ipynb", {}, "", tmp_path / "out")
    with pytest.raises(InputError, match="no output folder"):
        run_notebook(tmp_path / "nb.ipynb", {}, "", "")
    with pytest.raises(InputError, match="no notebook 01_vocab_overlp: did you mean 01_vocab_overlap"):
        find_notebook("01_vocab_overlp")


@pytest.mark.parametrize(
    ("cell", "exception", "said", "code"),
    [
        ("1 / 0", "ZeroDivisionError", "division by zero", 1),
        ("from workbench.errors import InputError\nraise InputError('no map at <b>x</b>; give one')", "InputError", "no map at", 2),
        ("import os\nos._exit(1)", "DeadKernelError", "the kernel died", 1),
        ("import time\ntime.sleep(60)", "CellTimeoutError", "longer than 20 s", 1),
        ("input('name?')", "StdinNotImplementedError", "raw_input was called", 1),
    ],
)
def test_a_run_that_fails_keeps_what_it_had(tmp_path: Path, cell: str, exception: str, said: str, code: int) -> None:
    """Whatever ends a cell: partial notebook, results so far, the error first on the page, the cell's number, no kernel left."""
    write_notebook(tmp_path / "nb.ipynb", "## Second", cell, "print('not reached')")
    result = run_notebook(tmp_path / "nb.ipynb", {}, "", tmp_path / "out", cell_seconds=20 if "sleep" in cell else 600)
    assert (result.status, result.exit_code) == ("failed", code)
    assert said in result.error
    status = load(tmp_path / "out", "status.json")
    executed = nbformat.read(tmp_path / "out" / "nb.ipynb", as_version=4)
    cells = [c for c in executed.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    assert (status["status"], status["exception"]) == ("failed", exception)
    assert cells[status["cell"] - 1].source == cell
    assert load(tmp_path / "out", "results.json")["results"] == {"k": 3}
    page = Path(result.html).read_text()
    assert page.index('role="alert"') < page.index('class="verdict"')
    assert page.index('class="plotly-graph-div"') < page.index('id="failed"')
    assert "Execution using papermill" not in page
    assert not re.search(r"<b>x</b>", page)
    assert not kernels()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_leaves_no_kernel(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C or a plain kill while a cell runs: status interrupted, page written, the kernel gone, the process ended by the interrupt."""
    mark = tmp_path / "reached"
    cell = f"import os, pathlib, time\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    write_notebook(tmp_path / "nb.ipynb", cell)
    code = f"from workbench.report import run_notebook\nrun_notebook({str(tmp_path / 'nb.ipynb')!r}, {{}}, '', {str(tmp_path / 'out')!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    for _ in range(1800):
        if mark.exists() and mark.read_text():
            break
        time.sleep(0.1)
    assert load(tmp_path / "out", "status.json")["status"] == "running"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in stderr
    status = load(tmp_path / "out", "status.json")
    assert (status["status"], status["exception"]) == ("interrupted", "KeyboardInterrupt")
    assert "was interrupted" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_a_number_has_one_column_whatever_runs_say_beside_it() -> None:
    """A label that differs from run to run stands in the cells, one that does not heads the column."""
    runs = [
        {"notebook": "n", "differs": f"k {k}", "status": "ok", "seconds": 1.0, "verdict": [
            {"key": "faults", "value": k, "label": f"faults: {k} kinds", "shown": str(k)},
            {"key": "rows", "value": k, "label": "rows kept", "shown": f"{k} of 9"},
        ]}
        for k in (1, 2)
    ]  # fmt: skip
    table = report._headlines(runs)
    assert re.findall("<th [^>]*>([^<]*)", table)[4:] == ["faults", "rows kept"]
    assert "2 faults: 2 kinds" in table
    assert ">2 of 9<" in table


def test_the_lab_report_runs_every_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder a notebook, and an index with failures first; a failed notebook does not stop the others; a full folder is refused."""
    (tmp_path / "nbs").mkdir()
    for name, cell in (("a", "1"), ("b", "raise ValueError('<i>no</i>')"), ("c", "1")):
        write_notebook(tmp_path / "nbs" / f"{name}.ipynb", cell)
    monkeypatch.setattr(report, "NOTEBOOKS", tmp_path / "nbs")
    said: list[str] = []
    results = report.lab_report(tmp_path / "out", said.append)
    assert [(r.notebook, r.status) for r in results] == [("a", "ok"), ("b", "failed"), ("c", "ok")]
    assert said[-1] == f"report: {tmp_path / 'out' / 'index.html'}"
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.index("b/report.html") < page.index("a/report.html") < page.index("c/report.html")
    assert "&lt;i&gt;no&lt;/i&gt;" in page
    assert page.count("<b>3</b>") == 3
    assert page.count("A title &amp; more") == 3
    assert "<table>" not in page  # three notebooks have no number in common
    assert len(page) < 60_000
    with pytest.raises(InputError, match="already holds files"):
        report.lab_report(tmp_path / "out")
