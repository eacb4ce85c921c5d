"""Rows for tokens that a head has never had: what each initialiser knows, and how it makes a row from it.

Notable:
* A `Rows` is any function from target ids [n] to float32 rows [n, width]. Every initialiser takes the verifier's and the drafter's rows of
  the *shared* tokens S in this form and returns one for the missing tokens, so nothing is held but the chunk at hand and what a fit needs.
* A drafter's logits are D h_d. For any invertible A, (D A^-1)(A h_d) is the same drafter: a head that was trained freely lives in a basis
  of its own. Verifier rows fit only a head that was tied to them; for a free head the basis is found from shared rows (`procrustes`,
  `ridge`, `omp`) or, better, from hidden states of both models at the same positions (`stitch`, `logit_ls`).
* Sums over rows are made in float32 chunks and added up in float64; factorisations are float64. numpy only.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.errors import InputError

Rows = Callable[[np.ndarray], np.ndarray]
Progress = Callable[[str], None]

CHUNK = 1024  # rows at a time: 29 MB of float32 at width 7168
PENALTIES = np.logspace(-6, 1, 8)  # candidates for lambda, in units of the mean eigenvalue
JUDGED = 2048  # rows on which candidates for lambda are judged
TOKENS_A_DIMENSION = 10  # positions that a hidden-state fit needs for each dimension
DICTIONARY = 32768  # shared rows that `omp` may choose from: its Gram matrix is then 4.3 GB
ATOMS = 32  # shared rows that make up one row of `omp`


def chunks(ids: np.ndarray, size: int = CHUNK) -> Iterator[np.ndarray]:
    """The ids in pieces."""
    return (ids[start : start + size] for start in range(0, len(ids), size))


# ---- without a fit


def mean(drafter: Rows, shared: np.ndarray) -> Rows:
    """Every missing row is the mean of the shared ones."""
    middle, _ = _spread(drafter, shared)
    return lambda ids: np.repeat(middle[None].astype(np.float32), len(ids), axis=0)


def random(drafter: Rows, shared: np.ndarray, seed: int) -> Rows:
    """Normal rows with the mean and spread of the shared ones in each coordinate; a token's row depends on seed and id alone."""
    middle, spread = _spread(drafter, shared)

    def rows(ids: np.ndarray) -> np.ndarray:
        noise = np.stack([np.random.default_rng([seed, int(i)]).standard_normal(len(middle)) for i in ids])
        return (middle + spread * noise).astype(np.float32)

    return rows


