"""Vocabulary maps as they lie on disk: a drafter folder, a d2t.npy / t2d.npy pair, a .pt or a .safetensors file.

Notable: what is read is what engines would read (d2t; offsets), unless t2d proves that d2t holds absolute ids; whatever had to be assumed
is kept in `VocabMap.assumption`. A map that contradicts itself is refused with the rows named, never repaired on the way in.
"""

import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workbench.checkpoint import DrafterCheckpoint, open_checkpoint
from workbench.dialects import canonical_names
from workbench.errors import InputError
from workbench.mapping import VocabMap, describe_map, integers, mask_of, refuse_bad_rows
from workbench.places import Place, open_place
from workbench.torch_file import load_torch, torch_header
from workbench.weights import read_stored, safetensors_header, stand_in_for_weights

TORCH = (".pt", ".pth", ".bin")
_NPY = re.compile(r"(?P<part>d2t|t2d)(?P<size>(-\d+)?)\.npy")  # speculators writes d2t-<K>.npy


class RawMap(NamedTuple):
    """Two map tensors as they are on disk, K by the head and V by the config (None where nothing tells), and what to call the place."""

    d2t: np.ndarray | None
    t2d: np.ndarray | None
    k: int | None
    v: int | None
    where: str


def read_map(path: str | Path) -> VocabMap:
    """The map of a drafter, of a folder with d2t.npy / t2d.npy, or of a .npy, .pt or .safetensors file; a Hugging Face id works too."""
    return map_from_tensors(*read_raw(path))


def read_maps(a: str | Path, b: str | Path) -> tuple[VocabMap, VocabMap]:
    """Two maps that are to be compared: where one does not say how large the target vocabulary is, the other does."""
    raw = [read_raw(path) for path in (a, b)]
    sizes = [len(r.t2d) if r.t2d is not None else r.v for r in raw]
    known = next((v for v in sizes if v is not None), None)
    first, second = (map_from_tensors(*r._replace(v=r.v if size is not None else known)) for r, size in zip(raw, sizes, strict=True))
    return first, second


def read_raw(path: str | Path) -> RawMap:
    """What lies at `path`, read but neither checked nor converted."""
    place = open_place(path)
    named = [place.chosen] if place.chosen else list(place.files)
    arrays = [match for name in named if (match := _NPY.fullmatch(name))]
    weights = [name for name in named if name.endswith((".safetensors", *TORCH))]
    if arrays and not weights:
        sizes = sorted({match["size"] for match in arrays})
        if len(sizes) > 1:
            listed = ", ".join(sorted(match.string for match in arrays))
            raise InputError(f"{place.location} holds several maps ({listed}): name one of the files")
        parts = {part: _npy(place, f"{part}{sizes[0]}.npy") for part in ("d2t", "t2d")}
        return RawMap(**parts, k=None, v=None, where=place.location)
    if len(weights) == 1:
        found = _map_only(place, weights[0])
        if found is not None:
            return found
    if place.chosen and not weights:
        raise InputError(f"{place.location} is no map: expected a drafter, d2t.npy, t2d.npy, or a .pt or .safetensors file with d2t in it")
    drafter = open_checkpoint(path)
    if not isinstance(drafter, DrafterCheckpoint):
        raise InputError(
            f"{drafter.location} holds a verifier, which has no draft vocabulary: expected a drafter, or a map (a folder with d2t.npy, a "
            ".pt or .safetensors file)",
            "wrong-model",
        )
    d2t, t2d = drafter.map_raw()
    if d2t is None and t2d is None and arrays and drafter.k != drafter.v:
        beside = ", ".join(match.string for match in arrays)
        raise InputError(f"{place.location}: the weights hold no map, but {beside} lies beside them: name that file to read it instead")
    return RawMap(d2t, t2d, drafter.k, drafter.v, drafter.location)


def _npy(place: Place, name: str) -> np.ndarray | None:
    """An array file, None when the folder has none of that name."""
    if name not in place.files:
        return None
    fault = stand_in_for_weights(place, name)
    if fault is not None:
        raise fault
    try:
        return np.load(io.BytesIO(place.read(name, 0, place.files[name])), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{place.where(name)} is no plain numpy array ({error}): expected numbers saved by numpy.save") from error


def _map_only(place: Place, file: str) -> RawMap | None:
    """The map in a file that holds nothing else: d2t and t2d, or a list of absolute ids; None when the file is a checkpoint."""
    where = place.where(file)
    tensors = torch_header(place, file) if file.endswith(TORCH) else safetensors_header(place, file)
    names = canonical_names(tensors)
    if names and set(names) <= {"d2t", "t2d"}:
        twice = next((found for found in names.values() if len(found) > 1), None)
        if twice:
            raise InputError(f"{where}: tensors {' and '.join(twice)} could each be the map: keep one of them")
        d2t, t2d = (read_stored(place, tensors[names[part][0]]) if part in names else None for part in ("d2t", "t2d"))
        return RawMap(d2t, t2d, None, None, where)
    if not tensors and file.endswith(TORCH):  # plain Python values: torch_header sees tensors only
        loaded = load_torch(place, file)
        ids = loaded.get("selected_token_ids") if isinstance(loaded, dict) else loaded
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return _absolute(np.array(ids), where)
    if "selected_token_ids" in tensors:
        return _absolute(read_stored(place, tensors["selected_token_ids"]), where)
    return None


def _absolute(ids: np.ndarray, where: str) -> RawMap:
    """A list of absolute ids, as NeMo AutoModel keeps beside its weights, in the form of offsets."""
    ids = integers(ids, f"{where}: selected_token_ids")
    return RawMap(ids - np.arange(len(ids)), None, None, None, where)


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
