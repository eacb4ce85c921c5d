"""What a head is made of, told from its weights; and what misplaced or new rows do to a loss.

Notable:
* A head that was tied to a verifier shows it row by row (cosine 1). A *free* head lives in a basis of its own, so its rows look unrelated
  to the verifier's, yet one linear map carries the verifier's rows to them. `unexplained` is what that map leaves over, 1 - R2 of a ridge
  judged by leave-one-out: near 0 tied (to this verifier or a relative), below 1 free, about 1 random or permuted.
* Token ids follow frequency, and so do norms and means of rows: rows that are a few places off still look alike. Alignment is therefore
  judged against the same rows *shifted*, never against a random permutation.
* Sampled rows: blocks of neighbours, evenly spread over the head. With fewer rows than dimensions `unexplained` is an upper bound; the
  comparison between readings of the same rows stands. numpy only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.initialise import Rows
from workbench.mapping import VocabMap
from workbench.weights import widen

SAMPLE = 1024  # rows looked at
BLOCK = 128  # neighbours a block
SHIFTS = 32  # places that rows are shifted either way
TIED, RELATED = 0.999, 0.5  # median row cosine of a tied head (bfloat16 costs 1e-5), and of one that began as tied
CERTAIN = 6.0  # standard errors that decide
ISOTROPIC = 1.5  # width x mean squared cosine between rows: 1 for independent random directions
PENALTIES = np.logspace(-5, 1, 7)  # lambda in units of the mean eigenvalue


class HeadRows:
    """Rows of a head by target id, as float32 [n, width]; `by_row` reads them by row number. Without a map row and id are one."""

    def __init__(self, checkpoint: Checkpoint, name: str = "lm_head.weight", vocab_map: VocabMap | None = None):
        self.checkpoint, self.name, self.map = checkpoint, name, vocab_map
        self.dtype, (_, self.width) = checkpoint.info(name).dtype, checkpoint.info(name).shape

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        return widen(self.stored(ids), self.dtype).astype(np.float32, copy=False)

    def stored(self, ids: np.ndarray) -> np.ndarray:
        """The rows of target ids as the bits on disk."""
        return self.checkpoint.stored(self.name, self.map.row_of[ids] if self.map is not None else ids)

    def by_row(self, rows: np.ndarray) -> np.ndarray:
        return self.checkpoint.array(self.name, rows).astype(np.float32, copy=False)


def sample_rows(k: int, size: int = SAMPLE) -> np.ndarray:
    """Row numbers in blocks of neighbours, evenly spread over 0..k-1, ascending; all of them when there are no more than `size`."""
    if k <= size:
        return np.arange(k)
    block = min(BLOCK, size)
    starts = np.linspace(0, k - block, size // block).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(block))


# ---- how well one set of rows explains another


class Explainer:
    """Ridge from rows x [n, X] to any other rows of the same tokens, in dual form: cheap for few rows of any width.

    Everything that depends on x is made once: for each penalty the matrix that turns targets into their leave-one-out residuals.
    """

    def __init__(self, x: np.ndarray):
        n = len(x)
        x = (x - x.mean(0)).astype(np.float32)
        values, vectors = np.linalg.eigh((x @ x.T).astype(np.float64))
        values = np.maximum(values, 0)
        self.leave_out, self.squared = [], []
        for penalty in PENALTIES * max(values.mean(), 1e-30):
            hat = (vectors * (values / (values + penalty))) @ vectors.T + 1 / n  # the intercept is free
            residual = ((np.eye(n) - hat) / (1 - np.diagonal(hat))[:, None]).astype(np.float32)
            self.leave_out.append(residual)
            self.squared.append(residual.T @ residual)

    def unexplained(self, gram: np.ndarray) -> float:
        """1 - R2 by leave-one-out at the best penalty, of targets y [n, Y] given as their inner products y y' [n, n]."""
        n = len(gram)
        total = (np.trace(gram) - gram.sum() / n) * (n / (n - 1)) ** 2  # squared distances to the means that leave each row out
        return min(float((square * gram).sum()) for square in self.squared) / max(float(total), 1e-30)

    def row_errors(self, y: np.ndarray) -> np.ndarray:
        """Squared leave-one-out residual of each row of y [n, Y] at the best penalty, over the mean squared distance to the mean, [n]."""
        gram = _gram(y)
        best = min(range(len(self.squared)), key=lambda i: float((self.squared[i] * gram).sum()))
        return ((self.leave_out[best] @ y) ** 2).sum(1) / max(float(((y - y.mean(0)) ** 2).sum(1).mean()), 1e-30)


def _gram(x: np.ndarray) -> np.ndarray:
    return x @ x.T


