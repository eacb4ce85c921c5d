"""Which files of a place hold its weights, and the headers of all of them.

Notable: an index is held against the files that are there, in both directions; several weights files without an index are not guessed
together. Training state that lies beside the weights is left alone.
"""

import gc
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from workbench.errors import InputError
from workbench.places import Place
from workbench.torch_file import torch_header
from workbench.weights import TensorInfo, safetensors_header

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}(?P<suffix>\.safetensors|\.bin)")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "training_state", "adapter_model")


def read_headers(place: Place) -> dict[str, TensorInfo]:
    """All tensors of a place by name, no data read; InputError when its weights are undecidable, damaged or incomplete."""
    tensors: dict[str, TensorInfo] = {}
    files, promised = _weight_files(place)
    with ThreadPoolExecutor(place.connections) as pool, collector_paused():
        each = pool.map if place.connections > 1 else map
        for header in each(lambda file: _header(place, file), files):
            twice = tensors.keys() & header.keys()
            if twice:
                name = min(twice)
                raise InputError(f"{place.location}: tensor {name!r} lies in both {tensors[name].file} and {header[name].file}: remove one")
            tensors |= header
    absent = promised - tensors.keys()
    if absent:
        raise InputError(
            f"{place.location}: {len(absent)} tensors named by the index are in no shard ({min(absent)!r}): index and shards belong to "
            "different exports; download both again",
            "shard-missing",
        )
    return tensors


def _header(place: Place, file: str) -> dict[str, TensorInfo]:
    return safetensors_header(place, file) if file.endswith(".safetensors") else torch_header(place, file)


def _weight_files(place: Place) -> tuple[list[str], set[str]]:
    """The files that hold the weights (the one chosen, those of an index, or the only candidate) and the tensors that an index promises."""
    if place.chosen is not None:
        return [place.chosen], set()
    for plain, suffixes in (("model.safetensors", ".safetensors"), ("pytorch_model.bin", (".bin", ".pt", ".pth"))):
        if f"{plain}.index.json" in place.files:
            return _indexed(place, f"{plain}.index.json")
        found = [f for f in place.files if f.endswith(suffixes) and not f.startswith(_NOT_WEIGHTS)]
        if plain in found:
            return [plain], set()
        shards = [f for f in found if _SHARD.fullmatch(f)]
        if shards or len(found) > 1:
            what = f"{len(shards)} shards without an index" if shards else f"{len(found)} weights files and no {plain}"
            raise InputError(
                f"{place.location} holds {what} ({', '.join(found[:4])}): expected {plain}.index.json to name its shards; "
                "download what is missing, or give the path of one file",
                "shard-missing" if shards else None,
            )
        if found:
            return found, set()
    if "adapter_config.json" in place.files or any(f.startswith("adapter_model") for f in place.files):
        raise InputError(
            f"{place.location} holds an adapter: expected weights that stand alone; merge it into its base first", "wrong-model"
        )
    if "d2t.npy" in place.files or "t2d.npy" in place.files:
        raise InputError(f"{place.location} holds a vocabulary map and no weights: expected a checkpoint here; are the paths exchanged?")
    held = [*place.files, *(f"{name}/" for name in place.folders)][:5]
    raise InputError(
        f"{place.location} holds no weights ({'only ' + ', '.join(held) if held else 'nothing'}): expected model.safetensors, an index "
        "with shards, or pytorch_model.bin; give the folder that holds them"
    )


def _indexed(place: Place, index: str) -> tuple[list[str], set[str]]:
    """The shards that an index names, all present and none left over, and its tensors."""
    where, weight_map = place.where(index), place.json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{where} has no weight_map from tensors to files: expected one; download it again")
    named = sorted(set(weight_map.values()))
    kinds = {(m["stem"], m["suffix"]) for file in named if (m := _SHARD.fullmatch(file))}
    absent = [file for file in named if file not in place.files]
    unnamed = [f for f in place.files if f not in named and (m := _SHARD.fullmatch(f)) and (m["stem"], m["suffix"]) in kinds]
    faults = [f"{len(absent)} of the {len(named)} files it names are absent ({', '.join(absent[:3])})"] if absent else []
    faults += [f"{len(unnamed)} shards beside it are not named ({', '.join(unnamed[:3])})"] if unnamed else []
    if faults:
        raise InputError(f"{where}: {' and '.join(faults)}: expected index and files to agree; download all of one export", "shard-missing")
    return named, set(weight_map)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of cycles: the headers of a large model are 200,000 small containers without a cycle, which it would walk
    again and again (1.0 of 2.0 s for 70,000 tensors)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
