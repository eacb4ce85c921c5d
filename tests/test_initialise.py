"""Initialisers: each recovers what it claims to know, exactly where the data are exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import initialise
from workbench.errors import InputError

V, D = 300, 12  # tokens, width
RNG = np.random.default_rng(5)
HEAD = RNG.standard_normal((V, D)).astype(np.float32)  # the verifier's
TURN = np.linalg.qr(RNG.standard_normal((D, D)))[0].astype(np.float32)
SHARED, MISSING = np.arange(0, 250), np.arange(250, 300)


def quiet(_line: str) -> None:
    pass


def rows_of(head: np.ndarray) -> initialise.Rows:
    return lambda ids: head[ids]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_sums_in_chunks_equal_sums_at_once(n: int, width: int, parts: int, centred: bool) -> None:
    """Moments collected in any chunks equal numpy's over all rows, around the means or not."""
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((n, width)).astype(np.float32) + 3, rng.standard_normal((n, 2)).astype(np.float32)
    sums = initialise.Sums()
    for piece in np.array_split(np.arange(n), min(parts, n)):
        sums.add(x[piece], y[piece])
    got = sums.moments(centred)
    a, b = (x - x.mean(0), y - y.mean(0)) if centred else (x, y)
    np.testing.assert_allclose(got.xx, a.T @ a, atol=1e-3)
    np.testing.assert_allclose(got.xy, a.T @ b, atol=1e-3)
    assert got.x_square == pytest.approx(float((a**2).sum()), abs=1e-3)
    assert got.n == n


def test_procrustes_finds_rotation_and_scale() -> None:
    """Drafter rows that are verifier rows turned, scaled and moved are continued exactly to tokens it has not seen."""
    drafter = 0.7 * HEAD @ TURN + 0.3
    made = initialise.procrustes(rows_of(HEAD), rows_of(drafter), SHARED, quiet)(MISSING)
    np.testing.assert_allclose(made, drafter[MISSING], atol=2e-3)


def test_procrustes_takes_heads_of_different_widths() -> None:
    """A narrower drafter head gets rows of its own width."""
    made = initialise.procrustes(rows_of(HEAD), rows_of((HEAD @ TURN)[:, :7]), SHARED, quiet)(MISSING)
    assert made.shape == (len(MISSING), 7)


def test_ridge_finds_any_linear_map_and_says_what_it_leaves() -> None:
    """A linear map is recovered with next to nothing unexplained; independent rows are explained not at all."""
    drafter = HEAD @ RNG.standard_normal((D, 9)).astype(np.float32) + 1
    rows, left = initialise.ridge(rows_of(HEAD), rows_of(drafter), SHARED, quiet)
    np.testing.assert_allclose(rows(MISSING), drafter[MISSING], atol=1e-2)
    assert left < 1e-4
    _, left = initialise.ridge(rows_of(HEAD), rows_of(RNG.standard_normal((V, D)).astype(np.float32)), SHARED, quiet)
    assert left > 0.95


def test_ridge_judges_lambda_by_true_leave_one_out() -> None:
    """The share left unexplained equals the best over penalties of refitting without each row in turn."""
    ids = np.arange(20)
    x, y = HEAD[:20, :4].astype(np.float64), RNG.standard_normal((20, 3)) + HEAD[:20, :3]
    _, left = initialise.ridge(rows_of(x.astype(np.float32)), rows_of(y.astype(np.float32)), ids, quiet)
    centred = x - x.mean(0)
    best = np.inf
    for penalty in initialise.PENALTIES * np.linalg.eigvalsh(centred.T @ centred).mean():
        error = 0.0
        for i in range(20):
            rest = np.delete(np.arange(20), i)
            # the penalised system of all rows less row i, around the common mean as the closed form has it, with a free intercept
            a = np.column_stack([centred[rest], np.ones(19)])
            weights = np.linalg.solve(a.T @ a + np.diag([penalty] * 4 + [0]), a.T @ y[rest])
            error += float(((y[i] - np.append(centred[i], 1) @ weights) ** 2).sum())
        best = min(best, error / float(((y - y.mean(0)) ** 2).sum()))
    assert left == pytest.approx(best, rel=1e-4)


def test_omp_writes_a_row_as_the_shared_rows_it_is_made_of() -> None:
    """A mix of two shared rows becomes the same mix of the drafter's rows; a row that is a shared one becomes that one."""
    head, drafter = (RNG.standard_normal((V, width)).astype(np.float32) for width in (200, 8))
    head[250] = 2 * head[3] - head[17]
    head[251] = head[40]
    made = initialise.omp(rows_of(head), rows_of(drafter), SHARED[:60], quiet)(np.array([250, 251]))
    np.testing.assert_allclose(made[0], 2 * drafter[3] - drafter[17], atol=1e-2)
    np.testing.assert_allclose(made[1], drafter[40], atol=1e-2)


