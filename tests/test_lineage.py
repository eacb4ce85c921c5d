"""What a head is made of: verdicts on heads whose origin is known, the two-map proof, and what misplaced rows do to a loss."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.synthetic import Drafter, Verifier, drafter_values, verifier_values, write_drafter, write_verifier
from workbench import lineage as module
from workbench.checkpoint import open_drafter, open_verifier
from workbench.lineage import HeadRows, leak, lineage, misalignment_index, null_loss, row_cosine, sample_rows, shared_only_loss, which_map
from workbench.mapping import VocabMap

V, K, WIDTH, SIZE = 3000, 600, 48, 384
RNG = np.random.default_rng(3)
# token rows as real ones are: a common part, a slow drift with frequency, and what a token has for itself
DRIFT = np.cumsum(RNG.standard_normal((V, WIDTH)), 0) / np.sqrt(V)
VERIFIER = (1 + 2 * DRIFT + RNG.standard_normal((V, WIDTH)) @ np.diag(np.linspace(0.2, 2, WIDTH))).astype(np.float32)
TURN = np.linalg.qr(RNG.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)
MAP, OTHER = (VocabMap(np.sort(np.random.default_rng(seed).choice(V, K, replace=False)), V) for seed in (1, 2))
NOISE = RNG.standard_normal((K, WIDTH)).astype(np.float32)
OWN = VERIFIER[MAP.ids]


class Rows:
    """A head in memory, as `lineage` reads one."""

    def __init__(self, rows: np.ndarray):
        self.rows, self.width = rows.astype(np.float32), rows.shape[1]

    def by_row(self, rows: np.ndarray) -> np.ndarray:
        return self.rows[rows]


def verifier(ids: np.ndarray) -> np.ndarray:
    return VERIFIER[ids]


HEADS = {
    "tied": OWN,
    "tied-then-trained": OWN + 0.5 * NOISE,
    "free": (OWN + 0.8 * NOISE) @ TURN * 0.4,
    "random": 0.02 * NOISE,
    "permuted": ((OWN + 0.5 * NOISE) @ TURN)[np.random.default_rng(4).permutation(K)],
}


@pytest.mark.parametrize("origin", HEADS)
def test_the_verdict_is_the_origin(origin: str) -> None:
    """A head made from the verifier's rows by a known act is named after that act, in a sentence."""
    found = lineage(Rows(HEADS[origin]), verifier, MAP, size=SIZE)
    assert found.verdict == origin, found
    assert found.sentence
    assert found.evidence["rows"] <= SIZE < found.evidence["k"] == K


def test_rows_that_follow_another_map_or_are_shifted_are_permuted() -> None:
    """The founding case (rows in another map's order), seen without that map; and rows rolled by one, with the shift named."""
    assert lineage(Rows(VERIFIER[OTHER.ids] @ TURN), verifier, MAP, size=SIZE).verdict == "permuted"
    for head in (OWN, OWN @ TURN):
        rolled = lineage(Rows(np.roll(head, 1, axis=0)), verifier, MAP, size=SIZE)
        assert (rolled.verdict, rolled.evidence["best_shift"]) == ("permuted", 1)


def test_a_head_tied_to_another_verifier_is_named_after_it() -> None:
    """Among several verifiers the one whose rows they are is told, and the one that is asked about is not it."""
    successor = VERIFIER + 0.3 * RNG.standard_normal(VERIFIER.shape).astype(np.float32)
    found = lineage(Rows(OWN), lambda ids: successor[ids], MAP, others={"predecessor": verifier}, size=SIZE)
    assert (found.verdict, "predecessor" in found.sentence) == ("tied-other", True)
    assert lineage(Rows(OWN), lambda ids: successor[ids], MAP, size=SIZE).verdict == "tied-then-trained"


def test_a_narrower_head_is_judged_without_cosines() -> None:
    """Widths may differ: then only the linear map counts."""
    found = lineage(Rows((OWN @ TURN)[:, :20]), verifier, MAP, size=SIZE)
    assert (found.verdict, found.evidence["cosine"]) == ("free", None)


