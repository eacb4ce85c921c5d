"""Two maps with counts and texts, as numbers."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import overlap_cases
from workbench import lab
from workbench.errors import InputError
from workbench.mapping import VocabMap
from workbench.overlap import MOVED, NEW, OUTSIDE, RIGHT, Overlap, open_overlap, summarise, with_maps
from workbench.runs import RunFolder

PARENT, CHILD = VocabMap.from_ids(np.array([0, 2, 4, 6]), 8), VocabMap.from_ids(np.array([0, 4, 5, 6]), 8)
COUNTS = np.array([[10, 1, 2, 0, 4, 3, 5, 0], [0, 0, 0, 0, 0, 0, 0, 0]])


def hand() -> Overlap:
    """Rows 0 (id 0) and 3 (id 6) agree; id 4 moved from row 2 to row 1; id 5 is new; id 2 is lost."""
    return Overlap(PARENT.compare(CHILD), COUNTS, ("text", "nothing"), [b"a", b" b", b"c"], np.array([1, 5]))


def test_what_a_label_meets_by_hand() -> None:
    """Right row, another row with its own elsewhere, another row and none of its own, no label."""
    view = hand()
    assert view.label_meets.tolist() == [RIGHT, OUTSIDE, OUTSIDE, OUTSIDE, MOVED, NEW, RIGHT, OUTSIDE]
    assert view.label_shares() == pytest.approx(np.array([15, 4, 3, 3]) / 25)
    assert view.wrong_label_share() == pytest.approx(7 / 22)
    assert view.label_shares("nothing").tolist() == [0, 0, 0, 0]
    assert view.wrong_label_share("nothing") == 0
    assert view.ranks()[[0, 6, 4, 5, 2]].tolist() == [1, 2, 3, 4, 5]
    assert view.by_frequency(CHILD.ids).tolist() == [0, 6, 4, 5]
    assert (view.text(1), view.text(7)) == ("␣b", "id 7")


def test_without_counts_every_token_weighs_one() -> None:
    """Shares are then shares of tokens, and the unit says so."""
    view = Overlap(PARENT.compare(CHILD))
    assert view.label_shares() == pytest.approx(np.array([2, 1, 1, 4]) / 8)
    assert "each counted once" in view.unit


def test_equal_maps_meet_only_right_rows() -> None:
    """The limit: nothing moved, nothing new."""
    assert Overlap(CHILD.compare(CHILD), COUNTS, ("text", "nothing")).wrong_label_share() == 0


@given(st.data())
def test_shares_agree_with_a_loop_over_tokens(data: st.DataObject) -> None:
    """Random maps, also of different K: the shares equal a count token by token, and add up to one."""
    v = 12
    ids = st.lists(st.integers(0, v - 1), min_size=1, max_size=v, unique=True)
    a, b = (VocabMap.from_ids(np.array(data.draw(ids)), v) for _ in range(2))
    counts = np.array(data.draw(st.lists(st.integers(0, 9), min_size=v, max_size=v)))
    found = Overlap(a.compare(b), counts[None], ("all",)).label_shares()
    expected = np.zeros(4)
    for x, n in enumerate(counts):
        row = b.ids.tolist().index(x) if x in b.ids else None
        means = a.ids[row] if row is not None and row < a.k else None
        expected[OUTSIDE if row is None else RIGHT if means == x else MOVED if x in a.ids else NEW] += n
    assert found == pytest.approx(expected / max(counts.sum(), 1))


def test_unknown_slices_get_the_nearest() -> None:
    """A misspelt slice is an error with the nearest name."""
    with pytest.raises(InputError, match="unknown slice 'txt': did you mean text\\? known are text, nothing"):
        hand().weights("txt")
    with pytest.raises(InputError, match="there are no counts"):
        Overlap(PARENT.compare(CHILD)).weights("text")


def test_the_summary_holds_the_overlap_contract_and_warns(tmp_path: Path) -> None:
    """results.json has every field of `overlap --json`, three to five verdict numbers, and a warning for each thing not to miss."""
    run = RunFolder(tmp_path)
    summarise(hand(), run)
    assert run.results["results"].items() >= hand().comparison.to_json(COUNTS).items()
    assert [entry["shown"] for entry in run.results["verdict"]] == ["2 of 4", "3 of 4", "1", "31.8 %", "88.0 %"]
    assert "disagree in 2 of 4 rows" in run.results["warnings"][0]
    assert "no row in the child: 1 (␣b)" in run.results["warnings"][1]
    clean = RunFolder("")
    summarise(Overlap(CHILD.compare(CHILD), COUNTS, ("text", "nothing"), [b"a"]), clean)
    assert clean.results["warnings"] == []
    bare = RunFolder("")
    summarise(Overlap(CHILD.compare(CHILD)), bare)
    assert [w.split(" ", 3)[:3] for w in bare.results["warnings"]] == [["No", "token", "counts"], ["No", "tokenizer", "was"]]
    assert 3 <= len(bare.results["verdict"]) <= 5


def test_opening_reads_maps_counts_and_texts(tmp_path: Path) -> None:
    """What was written is what is seen; the other verifier's counts are refused."""
    given_paths = overlap_cases.write_small_case(tmp_path)
    view = open_overlap(**given_paths)
    assert (view.comparison.a.k, view.comparison.b.k, view.comparison.a.v) == (280, 300, 1000)
    assert view.slices == ("chat", "code", "<b>lists</b>")
    assert view.inputs == given_paths
    assert sorted(view.text(i) for i in view.special) == ["<|im_end|>", "<|never|>"]
    bare = open_overlap(given_paths["parent"], given_paths["child"])
    assert bare.counts is None
    assert bare.tokens is None
    np.save(tmp_path / "other.npy", np.ones(999, dtype=np.int64))
    with pytest.raises(InputError, match="another verifier"):
        open_overlap(given_paths["parent"], given_paths["child"], str(tmp_path / "other.npy"))


