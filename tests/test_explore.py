"""Live controls, driven as a front end would: by setting values. No kernel and no browser."""

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ipywidgets as widgets
import numpy as np
import pytest

from tests import overlap_cases
from workbench import explore, explore_overlap, figures
from workbench.errors import InputError
from workbench.evidence import gather
from workbench.figures import Exhibit
from workbench.mapping import VocabMap
from workbench.overlap import open_overlap
from workbench.params import LossVsAccept
from workbench.stepper import Labels, Stepped


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """No control remembers another test's value."""
    explore._remembered.clear()
    yield
    explore._remembered.clear()


def find(box: widgets.Widget, kind: type) -> list:
    """Every widget of a kind below a box, in order."""
    found = [box] if isinstance(box, kind) and getattr(box, "value", "") != explore.STYLE else []
    return found + [w for child in getattr(box, "children", ()) for w in find(child, kind)]


def title(plot: explore.Plot) -> str:
    """What a figure on the screen says."""
    return plot.figure["layout"]["meta"]["title"]


def values(plot: explore.Plot, trace: int, axis: str) -> tuple:
    """What a trace holds on an axis."""
    held = plot.figure["data"][trace][axis]
    return tuple(np.frombuffer(base64.b64decode(held["bdata"]), held["dtype"]).tolist()) if isinstance(held, dict) else tuple(held)


def draw(k: int) -> list[figures.Exhibit]:
    """One figure whose bar is k; a refusal at 13, a bug at 14."""
    if k == 13:
        raise InputError("k = 13 brings <b>bad luck</b>: choose another")
    return [figures.plot(f"k is {k}", f"The bar is {1 // (14 - k) + k}.", [figures.trace("bar", x=[0], y=[k])], x="x")]


def test_a_change_redraws_the_same_figure() -> None:
    """The figure on the screen is updated in place, with its title and sentence."""
    slider = widgets.IntSlider(value=1, continuous_update=False)
    box = explore.live(draw, k=slider)
    (figure,) = find(box, explore.Plot)
    slider.value = 7
    assert find(box, explore.Plot) == [figure]
    assert values(figure, 0, "y") == (7,)
    assert figure.figure["layout"]["title"]["text"] == ""
    assert "k is 7" in find(box, widgets.HTML)[1].value
    assert title(figure) == "k is 7"
    assert "The bar is 7." in find(box, widgets.HTML)[-1].value


