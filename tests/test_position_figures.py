"""The picture of where each row went: on a page every token, live as much as is in sight."""

import base64
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from tests import overlap_cases
from workbench import figures
from workbench.mapping import VocabMap
from workbench.overlap import Overlap, open_overlap
from workbench.position_figures import POINTS, positions, rows_in, whole


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Overlap:
    """The shuffled pair with hostile token texts."""
    return open_overlap(**overlap_cases.write_small_case(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def shuffled() -> Overlap:
    """5,000 tokens that all changed their row, without counts."""
    ids = np.arange(5000)
    return Overlap(VocabMap.from_ids(ids, 6000).compare(VocabMap.from_ids(np.random.default_rng(0).permutation(ids), 6000)))


def test_every_shared_token_is_a_point_at_its_two_rows(small: Overlap) -> None:
    """The cloud is exactly the shared tokens: moved and unmoved apart, distance below; only the labelled ones carry texts."""
    moved, same, moved_by, _, named = positions(small, labelled=25).body.data
    old, new = small.shared_rows
    assert sorted(zip([*moved.x, *same.x], [*moved.y, *same.y], strict=True)) == sorted(zip(old, new, strict=True))
    assert (np.array(moved_by.y) == np.array(moved.y).astype(int) - np.array(moved.x)).all()
    assert len(named.hovertext) == 25
    assert moved.hovertext is None


def test_hover_texts_are_escaped(small: Overlap) -> None:
    """A token that is a tag is an entity in plotly's little HTML."""
    texts = " ".join(positions(small, labelled=300).body.data[-1].hovertext)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in texts
    assert "<script" not in texts


def test_drift_and_shuffle_are_told_apart() -> None:
    """Sorted maps drift, shuffled ones lose their order, equal ones keep their rows."""
    rng = np.random.default_rng(0)
    sorted_a, sorted_b = (VocabMap.from_ids(np.sort(rng.choice(1000, 300, replace=False)), 1000) for _ in range(2))
    assert "order is kept throughout" in positions(Overlap(sorted_a.compare(sorted_b))).sentence
    shuffled = VocabMap.from_ids(rng.permutation(sorted_a.ids), 1000)
    assert "order is lost" in positions(Overlap(sorted_a.compare(shuffled))).sentence
    assert "kept their row" in positions(Overlap(sorted_a.compare(sorted_a))).title


def test_too_many_points_are_painted_and_none_is_left_out(shuffled: Overlap) -> None:
    """An image of what each panel shows: coloured where a token is, transparent elsewhere. The legend cannot hide it and does not try."""
    shown = positions(shuffled, 10, seen=whole(shuffled))
    layout = shown.body.layout
    assert [len(trace.x) for trace in shown.body.data[:4]] == [1, 0, 1, 0]
    assert np.isnan(shown.body.data[0].x).all()  # nothing but the name in the legend
    assert layout.legend.itemclick is False
    assert "Zoom in to see each token." in shown.sentence
    old, new = shuffled.shared_rows
    moved = old != new
    for image, height in zip(layout.images, (new, new - old), strict=True):
        pixels = np.array(Image.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2]))).convert("RGBA"))
        down = ((image.y - height) / image.sizey * pixels.shape[0]).astype(int)
        across = ((old - image.x) / image.sizex * pixels.shape[1]).astype(int)
        assert np.all(pixels[down[moved], across[moved]] == [*ImageColor.getrgb(figures.VERMILLION), 255])
        near = np.zeros(pixels.shape[:2], bool)
        for y, x in itertools.product(range(-1, 2), repeat=2):
            near[down + y, across + x] = True
        assert not pixels[~near, 3].any()


def test_a_page_holds_every_point(shuffled: Overlap) -> None:
    """Without a kernel nothing is painted, and the legend hides and shows."""
    shown = positions(shuffled, 10)
    assert sum(len(trace.x) for trace in shown.body.data[:2]) == 5000
    assert shown.body.layout.images == ()
    assert shown.body.layout.legend.itemclick == "toggle"
    assert "Zoom in" not in shown.sentence


def test_zoomed_in_the_tokens_in_sight_are_points_and_have_names(shuffled: Overlap) -> None:
    """Each panel shows what its own axes show; rings go to tokens in sight, all of them where they are few."""
    old, new = shuffled.shared_rows
    seen = {"xaxis": (99.5, 199.5), "yaxis": (0, 2500), "yaxis2": (-1e4, 1e4)}
    moved, _, moved_by, _, named = positions(shuffled, 300, seen=seen).body.data
    inside = (old >= 100) & (old < 200)
    assert set(moved.x) == set(old[inside & (new <= 2500) & (new != old)])
    assert len(moved_by.x) == (inside & (new != old)).sum() <= POINTS
    assert set(named.x) == set(old[inside & (new <= 2500)])


def test_zoom_is_kept_because_the_axes_start_the_same(shuffled: Overlap) -> None:
    """What the axes show at first does not follow what is seen: plotly keeps a person's zoom only then. Every token is within."""
    first = whole(shuffled)
    seen = first | {"xaxis": (0, 10)}
    layouts = [positions(shuffled, 10, seen=now).body.layout for now in (first, seen)]
    assert [list(layouts[0][axis].range) for axis in first] == [list(layouts[1][axis].range) for axis in first] == list(first.values())
    old, new = shuffled.shared_rows
    for axis, values in (("xaxis", old), ("yaxis", new), ("yaxis2", new - old)):
        assert first[axis][0] < values.min()
        assert values.max() < first[axis][1]


def test_a_box_holds_the_tokens_of_its_panel(shuffled: Overlap) -> None:
    """Boxes in either panel, drawn in any direction; together they hold what either holds."""
    old, new = shuffled.shared_rows
    above, below = {"yref": "y", "x0": 50, "x1": 9, "y0": 4000, "y1": 0}, {"yref": "y2", "x0": 0, "x1": 5000, "y0": -3, "y1": 3}
    first, second = (old >= 9) & (old <= 50) & (new <= 4000), np.abs(new - old) <= 3
    assert rows_in(shuffled, [above]).tolist() == sorted(old[first])
    assert rows_in(shuffled, [below]).tolist() == sorted(old[second])
    assert rows_in(shuffled, [above, below]).tolist() == sorted(old[first | second])
    assert rows_in(shuffled, []).size == 0


def test_maps_that_share_nothing_are_drawn_too() -> None:
    """The limit: no shared token, on a page and live."""
    view = Overlap(VocabMap.from_ids(np.array([0, 1]), 9).compare(VocabMap.from_ids(np.array([5, 6, 7]), 9)))
    for seen in (None, whole(view)):
        assert sum(len(trace.x) for trace in positions(view, seen=seen).body.data) == 0
    assert rows_in(view, [{"yref": "y", "x0": 0, "x1": 9, "y0": 0, "y1": 9}]).size == 0


def test_the_picture_of_the_founding_pair_stays_small(tmp_path: Path) -> None:
    """K = 32,000 and V = 163,840: below 600 kB on a page, live half of it."""
    view = open_overlap(**overlap_cases.write_founding_case(tmp_path))
    assert len(positions(view).body.to_json()) < 600_000
    assert len(positions(view, seen=whole(view)).body.to_json()) < 300_000