def test_other_maps_under_the_same_texts(tmp_path: Path) -> None:
    """Only the maps are read again, unless their V is another one: then the counts do not fit, and it says so."""
    given_paths = overlap_cases.write_small_case(tmp_path)
    view = open_overlap(**given_paths)
    same = with_maps(view, given_paths["child"], given_paths["child"])
    assert same.comparison.same_position == 300
    assert (same.counts is view.counts, same.tokens is view.tokens) == (True, True)
    assert same.inputs == {**given_paths, "parent": given_paths["child"]}
    VocabMap.from_ids(np.arange(8), 999).write(tmp_path / "other")
    with pytest.raises(InputError, match="another verifier"):
        with_maps(view, str(tmp_path / "other"), str(tmp_path / "other"))


def test_a_map_of_the_lab_brings_its_counts_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is given by its path, and beside a map of one's own; what is given stays."""
    given_paths = overlap_cases.write_small_case(tmp_path)
    monkeypatch.setattr(lab, "fetch", lambda: given_paths["tokenizer"])
    VocabMap.from_ids(np.arange(4096), 49_152).write(tmp_path / "mine")
    for pair in ((str(lab.DATA / "map-parent"), str(lab.DATA / "map-child")), (str(tmp_path / "mine"), str(lab.DATA / "map-child"))):
        assert open_overlap(*pair).inputs["counts"] == str(lab.DATA / "counts-successor.npz")
    own = open_overlap(*pair, counts=str(lab.DATA / "counts-predecessor.npz"))
    assert own.inputs["counts"] == str(lab.DATA / "counts-predecessor.npz")


def test_the_founding_pair_at_its_real_size() -> None:
    """252 rows agree, 25,750 tokens are shared, 6,250 are new, of K = 32,000 and V = 163,840."""
    a, b = overlap_cases.founding_ids()
    view = Overlap(VocabMap.from_ids(a, 163_840).compare(VocabMap.from_ids(b, 163_840)))
    assert (view.comparison.same_position, len(view.comparison.shared_ids), len(view.comparison.missing_ids)) == (252, 25_750, 6_250)
    assert view.label_meets.tolist().count(RIGHT) == 252
