"""The head: present, finite, of the right rows in the right order.

Notable: rows are sampled and every finding says how many; only NaN and infinity are looked for in all of them, for one is enough. A *free*
head looks unrelated to the verifier's row by row, so a head is called random or misordered only on evidence that a free head lacks.
"""

from collections.abc import Iterable

import numpy as np

from workbench.case import FLOATS, Case, map_facts
from workbench.checks import check, finding, sample
from workbench.findings import Finding
from workbench.lineage import RELATED, TIED, HeadRows, isotropy, lineage, sample_rows, which_map
from workbench.remap import initialised_rows
from workbench.weights import stored_pieces

ROWS = 512  # looked at
SAME = 0.98  # cosine of a row that was copied and perhaps trained a little
MATCH = 0.85  # cosine that unrelated rows of 16 or more dimensions do not reach
MANY = 512  # rows from which a head's structure can be told without copies
EXPONENT = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}


def _plain_cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of rows of the same index [n]; 0 where one is zero."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.divide(np.einsum("nd,nd->n", a, b), norms, out=np.zeros(len(a), a.dtype), where=norms > 0)


def _usable(case: Case) -> bool:
    """Whether the head is there in floats, one row for each of a sound map's."""
    if "lm_head.weight" not in case.drafter.names or case.map.vocab_map is None:
        return False
    info = case.drafter.info("lm_head.weight")
    return info.dtype in FLOATS and len(info.shape) == 2 and info.shape[0] == case.map.vocab_map.k and min(info.shape) > 0


def _verifier_rows(case: Case) -> HeadRows | None:
    """The verifier's head by id, where it is a float matrix with a row for each id of the map."""
    info = case.verifier.info(case.verifier.head)
    fits = info.dtype in FLOATS and len(info.shape) == 2 and info.shape[0] > int(case.map.vocab_map.ids.max())
    return HeadRows(case.verifier, case.verifier.head) if fits else None


@check("head-missing")
def missing(case: Case) -> Iterable[Finding]:
    """No lm_head.weight: for K < V nothing can stand in for it."""
    if "lm_head.weight" in case.drafter.names:
        return
    k, v, stated = case.k, case.v, case.written("draft_vocab_size")
    evidence = {"k": k, "v": v, "draft_vocab_size": stated.value if stated else None}
    if k and v and k < v:
        title = (
            f"No lm_head.weight although K = {k:,} < V = {v:,}: engines lend the verifier's head, whose first {k:,} rows are other tokens"
        )
        cure = "export the head, or gather the verifier's rows by t2d if the head was tied to them"
        yield finding("head-missing", "error", title, case.where, cure, **evidence)
    elif stated is not None:
        title = (
            "No lm_head.weight although the config declares a draft vocabulary: SGLang leaves the head random, vLLM lends the verifier's"
        )
        cure = "remove draft_vocab_size if the verifier's head is meant (K = V), else export the head"
        yield finding("head-missing", "error", title, case.where, cure, **evidence)
    else:
        yield finding(
            "head-missing", "note", "No lm_head.weight: engines lend the verifier's, right if the head was tied", case.where, **evidence
        )


