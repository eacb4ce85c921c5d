"""The stepper's exhibits: numbers in their titles, one line a row, the label's row and what the head means there, hostile texts escaped."""

import math
from dataclasses import replace

import numpy as np
import pytest

from workbench import stepper_figures as drawn
from workbench.figures import Exhibit, Table
from workbench.mapping import VocabMap
from workbench.stepper import Labels, Stepped

HEAD = VocabMap(np.array([4, 2, 0, 3]), 6)
CHILD = VocabMap(np.array([0, 2, 3, 4]), 6)
TOKENS = [b"<script>", b"one", b" two", b"three", b"four", b"\n"]


def labels(vocab_map: VocabMap, token: list[int], loss: list[float]) -> Labels:
    """One TTT step of 4 rows; the last chain has left the text."""
    row = np.array([[vocab_map.row_of[t] if t >= 0 else -1 for t in token]], np.int32)
    gone = row < 0
    return Labels(vocab_map, row, np.where(gone, np.nan, 0.25).astype(np.float32), np.array([loss], np.float32))


@pytest.fixture
def view() -> Stepped:
    """Rows 1 and 2 are supervised; the child's label of row 1 (token 0) asks for row 0, where the head means token 4."""
    choices = np.tile(np.array([[0, 1, 2]], np.int32), (1, 4, 1)).reshape(1, 4, 3)
    return Stepped(
        head=HEAD,
        labels={
            "parent": labels(HEAD, [2, 0, 2, -1], [0.1, 0.5, 1.0, math.nan]),
            "child": labels(CHILD, [2, 0, 2, -1], [9, 8, 7.25, math.nan]),
        },
        document=np.array([0, 0, 1, 1], np.int32),
        sample=np.array([5, 5, 6, 6], np.int32),
        reads=np.array([[1, 2, 3, -1]], np.int32),
        position=np.array([[1, 2, 1, -1]], np.int32),
        supervised=np.array([[False, True, True, False]]),
        verifier=choices,
        verifier_p=np.full((1, 4, 3), 0.3, np.float32),
        drafter=choices,
        drafter_p=np.full((1, 4, 3), 0.2, np.float32),
        tokens=TOKENS,
    )  # fmt: skip


def lines_of(exhibit: Exhibit) -> list[dict]:
    assert isinstance(exhibit.body, Table)
    return [dict(zip([c.heading for c in exhibit.body.columns], row, strict=True)) for row in exhibit.body.rows]


def test_worst_lists_supervised_tokens_and_what_their_rows_mean(view: Stepped) -> None:
    """Costliest first; a misled label names the token that the head keeps in its row, a right one says so."""
    shown = drawn.worst(view, 0, "child")
    assert shown.title == "The worst of 2 supervised tokens costs 8.0 nats: label <script> asks for row 0, where the head means four"
    assert shown.sentence.endswith("1 of 2 labels ask for a row of another token.")
    first, second = lines_of(shown)
    assert (first["token"], first["reads"], first["label"], first["its row"], first["there the head means"]) == (
        1,
        b" two",
        b"<script>",
        0,
        b"four",
    )
    assert first["loss (nats)"] == 8
    assert first["verifier says"] == [(b"<script>", pytest.approx(0.3)), (b"one", pytest.approx(0.3)), (b" two", pytest.approx(0.3))]
    assert [token for token, _ in first["drafter says"]] == [b"four", b" two", b"<script>"]  # rows through the head's own map
    assert second["there the head means"] == second["label"] == b" two"
    assert drawn.worst(view, 0, "parent").title.endswith("label ␣two asks for row 1, its own")
    assert len(lines_of(drawn.worst(view, 0, "child", rows=1))) == 1
    assert drawn.worst(view, 0, "child", rows=1).body.total == 2
    html = shown.to_html()
    assert "<script>" not in html
    assert "<code><bdi>&lt;script&gt;</bdi></code>&nbsp;0.30" in html


def test_window_marks_its_row_and_ends_at_the_edges(view: Stepped) -> None:
    """Neighbours on both sides as far as there are any; an unsupervised row has no loss that counts, a chain past the text has nothing."""
    lines = lines_of(drawn.window(view, 0, "child", 1, around=1))
    assert [(line[""], line["token"], line["supervised"]) for line in lines] == [("", 0, "no"), ("▶", 1, "yes"), ("", 2, "yes")]
    assert "loss 8.00 nats" in drawn.window(view, 0, "child", 1).sentence
    assert "not supervised" in drawn.window(view, 0, "child", 0).sentence
    gone = drawn.window(view, 0, "child", 3)
    assert gone.title == "Token 3 of the batch: at TTT step 0 this chain has left the text"
    assert lines_of(gone)[-1]["label"] is None
    assert gone.to_html().count("–") == 7  # position, token, label, its row, its meaning, probability, loss


def test_trail_has_every_supervised_loss_and_the_yardstick(view: Stepped) -> None:
    """One point a supervised row at its loss, ln K as a line, documents parted, the row ringed; the title counts what is above ln K."""
    shown = drawn.trail(view, 0, "child", 2)
    points, ring = shown.body.data
    assert (list(points.x), list(points.y)) == ([1, 2], [8, 7.25])
    assert (list(ring.x), list(ring.y)) == ([2], [7.25])
    assert [shape.y0 for shape in shown.body.layout.shapes] == [pytest.approx(math.log(4)), 0]
    assert shown.body.layout.shapes[1].x0 == 1.5
    assert shown.title.startswith("TTT step 0: 100 % of 2 supervised tokens")
    assert drawn.trail(view, 0, "parent").title.startswith("TTT step 0: 0 % of 2")
    assert len(drawn.trail(view, 0, "parent").body.data[1].x) == 0


def test_moved_shows_the_same_rows_before_and_after(view: Stepped) -> None:
    """The worst rows before; the row stays, its meaning and loss change."""
    after = replace(view, head=CHILD, labels={"child": labels(CHILD, [2, 0, 2, -1], [0.1, 0.5, 1.0, math.nan])})
    shown = drawn.moved(view, after, 0, "parent", "child")
    assert shown.title == "<script> is asked of row 0, which meant four and means <script> now: loss 8.0 → 0.5 nats"
    first = lines_of(shown)[0]
    assert (first["its row in the parent map"], first["its row in the child map"]) == (2, 0)
    assert (first["there the head meant"], first["there it means now"]) == (b"four", b"<script>")
    assert (first["loss before"], first["loss after"]) == (8, 0.5)
    assert "mean loss 7.62 before, 0.75 after" in shown.sentence


def test_what_cannot_be_shown_says_why(view: Stepped) -> None:
    """A map that does not fit the head, and a step where nothing is supervised, are sentences and no error."""
    for draw, more in ((drawn.worst, ()), (drawn.trail, ()), (drawn.window, (0,))):
        assert "no labels through the grandchild map here" in draw(view, 0, "grandchild", *more).sentence
        silent = replace(view, supervised=np.zeros((1, 4), bool))
        assert draw(silent, 0, "child", *more).sentence == "no token of this batch is supervised at TTT step 0."
    alone = replace(view, labels={"parent": view.labels["parent"]})
    assert "could not be put to the parent's head" in drawn.moved(alone, view, 0, "parent", "child").sentence