def test_unexplained_is_leave_one_out_by_refitting() -> None:
    """The dual form equals refitting a penalised line without each row in turn, at the best penalty."""
    x, y = OWN[:25, :5].astype(np.float64), NOISE[:25, :2] + OWN[:25, :2]
    explainer = module.Explainer(x)
    centred, best = x - x.mean(0), np.inf
    scale = np.linalg.eigvalsh(centred @ centred.T).clip(0).mean()
    total = sum(float(((y[i] - np.delete(y, i, 0).mean(0)) ** 2).sum()) for i in range(25))
    for penalty in module.PENALTIES * scale:
        error = 0.0
        for i in range(25):
            rest = np.delete(np.arange(25), i)
            a = np.column_stack([centred[rest], np.ones(24)])
            weights = np.linalg.solve(a.T @ a + np.diag([penalty] * 5 + [0]), a.T @ y[rest])
            error += float(((y[i] - np.append(centred[i], 1) @ weights) ** 2).sum())
        best = min(best, error / total)
    assert explainer.unexplained(y @ y.T) == pytest.approx(best, rel=1e-3)
    assert explainer.row_errors(y).sum() == pytest.approx(best * total / float(((y - y.mean(0)) ** 2).sum(1).mean()), rel=1e-3)


@given(st.integers(1, 5000), st.integers(16, 1024))
def test_sampled_rows_are_spread_blocks(k: int, size: int) -> None:
    """Ascending rows within the head, all of them when they are few, never more than asked for (in whole blocks)."""
    rows = sample_rows(k, size)
    assert np.all(np.diff(rows) > 0)
    assert rows[0] >= 0
    assert rows[-1] < k
    assert len(rows) <= max(size, module.BLOCK)
    if k <= size:
        assert len(rows) == k


# ---- which of two maps


@pytest.mark.parametrize(("follows", "rows_of"), [("a", MAP), ("b", OTHER)])
@pytest.mark.parametrize("act", ["copy", "train", "turn"])
def test_the_map_that_the_rows_follow_is_proven(follows: str, rows_of: VocabMap, act: str) -> None:
    """Copies, trained copies and heads in another basis: the reading that the rows were made by wins by many standard errors."""
    rows = VERIFIER[rows_of.ids]
    head = {"copy": rows, "train": rows + 0.4 * NOISE, "turn": (rows + 0.4 * NOISE) @ TURN}[act]
    found = which_map(Rows(head), MAP, OTHER, verifier, np.ones(V, bool), size=SIZE)
    assert (found.verdict, found.margin > module.CERTAIN) == (follows, True)
    assert found.differ == int((MAP.ids != OTHER.ids).sum())
    if act != "turn":
        assert {"a": found.in_place_a, "b": found.in_place_b}[follows] > 0.9


def test_a_head_that_follows_neither_map_is_said_to_follow_neither() -> None:
    """A random head, and equal maps, which nothing can decide."""
    assert which_map(Rows(NOISE), MAP, OTHER, verifier, np.ones(V, bool), size=SIZE).verdict == "neither"
    assert which_map(Rows(OWN), MAP, MAP, verifier, np.ones(V, bool), size=SIZE).verdict == "undecidable"


def test_the_parents_head_proves_a_naive_warm_start(tmp_path) -> None:
    """Parent's rows beside the new map, read from files: with the parent as reference its own map is the one that the rows follow."""
    d = Drafter(k=200, v=400, h=16)
    values = drafter_values(d, seed=1)
    parent = write_drafter(tmp_path / "parent", d, values=values)
    new = VocabMap(np.sort(np.random.default_rng(8).choice(400, 200, replace=False)), 400)
    child = write_drafter(tmp_path / "child", d, values=values | {"d2t": new.d2t, "t2d": new.t2d})
    old = VocabMap(values["d2t"] + np.arange(200), 400)
    reference = HeadRows(open_drafter(parent), "lm_head.weight", old)
    found = which_map(HeadRows(open_drafter(child), "lm_head.weight", new), old, new, reference, old.t2d)
    assert (found.verdict, found.in_place_a) == ("a", 1.0)
    assert found.in_place_b < 0.1


