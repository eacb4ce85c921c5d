"""The vocabulary map: building, comparing, coverage, and judging what lies on disk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.mapfiles import map_from_tensors
from workbench.mapping import Comparison, VocabMap, coverage_curve, describe_map, k_needed


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Two id lists, any order, any sizes, in one target vocabulary."""
    v = draw(st.integers(1, 60))
    lists = [draw(st.permutations(range(v)))[: draw(st.integers(1, v))] for _ in range(2)]
    return lists[0], lists[1], v


@given(maps())
def test_comparison_equals_a_brute_force_count(drawn: tuple[list[int], list[int], int]) -> None:
    """Every number of the overlap contract equals what plain loops over sets and rows count."""
    a, b, v = drawn
    counts = np.arange(v) ** 2
    got = VocabMap.from_ids(np.array(a), v).compare(VocabMap.from_ids(np.array(b), v)).to_json(counts)
    rows = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    longer = min(len(a), len(b)) if len(a) != len(b) else None
    total = sum(i * i for i in range(v))
    assert got["same_position"] == sum(x == y for x, y in zip(a, b, strict=False))
    assert (got["shared"], got["only_a"], got["only_b"]) == (len(set(a) & set(b)), len(set(a) - set(b)), len(set(b) - set(a)))
    assert got["jaccard"] == pytest.approx(len(set(a) & set(b)) / len(set(a) | set(b)))
    assert got["first_divergence"] == (rows[0] if rows else longer)
    assert got["missing_ids_sample"] == sorted(set(b) - set(a))[:20]
    assert (got["coverage_a"] is None) == (total == 0)
    if total:
        assert got["coverage_a"] == pytest.approx(sum(i * i for i in a) / total)
        assert got["coverage_b"] == pytest.approx(sum(i * i for i in b) / total)
        assert got["missing_mass"] == pytest.approx(sum(i * i for i in set(b) - set(a)) / total)


def test_the_founding_case_has_its_numbers() -> None:
    """K = 32,000 of V = 163,840: sorted maps with 25,750 shared tokens agree in 252 rows only, and 6,250 have no counterpart."""
    k, v, same, missing = 32_000, 163_840, 252, 6_250
    shared = np.arange(0, 5 * (k - missing), 5)
    lost = shared[-missing:] + 1  # the old map's own tokens lie at the end,
    gained = shared[same - 1 :][:missing] + 2  # the new map's from row 252 on: every later row shifts
    a = VocabMap.from_ids(np.sort(np.concatenate([shared, lost])), v)
    b = VocabMap.from_ids(np.sort(np.concatenate([shared, gained])), v)
    got = a.compare(b).to_json()
    assert (got["k_a"], got["k_b"], got["v"], got["shared"], got["only_b"]) == (k, k, v, 25_750, 6_250)
    assert got["same_position"] == same
    assert got["first_divergence"] == same


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_build_keeps_the_most_frequent_with_ties_to_the_lower_id(counts: list[int], data: st.DataObject) -> None:
    """The chosen set is the first K of (count descending, id ascending), forced ids first; what they pushed out is recorded."""
    k = data.draw(st.integers(1, len(counts)))
    forced = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=k, unique=True))
    built = VocabMap.build(np.array(counts), k, forced)
    ranked = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    expected = set(forced) | set([i for i in ranked if i not in forced][: k - len(forced)])
    assert built.ids.tolist() == sorted(expected)
    assert built.displaced.tolist() == sorted(set(ranked[:k]) - expected)
    assert built.filler.tolist() == sorted(i for i in expected if counts[i] == 0 and i not in forced)
    assert built.forced.tolist() == sorted(forced)


def test_filler_is_the_lowest_unused_ids() -> None:
    """Fewer distinct tokens than K: the lowest ids that were never counted fill up, as speculators does."""
    built = VocabMap.build(np.array([0, 0, 9, 0, 4, 0]), 4)
    assert built.ids.tolist() == [0, 1, 2, 4]
    assert built.filler.tolist() == [0, 1]


def test_slices_are_added_up() -> None:
    """Counts of several slices [slices, V] rank by their sum."""
    assert VocabMap.build(np.array([[3, 0, 2], [0, 0, 2]]), 1).ids.tolist() == [2]


