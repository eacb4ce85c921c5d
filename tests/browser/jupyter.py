"""A real JupyterLab in Chromium, used as a person would: its server, and a notebook that is open in it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator

from tests.browser.chromium import Seen

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PANEL = "window.jupyterapp?.shell.currentWidget"
CODE = f"{PANEL}.content.widgets.filter(cell => cell.model.type === 'code')"
OUTPUTS = "[...Array(cell.model.outputs.length).keys()].map(n => cell.model.outputs.get(n).toJSON())"
REST = 1.0  # seconds without a move
CONTRAST = """(cell) => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3)
    .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = light(getComputedStyle(document.querySelector(".jp-Notebook")).backgroundColor);
  const texts = [...cell.querySelectorAll(".main-svg text")].filter(t => t.textContent.trim() && !t.closest(".bars, .hm, .heatmaplayer"));
  return texts.map(t => [light(getComputedStyle(t).fill), t.textContent]).map(([l, text]) =>
    [(Math.max(l, behind) + 0.05) / (Math.min(l, behind) + 0.05), text]);
}"""


@contextmanager
def server(root: Path, parameters: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> Iterator[str]:
    """A JupyterLab that knows nothing of this machine's user; yields the address of a file, to be filled with a workspace and the file.

    parameters: of each notebook that it is to hold, what its parameters cell says instead of the defaults.
    """
    own = {f"JUPYTER_{part}_DIR": str(root / part.lower()) for part in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTER_CONFIG_PATH": str(NOTEBOOKS / ".jupyter")}
    own |= {"IPYTHONDIR": str(root / "ipython"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (root / "files").mkdir()
    for page in NOTEBOOKS.glob("*.md"):
        shutil.copy(page, root / "files")
    for name, values in parameters.items():
        (root / "files" / f"{name}.ipynb").write_text(_filled((NOTEBOOKS / f"{name}.ipynb").read_text(), values))
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--ServerApp.root_dir={root / 'files'}", "--LabApp.expose_app_in_browser=True"]
    with open(root / "server.log", "w") as log:
        process = subprocess.Popen(command, env={**os.environ, **own, **environment}, stdout=log, stderr=log, cwd=root)
        try:
            yield _address(root / "runtime", process, root / "server.log")
        finally:
            process.terminate()
            process.wait(60)


def _filled(notebook: str, values: Mapping[str, Any]) -> str:
    """A notebook with other values in its parameters cell."""
    content = json.loads(notebook)
    (cell,) = (cell for cell in content["cells"] if "parameters" in cell["metadata"].get("tags", []))
    source = "".join(cell["source"])
    for name, value in values.items():
        source, found = re.subn(rf"^({name}: \w+) = .*?(  # )", lambda m, v=value: f"{m[1]} = {v!r}{m[2]}", source, flags=re.MULTILINE)
        assert found == 1, name
    cell["source"] = source.splitlines(keepends=True)
    return json.dumps(content)


def _address(runtime: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the server's own note of where it listens."""
    while True:
        for note in runtime.glob("jpserver-*.json"):
            try:
                found = json.loads(note.read_text())
            except json.JSONDecodeError:  # half written
                continue
            return f"{found['url']}lab/workspaces/{{}}/tree/{{}}?token={found['token']}"
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


class Notebook(Seen):
    """A notebook that is open in JupyterLab, its kernel ready."""

    def __init__(self, browser: Browser, address: str, name: str, width: int = 1280, script: str = ""):
        super().__init__(browser, width)
        self.page.add_init_script(script)
        self.page.goto(address.format(name, f"{name}.ipynb"))
        self.page.wait_for_function(f"{PANEL}?.content?.widgets?.length && {PANEL}.sessionContext.session?.kernel?.status === 'idle'")

    def run_all(self) -> None:
        """Run > Run All Cells, until the last one has finished or one has failed."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        done = f"{CODE}.every(cell => cell.model.executionCount && cell.model.executionState === 'idle')"
        failed = f"{CODE}.some(cell => {OUTPUTS}.some(output => output.output_type === 'error'))"
        self.page.wait_for_function(f"{done} || {failed}", timeout=600_000, polling=200)

    def failures(self) -> list[str]:
        """The error outputs of all cells."""
        errors = f"{CODE}.flatMap(cell => {OUTPUTS}).filter(output => output.output_type === 'error')"
        return self.page.evaluate(f"{errors}.map(output => `${{output.ename}}: ${{output.evalue}}`)")

    def cell(self, text: str) -> Locator:
        """The code cell whose source holds a text, in view."""
        cells = f"{PANEL}.content.widgets"
        at = self.page.evaluate(
            f"text => {cells}.findIndex(c => c.model.type === 'code' && c.model.sharedModel.source.includes(text))", text
        )
        assert at >= 0, text
        cell = self.page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{at}']")
        cell.scroll_into_view_if_needed()
        return cell

    def rerun(self, cell: Locator) -> None:
        """Click into a cell's source and press Ctrl+Enter."""
        count = "cell => cell.querySelector('.jp-InputPrompt').textContent"
        before = cell.evaluate(count)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        self.until(cell, f"cell => (text => text !== {before!r} && !text.includes('*'))(({count})(cell))")

    def until(self, cell: Locator, truth: str) -> None:
        """Wait until a function of the cell's element holds."""
        self.page.wait_for_function(f"cell => ({truth})(cell)", arg=cell.element_handle(), polling=100)

    def theme(self, name: str) -> None:
        """Settings > Theme."""
        self.page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', { theme: name })", name)
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


class Figure:
    """The n-th plotly figure in a cell."""

    def __init__(self, notebook: Notebook, cell: Locator, n: int = 0):
        self.notebook, self.plot = notebook, cell.locator(".js-plotly-plot").nth(n)
        self.plot.scroll_into_view_if_needed()
        drawn = "plot => plot.data?.length && plot.querySelector('.main-svg')"
        notebook.page.wait_for_function(f"plot => ({drawn})(plot)", arg=self.plot.element_handle(), polling=100)

    @property
    def title(self) -> str:
        return self.plot.evaluate("plot => plot.layout.meta.title")

    def values(self, trace: int, axis: str) -> list[Any]:
        """What a trace holds on an axis, as numbers: plotly keeps apart what came packed."""
        return self.plot.evaluate("(plot, [n, axis]) => [...(plot._fullData[n][axis] ?? [])]", [trace, axis])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag across the first panel, from and to shares of its width and height, once the page has come to rest and the panel is in view.

        What arrives below a figure moves it, and what changes its width draws it anew, which ends a drag.
        """
        page, panel = self.notebook.page, self.plot.locator(".nsewdrag").first
        self.plot.scroll_into_view_if_needed()
        place, since = panel.bounding_box(), time.monotonic()
        while time.monotonic() - since < REST:
            page.wait_for_timeout(50)
            if place != (place := panel.bounding_box()):
                since = time.monotonic()
        points = [(place["x"] + x * place["width"], place["y"] + y * place["height"]) for x, y in (start, end)]
        assert all(panel.evaluate("(panel, point) => document.elementFromPoint(...point) === panel", [*point]) for point in points)
        page.mouse.move(*points[0])
        page.mouse.down()
        page.mouse.move(*points[1], steps=5)
        page.mouse.up()

    def changes(self, what: str, before: Any) -> Any:
        """Wait until a JavaScript expression of `plot` has another value than before; that value."""
        handle = self.plot.element_handle()
        self.notebook.page.wait_for_function(
            f"([plot, before]) => JSON.stringify({what}) !== JSON.stringify(before)", arg=[handle, before], polling=50
        )
        return self.plot.evaluate(f"plot => {what}")
