"""Run notebooks headless and turn each run into one self-contained page.

Notable:
* Everything that a user can get wrong in a name, a value or a path is refused before a kernel starts and before anything is written.
* From the start of a run its folder tells what became of it: `status.json`, `results.json` and `report.html` are there whether the
  notebook succeeded, raised, ran into its time limit, lost its kernel or was interrupted. A user's mistake found inside a cell
  (InputError) gives exit code 2, every other failure 1.
* The page needs no network and no kernel: plotly.js once in its head, live cells (tagged `interactive`) neither run nor shown, code
  folded, tables sorted and searched by a few lines of script in `page.html.j2`. papermill's own file stays beside it as the log.
"""

import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from papermill.exceptions import PapermillExecutionError
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from traitlets.config import Config

from workbench import figures, params
from workbench.checkpoint import open_drafter, open_verifier
from workbench.errors import InputError
from workbench.mapfiles import read_raw
from workbench.runs import RunFolder, atomic_file, check_destination

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
CELL_SECONDS = 3600  # papermill's own default is to wait for ever
START_SECONDS = 120
HEADING = re.compile(r'<h2 id="([^"]+)">(.*?)<a class="anchor-link"', re.DOTALL)

OPENERS = {"drafter": open_drafter, "verifier": open_verifier, "map": read_raw}  # read headers, InputError for another kind of thing

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """What became of one run. html and results are paths; error is None or one sentence; exit_code 0 ok, 1 failed, 2 a user's mistake."""

    notebook: str
    status: str
    html: str
    results: str
    seconds: float
    error: str | None
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        """The contract of `run`, `report` and `batch`."""
        return {name: value for name, value in asdict(self).items() if name != "exit_code"}


def quiet(_line: str) -> None:
    """A progress callback that says nothing."""


def run_notebook(
    notebook: str | Path,
    parameters: dict[str, Any],
    params_file: str | Path = "",
    out: str | Path = "",
    progress: Progress = quiet,
    cell_seconds: float = CELL_SECONDS,
) -> RunResult:
    """Run a notebook (a path, or a name such as 01_vocab_overlap) into the new folder `out`.

    parameters win over those of the YAML file `params_file`; relative paths in both are seen from the caller's folder.
    Raises InputError before anything is written, and KeyboardInterrupt again after the page of an interrupted run is.
    """
    path = find_notebook(notebook)
    given = {**(params.read_file(params_file) if params_file else {}), **parameters}
    cls = params.of_notebook(path)
    if "out" in given:
        raise InputError("parameter out is set by the run itself: name the output folder with --out")
    settings = params.check(cls, given, Path.cwd())
    values = {name: getattr(settings, name) for name in given}
    for f in fields(cls):
        if (kind := f.metadata.get("path")) in OPENERS and Path(values.get(f.name, "")).is_absolute():  # the notebook looks an id up
            OPENERS[kind](values[f.name])
    for name, value in values.items():
        progress(f"{path.stem}: {name} = {value!r} ({type(value).__name__})")
    if not str(out):
        raise InputError("no output folder named: a run needs a new folder for its page, results and status")
    run = RunFolder.start(Path(out), path.stem, values)
    paths = {f.name: str(values.get(f.name, "")) for f in fields(cls) if f.metadata.get("path") in (True, *OPENERS) and f.type is str}
    run.trace(paths, device="not reached", seed=None)  # the notebook replaces it once it knows more
    if "out" in {f.name for f in fields(cls)}:
        values["out"] = str(run.folder)
    executed = run.folder / f"{path.stem}.ipynb"
    reached = [0]
    error: BaseException | None = None
    try:
        with _terminable():
            _execute(path, executed, values, reached, progress, cell_seconds)
    except BaseException as caught:  # whatever happened, the run folder has to say so first
        error = caught
    status = run.finish(**_outcome(error, reached[0], cell_seconds))
    _write_page(run, executed, settings, status)
    if error is not None and not isinstance(error, Exception):
        raise error
    message = status.get("message")
    code = 0 if error is None else 2 if status["exception"] == "InputError" else 1
    return RunResult(
        path.stem, status["status"], str(run.folder / "report.html"), str(run.folder / "results.json"), status["seconds"], message, code
    )


def find_notebook(notebook: str | Path) -> Path:
    """The notebook that a path or a bare name means."""
    for path in (Path(notebook).expanduser(), NOTEBOOKS / f"{notebook}.ipynb"):
        if path.is_file():
            return path.absolute()
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    near = get_close_matches(str(notebook), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"no notebook {notebook}: {hint}give a path to an .ipynb file or one of {', '.join(names)}")