@given(st.integers(1, 50).flatmap(lambda v: st.permutations(range(v)).flatmap(lambda p: st.integers(1, v).map(lambda k: (p[:k], v)))))
def test_offsets_ids_and_mask_are_one_thing(drawn: tuple[list[int], int]) -> None:
    """From ids to d2t and back is exact for any order of rows; t2d marks exactly those ids; row_of inverts ids."""
    ids, v = drawn
    made = VocabMap.from_ids(np.array(ids), v)
    assert VocabMap.from_offsets(made.d2t, v) == made
    assert np.flatnonzero(made.t2d).tolist() == sorted(ids)
    assert made.row_of[made.ids].tolist() == list(range(len(ids)))
    assert (made.row_of >= 0).sum() == len(ids)
    assert made.is_sorted == (ids == sorted(ids))


def test_a_map_cannot_be_changed() -> None:
    """The arrays refuse writes, and the caller's array is not shared."""
    source = np.array([1, 3])
    made = VocabMap.from_ids(source, 5)
    source[0] = 4
    assert made.ids.tolist() == [1, 3]
    for array in (made.ids, made.d2t, made.t2d, made.row_of):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_written_maps_are_equal_byte_for_byte(tmp_path) -> None:
    """Two builds from equal counts write equal bytes, and fingerprints tell different maps apart."""
    counts = np.random.default_rng(0).integers(0, 50, 300)
    for name in ("one", "two"):
        VocabMap.build(counts, 64, forced=[299]).write(tmp_path / name)
    for file in ("d2t.npy", "t2d.npy", "map.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    d2t = np.load(tmp_path / "one" / "d2t.npy")
    assert (d2t.dtype, np.load(tmp_path / "one" / "t2d.npy").dtype) == (np.int64, np.bool_)
    assert VocabMap.from_offsets(d2t, 300).fingerprint == VocabMap.build(counts, 64, [299]).fingerprint
    assert VocabMap.from_ids(np.array([0, 1]), 300).fingerprint != VocabMap.from_ids(np.array([1, 0]), 300).fingerprint


def test_coverage_by_hand() -> None:
    """Counts 5, 3, 2: the best one covers 50 %, two 80 %, three all; a level is reached at the first K that is at least as high."""
    counts = np.array([3, 0, 5, 2])
    assert coverage_curve(counts).tolist() == [0.5, 0.8, 1.0, 1.0]
    assert k_needed(counts, (0.5, 0.51, 0.8, 1.0)) == {0.5: 1, 0.51: 2, 0.8: 2, 1.0: 3}
    assert VocabMap.from_ids(np.array([2, 1]), 4).coverage(counts) == 0.5


def test_coverage_without_counts_is_not_a_number() -> None:
    """Nothing counted: no coverage is invented."""
    assert np.isnan(VocabMap.from_ids(np.array([0]), 2).coverage(np.zeros(2, dtype=int)))
    assert np.isnan(coverage_curve(np.zeros(3, dtype=int))).all()
    assert k_needed(np.zeros(3, dtype=int)) == {}


@given(st.integers(2, 30).flatmap(lambda k: st.permutations(range(2 * k)).map(lambda p: p[:k])))
def test_with_t2d_the_reading_of_d2t_is_never_ambiguous(ids: list[int]) -> None:
    """Offsets and absolute ids are told apart by the set that t2d marks, in any order of rows, and both give the same map."""
    made = VocabMap.from_ids(np.array(ids), 2 * len(ids))
    for values, form in ((made.d2t, "offsets"), (made.ids, "absolute")):
        report = describe_map(values, made.t2d, made.k, made.v)
        assert (report["form"], report["t2d_agrees"], report["unique"], report["in_range"]) == (form, True, True, True)
        read = map_from_tensors(values, made.t2d, made.k, made.v, "here")
        assert read == made
        assert bool(read.assumption) == (form == "absolute")


def test_without_t2d_a_rising_d2t_is_read_as_engines_do_and_said_to_be_ambiguous() -> None:
    """[0, 2, 4] of 12 fits both readings: offsets it is, with the assumption recorded."""
    read = map_from_tensors(np.array([0, 2, 4]), None, 3, 12, "here")
    assert read.ids.tolist() == [0, 3, 6]
    assert "could also be absolute" in read.assumption
    assert describe_map(np.array([0, 2, 4]), None, 3, 12)["ambiguous"]
    assert not describe_map(np.array([0, 2, 2]), None, 3, 12)["ambiguous"]


def test_full_vocabulary_needs_no_map() -> None:
    """K = V: no tensors, or zero offsets, are the identity and right."""
    assert map_from_tensors(None, None, 6, 6, "here") == VocabMap.from_ids(np.arange(6), 6)
    assert describe_map(np.zeros(6, dtype=np.int64), np.ones(6, dtype=bool), 6, 6)["form"] == "full"
    assert describe_map(None, None, 6, 6)["form"] == "full"
    assert describe_map(None, None, 4, 6)["form"] == "none"


def test_t2d_alone_states_its_assumption() -> None:
    """The mask alone gives ascending rows, and says that this was assumed."""
    read = map_from_tensors(None, np.array([False, True, True]), 2, 3, "here")
    assert read.ids.tolist() == [1, 2]
    assert "ascending" in read.assumption


@pytest.mark.parametrize(
    ("d2t", "t2d", "k", "v", "said"),
    [
        (np.array([0.0, 1.0]), None, 2, 8, "expected integers"),
        (np.array([0, 9]), None, 2, 8, r"row 1 \(offset 9, id 10\)"),
        (np.array([-1, 0]), None, 2, 8, r"row 0 \(offset -1, id -1\)"),
        (np.array([1, 0, 0]), None, 3, 8, r"rows 0 and 1 \(id 1\)"),
        (np.array([0, 0, 0]), None, 2, 8, "3 rows but the head has K = 2"),
        (np.array([0, 0]), np.array([1, 1, 1, 0], dtype=bool), 2, 4, "t2d marks 3"),
        (np.array([0, 0]), np.array([0, 0, 1, 1], dtype=bool), 2, 4, "different tokens"),
        (np.array([0, 0]), np.array([0.0, 1.0]), 2, 2, "expected a mask"),
        (np.array([0, 0]), np.array([1, 1], dtype=bool), 2, 4, "t2d covers 2 ids but the target vocabulary has V = 4"),
        (np.zeros((2, 1), dtype=int), None, 2, 8, r"shape \[2, 1\]"),
        (np.array([0, 0]), None, 2, None, "put t2d beside d2t"),
        (None, None, 2, 8, "no d2t and no t2d"),
        (None, np.array([1, 1, 1, 0], dtype=bool), 2, 4, "t2d marks 3 ids but the head has K = 2"),
    ],
)
def test_a_broken_map_is_refused_with_its_rows(d2t, t2d, k, v, said: str) -> None:
    """One sentence that names the place, the row, the value and what was expected."""
    with pytest.raises(InputError, match=said) as caught:
        map_from_tensors(d2t, t2d, k, v, "the file")
    assert "the file" in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "k", "forced", "said"),
    [
        (np.array([1, 2]), 3, [], "K = 3"),
        (np.array([1, 2]), 0, [], "K = 0"),
        (np.array([1, 2]), 1, [2], "forced id 2"),
        (np.array([1, 2]), 1, [0, 1], "2 forced ids"),
        (np.array([1, -2]), 1, [], "negative number at id 1"),
        (np.array([1.5, 2]), 1, [], "expected integers"),
    ],
)
def test_build_refuses_what_does_not_fit(counts, k: int, forced: list[int], said: str) -> None:
    """Sizes, forced ids and counts that make no sense are named."""
    with pytest.raises(InputError, match=said):
        VocabMap.build(counts, k, forced)


def test_maps_of_two_vocabularies_are_not_compared() -> None:
    """V differs: there is no common meaning of an id; counts of another V are refused too."""
    a = VocabMap.from_ids(np.array([0]), 4)
    with pytest.raises(InputError, match="V = 4 and V = 5"):
        a.compare(VocabMap.from_ids(np.array([0]), 5))
    with pytest.raises(InputError, match="cover 5 ids"):
        Comparison(a, a).to_json(np.ones(5, dtype=int))