def row_cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine between rows of the same index, [n], both less their mean row (what all rows share says nothing); 0 where a row is zero."""
    a, b = a - a.mean(0), b - b.mean(0)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.einsum("nd,nd->n", a, b) / np.where(norms > 0, norms, 1)


def isotropy(x: np.ndarray) -> float:
    """width x mean squared cosine between different rows: 1 for a fresh head, far more for a trained one."""
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
    n, width = x.shape
    return float(width * ((_gram(unit) ** 2).sum() - n) / max(n * (n - 1), 1))


# ---- the verdict on one head


@dataclass(frozen=True)
class Lineage:
    """verdict: tied | tied-other | tied-then-trained | free | permuted | random. evidence: the numbers behind it, by name."""

    verdict: str
    sentence: str
    evidence: dict[str, Any]


def lineage(head: HeadRows, verifier: Rows, vocab_map: VocabMap, others: Mapping[str, Rows] | None = None, size: int = SAMPLE) -> Lineage:
    """What the head [K, H] is, seen from `size` sampled rows of it and the verifier's head rows of the tokens that the map names.

    others: heads of other verifiers by name, to which it may have been tied. Evidence: rows looked at of k; median `cosine` (None when the
    widths differ) and to each other verifier; `norm_ratio` drafter / verifier; `unexplained` at the map's own reading and the best over
    shifts, `best_shift` and how many standard errors the unshifted reading stands out (`stands_out`); `isotropy`.
    """
    rows = sample_rows(vocab_map.k, size)
    ids = vocab_map.ids[rows]
    own, theirs = head.by_row(rows), verifier(ids)
    cosine = _median_cosine(own, theirs)
    related = {name: _median_cosine(own, other(ids)) for name, other in (others or {}).items()}
    shifts = _shift_scan(head, rows, theirs, vocab_map.k)
    neighbours = np.array([value for shift, value in shifts.items() if shift])
    stands_out = (neighbours.mean() - shifts[0]) / max(neighbours.std(), 1e-9) if len(neighbours) else 0.0
    best = min(shifts, key=shifts.__getitem__)
    evidence = {
        "rows": len(rows),
        "k": vocab_map.k,
        "cosine": cosine,
        "cosine_others": related,
        "norm_ratio": float(np.median(np.linalg.norm(own, axis=1)) / max(float(np.median(np.linalg.norm(theirs, axis=1))), 1e-30)),
        "unexplained": shifts[0],
        "best_shift": best,
        "unexplained_best_shift": shifts[best],
        "stands_out": float(stands_out),
        "isotropy": isotropy(own),
    }
    return Lineage(*_verdict(evidence), evidence)


def _verdict(e: dict[str, Any]) -> tuple[str, str]:
    """Verdict and sentence from the evidence."""
    cosine, others = e["cosine"] or 0.0, {name: c for name, c in e["cosine_others"].items() if c is not None}
    nearest = max(others, key=others.__getitem__, default="")
    if cosine > TIED:
        return "tied", f"its rows are this verifier's (median cosine {cosine:.4f})"
    if nearest and others[nearest] > TIED:
        return "tied-other", f"its rows are those of {nearest} (median cosine {others[nearest]:.4f}; to this verifier {cosine:.3f})"
    if cosine > RELATED:
        return "tied-then-trained", f"its rows began as this verifier's or a relative's (median cosine {cosine:.3f})"
    if e["best_shift"] and e["unexplained_best_shift"] < 0.95 * e["unexplained"]:
        return "permuted", f"its rows fit this verifier's tokens {e['best_shift']:+d} places off better than where the map puts them"
    if e["stands_out"] > CERTAIN:
        return (
            "free",
            f"its rows are a linear map of this verifier's that leaves {e['unexplained']:.0%} unexplained (median cosine {cosine:.3f})",
        )
    if e["isotropy"] < ISOTROPIC:
        return (
            "random",
            f"its rows point in independent random directions (isotropy {e['isotropy']:.2f}; a trained head has far more than 1)",
        )
    return "permuted", "its rows are trained, but not for the tokens that the map names, or not for this verifier"


def _median_cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    return float(np.median(row_cosine(a, b))) if a.shape == b.shape else None


def _shift_scan(head: HeadRows, rows: np.ndarray, theirs: np.ndarray, k: int) -> dict[int, float]:
    """`unexplained` of the head's rows r + s given the verifier's rows of the tokens at r, for each shift s of up to SHIFTS places."""
    reach = min(SHIFTS, k // 8)
    inside = (rows >= reach) & (rows < k - reach)
    if inside.sum() < 3:
        return {0: 1.0}  # too few rows for any line
    wide = np.unique(rows[inside][:, None] + np.arange(-reach, reach + 1))
    gram = _gram(head.by_row(wide))
    explainer = Explainer(theirs[inside])
    scan = {}
    for shift in range(-reach, reach + 1):
        at = np.searchsorted(wide, rows[inside] + shift)
        scan[shift] = explainer.unexplained(gram[np.ix_(at, at)])
    return scan


# ---- which of two maps a head follows


@dataclass(frozen=True)
class Follows:
    """Which of two maps a head's rows follow, on `rows` sampled rows whose token differs between them.

    verdict: "a", "b", "neither" or "undecidable". in_place_a, in_place_b: share of those rows that are the reference's row of their token
    (cosine over RELATED), None when the widths differ. unexplained_a, unexplained_b: as in `lineage`. margin: by how many standard errors
    the better reading leads, row by row.
    """

    verdict: str
    rows: int
    differ: int
    in_place_a: float | None
    in_place_b: float | None
    unexplained_a: float
    unexplained_b: float
    margin: float


def which_map(head: HeadRows, a: VocabMap, b: VocabMap, reference: Rows, known: np.ndarray, size: int = SAMPLE // 2) -> Follows:
    """Whether the rows of a head follow map `a` or `b`, both of its K rows, by a reference head whose rows are known by token.

    reference: rows by target id, of the parent's head or a verifier's. known: bool [V], the ids that it has. Only rows count for which the
    maps name different tokens, both known. Rows that are copies settle it by cosine, free heads by which reading explains them.
    """
    rows = np.flatnonzero((a.ids != b.ids) & known[a.ids] & known[b.ids])
    differ = len(rows)
    rows = rows[sample_rows(differ, size)] if differ else rows
    if len(rows) < 16:
        return Follows("undecidable", len(rows), differ, None, None, 1.0, 1.0, 0.0)
    own, under_a, under_b = head.by_row(rows), reference(a.ids[rows]), reference(b.ids[rows])
    places = [float((row_cosine(own, x) > RELATED).mean()) if own.shape == x.shape else None for x in (under_a, under_b)]
    explainers = Explainer(under_a), Explainer(under_b)
    unexplained = [e.unexplained(_gram(own)) for e in explainers]
    if places[0] is not None and max(places) > 0.1:
        hits = [(row_cosine(own, x) > RELATED).astype(float) for x in (under_b, under_a)]
        gap = hits[1] - hits[0]
    else:
        gap = explainers[1].row_errors(own) - explainers[0].row_errors(own)
    margin = float(gap.mean() / max(gap.std() / np.sqrt(len(gap)), 1e-9))
    verdict = "a" if margin > CERTAIN else "b" if margin < -CERTAIN else "neither"
    return Follows(verdict, len(rows), differ, *places, *unexplained, abs(margin))


# ---- what misplaced and new rows do to a loss


def null_loss(hidden: np.ndarray, head: np.ndarray, teacher: np.ndarray | None = None, in_place: np.ndarray | None = None) -> float:
    """Cross-entropy in nats of labels that have nothing to do with the rows: mean over positions of logsumexp(z) - mean(z), z = head h.

    hidden [N, H] final-norm outputs, head [K, H]. A loss near it means permuted rows, even where it lies far above ln K. Where some rows
    do stand where their labels look (in_place, bool [K]), these labels cost what they cost under the teacher's probabilities [N, K], and
    the mean goes over the other rows.
    """
    total = 0.0
    for start in range(0, len(hidden), 256):
        logits = hidden[start : start + 256].astype(np.float64) @ head.T.astype(np.float64)  # [n, K]
        expected = logits.mean(1)
        if teacher is not None and in_place is not None and not in_place.all():
            right = teacher[start : start + 256][:, in_place]
            expected = (right * logits[:, in_place]).sum(1) + (1 - right.sum(1)) * logits[:, ~in_place].mean(1)
        total += float((_logsumexp(logits) - expected).sum())
    return total / len(hidden)


def misalignment_index(loss: float, null: float, best: float) -> float:
    """(loss - best) / (null - best): 0 at the best loss known, 1 when labels and rows have nothing to do with each other."""
    return (loss - best) / (null - best)


def leak(logits: np.ndarray, teacher: np.ndarray, made: np.ndarray) -> float:
    """Probability that made rows take beyond what the teacher gives them, mean over positions; 0 is right, negative too shy.

    logits [N, K], teacher [N, K] probabilities over the same rows, made bool [K].
    """
    given = np.exp(logits - _logsumexp(logits)[:, None])[:, made].sum(1)
    return float((given - teacher[:, made].sum(1)).mean())


def shared_only_loss(logits: np.ndarray, teacher: np.ndarray, made: np.ndarray) -> float:
    """Cross-entropy in nats, both distributions restricted to the rows that were carried over, positions weighted by teacher mass there.

    Low: the body is sound and only new rows are at fault. High: the body or its inputs are broken. Arguments as in `leak`.
    """
    kept, p = logits[:, ~made], teacher[:, ~made]
    return float((p * (_logsumexp(kept)[:, None] - kept)).sum() / p.sum())


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(1)
    return top + np.log(np.exp(logits - top[:, None]).sum(1))
