"""Cures that are mechanical: a new folder in which one fault is gone and every other byte of the weights is what it was.

Notable: nothing is cured that could lower acceptance unseen (rope, taps, norms' order): such values are only ever compared by a replay.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workbench.case import Case, MapFacts, map_facts
from workbench.checkpoint import DrafterCheckpoint, open_drafter, write_checkpoint
from workbench.checks import config, norms
from workbench.checks.map import SIDE_FILE
from workbench.errors import InputError
from workbench.mapfiles import map_from_tensors, read_raw
from workbench.mapping import VocabMap
from workbench.runs import atomic_folder, check_destination
from workbench.weights import entries, stored_pieces

Change = tuple[dict[str, np.ndarray], set[str], dict[str, Any]]  # tensors by canonical name, disk names left out, config by dotted key


def _written(vocab_map: VocabMap) -> Change:
    return {"d2t": vocab_map.d2t.copy(), "t2d": vocab_map.t2d.copy()}, set(), {}


def _map(source: DrafterCheckpoint, facts: MapFacts) -> VocabMap:
    """The map as its rows mean it; InputError where rows are wrong beyond a mechanical cure."""
    if facts.ids is None or len(facts.outside) or len(facts.doubled) or not facts.v:
        raise InputError(f"{source.location}: the map itself is wrong (see `workbench doctor`): restore d2t from its source")
    return VocabMap(facts.ids, facts.v)


def _missing(source: DrafterCheckpoint, facts: MapFacts) -> Change:
    """From a map file beside the weights, else from t2d with rows in ascending order."""
    for name in source.place.files:
        if SIDE_FILE.fullmatch(name) and hasattr(source.place, "folder"):
            ids = read_side_map(Path(source.place.folder) / name, facts.v)
            if ids is not None and ids.k == source.k:
                return _written(ids)
    if facts.marks is None or len(facts.marks) != source.k:
        raise InputError(f"{source.location}: no map file beside the weights and no t2d with {source.k} marks: nothing to rebuild d2t from")
    return _written(VocabMap(facts.marks, facts.v))


def read_side_map(path: Path, v: int | None) -> VocabMap | None:
    """The map in one file, for a target vocabulary of v; None when it holds none by itself."""
    try:
        raw = read_raw(path)
        return map_from_tensors(*(raw if raw.v or raw.t2d is not None else raw._replace(v=v)))
    except InputError:
        return None


def _unsorted(source: DrafterCheckpoint, facts: MapFacts) -> Change:
    """Map and head sorted together; a bias of the head goes with them."""
    order = np.argsort(_map(source, facts).ids)
    tensors, _, _ = _written(VocabMap(facts.ids[order], facts.v))
    return tensors | {name: source.stored(name)[order] for name in ("lm_head.weight", "lm_head.bias") if name in source.names}, set(), {}


def _dtype(source: DrafterCheckpoint, facts: MapFacts) -> Change:
    if facts.d2t is not None and facts.d2t.dtype.kind == "f":
        raise InputError(f"{source.location}: d2t went through floats and has lost ids: restore it from its source")
    kept = {"d2t": facts.d2t.astype(np.int64)} if facts.d2t is not None else {}
    return kept | ({"t2d": facts.t2d != 0} if facts.t2d_is_mask else {}), set(), {}


def _embedding(source: DrafterCheckpoint, facts: MapFacts) -> Change:
    """Left out, so that every engine and trainer takes the verifier's."""
    return {}, {source.names["embed_tokens.weight"]} if "embed_tokens.weight" in source.names else set(), {}


def _norms(source: DrafterCheckpoint, facts: MapFacts) -> Change:
    return {}, set(), {flag: True for flag, (weight, _) in norms.FLAGS.items() if weight in source.names}


def _config(source: DrafterCheckpoint, facts: MapFacts) -> Change:
    """Every number that weights decide, in the place where it stands."""
    found = {}
    for one in (*config.weights(Case(source)),):
        if one.evidence.get("setting") and isinstance(one.evidence["weights"], int):
            found[one.where.removeprefix(f"{source.location}: ")] = one.evidence["weights"]
    if source.k and "draft_vocab_size" in source.settings:
        stated = source.settings["draft_vocab_size"]
        found["draft_vocab_size" if stated.source.startswith("weights") else stated.source] = source.k
    return {}, set(), found | {"tie_word_embeddings" if "." not in s.source else s.source: False for s in _tied(source)}


def _tied(source: DrafterCheckpoint) -> list[Any]:
    found = source.settings.get("tie_word_embeddings")
    return [place for place in (found, *found.also) if place.value is True] if found else []


CURES: dict[str, Callable[[DrafterCheckpoint, MapFacts], Change]] = {
    "map-missing": _missing,
    "map-absolute": lambda source, facts: _written(_map(source, facts)),
    "map-t2d-disagrees": lambda source, facts: _written(_map(source, facts)),
    "map-dtype": _dtype,
    "map-unsorted": _unsorted,
    "embed-random": _embedding,
    "embed-differs": _embedding,
    "embed-rotated": _embedding,
    "norm-ignored": _norms,
    "config-weights": _config,
}


def cure(drafter: str | Path, code: str, out: str | Path) -> dict[str, Any]:
    """Write `drafter` without the fault `code` into the new folder `out`: code, changed (tensors and settings), left_out, out.

    Raises InputError, with nothing written, for a fault that has no mechanical cure, or that the drafter does not have.
    """
    if code not in CURES:
        raise InputError(f"{code} has no mechanical cure: expected one of {', '.join(CURES)}; `workbench doctor` says what to do")
    out, source = check_destination(Path(out)), open_drafter(drafter)
    tensors, dropped, settings = CURES[code](source, map_facts(source))
    if not (tensors or dropped or settings):
        raise InputError(f"{source.location} has no {code}: nothing was written")
    written = json.loads(json.dumps(source.config))
    for key, value in settings.items():
        *places, last = key.split(".")
        block = written
        for place in places:
            block = block[place]
        block[last] = value
    with atomic_folder(out) as folder:
        write_checkpoint(folder, _entries(source, tensors, dropped), written)
    return {"code": code, "changed": [*tensors, *settings], "left_out": sorted(dropped), "out": str(out)}


def _entries(source: DrafterCheckpoint, tensors: dict[str, np.ndarray], dropped: set[str]) -> Iterator[tuple]:
    """Every tensor for the writer: changed ones anew, in stored bits and their own type, the rest byte for byte."""
    anew = {source.names.get(name, name): array for name, array in tensors.items()}
    for disk, info in source.tensors.items():
        if disk not in anew and disk not in dropped:
            yield disk, info.dtype, info.shape, stored_pieces(source.place, info)
    for disk, array in anew.items():
        if array.dtype in (np.int64, np.bool_):
            yield from entries({disk: array})
        else:
            yield disk, source.tensors[disk].dtype, array.shape, [array]