@check("head-nonfinite")
def nonfinite(case: Case) -> Iterable[Finding]:
    """Rows with NaN or infinity, all rows read."""
    if (
        "lm_head.weight" not in case.drafter.names
        or (info := case.drafter.info("lm_head.weight")).dtype not in FLOATS
        or len(info.shape) != 2
    ):
        return
    kind, ones = EXPONENT[info.dtype]
    row_bytes = info.shape[1] * np.dtype(kind).itemsize
    if not row_bytes:
        return
    bad, at = [], 0
    for piece in stored_pieces(case.drafter.place, info, max(1, 2**22 // row_bytes) * row_bytes):
        bits = np.frombuffer(piece, kind).reshape(-1, info.shape[1])
        exponents = bits & kind(ones)
        if int(exponents.max()) == ones:
            bad += (np.flatnonzero((exponents == ones).any(axis=1)) + at).tolist()
        at += len(bits)
    if bad:
        title = f"{len(bad):,} of {info.shape[0]:,} head rows hold NaN or infinity, first row {bad[0]}: speculators replaces the whole head"
        yield finding("head-nonfinite", "error", title, f"{case.where}: {info.name}", rows=bad[:20], count=len(bad))


@check("head-row-order", "head-scale", needs="parent")
def against_parent(case: Case) -> Iterable[Finding]:
    """Rows against the parent's, by position and by token; made rows against kept ones."""
    old, facts = map_facts(case.parent, case.v).vocab_map, case.map
    if old is None or "lm_head.weight" not in case.parent.names or not _usable(case) or old.v != facts.vocab_map.v:
        return
    info = case.parent.info("lm_head.weight")
    own_info = case.drafter.info("lm_head.weight")
    if info.dtype not in FLOATS or info.shape != (old.k, own_info.shape[1]):
        return
    new = facts.vocab_map
    head, theirs = HeadRows(case.drafter, vocab_map=new), HeadRows(case.parent, vocab_map=old)
    both = np.arange(min(old.k, new.k))
    differ = both[old.ids[both] != new.ids[both]]
    differ = differ[sample_rows(len(differ), ROWS)] if len(differ) else differ
    if len(differ):
        by_place = _plain_cosine(head.by_row(differ), theirs.by_row(differ)) > SAME
        movable = differ[old.t2d[new.ids[differ]]]
        by_token = _plain_cosine(head.by_row(movable), theirs(new.ids[movable])) > SAME if len(movable) else np.array([])
        in_place = float(by_token.mean()) if len(by_token) else 0.0
        wrong = float(by_place.mean()) > 0.5 and in_place < 0.5
        if not wrong and max(float(by_place.mean()), in_place) < 0.1:  # trained on since: which map explains the rows?
            follows = which_map(head, old, new, theirs, old.t2d, ROWS // 2) if old.k == new.k else None
            wrong = follows is not None and follows.verdict == "a"
        if wrong:
            same = old.compare(new)
            title = (
                f"The map changed and the head did not: {same.same_position:,} of {new.k:,} rows still mean their token, "
                f"{len(same.shared_ids):,} tokens are shared, {len(same.missing_ids):,} have no row yet"
            )
            evidence = {"same_position": same.same_position, "shared": len(same.shared_ids), "missing": len(same.missing_ids)}
            shares = {"rows_looked_at": len(differ), "rows_equal_at_old_place": float(by_place.mean()), "rows_equal_by_token": in_place}
            yield finding("head-row-order", "error", title, f"{case.where}: lm_head", **evidence, **shares)
            return
    made = np.flatnonzero(~old.t2d[new.ids])
    yield from _scale(case, head, np.setdiff1d(np.arange(new.k), made), made)


def _scale(case: Case, head: HeadRows, kept: np.ndarray, made: np.ndarray) -> Iterable[Finding]:
    """Norms of made rows against kept ones."""
    if not len(kept) or not len(made):
        return
    kept, made = kept[sample_rows(len(kept), ROWS)], made[sample_rows(len(made), ROWS)]
    before, after = (float(np.median(np.linalg.norm(head.by_row(rows), axis=1))) for rows in (kept, made))
    ratio = after / before if before and np.isfinite(after) else 1.0
    if not 1 / 1.5 < ratio < 1.5:
        title = f"New head rows have {ratio:.2f} times the norm of the kept ones: proposed too {'often' if ratio > 1 else 'seldom'}"
        evidence = {"kept_norm": before, "new_norm": after, "kept_rows": len(kept), "new_rows": len(made), "rows": sample(made)}
        yield finding("head-scale", "warning", title, f"{case.where}: lm_head", **evidence)


@check("head-scale", needs="verifier")
def made_rows(case: Case) -> Iterable[Finding]:
    """Without a parent, made rows are those that a remap recorded, or verifier rows in a head that else is free."""
    if case.parent is not None or not _usable(case):
        return
    head, folder = HeadRows(case.drafter, vocab_map=case.map.vocab_map), getattr(case.drafter.place, "folder", None)
    made = initialised_rows(folder) if folder is not None else None
    if made is None or len(made) != case.map.vocab_map.k:
        rows, own, theirs = _beside(case)
        if theirs is None:
            return
        cosine = _plain_cosine(own, theirs)
        copied = cosine > TIED
        mixed = 0.02 < copied.mean() < 0.6 and float(np.median(cosine[~copied])) < RELATED
        yield from _scale(case, head, rows[~copied], rows[copied]) if mixed else ()
    else:
        yield from _scale(case, head, np.flatnonzero(~made), np.flatnonzero(made))


def _beside(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Sampled rows, the head's and the verifier's of the same tokens (None when their widths differ)."""
    verifier = _verifier_rows(case)
    rows = sample_rows(case.map.vocab_map.k, ROWS)
    own = HeadRows(case.drafter).by_row(rows)
    theirs = verifier(case.map.vocab_map.ids[rows]) if verifier is not None else None
    return rows, own, theirs if theirs is not None and theirs.shape == own.shape else None


@check("head-row-order", "head-random", "head-overwritten", "map-absolute", needs="verifier")
def against_verifier(case: Case) -> Iterable[Finding]:
    """Rows that are the verifier's but for other tokens; rows that are nobody's; rows that should not be the verifier's."""
    if not _usable(case):
        return
    rows, own, theirs = _beside(case)
    where = f"{case.where}: lm_head"
    if theirs is not None:
        tied = _plain_cosine(own, theirs)
        order = _copied_elsewhere(case, rows, own) if tied.min() < RELATED else None
        if order is not None:
            if case.map.report["ambiguous"] and (case.map.d2t < _verifier_rows(case).checkpoint.info(case.verifier.head).shape[0]).all():
                absolute = _plain_cosine(own, _verifier_rows(case)(case.map.d2t[rows]))
                if float(np.median(absolute)) > RELATED:
                    title = "d2t holds absolute ids, not offsets: read so, the head's rows are the verifier's rows of their tokens"
                    yield finding("map-absolute", "error", title, where, rows_looked_at=len(rows), cosine=float(np.median(absolute)))
                    return
            share, found = order
            title = f"Head rows are the verifier's, but of other tokens: {(tied > SAME).mean():.0%} in place, {share:.0%} another id's"
            cure = "workbench remap with the map that the head follows; see evidence for the ids that its rows are"
            yield finding(
                "head-row-order", "error", title, where, cure, rows_looked_at=len(rows), in_place=float((tied > SAME).mean()), **found
            )
            return
        if float(np.median(tied)) > TIED:
            yield from _overwritten(case, tied, rows, where)
        if float((tied > RELATED).mean()) > 0.5:
            return
        if (why := _fresh(case, own, theirs)) is not None:
            yield finding(
                "head-random", "error", f"The head looks freshly initialised: {why}", where, rows_looked_at=len(rows), **_spread(own)
            )
            return
    if (
        case.parent is None
        and len(own) >= MANY
        and case.map.report["t2d_agrees"] is not False
        and (verifier := _verifier_rows(case)) is not None
        and own.any()
    ):
        found = lineage(HeadRows(case.drafter), verifier, case.map.vocab_map, size=ROWS)
        if found.verdict in ("permuted", "random"):
            code = "head-random" if found.verdict == "random" else "head-row-order"
            yield finding(code, "error", f"Head: {found.sentence}", where, **found.evidence)


def _overwritten(case: Case, tied: np.ndarray, rows: np.ndarray, where: str) -> Iterable[Finding]:
    """A tied head is a design, unless the parent's was free."""
    evidence = {"rows_looked_at": len(rows), "cosine_to_verifier": float(np.median(tied))}
    if case.parent is None or "lm_head.weight" not in case.parent.names or case.parent.info("lm_head.weight").dtype not in FLOATS:
        return
    old, verifier = map_facts(case.parent, case.v).vocab_map, _verifier_rows(case)
    if (
        old is None
        or old.k != case.parent.info("lm_head.weight").shape[0]
        or int(old.ids.max()) >= verifier.checkpoint.info(verifier.name).shape[0]
    ):
        return
    at = sample_rows(old.k, ROWS)
    before, theirs = HeadRows(case.parent).by_row(at), verifier(old.ids[at])
    cosine = float(np.median(_plain_cosine(before, theirs))) if before.shape == theirs.shape else 0.0
    if cosine < TIED - 0.005:
        title = (
            f"The head is the verifier's (cosine {evidence['cosine_to_verifier']:.4f}) while the parent's was its own (cosine {cosine:.2f})"
        )
        yield finding("head-overwritten", "error", title, where, **evidence, parent_cosine=cosine)


def _copied_elsewhere(case: Case, rows: np.ndarray, own: np.ndarray) -> tuple[float, dict] | None:
    """Share of rows that are verifier rows of another token: looked for among the map's ids and, in small vocabularies, all."""
    verifier, ids = _verifier_rows(case), case.map.vocab_map.ids
    known = case.verifier.info(case.verifier.head).shape[0]
    pool = np.arange(known) if known <= 4096 else np.unique(ids[np.unique(np.clip(rows[:, None] + np.arange(-2, 3), 0, len(ids) - 1))])
    theirs = verifier(pool)
    own, unit = (
        own / np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-30),
        theirs / np.maximum(np.linalg.norm(theirs, axis=1, keepdims=True), 1e-30),
    )
    cosine = own @ unit.T  # [rows, pool]
    best = cosine.argmax(axis=1)
    copied = cosine.max(axis=1) > MATCH
    elsewhere = copied & (pool[best] != ids[rows])
    marks = case.map.marks
    if case.map.report["t2d_agrees"] is False and len(marks) == len(ids):
        elsewhere &= pool[best] != marks[rows]  # then the map is wrong and the head may follow t2d
    if elsewhere.sum() < 2 or elsewhere.mean() < 0.05:
        return None
    return float(elsewhere.mean()), {
        "rows": sample(rows[elsewhere]),
        "map_says": sample(ids[rows[elsewhere]]),
        "rows_are": sample(pool[best[elsewhere]]),
    }


def _spread(own: np.ndarray) -> dict[str, float]:
    return {"standard_deviation": float(own.std()), "isotropy": isotropy(own), "norm_spread": float(np.linalg.norm(own, axis=1).std())}


def _fresh(case: Case, own: np.ndarray, theirs: np.ndarray) -> str | None:
    """Why rows unrelated to the verifier's look like an initialiser's, None when they may be a trained head's."""
    deviation, width = float(own.std()), own.shape[1]
    if not deviation:
        return "all of its rows looked at are zero" if case.verifier is not None and theirs.any() else None
    if abs(float(own.mean())) > 4 * deviation / np.sqrt(own.size) or isotropy(own) > 1.5:
        return None
    near = 4 / np.sqrt(2 * own.size) + 0.01
    stated = case.drafter.setting("initializer_range")
    for usual in {0.02, stated if isinstance(stated, float) else 0.02}:
        if abs(deviation / usual - 1) < near:
            return f"independent numbers of standard deviation {deviation:.4f}, the usual start of {usual:g}"
    bound = 1 / np.sqrt(width)
    if 0.97 * bound < float(np.abs(own).max()) <= 1.005 * bound and abs(deviation / (bound / np.sqrt(3)) - 1) < near:
        return f"independent numbers evenly spread within 1/sqrt({width}), torch's own start of a linear layer"
    apart = deviation / max(float(theirs.std()), 1e-30)
    if not 1 / 3 < apart < 3:
        return f"independent numbers {apart:.2g} times the size of the verifier's"
    return None
