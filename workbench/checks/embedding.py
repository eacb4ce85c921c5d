"""The drafter's own embedding against the verifier's: equal, a trained variant, rotated, permuted, or nobody's."""

from collections.abc import Iterable

import numpy as np

from workbench.case import FLOATS, Case
from workbench.checks import check, finding, sample
from workbench.findings import Finding
from workbench.lineage import RELATED, sample_rows

ROWS = 512
WHOLE = 2**22  # numbers up to which rows are looked for all over the table


@check("embed-differs", "embed-rotated", "embed-random", needs="drafter, verifier")
def embedding(case: Case) -> Iterable[Finding]:
    """Sampled rows of both tables."""
    if "embed_tokens.weight" not in case.drafter.names or "embed_tokens.weight" not in case.verifier.names:
        return
    own_info, info = case.drafter.info("embed_tokens.weight"), case.verifier.info("embed_tokens.weight")
    if {own_info.dtype, info.dtype} - set(FLOATS) or own_info.shape[1:] != info.shape[1:] or len(info.shape) != 2:
        return
    rows = sample_rows(min(own_info.shape[0], info.shape[0]), ROWS)
    own, theirs = (c.array("embed_tokens.weight", rows).astype(np.float32) for c in (case.drafter, case.verifier))
    rows, own, theirs = (x[np.isfinite(own).all(1) & np.isfinite(theirs).all(1)] for x in (rows, own, theirs))
    norms, ours = np.linalg.norm(theirs, axis=1), np.linalg.norm(own, axis=1)
    same = np.linalg.norm(own - theirs, axis=1) <= 0.01 * norms
    if not len(rows) or same.all():
        return
    where = f"{case.where}: {own_info.name}"
    cosine = np.einsum("nd,nd->n", own, theirs) / np.maximum(norms * ours, 1e-30)
    evidence = {"rows_looked_at": len(rows), "rows": own_info.shape[0], "equal": float(same.mean()), "mean_cosine": float(cosine.mean())}
    if same.any():
        evidence |= {"rows_that_differ": sample(rows[~same]), "differing_from_to": [int(rows[~same].min()), int(rows[~same].max())]}
    if float(np.median(cosine)) > RELATED or same.mean() > 0.25:
        keeps = "vLLM keeps it, SGLang and TensorRT-LLM overwrite it with the verifier's"
        title = f"Own embedding (mean cosine to the verifier's {cosine.mean():.2f}, {same.mean():.0%} of rows equal) must be kept: {keeps}"
        yield finding("embed-differs", "warning", title, where, **evidence)
    elif (how := _rotated(own, theirs) or _moved(case, own, theirs, rows)) is not None:
        yield finding("embed-rotated", "error", f"The embedding is the verifier's in another basis or order: {how}", where, **evidence)
    else:
        title = f"The drafter's own embedding has nothing to do with the verifier's (mean row cosine {cosine.mean():.2f}): it looks fresh"
        yield finding(
            "embed-random", "error", title, where, **evidence, norm_ratio=float(np.median(ours) / max(float(np.median(norms)), 1e-30))
        )


def _rotated(own: np.ndarray, theirs: np.ndarray) -> str | None:
    """Whether inner products of rows are the same: a rotation or a permutation of columns."""
    gram, other = own @ own.T, theirs @ theirs.T
    scale = float(np.linalg.norm(other))
    error = float(np.linalg.norm(gram - other)) / scale if scale else 1.0
    if error > 0.05 or len(own) < 4:
        return None
    u, _, w = np.linalg.svd(theirs.T @ own) if own.shape[1] <= 1024 else (None, None, None)
    left = "" if u is None else f", best rotation leaves {np.linalg.norm(theirs @ (u @ w) - own) / np.linalg.norm(own):.1%}"
    return f"inner products of rows agree to {error:.1%}{left}"


def _moved(case: Case, own: np.ndarray, theirs: np.ndarray, rows: np.ndarray) -> str | None:
    """Whether rows are the verifier's rows of other tokens."""
    shape = case.verifier.info("embed_tokens.weight").shape
    table = case.verifier.array("embed_tokens.weight").astype(np.float32) if shape[0] * shape[1] <= WHOLE else theirs
    unit = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x in (own, table)]
    found = (unit[0] @ unit[1].T).max(axis=1) > 0.98
    return f"{found.mean():.0%} of the {len(rows)} rows looked at are its rows of other tokens" if found.mean() > 0.5 else None
