"""The report page as a reader gets it: Chromium, every host blocked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests import overlap_cases

pytestmark = pytest.mark.browser

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"]
DRAWN = """() => [...document.querySelectorAll(".plotly-graph-div")].map(plot => {
  const box = plot.querySelector(".main-svg").getBoundingClientRect();
  return [box.width, box.height, plot.querySelectorAll(".trace path, .points path, .lines path, .gl-canvas").length];
})"""
CUT = """() => [...document.querySelectorAll("main *")]
  .filter(e => !e.closest("svg, .plotly-graph-div") && e.getClientRects().length)
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a network."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        yield browser
        browser.close()


class Seen:
    """A page that is open, with what its console said and what it asked the network for."""

    def __init__(self, browser: Browser, path: Path, width: int):
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900})
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("dialog", lambda d: (self.errors.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.requests.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
        self.page.goto(f"file://{path}")
        self.page.wait_for_function("document.querySelectorAll('.plotly-graph-div .main-svg').length >= 5", timeout=60_000)


@pytest.mark.parametrize("case", ["small", "founding"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_drawn_and_nothing_is_asked_or_cut(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory, case: str, width: int
) -> None:
    """No request, no console error, five figures of non-zero size with marks in them, nothing beyond the right edge."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), case)
    seen = Seen(chromium, out / "report.html", width)
    drawn = seen.page.evaluate(DRAWN)
    assert len(drawn) == 5
    assert all(w > 200 and h > 100 and marks > 0 for w, h, marks in drawn)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.evaluate(CUT) == []
    assert seen.errors == []
    assert seen.requests == []
    seen.page.close()


def test_hostile_tokens_are_read_literally(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tags, escapes, right-to-left marks and broken UTF-8 appear as text in tables and in what plotly shows on hover."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), "small")
    seen = Seen(chromium, out / "report.html", 1280)
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


def test_tables_sort_and_search_without_a_kernel(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A click sorts by number and by text in both directions, the keyboard does too, typing filters; without script all rows are there."""
    out, _ = overlap_cases.run_once(tmp_path_factory.getbasetemp(), "small")
    page = Seen(chromium, out / "report.html", 1280).page
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
    plain = chromium.new_context(java_script_enabled=False).new_page()
    plain.goto(f"file://{out / 'report.html'}")
    assert plain.locator("div.table[data-search]").first.locator("tbody tr").count() == len(before)
    assert plain.locator("input").count() == 0
