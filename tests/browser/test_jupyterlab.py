"""The live notebooks as a person uses them: a real JupyterLab in Chromium, mouse and keyboard; what is drawn is read from the page."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests import overlap_cases
from tests.browser.chromium import SLOWEST, Seen, chromium
from tests.browser.jupyter import CONTRAST, Figure, Notebook, server
from tests.tiny_replay import tiny_replay
from tests.warm_start_case import write_case

pytestmark = pytest.mark.browser

expect.set_options(timeout=SLOWEST)

MISTAKE = "p[style*=jp-error-color]"
LATE = "[anywidget] Failed to initialize model."  # its complaint on a busy machine; nothing of ours needs what it then gives up
HURRIED = "(limit => AbortSignal.timeout = () => limit(1))(AbortSignal.timeout.bind(AbortSignal))"
STEPS = 600  # of a live training: some seconds, time enough to press Stop


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Each notebook's parameters: everything small, nothing of the lab."""
    root = tmp_path_factory.mktemp("inputs")
    wired, case = tiny_replay(root / "wired"), write_case(root / "case")
    return {
        "01_vocab_overlap": overlap_cases.write_small_case(root / "overlap"),
        "02_layer_wiring": {"drafter": str(wired.drafter), "verifier": str(wired.lab.root / "verifier"), "replay": str(wired.replay)},
        "03_remap_and_train": case | {"tokens": 128, "train_tokens": 100, "step_tokens": 32, "steps": STEPS, "ways": ["remapped"]},
        "04_loss_vs_accept": {
            "drafter": case["drafter"], "verifier": case["verifier"], "prompts": case["chats"], "prompt_count": 3, "new_tokens": 6,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def address(inputs: dict[str, dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("jupyter"), inputs, {"OMP_NUM_THREADS": "1"}) as found:
        yield found


def opened(browser: Browser, address: str, name: str, script: str = "") -> Notebook:
    """A notebook whose cells have all run without an error."""
    notebook = Notebook(browser, address, name, script=script)
    notebook.run_all()
    assert notebook.failures() == []
    return notebook


def finish(notebook: Notebook, tmp_path: Path) -> None:
    """Light and dark, usual and wide: every figure is drawn and fits, its text can be read; the console has no error. Leaves pictures."""
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.theme(theme)
        for width in (1920, 1280):
            notebook.page.set_viewport_size({"width": width, "height": 12_000})
            notebook.page.wait_for_timeout(1000)
            notebook.page.screenshot(path=tmp_path / f"{theme.split()[1].lower()}-{width}.png")
            plots = notebook.page.locator(".jp-Notebook .js-plotly-plot")
            for box in plots.evaluate_all("plots => plots.map(p => [p.clientWidth, p.clientHeight, p.parentElement.clientWidth])"):
                assert 200 < box[0] <= box[2] + 1
                assert box[1] > 100
        contrast = notebook.page.locator(".jp-Notebook").first.evaluate(CONTRAST)
        assert [pair for pair in contrast if pair[0] < 3.5] == []
    assert [error for error in notebook.errors if LATE not in error] == []
    notebook.page.close()


def test_the_start_page_leads_to_every_notebook(browser: Browser, address: str, inputs: dict[str, dict[str, object]]) -> None:
    """Four questions, rendered; its links lead to the notebooks."""
    seen = Seen(browser, 1280)
    seen.page.goto(address.format("start", "START.md"))
    links = seen.page.locator(".jp-RenderedMarkdown td a")
    expect(links).to_have_count(4)
    links = [link.get_attribute("href") for link in links.all()]
    assert all(f"{name}.ipynb" in link for name, link in zip(sorted(inputs), links, strict=True))
    seen.page.get_by_role("link", name="02 layer wiring").click()
    seen.page.locator(".lm-TabBar-tab.jp-mod-current", has_text="02_layer_wiring.ipynb").wait_for()
    assert seen.errors == []
    seen.page.close()


def test_vocab_overlap(browser: Browser, address: str, inputs: dict[str, dict[str, object]], tmp_path: Path) -> None:
    """Path field, slice, a box around points, K and a search: each changes what is drawn; a mistake is a sentence; a rerun keeps all.

    All of it where every widget's code came too late for anywidget's limit, as on a busy machine.
    """
    notebook = opened(browser, address, "01_vocab_overlap", HURRIED)
    assert any(LATE in error for error in notebook.errors)
    cell = notebook.cell("live.positions(")
    headline, picture = Figure(notebook, cell, 0), Figure(notebook, cell, 1)
    given = inputs["01_vocab_overlap"]

    picture.drag((0.01, 0.01), (0.5, 0.98))
    share = Figure(notebook, cell, 2)
    before = share.title
    assert before.startswith("Without")
    assert sum(len(picture.plot.evaluate("(plot, n) => plot._fullData[n].selectedpoints ?? []", n)) for n in range(5)) > 20
    assert "chosen tokens, first" in cell.inner_text()

    picture.plot.scroll_into_view_if_needed()
    drawn, axis = len(picture.values(0, "x")), picture.plot.evaluate("plot => plot.layout.xaxis.range")
    picture.plot.locator("[data-title='Zoom']").click()
    picture.drag((0.6, 0.05), (0.8, 0.95))  # one that begins in the box would move the box
    zoomed = picture.changes("plot._fullData[0].x?.length ?? 0", drawn)  # drawn anew for what is in sight
    assert 0 < zoomed < drawn / 2
    picture.plot.locator("[data-title='Reset axes']").click()
    assert picture.changes("plot._fullData[0].x?.length ?? 0", zoomed) == drawn
    assert picture.plot.evaluate("plot => plot.layout.xaxis.range") == axis
    assert share.title == before

    cell.get_by_label("slice").select_option("code")
    assert "of code" in share.changes("plot.layout.meta.title", before)

    parent, bars = cell.get_by_label("parent"), headline.values(0, "x")
    parent.fill("/nowhere/map")
    assert headline.values(0, "x") == bars  # nothing is read while one types
    parent.press("Enter")
    expect(cell.locator(MISTAKE)).to_contain_text("/nowhere/map")
    parent.fill(given["child"])
    parent.press("Enter")
    assert headline.changes("[...plot._fullData[0].x]", bars) == [300, 300]
    expect(cell.locator(MISTAKE)).to_have_count(0)

    notebook.rerun(cell)
    assert Figure(notebook, cell, 0).values(0, "x") == [300, 300]
    expect(cell.get_by_label("slice")).to_have_value("code")
    cell.get_by_label("parent").fill(given["parent"])
    cell.get_by_label("parent").press("Enter")

    cell = notebook.cell("live.coverage(")
    curve = Figure(notebook, cell)
    marked = "plot.layout.shapes[0].x0"
    before = curve.plot.evaluate(f"plot => {marked}")
    handle = cell.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    assert curve.changes(marked, before) > before

    cell = notebook.cell("live.tokens(")
    cell.get_by_label("search").fill("script")
    cell.get_by_label("search").press("Enter")
    expect(cell.get_by_text("Tokens that match script: 2")).to_be_visible()
    expect(cell.get_by_text("<script>alert(1)</script>", exact=True).first).to_be_visible()
    finish(notebook, tmp_path)


def test_layer_wiring(browser: Browser, address: str, tmp_path: Path) -> None:
    """A tap moved by keyboard, then by clicks on the heat map; a reading flipped; undone. The comparison follows each."""
    notebook = opened(browser, address, "02_layer_wiring")
    cell = notebook.cell("WiringSwitch(")
    heat, compared = Figure(notebook, cell, 0), Figure(notebook, cell, 1)
    now = "[...plot._fullData[1].x]"
    assert heat.values(1, "x") == [1, 2, 3]
    handle = cell.locator(".noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    assert heat.changes(now, [1, 2, 3]) == [2, 2, 3]
    loss = compared.changes("[...plot._fullData[2].y]", compared.values(0, "y"))
    assert compared.title.startswith("tap 0 to h_2")

    area = heat.plot.locator(".nsewdrag").first
    for k, column in ((4, 0.98), (0, 0.02)):
        box, before = area.bounding_box(), heat.values(1, "x")
        area.click(position={"x": box["width"] * column, "y": box["height"] * 0.9})
        assert heat.changes(now, before) == [2, 2, k]
    assert compared.changes("[...plot._fullData[2].y]", loss) != loss

    before = compared.title
    cell.get_by_label("readings").select_option("label +1")
    assert "label +1" in compared.changes("plot.layout.meta.title", before)
    cell.get_by_role("button", name="as wired").click()
    heat.changes(now, [2, 2, 0])
    notebook.page.wait_for_function("plot => plot.layout.meta.title.startsWith('As wired')", arg=compared.plot.element_handle())
    finish(notebook, tmp_path)


def test_remap_and_train(browser: Browser, address: str, tmp_path: Path) -> None:
    """The batch stepper by keyboard and mouse; a training that stops at once and goes on where it was."""
    notebook = opened(browser, address, "03_remap_and_train")
    page, cell = notebook.page, notebook.cell("BatchStepper(")
    trail, ring = Figure(notebook, cell), "plot._fullData[1].x[0]"
    supervised, losses = trail.values(0, "x"), trail.values(0, "y")
    worst = [row for _, row in sorted(zip(losses, supervised, strict=True), key=lambda pair: -pair[0])]
    field = cell.get_by_text("click here for the keyboard")
    field.click()
    first = supervised[0]
    for key, to in (("ArrowRight", first + 1), ("ArrowRight", first + 2), ("ArrowLeft", first + 1), ("w", worst[0]), ("w", worst[1])):
        before = trail.plot.evaluate(f"plot => {ring}")
        page.keyboard.press(key)
        assert trail.changes(ring, before) == to
    expect(cell.get_by_text(f"Token {worst[1]:,} of the batch: label")).to_be_visible()
    page.keyboard.press("t")
    assert trail.changes("[...plot._fullData[0].y]", losses) != losses
    before = trail.values(0, "y")
    page.keyboard.press("m")
    mapped = trail.changes("[...plot._fullData[0].y]", before)
    cell.get_by_role("button", name="remapped").click()
    assert sum(trail.changes("[...plot._fullData[0].y]", mapped)) < sum(mapped)
    before = trail.plot.evaluate(f"plot => {ring}")
    cell.get_by_role("button", name="forward").click()
    assert trail.changes(ring, before) == before + 1
    page.keyboard.press("ArrowRight")  # a button of the panel hands the keyboard on
    assert trail.changes(ring, before + 1) == before + 2
    notebook.rerun(cell)
    assert Figure(notebook, cell).plot.evaluate(f"plot => {ring}") == before + 2

    cell = notebook.cell("LiveTraining(")
    cell.get_by_label("start").select_option("remapped")
    first = train_and_stop(notebook, cell, 0)
    assert 0 < len(first) < STEPS
    second = train_and_stop(notebook, cell, len(first))
    assert second[: len(first)] == first
    notebook.rerun(cell)
    third = train_and_stop(notebook, cell, len(second))
    assert third[: len(second)] == second
    finish(notebook, tmp_path)


def train_and_stop(notebook: Notebook, cell, done: int) -> list[float]:
    """Train until a step beyond those that are done is drawn, stop; the losses of all steps, in their order, none twice."""
    train, stop = (cell.get_by_role("button", name=name, exact=True) for name in ("train", "stop"))
    train.click()
    notebook.until(cell, f"cell => cell.querySelector('.js-plotly-plot')?._fullData?.[0]?.x?.length > {done}")
    expect(stop).to_be_enabled()
    started = time.monotonic()
    stop.click()
    expect(cell.get_by_text("stopped, and goes on from here")).to_be_visible()
    assert time.monotonic() - started < 5
    expect(train).to_be_enabled()
    drawn = Figure(notebook, cell)
    steps = drawn.values(0, "x")
    assert all(b == a + 1 for a, b in pairwise(steps))
    return drawn.values(0, "y")


def test_loss_vs_accept(browser: Browser, address: str, tmp_path: Path) -> None:
    """A run of one's own: a throughput typed, draft tokens by the slider's keys; both figures follow, what cannot be is a sentence."""
    notebook = opened(browser, address, "04_loss_vs_accept")
    cell = notebook.cell("BreakEven(")
    even, best = Figure(notebook, cell, 0), Figure(notebook, cell, 1)
    everything = "plot._fullData.map(trace => [[...trace.x], [...trace.y]])"
    before = even.plot.evaluate(f"plot => {everything}")
    speed = cell.get_by_label("tokens/s")
    speed.fill("5")
    assert even.plot.evaluate(f"plot => {everything}") == before
    speed.press("Enter")
    even.changes(everything, before)
    before = best.plot.evaluate(f"plot => {everything}")
    handle = cell.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    best.changes(everything, before)
    length = cell.get_by_label("accept length")
    length.fill("9")
    length.press("Enter")
    expect(cell.locator(MISTAKE)).to_contain_text("accept length")
    finish(notebook, tmp_path)