def _execute(path: Path, executed: Path, values: dict[str, Any], reached: list[int], progress: Progress, cell_seconds: float) -> None:
    """papermill, with the options that make a headless run end, stay small and say where it is."""

    def on_cell_start(cell: nbformat.NotebookNode, cell_index: int) -> None:
        reached[0] = cell_index + 1
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            progress(f"{path.stem}: {cell.source.splitlines()[0][3:]}")

    # no ports, and sockets in a folder of their own: runs side by side cannot take each other's
    with tempfile.TemporaryDirectory(prefix="workbench-") as sockets:
        papermill.execute_notebook(
            path,
            executed,
            parameters=values,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=START_SECONDS,
            execution_timeout=cell_seconds,
            skip_cells_with_tag="interactive",
            coalesce_streams=True,
            store_widget_state=False,
            shutdown_kernel="immediate",
            on_cell_start=on_cell_start,
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
        )


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a run the way Ctrl-C does, so that its kernel goes and its page is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _outcome(error: BaseException | None, cell: int, cell_seconds: float) -> dict[str, Any]:
    """The end of a run as fields of status.json."""
    if error is None:
        return {"status": "ok"}
    name, message = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, PapermillExecutionError):
        name, message, cell = error.ename, error.evalue, error.cell_index + 1
    elif isinstance(error, DeadKernelError):
        message = "the kernel died while this cell ran: most often the machine had no memory left; try smaller inputs"
    elif isinstance(error, CellTimeoutError):
        message = f"the cell ran longer than {cell_seconds:g} s, the limit for one cell"
    elif isinstance(error, KeyboardInterrupt):
        message = "interrupted from outside (Ctrl-C or a signal)"
    status = "failed" if isinstance(error, Exception) else "interrupted"
    return {"status": status, "cell": cell or None, "exception": name, "message": message}


# ---- pages ----------------------------------------------------------------------------------------------------------------------


def _write_page(run: RunFolder, executed: Path, settings: Any, status: dict[str, Any]) -> None:
    """report.html from what the run left, however far it came."""
    notebook = nbformat.read(executed, as_version=4) if executed.exists() else nbformat.v4.new_notebook()
    title, intro, setup = _prepare(notebook, status)
    exporter = HTMLExporter(
        template_name="basic",
        template_file=str(Path(__file__).parent / "cells.html.j2"),
        exclude_output_prompt=True,
        exclude_input_prompt=True,
    )
    cells, _ = exporter.from_notebook_node(notebook)
    code = HtmlFormatter(style="friendly")
    page = _render(
        "report.html.j2",
        title=title or status["notebook"],
        intro=markdown2html(intro),
        words=_words() if status["notebook"] in params.NOTEBOOKS else "",
        status=status,
        results=run.read("results.json"),
        contents=[(jinja2.filters.do_striptags(name), id) for id, name in HEADING.findall(cells)],
        cells=cells,
        setup=highlight("\n\n".join(setup), PythonLexer(), code),
        parameters=figures.settings_table(params.explain(settings)).body.to_html(),
        provenance=figures.provenance_table(run.read("provenance.json")).body.to_html(),
        code_style=code.get_style_defs(".highlight"),
        plotlyjs=figures.plotlyjs(),
    )
    with atomic_file(run.folder / "report.html") as work:
        work.write_text(page, "utf-8")


def _words() -> str:
    """The glossary as a table."""
    return markdown2html((NOTEBOOKS / "WORDS.md").read_text("utf-8").partition("\n")[2])


