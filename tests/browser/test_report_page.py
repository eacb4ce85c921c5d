"""The report page as a reader gets it: Chromium, every host blocked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests import overlap_cases, page_cases
from tests.browser.chromium import Seen, chromium

pytestmark = pytest.mark.browser

DRAWN = """() => [...document.querySelectorAll(".plotly-graph-div")].map(plot => {
  const box = plot.querySelector(".main-svg").getBoundingClientRect();
  return [box.width, box.height, plot.querySelectorAll(".trace path, .points path, .lines path, .gl-canvas").length];
})"""
CUT = """() => [...document.querySelectorAll("main *")]
  .filter(e => !e.closest("svg, .plotly-graph-div, .scroll table") && e.getClientRects().length)
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def read(browser: Browser, path: Path, width: int, figures: int = 5) -> Seen:
    """A report that is open, all its figures drawn."""
    seen = Seen(browser, width)
    seen.page.on("dialog", lambda d: (seen.errors.append(f"dialog {d.message}"), d.dismiss()))
    seen.page.goto(f"file://{path}")
    seen.page.wait_for_function(f"document.querySelectorAll('.plotly-graph-div .main-svg').length >= {figures}")
    return seen


def is_whole(seen: Seen, figures: int) -> None:
    """No request, no console error, every figure of non-zero size with marks in it, nothing beyond the right edge."""
    drawn = seen.page.evaluate(DRAWN)
    assert len(drawn) == figures
    assert all(w > 200 and h > 100 and marks > 0 for w, h, marks in drawn)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= seen.page.viewport_size["width"]
    assert seen.page.evaluate(CUT) == []
    assert seen.errors == []
    assert seen.requests == []


@pytest.mark.parametrize("case", ["small", "founding"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_drawn_and_nothing_is_asked_or_cut(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, case: str, width: int
) -> None:
    """Notebook 1, small and at its real size."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), case)
    seen = read(browser, out / "report.html", width)
    is_whole(seen, 5)
    seen.page.close()


@pytest.mark.parametrize("notebook", page_cases.FIGURES)
def test_the_other_pages_are_whole_too_and_their_tables_sort(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, notebook: str
) -> None:
    """Notebooks 2 to 4, narrow and wide; a click on a heading puts the numbers of its column in order."""
    out, _ = page_cases.run_once(tmp_path_factory.getbasetemp(), notebook)
    for width in (390, 1280):
        seen = read(browser, out / "report.html", width, page_cases.FIGURES[notebook])
        is_whole(seen, page_cases.FIGURES[notebook])
        seen.page.screenshot(path=out / f"page-{width}.png", full_page=True)
        tables = seen.page.locator("main table:visible:has(th.number)").all()
        assert tables
        for table in tables:
            head = table.locator("th.number").first
            head.click()
            shown = table.evaluate("table => { const i = table.querySelector('th.number').cellIndex;"
                                   "return [...table.tBodies[0].rows].map(row => row.cells[i].textContent); }")  # fmt: skip
            numbers = [float(text.replace(",", "")) if text != "–" else float("-inf") for text in shown]
            assert numbers == sorted(numbers)
        seen.page.close()


def test_hostile_tokens_are_read_literally(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tags, escapes, right-to-left marks and broken UTF-8 appear as text in tables and in what plotly shows on hover."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), "small")
    seen = read(browser, out / "report.html", 1280)
    cells = seen.page.locator("td.token code").all_text_contents()
    for text in ("<script>alert(1)</script>", "<b>", "␣the", "\\n", "\\u202eabc", "\\u200f", "\\xff\\xfe"):
        assert text in cells
    names = seen.page.evaluate(
        """async () => {
          const plot = document.querySelectorAll('.plotly-graph-div')[1], n = plot.data.length - 1, found = [];
          for (let i = 0; i < plot._fullData[n].x.length && i < 30; i++) {
            Plotly.Fx.hover(plot, [{curveNumber: n, pointNumber: i}]); await new Promise(r => setTimeout(r, 150));
            found.push(plot.querySelector('.hoverlayer').textContent);
          }
          return found.join(' ');
        }"""
    )
    for text in ("<script>alert(1)</script>", "<b>", "\\u202eabc", "\\xff\\xfe"):
        assert text in names
    assert seen.errors == []


def test_tables_sort_and_search_without_a_kernel(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A click sorts by number and by text in both directions, the keyboard does too, typing filters; without script all rows are there."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), "small")
    page = read(browser, out / "report.html", 1280).page
    gained = page.locator("div.table[data-search]").first
    ids = lambda: [int(t.replace(",", "")) for t in gained.locator("tr:not([hidden]) td:nth-child(2)").all_text_contents()]  # noqa: E731
    before = ids()
    gained.locator("th", has_text="target id").click()
    assert ids() == sorted(before)
    gained.locator("th", has_text="target id").press("Enter")
    assert ids() == sorted(before, reverse=True)
    gained.get_by_role("searchbox").fill(str(before[0]))
    assert before[0] in ids()
    assert len(ids()) < len(before)
    assert "rows match" in gained.text_content()
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f"file://{out / 'report.html'}")
    assert plain.locator("div.table[data-search]").first.locator("tbody tr").count() == len(before)
    assert plain.locator("input").count() == 0
