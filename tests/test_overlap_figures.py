"""The figures of notebook 1 say their number, name their units, stay small and escape what they show."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests import overlap_cases
from workbench import overlap_figures as drawn
from workbench.figures import Exhibit, Table
from workbench.mapping import VocabMap
from workbench.overlap import Overlap, open_overlap

ALL = ("next_steps", "headline", "labels", "label_examples", "coverage", "slices", "gained", "lost", "special")
FIGURES = ("headline", "labels", "coverage", "slices")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Overlap:
    """The shuffled pair with hostile token texts."""
    return open_overlap(**overlap_cases.write_small_case(tmp_path_factory.mktemp("small")))


def rows_of(exhibit: Exhibit) -> list[tuple]:
    assert isinstance(exhibit.body, Table)
    return [tuple(row) for row in exhibit.body.rows]


@pytest.mark.parametrize("name", ALL)
def test_titles_state_a_number_and_axes_their_units(small: Overlap, name: str) -> None:
    """Every title and sentence holds a digit or names the token; every axis with numbers has a title."""
    shown = getattr(drawn, name)(small)
    assert any(c.isdigit() for c in shown.title + shown.sentence)
    assert shown.sentence.endswith(".")
    if name in FIGURES:
        assert shown.body.layout.xaxis.title.text
        assert shown.body.layout.template.layout.colorway


def test_the_two_numbers_side_by_side(small: Overlap) -> None:
    """The bars' segments add up to both maps' rows; the title has rows that agree and tokens shared."""
    bars = {bar.name: list(bar.x) for bar in drawn.headline(small).body.data}
    assert [sum(values[i] for values in bars.values()) for i in (0, 1)] == [300, 280]
    assert drawn.headline(small).title == "41 of 280 rows mean the same token, though 251 tokens are shared"


def test_coverage_marks_k_and_ends_at_one_hundred(small: Overlap) -> None:
    """Curves are monotone to 100 %, the marked K is the asked one, and the markers stand at the maps' own K and coverage."""
    shown = drawn.coverage(small, k=100)
    everything, parent, child = shown.body.data[0], shown.body.data[-2], shown.body.data[-1]
    assert np.all(np.diff(everything.y) >= 0)
    assert everything.y[-1] == pytest.approx(100)
    assert shown.body.layout.shapes[0].x0 == 100
    c = small.comparison
    assert (parent.x[0], child.x[0]) == (280, 300)
    assert child.y[0] == pytest.approx(100 * c.b.coverage(small.weights()))
    assert {trace.line.dash for trace in shown.body.data[:4]} == {"solid", "dash", "dot"}
    assert "100 most frequent tokens" in shown.title


def test_label_bars_add_up(small: Overlap) -> None:
    """Each slice's four parts make 100 %."""
    assert np.sum([bar.x for bar in drawn.labels(small).body.data], axis=0) == pytest.approx(np.full(4, 100), abs=1e-3)


def test_tables_rank_by_count_and_say_what_was_cut(small: Overlap) -> None:
    """Lost and gained come most frequent first with rank and count, each table capped and its total known."""
    for shown, ids in (
        (drawn.gained(small, rows=10), small.comparison.missing_ids),
        (drawn.lost(small, rows=10), small.comparison.lost_ids),
    ):
        counts = [row[3] for row in rows_of(shown)]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] == small.weights()[ids].max()
        assert (len(counts), shown.body.total, shown.body.search) == (10, len(ids), True)


def test_next_steps_are_those_that_apply(small: Overlap) -> None:
    """Moved rows, a thin vocabulary and a special token without a row here; equal maps can be used as they are."""
    assert [row[0].split(":")[0] for row in rows_of(drawn.next_steps(small))] == [
        "The rows have moved",
        "The child covers less than 95 % of the text",
        "A special token that occurs has no row in the child",
    ]
    b = small.comparison.b
    (same,) = rows_of(drawn.next_steps(Overlap(b.compare(b))))
    assert same[0].startswith("Every row means the same token")


def test_label_examples_name_what_the_head_means(small: Overlap) -> None:
    """Each line: the label's row in the child, and the token that the parent has in that row."""
    c = small.comparison
    for token, i, row, means, own in rows_of(drawn.label_examples(small)):
        assert token == small.bytes_of(i)
        assert row == c.b.row_of[i]
        assert means == (small.bytes_of(c.a.ids[row]) if row < c.a.k else None)
        assert own == c.a.row_of[i] != row


def test_search_finds_by_text_escape_and_id(small: Overlap) -> None:
    """A piece of text, a visible space, an escape and an id all find their tokens; nothing found is said."""
    assert [row[0] for row in rows_of(drawn.search(small, "script"))]
    assert {row[0] for row in rows_of(drawn.search(small, "␣the"))} == {b" the"}
    assert {row[0] for row in rows_of(drawn.search(small, "\\xff"))} == {b"\xff\xfe"}
    assert [row[1] for row in rows_of(drawn.search(small, "17"))] == [17]
    assert drawn.search(small, "no such text").title == "No token matches no such text"


def test_equal_and_shuffled_maps_in_words() -> None:
    """A shuffle starts above ln K; equal maps have nothing to permute and no token gained."""
    ids = np.sort(np.random.default_rng(0).choice(1000, 300, replace=False))
    one, shuffled = VocabMap.from_ids(ids, 1000), VocabMap.from_ids(ids[::-1].copy(), 1000)
    assert f"ln K = {math.log(300):.2f}" in drawn.headline(Overlap(one.compare(shuffled))).sentence
    equal = Overlap(one.compare(one))
    assert drawn.headline(equal).title == "All 300 rows mean the same token: the two maps are equal"
    assert drawn.label_examples(equal).title == "Every label asks for its own row"
    assert drawn.gained(equal).title == "No token is gained"


def test_maps_that_share_nothing_are_drawn_too() -> None:
    """The limit: no shared token, no counts, no texts."""
    view = Overlap(VocabMap.from_ids(np.array([0, 1]), 9).compare(VocabMap.from_ids(np.array([5, 6, 7]), 9)))
    for name in ALL:
        shown = getattr(drawn, name)(view)
        assert shown.title
    assert "needs token counts" in drawn.coverage(view).sentence
    assert "The first misled label" in drawn.label_examples(view).title  # nothing was counted: none is the most frequent
    assert drawn.headline(view).title.startswith("0 of 2 rows mean the same token, though 0 tokens")


def test_figures_of_the_founding_pair_stay_small(tmp_path: Path) -> None:
    """K = 32,000 and V = 163,840: each figure below 600 kB, each table below 150 kB."""
    view = open_overlap(**overlap_cases.write_founding_case(tmp_path))
    for name in ALL:
        shown = getattr(drawn, name)(view)
        size = len(shown.body.to_html() if isinstance(shown.body, Table) else shown.body.to_json())
        assert size < (150_000 if isinstance(shown.body, Table) else 600_000), name
    assert drawn.headline(view).title == "252 of 32,000 rows mean the same token, though 25,750 tokens are shared"