def test_mean_and_random_have_the_spread_of_the_shared_rows() -> None:
    """Mean rows are the mean; random rows have its mean and spread, and a token's row does not depend on its neighbours."""
    drafter = rows_of(HEAD * 0.5 + 2)
    assert np.allclose(initialise.mean(drafter, SHARED)(MISSING), drafter(SHARED).mean(0), atol=1e-5)
    random = initialise.random(drafter, SHARED, seed=1)
    many = random(np.arange(1000, 3000))
    assert many.mean() == pytest.approx(2, abs=0.05)
    assert many.std() == pytest.approx(float(drafter(SHARED).std(0).mean()), rel=0.1)
    assert np.array_equal(random(np.array([7])), random(np.array([3, 7, 9]))[1:2])
    assert not np.array_equal(random(MISSING), initialise.random(drafter, SHARED, seed=2)(MISSING))


def test_matched_rows_keep_their_direction_and_get_the_shared_norm() -> None:
    """Every row's norm becomes the mean norm of the shared rows, its direction stays, and a zero row stays zero."""
    made = HEAD * 0.01
    made[MISSING[0]] = 0
    got = initialise.match_norms(rows_of(made), rows_of(HEAD), SHARED)(MISSING)
    norms = np.linalg.norm(got, axis=1)
    np.testing.assert_allclose(norms[1:], np.linalg.norm(HEAD[SHARED], axis=1).mean(), rtol=1e-4)
    assert norms[0] == 0
    np.testing.assert_allclose(got[1:] / norms[1:, None], HEAD[MISSING[1:]] / np.linalg.norm(HEAD[MISSING[1:]], axis=1)[:, None], atol=1e-4)


def stored_pairs(n: int, turn: np.ndarray, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Verifier states of correlated channels, and drafter states that carry the same in another basis."""
    rng = np.random.default_rng(8)
    verified = rng.standard_normal((n, D)) @ np.diag(np.linspace(0.3, 2, D)) + 0.5
    drafted = verified @ np.linalg.inv(turn).T + noise * rng.standard_normal((n, D))
    return drafted.astype(np.float32), verified.astype(np.float32)


def test_stitch_and_logit_ls_recover_the_basis_from_states() -> None:
    """Where drafter logits equal verifier logits, rows for unseen tokens follow from states alone, though the head is in another basis."""
    basis = TURN * np.linspace(0.5, 2, D)
    drafter = (HEAD @ basis).astype(np.float32)  # D h_d = V h_v for h_d = basis^-1 h_v
    drafted, verified = stored_pairs(2000, basis)
    pairs = [(drafted[i : i + 500], verified[i : i + 500]) for i in range(0, 2000, 500)]
    fit = initialise.stitch(pairs, rows_of(HEAD), rows_of(drafter), SHARED, MISSING)
    np.testing.assert_allclose(fit.rows(MISSING), drafter[MISSING], atol=2e-2)
    assert fit.tokens == 2000
    prior = initialise.mean(rows_of(drafter), SHARED)
    fit = initialise.logit_ls(pairs, rows_of(HEAD), rows_of(drafter), SHARED, MISSING, prior)
    np.testing.assert_allclose(fit.rows(MISSING), drafter[MISSING], atol=2e-2)


def test_logit_ls_falls_back_on_its_prior_when_states_tell_nothing() -> None:
    """States that have nothing to do with each other make the judged lambda large, and rows near the prior."""
    rng = np.random.default_rng(1)
    pairs = [(rng.standard_normal((200, D)).astype(np.float32), rng.standard_normal((200, D)).astype(np.float32))]
    prior = rows_of(HEAD + 5)
    fit = initialise.logit_ls(pairs, rows_of(HEAD), rows_of(HEAD), SHARED, MISSING, prior)
    unrelated = initialise.stitch(pairs, rows_of(HEAD), rows_of(HEAD), SHARED, MISSING)
    away = np.linalg.norm(fit.rows(MISSING) - prior(MISSING))
    assert away < np.linalg.norm(unrelated.rows(MISSING) - prior(MISSING))


def test_too_few_states_say_how_many_are_needed() -> None:
    """Below ten positions a dimension the fit is refused with both numbers; so are states that are not finite."""
    pairs = [(np.zeros((100, D), np.float32), np.zeros((100, D), np.float32))]
    with pytest.raises(InputError, match=r"100 supervised positions, and 10 x 12 = 120"):
        initialise.stitch(pairs, rows_of(HEAD), rows_of(HEAD), SHARED, MISSING)
    with pytest.raises(InputError, match="NaN or infinity"):
        initialise.stitch([(np.full((10, D), np.nan), np.zeros((10, D)))], rows_of(HEAD), rows_of(HEAD), SHARED, MISSING)