def test_a_mistake_is_a_sentence_and_leaves_the_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal and a bug both appear under the controls, escaped; the next good value clears them."""
    slider = widgets.IntSlider(value=1)
    box = explore.live(draw, k=slider)
    message, (figure,) = find(box, widgets.HTML)[0], find(box, explore.Plot)
    slider.value = 13
    assert "k = 13 brings &lt;b&gt;bad luck&lt;/b&gt;" in message.value
    assert "still of the values before" in message.value
    slider.value = 14
    assert "ZeroDivisionError" in message.value
    assert values(figure, 0, "y") == (1,)
    slider.value = 2
    assert message.value == ""
    assert values(figure, 0, "y") == (2,)


def test_controls_that_start_on_a_mistake_draw_once_it_is_mended() -> None:
    """A first value that is refused shows the sentence, and the figure appears with the first good value."""
    slider = widgets.IntSlider(value=13)
    box = explore.live(draw, k=slider)
    assert find(box, explore.Plot) == []
    slider.value = 3
    assert values(find(box, explore.Plot)[0], 0, "y") == (3,)


def test_values_survive_running_the_cell_again() -> None:
    """A control of the same name starts where the last one was, unless it can no longer have that value."""
    first = explore.remembered("choice", widgets.Dropdown(options=["a", "b"], value="a"))
    first.value = "b"
    assert explore.remembered("choice", widgets.Dropdown(options=["a", "b"], value="a")).value == "b"
    assert explore.remembered("choice", widgets.Dropdown(options=["a", "c"], value="a")).value == "a"


def test_a_path_field_completes_and_waits_for_enter(tmp_path: Path) -> None:
    """Neighbours are offered, folders with a slash; nothing happens on a keystroke."""
    (tmp_path / "maps").mkdir()
    (tmp_path / "map.pt").write_text("")
    field = explore_overlap.path_field("parent", str(tmp_path / "ma"))
    assert field.options == (str(tmp_path / "map.pt"), f"{tmp_path / 'maps'}/")
    assert field.continuous_update is False
    (tmp_path / "maps" / "a").write_text("")
    field.value = f"{tmp_path / 'maps'}/"
    assert field.options == (str(tmp_path / "maps" / "a"),)


def test_every_panel_of_the_overlap_follows_the_maps(tmp_path: Path) -> None:
    """Picking another parent redraws all three panels from one reading; a wrong path is a sentence in each; controls wait for the end."""
    given = overlap_cases.write_small_case(tmp_path)
    live = explore_overlap.OverlapExplorer(open_overlap(**given))
    positions, coverage, tokens = live.positions(50), live.coverage(), live.tokens()
    headline = find(positions, explore.Plot)[0]
    assert title(headline).startswith("41 of 280 rows")
    live.parent.value = given["child"]
    assert title(headline).startswith("All 300 rows")
    assert "parent 88.5 %" in title(find(coverage, explore.Plot)[0])
    live.parent.value = str(tmp_path / "nowhere")
    for panel in (positions, coverage, tokens):
        assert "nowhere" in find(panel, widgets.HTML)[0].value
    live.parent.value = given["parent"]
    live.slice.value = "code"
    assert "of code;" in title(find(coverage, explore.Plot)[0])
    slider = find(coverage, widgets.SelectionSlider)[0]
    slider.value = slider.options[0][1]
    assert f"The {slider.value:,} most frequent" in title(find(coverage, explore.Plot)[0])
    (search,) = (field for field in find(tokens, widgets.Text) if field.description == "search")
    search.value = "script"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in find(tokens, widgets.HTML)[1].value
    assert not any(getattr(control, "continuous_update", False) for panel in (coverage, tokens) for control in find(panel, widgets.Widget))


def test_selected_points_become_a_share_and_a_table_and_another_map_forgets_them(tmp_path: Path) -> None:
    """What boxes hold becomes rows, each once; the slice is followed, the picture keeps its selection until the maps change."""
    given = overlap_cases.write_small_case(tmp_path)
    live = explore_overlap.OverlapExplorer(open_overlap(**given))
    panel = live.positions(50)
    picture = find(panel, explore.Plot)[1]
    layout = picture.figure["layout"]
    assert layout["dragmode"] == "select"
    assert len(find(panel, explore.Plot)) == 2

    def select(rows: list[int]) -> None:
        new = dict(zip(*(rows.tolist() for rows in live.view.shared_rows), strict=True))
        boxes = [{"yref": "y", "x0": row - 0.1, "x1": row + 0.1, "y0": new[row], "y1": new[row]} for row in rows]
        picture._handle_custom_msg({"kind": "select", "value": boxes}, [])

    ids = live.view.comparison.a.ids[[3, 5, 45]]
    select([45, 3, 5, 45, 3, 5])
    share, table = find(panel, explore.Plot)[2], find(panel, widgets.HTML)[-1]
    mine = live.view.weights()[ids].sum() / live.view.weights().sum()
    assert values(share, 0, "x")[0] == pytest.approx(100 * mine)
    assert title(share).startswith("Without 3 chosen tokens the child would cover")
    assert all(f">{i}</td>" in table.value for i in ids)
    texts = " ".join(text.value for text in find(panel, widgets.HTML))
    assert "They matter most to" in texts
    assert "&amp;lt;" not in texts
    live.slice.value = "code"
    assert picture.figure["layout"]["selectionrevision"] == layout["selectionrevision"]
    assert "% of code, not" in title(find(panel, explore.Plot)[2])
    select([7])
    assert "1 chosen token," in find(panel, widgets.HTML)[-1].value
    select([])
    assert "nothing is chosen" in find(panel, widgets.HTML)[-1].value
    select([7])
    live.parent.value = given["child"]
    assert picture.figure["layout"]["selectionrevision"] != layout["selectionrevision"]
    assert len(find(panel, explore.Plot)) == 2
    assert "nothing is chosen" in find(panel, widgets.HTML)[-1].value


def test_the_picture_is_drawn_for_what_its_axes_show(tmp_path: Path) -> None:
    """Zoomed in, only tokens in sight are drawn; the slice is followed there; the headline and what is chosen stay as they are."""
    live = explore_overlap.OverlapExplorer(open_overlap(**overlap_cases.write_small_case(tmp_path)))
    panel = live.positions(50)
    headline, picture = find(panel, explore.Plot)
    before = headline.figure
    assert picture.told == ["select", "view"]
    picture._handle_custom_msg({"kind": "view", "value": [{"xaxis": [9.5, 30.5], "yaxis": [0, 300], "yaxis2": [-300, 300]}]}, [])
    for _ in range(2):
        seen = {*values(picture, 0, "x"), *values(picture, 1, "x")}
        assert seen == set(range(10, 31)) & set(live.view.shared_rows[0].tolist())
        live.slice.value = "code"
    assert headline.figure == before


def test_a_round_is_not_cheaper_than_the_step_in_it() -> None:
    """Three numbers that cannot be true together are a sentence, and the figures stay."""
    known = gather(LossVsAccept(runs=[{"accept_length": 2.4, "tokens_per_s": 90.0, "draft_tokens": 3}], baseline_tokens_per_s=60.0), print)
    controls = explore.BreakEven(known)
    box = controls.panel()
    before = [plot.figure for plot in find(box, explore.Plot)]
    controls.accept_length.value = 1.2
    assert "takes 0.80 plain steps" in find(box, widgets.HTML)[0].value
    assert [plot.figure for plot in find(box, explore.Plot)] == before


def stepped(losses: list[list[float]], head: VocabMap, maps: dict[str, VocabMap]) -> Stepped:
    """A batch of as many rows as there are losses, two TTT steps; each label is token 2."""
    loss = np.array(losses, np.float32)  # [S, N]
    choices = np.zeros((*loss.shape, 3), np.int32)
    labels = {name: Labels(m, np.full(loss.shape, m.row_of[2], np.int32), loss * 0, loss) for name, m in maps.items()}
    rows = np.arange(loss.shape[1], dtype=np.int32)
    return Stepped(
        head, labels, rows * 0, rows * 0, choices[..., 0], choices[..., 0], loss > 0, choices, choices + 0.5, choices, choices + 0.5
    )


def test_the_batch_stepper_by_mouse_and_keyboard() -> None:
    """It begins at the first supervised row. Forward and back stop at the ends, worst goes down the ranking, step and map go round; table,
    figure and title follow."""
    maps = {"parent": VocabMap(np.array([2, 0]), 4), "child": VocabMap(np.array([1, 2]), 4)}
    losses = [[0, 3, 1, 2], [0, 0.5, 0, 4]]
    views = {"before": stepped(losses, maps["parent"], maps), "after": stepped(losses, maps["child"], maps)}
    live = explore.BatchStepper(views)
    panel = live.panel()
    back, forward, worst = find(panel, widgets.Button)
    (keyboard,) = find(panel, explore.Keyboard)
    (figure,) = find(panel, explore.Plot)

    def press(key: str) -> None:
        keyboard._handle_custom_msg({"key": key}, [])

    def now() -> tuple:
        return live.row.value, live.step.value, live.labels.value

    assert now() == (1, 0, "parent")
    live.row.value = 3
    worst.click()
    assert now() == (1, 0, "parent")  # the worst, wherever one is
    for _ in range(2):
        back.click()
        assert now() == (0, 0, "parent")
    forward.click()
    press("ArrowRight")
    assert now() == (2, 0, "parent")
    press("ArrowLeft")
    assert (values(figure, 1, "x"), values(figure, 1, "y")) == ((1,), (3,))
    live.row.value = 0
    worst.click()
    assert now() == (1, 0, "parent")
    press("w")
    assert now() == (3, 0, "parent")
    press("t")
    press("w")
    assert now() == (1, 1, "parent")
    table = find(panel, widgets.HTML)[-1]
    assert "Token 1 of the batch: label id 2 asks for row 0, its own" in table.value
    press("m")
    assert "Token 1 of the batch: label id 2 asks for row 1, where the head means id 0" in table.value
    live.head.value = "after"
    assert "Token 1 of the batch: label id 2 asks for row 1, its own" in table.value
    press("t")
    press("m")
    assert now() == (1, 0, "parent")
    assert explore.BatchStepper(views).row.value == 1
    assert keyboard.accepted == ["ArrowLeft", "ArrowRight", "w", "t", "m"]


def test_a_map_that_does_not_fit_the_head_is_said_in_the_stepper() -> None:
    """Labels that a head cannot take are a sentence where the figures were, and the next choice brings them back."""
    wide = VocabMap(np.array([0, 1, 2]), 4)
    views = {"before": stepped([[1.0]], wide, {"parent": wide}), "after": stepped([[1.0]], wide, {"child": wide})}
    live = explore.BatchStepper(views)
    panel = live.panel()
    live.labels.value = "child"
    live.worst()
    assert find(panel, explore.Plot) == []
    assert "no labels through the child map here" in find(panel, widgets.HTML)[-1].value
    live.head.value = "after"
    assert len(find(panel, explore.Plot)) == 1


def test_a_live_training_stops_goes_on_and_says_what_is_wrong() -> None:
    """Train, stop within a step, train again: old records come first, none twice; a user's mistake is a sentence, and train works again."""
    made: list[int] = []

    def records(way: str, stop: Callable[[], bool]) -> Iterator[int]:
        if way == "naive":
            raise InputError("naive <cannot> be trained")
        yield from list(made)
        while len(made) < 6 and not stop():
            made.append(len(made))
            yield made[-1]
            if len(made) == 3:
                live._end()

    def draw(done: dict[str, list[int]]) -> Exhibit:
        return figures.plot(f"{done}", "", [figures.trace("scatter", x=done["remapped"], y=done["remapped"])])

    live = explore.LiveTraining(records, draw, ["remapped", "naive"], 6)
    panel = live.panel()

    def train() -> None:
        live.start.click()
        live._thread.join(30)
        assert (live.start.disabled, live.stop.disabled) == (False, True)

    train()
    assert (live.done["remapped"], live.bar.value) == ([0, 1, 2], 3)
    assert "goes on from here" in live.message.value
    train()
    assert (live.done["remapped"], live.bar.value) == ([0, 1, 2, 3, 4, 5], 6)
    assert live.message.value.endswith("done; the parameter steps makes it longer")
    assert values(find(panel, explore.Plot)[0], 0, "x") == (0, 1, 2, 3, 4, 5)
    live.way.value = "naive"
    train()
    assert "naive &lt;cannot&gt; be trained" in live.message.value


def test_a_training_whose_cell_is_run_again_stops_first() -> None:
    """The new panel appears once the old one's thread has ended; an unforeseen error in a training is a sentence too."""

    def records(way: str, stop: Callable[[], bool]) -> Iterator[int]:
        while not stop():
            time.sleep(0.01)
            yield 0
        raise RuntimeError("no <memory>")

    live = explore.LiveTraining(records, lambda done: figures.missing("loss", "of no step"), ["remapped"], 6)
    live.start.click()
    explore.LiveTraining(records, live._draw_them, ["remapped"], 6)
    assert not live._thread.is_alive()
    assert "RuntimeError: no &lt;memory&gt;" in live.message.value
