"""Vocabulary maps as they lie on disk: a drafter folder, a d2t.npy / t2d.npy pair, a .pt or a .safetensors file.

Notable: what is read is what engines would read (d2t; offsets), unless t2d proves that d2t holds absolute ids; whatever had to be assumed
is kept in `VocabMap.assumption`. A map that contradicts itself is refused with the rows named, never repaired on the way in.
"""

import numpy as np

from workbench.errors import InputError
from workbench.mapping import VocabMap, describe_map, integers, mask_of, refuse_bad_rows


def map_from_tensors(d2t: np.ndarray | None, t2d: np.ndarray | None, k: int | None, v: int | None, where: str) -> VocabMap:
    """The map that two tensors on disk mean, or InputError naming `where`, what is wrong and what to do.

    k: rows of the head when known. v: target vocabulary when known otherwise than by t2d.
    """
    mask = mask_of(t2d, where) if t2d is not None else None
    if mask is not None and v is not None and len(mask) != v:
        raise InputError(f"{where}: t2d covers {len(mask)} ids but the target vocabulary has V = {v}: the map belongs to another verifier")
    v = v if mask is None else len(mask)
    if d2t is None:
        return _map_without_offsets(mask, k, v, where)
    d2t = integers(d2t, f"{where}: d2t")
    if d2t.ndim != 1 or not len(d2t):
        raise InputError(f"{where}: d2t has shape {list(d2t.shape)}: expected one number a row, [K]")
    if k is not None and len(d2t) != k:
        raise InputError(f"{where}: d2t has {len(d2t)} rows but the head has K = {k}: map and head do not belong together")
    if v is None:
        raise InputError(f"{where}: no t2d and no config say how large the target vocabulary is: put t2d beside d2t")
    if mask is not None and mask.sum() != len(d2t):
        raise InputError(f"{where}: d2t has {len(d2t)} rows but t2d marks {int(mask.sum())} ids: expected one number; rebuild t2d from d2t")
    report = describe_map(d2t, mask, k, v)
    absolute = report["form"] == "absolute"
    ids = d2t if absolute else d2t + np.arange(len(d2t))
    refuse_bad_rows(ids, d2t, v, "id" if absolute else "offset", where)
    if report["t2d_agrees"] is False:
        wrong = np.setxor1d(ids, np.flatnonzero(mask))
        raise InputError(
            f"{where}: d2t and t2d mark different tokens ({len(wrong)} ids, first {wrong[:5].tolist()}): engines read d2t, trainers t2d; "
            "rebuild the wrong one from the other"
        )
    assumption = ""
    if absolute:
        proof = "they equal the ids that t2d marks" if mask is not None else f"read as offsets they leave 0..{v - 1} or collide"
        assumption = f"d2t holds absolute ids, not offsets ({proof})"
    elif report["ambiguous"]:
        assumption = "d2t read as offsets, as engines do; without t2d it could also be absolute ids"
    return VocabMap(ids, v, assumption=assumption)


def _map_without_offsets(mask: np.ndarray | None, k: int | None, v: int | None, where: str) -> VocabMap:
    if k is not None and k == v:
        return VocabMap(np.arange(k), k)
    if mask is None:
        raise InputError(
            f"{where}: no d2t and no t2d, though the head has {k or 'fewer'} rows for V = {v or '?'}: "
            "engines would read its rows as ids 0..K-1; put the map beside the weights"
        )
    found = VocabMap.from_t2d(mask)
    if k is not None and found.k != k:
        raise InputError(f"{where}: t2d marks {found.k} ids but the head has K = {k} rows: map and head do not belong together")
    return found
