"""How long a control of notebook 1 takes to redraw its figures in a real JupyterLab, at K = 32,000 of V = 163,840.

    PYTHONPATH=. python benchmarks/redraw.py

Needs Chromium (`make test` sets it up). From the key or the mouse to the changed figure in the page, five times each; the size is that of
the notebook as JupyterLab saves it after all cells have run.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests import overlap_cases
from tests.browser.chromium import chromium
from tests.browser.jupyter import Figure, Notebook, server

REPEATS = 5
# from the event that a person causes to the frame that shows the new figure, by the page's own clock
WATCH = """plot => {
  const value = () => JSON.stringify(WHAT), before = value();
  let started = null;
  for (const kind of ["mouseup", "keydown", "change"])
    window.addEventListener(kind, () => { started ??= performance.now(); }, { capture: true, once: true });
  window.redrawn = new Promise((drawn) => plot.on("plotly_react", () => {
    if (value() === before) return;
    // a task that a frame posts with the first priority runs when that frame has been painted, before anything else
    requestAnimationFrame(() => scheduler.postTask(() => drawn(performance.now() - started), { priority: "user-blocking" }));
  }));
}"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        root = Path(folder)
        given = overlap_cases.write_founding_case(root / "case")
        (root / "jupyter").mkdir()
        with server(root / "jupyter", {"01_vocab_overlap": given}, {}) as address:
            notebook = Notebook(browser, address, "01_vocab_overlap")
            started = time.perf_counter()
            notebook.run_all()
            took = time.perf_counter() - started
            assert notebook.failures() == []
            print("| control | median s | slowest s |\n|---|---|---|")
            for name, act in controls(notebook, given).items():
                times = [act(n) for n in range(REPEATS)]
                print(f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} |", flush=True)
            notebook.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
            size = (root / "jupyter" / "files" / "01_vocab_overlap.ipynb").stat().st_size
            print(f"\nall cells: {took:.0f} s; saved notebook: {size / 1e6:.2f} MB")


def controls(notebook: Notebook, given: dict[str, str]) -> dict[str, Callable[[int], float]]:
    """What a person does, the n-th time; seconds until the figure that it changes has changed."""
    cell = notebook.cell("live.positions(")
    headline, picture = Figure(notebook, cell, 0), Figure(notebook, cell, 1)
    share = "plot.layout.meta.title"

    def timed(act: Callable[[], object], figure: Figure, what: str) -> float:
        figure.plot.evaluate(WATCH.replace("WHAT", what))
        act()
        return notebook.page.evaluate("() => window.redrawn") / 1000

    def pick(n: int) -> object:
        """Another slice of the text."""
        return cell.get_by_label("slice").select_option(index=n % 2 + 1)

    def sliced(n: int) -> float:
        return timed(lambda: pick(n), Figure(notebook, cell, 2), share)

    def named(n: int) -> float:
        """The most frequent tokens, ringed in the picture of all rows."""
        return timed(lambda: pick(n + 1), picture, "[...plot._fullData[4].x].slice(0, 40)")

    def draw(n: int) -> None:
        """A box around the n-th strip of points, but for letting the button go; a drag within an older box would move that one."""
        picture.plot.scroll_into_view_if_needed()
        drag = picture.plot.locator(".nsewdrag").first.bounding_box()
        left, width = drag["x"] + 5, drag["width"] / (REPEATS + 2)
        notebook.page.mouse.move(left + width * n, drag["y"] + 5)
        notebook.page.mouse.down()
        notebook.page.mouse.move(left + width * (n + 0.8), drag["y"] + drag["height"] - 5, steps=5)

    def box(n: int) -> float:
        """A box around other points."""
        draw(n + 1)
        return timed(notebook.page.mouse.up, Figure(notebook, cell, 2), share)

    def maps(n: int, figure: Figure, what: str) -> float:
        """Another parent: the child's own map, and back."""
        field = cell.get_by_label("parent")
        field.fill([given["child"], given["parent"]][n % 2])
        return timed(lambda: field.press("Enter"), figure, what)

    curve = notebook.cell("live.coverage(")
    tokens = notebook.cell("live.tokens(")
    draw(0)
    notebook.page.mouse.up()

    def k(_n: int) -> float:
        """K one step up."""
        handle = curve.locator(".noUi-handle")
        handle.focus()
        return timed(lambda: handle.press("ArrowRight"), Figure(notebook, curve), "plot.layout.shapes[0].x0")

    def search(n: int) -> float:
        """A token by its id."""
        field, number = tokens.get_by_label("search"), str(1000 + n)
        field.fill(number)
        started = time.perf_counter()
        field.press("Enter")
        tokens.get_by_text(f"Tokens that match {number}").wait_for()
        return time.perf_counter() - started

    return {
        "box around points: share": box,
        "slice: share": sliced,
        "slice: rings in the picture of 25,750 tokens": named,
        "K": k,
        "search": search,
        "another map, read from disk: headline": lambda n: maps(n, headline, "[...plot._fullData[0].x]"),
        "another map, read from disk: picture": lambda n: maps(n + REPEATS, picture, "[...plot._fullData[4].x].slice(0, 40)"),
    }


if __name__ == "__main__":
    main()