def _prepare(notebook: nbformat.NotebookNode, status: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Make a notebook ready for its page, in place; return its title, the text under the title and the code of its set-up cells.

    Figures become drawings; live cells and papermill's own banners go. Set-up cells without an error leave the flow: their code has one
    place, and parameters and provenance have theirs, at the end of the page.
    """
    cells = [cell for cell in notebook.cells if not _tags(cell, "papermill-error-cell-tag")]
    if status.get("cell"):
        cells[status["cell"] - 1].metadata["failed"] = True  # counted before papermill put its banners in
    notebook.cells, setup = [], []
    for n, cell in enumerate(cells):
        if _tags(cell, "parameters", "injected-parameters", "setup") and not cell.metadata.get("failed"):
            setup.append(cell.source)
        elif not _tags(cell, "interactive"):
            if "outputs" in cell:
                cell.outputs = [o for o in cell.outputs if WIDGET_MIME not in o.get("data", {}) and o.get("metadata") != figures.TITLE]
            for m, output in enumerate(cell.get("outputs", [])):
                if figures.PLOTLY_MIME in output.get("data", {}):
                    drawing = figures.figure_html(output.data[figures.PLOTLY_MIME], f"figure-{n}-{m}")
                    cell.outputs[m] = nbformat.v4.new_output("display_data", {"text/html": drawing})
            notebook.cells.append(cell)
    first = notebook.cells[0].source if notebook.cells and notebook.cells[0].cell_type == "markdown" else ""
    if not first.startswith("# "):
        return "", "", setup
    del notebook.cells[0]
    title, _, intro = first[2:].partition("\n")
    return title.strip(), intro, setup


def _tags(cell: nbformat.NotebookNode, *wanted: str) -> bool:
    return bool({*wanted} & {*cell.metadata.get("tags", [])})


def _render(template: str, **content: Any) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["marked"] = figures.marked
    return environment.get_template(template).render(**content)


def lab_report(out: str | Path | None = None, progress: Progress = quiet) -> list[RunResult]:
    """Every notebook on the lab, one after the other, and an index page; default folder runs/report-<time>. Goes on after a failure."""
    folder = check_destination(Path(out or f"runs/report-{datetime.now():%Y%m%d-%H%M%S}"))
    started, results = time.monotonic(), []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        results.append(run_notebook(path, {}, "", folder / path.stem, progress))
    write_index(folder, results, f"The workbench on its lab: {len(results)} notebooks in {time.monotonic() - started:.0f} s")
    progress(f"report: {folder / 'index.html'}")
    return results


def write_index(folder: Path, results: Sequence[RunResult], title: str, differs: Sequence[str] = ()) -> Path:
    """index.html: a table of all runs' headline numbers, then every run with its page; failed ones first, with the sentence that says why.

    differs: for each result what tells its run from the others.
    """
    runs = []
    for result, words in zip(results, differs or [""] * len(results), strict=True):
        found = RunFolder(Path(result.html).parent).read("results.json") if result.html else {"verdict": [], "warnings": []}
        link = Path(result.html).relative_to(folder).as_posix() if result.html else ""
        about = {"link": link, "differs": words, "question": "", "inputs": ""}
        runs.append({**result.to_json(), **about, **(_about(Path(result.html).parent, result.notebook) if result.html else {}), **found})
    runs.sort(key=lambda run: run["status"] == "ok")
    with atomic_file(folder / "index.html", replace=True) as work:
        work.write_text(_render("index.html.j2", title=title, runs=runs, table=_headlines(runs)), "utf-8")
    return folder / "index.html"


def _about(folder: Path, notebook: str) -> dict[str, str]:
    """The question that a run asks, its notebook's title, and the names of what it was asked of."""
    executed = folder / f"{notebook}.ipynb"
    cells = nbformat.read(executed, as_version=4).cells if executed.exists() else []
    title = next((cell.source.partition("\n")[0] for cell in cells if cell.source.startswith("# ")), "")
    inputs = RunFolder(folder).read("provenance.json").get("inputs", {})
    return {"question": title[2:], "inputs": ", ".join(f"{name} {Path(found['path']).name}" for name, found in inputs.items())}


def _headlines(runs: Sequence[dict[str, Any]]) -> str:
    """One row a run, one column a headline number, as HTML that sorts in the page; none for notebooks that have no number in common."""
    if len({run["notebook"] for run in runs}) == len(runs):
        return ""
    labels: dict[str, dict[str, None]] = {}  # of each headline number: what runs say beside it
    for entry in (entry for run in runs for entry in run["verdict"]):
        labels.setdefault(entry["key"], {})[entry["label"]] = None
    columns = [figures.Column(name) for name in ("run", "what differs", "status")]
    columns += [figures.Column("seconds", "number")]
    columns += [figures.Column(next(iter(said)) if len(said) == 1 else key, "value") for key, said in labels.items()]
    rows = []
    for run in runs:
        told = {e["key"]: e["shown"] if len(labels[e["key"]]) == 1 else f"{e['shown']} {e['label']}" for e in run["verdict"]}
        rows.append([run["notebook"], run["differs"], run["status"], run["seconds"], *map(told.get, labels)])
    return figures.Table(columns, rows).to_html()