def _spread(rows: Rows, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each coordinate, float64 [width]."""
    total = square = np.zeros(1)
    for part in chunks(ids):
        block = rows(part).astype(np.float64)
        total, square = total + block.sum(0), square + (block**2).sum(0)
    middle = total / len(ids)
    return middle, np.sqrt(np.maximum(square / len(ids) - middle**2, 0))


def match_norms(made: Rows, drafter: Rows, shared: np.ndarray) -> Rows:
    """The same rows, each with the mean norm of the shared ones: a fit shrinks rows, so that new tokens start too shy."""
    target = sum(float(np.linalg.norm(drafter(part), axis=1).sum()) for part in chunks(shared)) / len(shared)

    def rows(ids: np.ndarray) -> np.ndarray:
        block = made(ids)
        norms = np.linalg.norm(block, axis=1, keepdims=True)
        return block * (target / np.where(norms > 0, norms, 1)).astype(np.float32)

    return rows


# ---- from shared rows


class Moments(NamedTuple):
    """Sums over pairs of rows x [n, X], y [n, Y]: means, xx = X'X [X, X] (None when not asked for), xy = X'Y [X, Y], |X|^2."""

    n: int
    x_mean: np.ndarray
    y_mean: np.ndarray
    xx: np.ndarray | None
    xy: np.ndarray
    x_square: float


class Sums:
    """Collects chunks of pairs, float32 [m, X] and [m, Y], into float64 sums."""

    def __init__(self, gram: bool = True):
        self.gram, self.n, self.x_square = gram, 0, 0.0
        self.x = self.y = self.xx = self.xy = np.zeros(1)

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        self.n += len(x)
        self.x, self.y = self.x + x.sum(0, dtype=np.float64), self.y + y.sum(0, dtype=np.float64)
        self.x_square += float(np.einsum("nx,nx->", x, x, dtype=np.float64))
        self.xy = self._grow(self.xy, x.T @ y)
        if self.gram:
            self.xx = self._grow(self.xx, x.T @ x)

    @staticmethod
    def _grow(total: np.ndarray, block: np.ndarray) -> np.ndarray:
        if total.ndim < 2:
            return block.astype(np.float64)
        total += block
        return total

    def moments(self, centred: bool = True) -> Moments:
        """The sums, around the means unless centred is False. Ends the collecting: it reuses the memory."""
        x_mean, y_mean = self.x / self.n, self.y / self.n
        if centred:
            self.xy -= np.outer(self.x, y_mean)
            self.x_square -= float(self.x @ x_mean)
            if self.gram:
                self.xx -= np.outer(self.x, x_mean)
        return Moments(self.n, x_mean, y_mean, self.xx if self.gram else None, self.xy, self.x_square)


def _moments(verifier: Rows, drafter: Rows, shared: np.ndarray, progress: Progress, gram: bool = True) -> Moments:
    """Centred moments of verifier rows (x) and drafter rows (y) of the shared tokens."""
    sums = Sums(gram)
    for number, part in enumerate(chunks(shared), 1):
        sums.add(verifier(part), drafter(part))
        if number % 4 == 0 or sums.n == len(shared):
            progress(f"shared rows read: {sums.n:,} of {len(shared):,}")
    return sums.moments()


def procrustes(verifier: Rows, drafter: Rows, shared: np.ndarray, progress: Progress) -> Rows:
    """Rotation and one scale from verifier to drafter rows: U, s, W' = svd(V_S' D_S), rows = sum(s) / |V_S|^2 (v - m_v) U W' + m_d.

    No data, no free parameter; keeps angles and relative norms. Centred; works for different widths too.
    """
    m = _moments(verifier, drafter, shared, progress, gram=False)
    progress(f"singular values of a {m.xy.shape[0]} x {m.xy.shape[1]} matrix")
    left, values, right = np.linalg.svd(m.xy, full_matrices=False)
    turn = (values.sum() / m.x_square * (left @ right)).astype(np.float32)
    return _affine(verifier, m, turn)


def ridge(verifier: Rows, drafter: Rows, shared: np.ndarray, progress: Progress) -> tuple[Rows, float]:
    """Ridge regression from verifier to drafter rows, lambda by leave-one-out; also the share 1 - R2 that it leaves unexplained.

    The leave-one-out residual of row i is exact from one factorisation: e_i / (1 - 1/n - x_i'(X'X + l)^-1 x_i).
    """
    m = _moments(verifier, drafter, shared, progress)
    progress(f"eigenvalues of a {m.xx.shape[0]} x {m.xx.shape[0]} matrix")
    values, vectors = np.linalg.eigh(m.xx)
    target = vectors.T @ m.xy  # [X, Y]
    judged = np.random.default_rng(0).permutation(shared)[:JUDGED]
    x = (verifier(judged) - m.x_mean) @ vectors  # [j, X], in eigenvector coordinates
    y = drafter(judged) - m.y_mean
    best = (np.inf, 1.0)
    for penalty in PENALTIES * values.mean():
        shrunk = x / (values + penalty)
        left_out = 1 - 1 / m.n - np.einsum("jx,jx->j", shrunk, x)
        residual = (y - shrunk @ target) / left_out[:, None]
        best = min(best, (float((residual**2).sum() / (y**2).sum()), float(penalty)))
    unexplained, penalty = best
    progress(f"lambda {penalty:.3g} leaves {unexplained:.2%} of the shared rows unexplained (leave-one-out)")
    slope = vectors @ (target / (values + penalty)[:, None])
    return _affine(verifier, m, slope.astype(np.float32)), unexplained


def _affine(verifier: Rows, m: Moments, slope: np.ndarray) -> Rows:
    x_mean, y_mean = m.x_mean.astype(np.float32), m.y_mean.astype(np.float32)
    return lambda ids: (verifier(ids) - x_mean) @ slope + y_mean


def omp(verifier: Rows, drafter: Rows, shared: np.ndarray, progress: Progress) -> Rows:
    """Orthogonal matching pursuit: each missing verifier row as a sum of ATOMS shared ones, the same sum taken over drafter rows.

    More than DICTIONARY shared tokens are thinned evenly.
    """
    if len(shared) > DICTIONARY:
        shared = shared[np.linspace(0, len(shared) - 1, DICTIONARY).astype(np.int64)]
    donors = np.concatenate([verifier(part) for part in chunks(shared)])  # [n, X]
    progress(f"inner products of {len(shared):,} shared rows")
    gram = donors @ donors.T  # [n, n]
    norms = np.sqrt(np.maximum(np.diagonal(gram), 1e-30))
    atoms = min(ATOMS, *donors.shape)
    return lambda ids: np.concatenate([_pursue(verifier(part), donors, gram, norms, atoms, drafter, shared) for part in chunks(ids, 64)])


def _pursue(
    wanted: np.ndarray, donors: np.ndarray, gram: np.ndarray, norms: np.ndarray, atoms: int, drafter: Rows, shared: np.ndarray
) -> np.ndarray:
    """One batch of `omp`: wanted [b, X] -> rows [b, Y]. Correlations are updated through the Gram matrix, never through residuals."""
    overlap = wanted @ donors.T  # [b, n]
    chosen = np.empty((len(wanted), 0), np.int64)
    correlation, weights = overlap.copy(), np.empty((len(wanted), 0))
    batch = np.arange(len(wanted))[:, None]
    for _ in range(atoms):
        score = np.abs(correlation) / norms
        score[batch, chosen] = -1
        chosen = np.concatenate([chosen, score.argmax(1)[:, None]], axis=1)  # [b, j]
        system = gram[chosen[:, :, None], chosen[:, None, :]].astype(np.float64)  # [b, j, j]
        system += 1e-6 * np.eye(chosen.shape[1]) * np.trace(system, axis1=1, axis2=2)[:, None, None] / chosen.shape[1]
        weights = np.linalg.solve(system, overlap[batch, chosen][:, :, None])[:, :, 0]  # [b, j]
        correlation = overlap - np.einsum("bj,bjn->bn", weights.astype(np.float32), gram[chosen], optimize=True)
    used, place = np.unique(chosen, return_inverse=True)
    lent = drafter(shared[used])[place.reshape(chosen.shape)]  # [b, j, Y]
    return np.einsum("bj,bjy->by", weights.astype(np.float32), lent)


# ---- from hidden states


@dataclass(frozen=True, eq=False)
class StateFit:
    """A fit from hidden states, and how it was chosen: tokens used, lambda in units of the mean eigenvalue."""

    rows: Rows
    tokens: int
    penalty: float


def stitch(
    states: Iterable[tuple[np.ndarray, np.ndarray]], verifier: Rows, drafter: Rows, shared: np.ndarray, missing: np.ndarray
) -> StateFit:
    """Rows from regressing the verifier's hidden states on the drafter's: B = (H_d'H_d + l)^-1 H_d'H_v, rows = (v - m_v) B' + m_d.

    states: chunks (H_d [m, H], H_v [m, Ht]), both after their final norm and both predicting the same next token; centred here. m_v, m_d:
    means of the shared rows. The same as fitting the verifier's logits of every missing token by least squares. lambda is the one that
    fits the missing tokens' logits best on positions kept aside. InputError below TOKENS_A_DIMENSION * H positions.
    """
    return _from_states(states, verifier, drafter, shared, missing, None)


def logit_ls(
    states: Iterable[tuple[np.ndarray, np.ndarray]], verifier: Rows, drafter: Rows, shared: np.ndarray, missing: np.ndarray, prior: Rows
) -> StateFit:
    """Rows that reproduce the verifier's logits by least squares, drawn towards the rows of `prior` (Procrustes): a MAP estimate.

    Logits are taken against the mean logit of the shared tokens at each position (softmax does not see a constant):
    min_w |H_d (w - m_d) - H_v (v - m_v)|^2 + l |w - prior|^2, states not centred. Arguments and errors as in `stitch`.
    """
    return _from_states(states, verifier, drafter, shared, missing, prior)


def _from_states(
    states: Iterable[tuple[np.ndarray, np.ndarray]],
    verifier: Rows,
    drafter: Rows,
    shared: np.ndarray,
    missing: np.ndarray,
    prior: Rows | None,
) -> StateFit:
    fit, aside = _split_moments(states, centred=prior is None)
    values, vectors = np.linalg.eigh(fit.xx)
    v_mean, d_mean = (_spread(rows, shared)[0] for rows in (verifier, drafter))

    def pull(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the data and the prior want of these tokens, in eigenvector coordinates [H, n]."""
        data = vectors.T @ (fit.xy @ (verifier(ids) - v_mean).T)
        return data, vectors.T @ (prior(ids) - d_mean).T if prior is not None else np.zeros_like(data)

    def solve(pulled: tuple[np.ndarray, np.ndarray], penalty: float) -> np.ndarray:
        """Rows less m_d, as columns [H, n]."""
        return vectors @ ((pulled[0] + penalty * pulled[1]) / (values + penalty)[:, None])

    judged = np.random.default_rng(0).permutation(missing)[:JUDGED]
    pulled, wanted = pull(judged), aside.xy @ (verifier(judged) - v_mean).T
    best = (np.inf, 1.0)
    for penalty in PENALTIES * values.mean():
        made = solve(pulled, penalty)
        best = min(best, (float(np.sum(made * (aside.xx @ made - 2 * wanted))), float(penalty)))
    penalty = best[1]
    return StateFit(lambda ids: (solve(pull(ids), penalty).T + d_mean).astype(np.float32), fit.n + aside.n, penalty / values.mean())


def _split_moments(states: Iterable[tuple[np.ndarray, np.ndarray]], centred: bool) -> tuple[Moments, Moments]:
    """Moments over nine tenths of each chunk and over its last tenth, which is kept aside to judge lambda."""
    fit, aside = Sums(), Sums()
    tokens = width = 0
    for drafted, verified in states:
        if not (np.isfinite(drafted).all() and np.isfinite(verified).all()):
            raise InputError(f"hidden states hold NaN or infinity after {tokens} positions: expected finite states; extract them again")
        cut = len(drafted) - len(drafted) // 10
        fit.add(drafted[:cut], verified[:cut])
        aside.add(drafted[cut:], verified[cut:])
        tokens, width = tokens + len(drafted), drafted.shape[1]
    if tokens < TOKENS_A_DIMENSION * width or not tokens:
        raise InputError(
            f"too few hidden states: {tokens:,} supervised positions, and {TOKENS_A_DIMENSION} x {width} = {TOKENS_A_DIMENSION * width:,} "
            "are needed; extract more, or choose --init procrustes, which needs none"
        )
    return fit.moments(centred), aside.moments(centred)