def test_head_rows_read_by_token_and_by_row(tmp_path) -> None:
    """A drafter's rows come by target id through its map, a verifier's by id itself; widths are the files'."""
    drafter = open_drafter(write_drafter(tmp_path / "d", Drafter(dtype="F32")))
    m = VocabMap.from_offsets(drafter.map_raw()[0], 64)
    rows = HeadRows(drafter, "lm_head.weight", m)
    head = drafter_values(Drafter())["lm_head.weight"]
    assert np.array_equal(rows(m.ids[[3, 1]]), head[[3, 1]])
    assert np.array_equal(rows.by_row(np.array([3, 1])), head[[3, 1]])
    model = open_verifier(write_verifier(tmp_path / "v", Verifier(dtype="F32")))
    assert np.array_equal(HeadRows(model, model.head)(np.array([9])), verifier_values(Verifier())["lm_head.weight"][[9]])


def test_row_cosine_ignores_what_all_rows_share() -> None:
    """A common offset does not make unrelated rows alike; equal rows have cosine 1, opposite ones -1, zero rows 0."""
    a = np.array([[1.0, 0], [-1, 0], [0, 0]])
    np.testing.assert_allclose(row_cosine(a + 100, a - 7), [1, 1, 0])
    np.testing.assert_allclose(row_cosine(a, -a)[:2], [-1, -1])


# ---- losses


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(1, keepdims=True))


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**31))
def test_the_null_is_the_mean_loss_over_all_labels(n: int, k: int, seed: int) -> None:
    """Labels that know nothing of the rows cost, on average over every row as label, exactly the null."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((n, 3)) * 4, rng.standard_normal((k, 3))
    assert null_loss(hidden, head) == pytest.approx(float(-log_softmax(hidden @ head.T).mean()))


def test_the_null_with_some_rows_in_place_is_the_mean_over_all_ways_to_shuffle_the_others() -> None:
    """Teacher probabilities, two rows where their labels look: exactly the cross-entropy averaged over permutations of the other three."""
    rng = np.random.default_rng(0)
    hidden, head, in_place = rng.standard_normal((4, 3)), rng.standard_normal((5, 3)), np.array([True, False, False, True, False])
    teacher = rng.dirichlet(np.ones(5), 4)
    moved = np.flatnonzero(~in_place)
    costs = []
    for order in itertools.permutations(moved):
        shuffled = head.copy()
        shuffled[moved] = head[list(order)]
        costs.append(-(teacher * log_softmax(hidden @ shuffled.T)).sum(1).mean())
    assert null_loss(hidden, head, teacher, in_place) == pytest.approx(np.mean(costs))
    assert null_loss(hidden, head, teacher, ~in_place | in_place) == null_loss(hidden, head)


def test_the_null_of_a_confident_head_is_far_above_uniform() -> None:
    """A head that says nothing has ln K; one that is sure of one row has its margin; a small random one ln K + var / 2."""
    assert null_loss(np.zeros((2, 3)), np.ones((50, 3))) == pytest.approx(np.log(50))
    sure = np.zeros((50, 1))
    sure[7] = 40
    assert null_loss(np.ones((1, 1)), sure) == pytest.approx(40 - 40 / 50)
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((400, 64)) / 8, rng.standard_normal((4000, 64)) * 0.7
    assert null_loss(hidden, head) == pytest.approx(np.log(4000) + 0.7**2 / 2, rel=0.01)
    assert misalignment_index(17.8, 18.0, 2.0) == pytest.approx(0.9875)


def test_leak_and_shared_loss_split_new_rows_from_a_broken_body() -> None:
    """By hand: three rows, the last one made. It takes 1/2 where the teacher gives 1/4; among the shared two the drafter is even."""
    logits = np.log(np.array([[0.25, 0.25, 0.5]]))
    teacher, made = np.array([[0.75, 0.0, 0.25]]), np.array([False, False, True])
    assert leak(logits, teacher, made) == pytest.approx(0.25)
    assert shared_only_loss(logits, teacher, made) == pytest.approx(np.log(2))
    heavier = np.vstack([teacher, [[0.0, 0.25, 0.75]]]), np.log(np.array([[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]]))
    expected = (0.75 * np.log(2) + 0.25 * np.log(1.5)) / 1.0
    assert shared_only_loss(heavier[1], heavier[0], made) == pytest.approx(expected)
