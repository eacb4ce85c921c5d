"""Open any drafter or verifier lazily, and write checkpoints.

Notable: opening reads JSON and headers only; `array`, `stored` and `tensor` read what is asked, row by row if wanted. What a checkpoint is,
is told by tensors and shapes. K, V, H and Ht come from the tensors where these tell, else from the config; `settings` keeps both when they
differ. Nothing is repaired on the way in: a drafter with a faulty map opens, so that its fault can be named.
"""

import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from workbench.dialects import DEFAULTS, Setting, Taps, canonical_names, family, read_settings, read_taps, recognise
from workbench.errors import InputError
from workbench.mapping import describe_map
from workbench.places import Place, open_place
from workbench.shards import collector_paused, read_headers
from workbench.weights import DTYPES, TensorInfo, read_stored, widen, write_safetensors

LARGEST_DRAFTER = 1000  # tensors; one of twenty layers has 250, the smallest mixture of experts has more


class Checkpoint:
    """A checkpoint whose headers have been read.

    location, revision: where it is, and the pinned commit on a hub. config: config.json as it is ({} without one). settings: its values by
    plain name with their sources. tensors: {disk name: TensorInfo}. names: {canonical name: disk name}; every reader takes either name.
    """

    kind: str
    layers: int | None

    def __init__(self, place: Place, tensors: dict[str, TensorInfo], config: dict[str, Any]):
        self.place, self.tensors, self.config = place, tensors, config
        self.location, self.revision = place.location, place.revision
        self.settings = read_settings(config)
        self.names: dict[str, str] = {}

    def info(self, name: str) -> TensorInfo:
        """A tensor's shape, dtype and file by canonical or disk name; InputError when there is none."""
        disk = self.names.get(name, name)
        if disk not in self.tensors:
            raise InputError(
                f"{self.location} has no tensor {name}: it holds {len(self.tensors)}, such as {', '.join(list(self.tensors)[:4])}"
            )
        return self.tensors[disk]

    def stored(self, name: str, rows: Any = None) -> np.ndarray:
        """A tensor or its rows as the bits on disk (bfloat16 as uint16 patterns), in the order of `rows`."""
        return read_stored(self.place, self.info(name), rows)

    def array(self, name: str, rows: Any = None) -> np.ndarray:
        """A tensor or its rows (None, a slice, or whole numbers [R]) as numpy; bfloat16 widened to float32."""
        return widen(self.stored(name, rows), self.info(name).dtype)

    def tensor(self, name: str, rows: Any = None) -> Any:
        """A tensor or its rows as a torch tensor of the type on disk."""
        import torch

        tensor = torch.from_numpy(self.stored(name, rows))
        dtype = getattr(torch, DTYPES[self.info(name).dtype].torch)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def setting(self, name: str) -> Any:
        """The value of a setting, None when neither config nor default gives one."""
        return self.settings[name].value if name in self.settings else None

    def number(self, name: str) -> int | None:
        """A setting that counts something; InputError when it is no whole number."""
        value = self.setting(name)
        if value is not None and (type(value) is not int or value < 0):
            raise InputError(f"{self.location}: {self.settings[name].source} is {value!r} in the config: expected a whole number; mend it")
        return value

    def _shape(self, name: str, ndim: int) -> tuple[int, ...] | None:
        """Shape of a tensor, None when it is absent; InputError when its rank is wrong."""
        if name not in self.names:
            return None
        shape = self.info(name).shape
        if len(shape) != ndim:
            raise InputError(f"{self.location}: {self.names[name]} has shape {list(shape)}: expected {ndim} dimension(s); re-export it")
        return shape


class DrafterCheckpoint(Checkpoint):
    """An EAGLE-3 drafter. k, v, h, ht: draft and target vocabulary, drafter and verifier hidden size (None where nothing tells)."""

    kind = "drafter"

    def __init__(self, place: Place, tensors: dict[str, TensorInfo], config: dict[str, Any], names: dict[str, list[str]]):
        super().__init__(place, tensors, config)
        for canonical, disk in names.items():
            if len(disk) > 1:
                raise InputError(f"{self.location}: tensors {disk[0]!r} and {disk[1]!r} are both {canonical}: keep one")
            self.names[canonical] = disk[0]
        self._dialect = recognise(self.names, self.settings, full_vocabulary=self.k is not None and self.k == self.v)
        self.dialect = self._dialect.name
        self._settle()

    @cached_property
    def k(self) -> int | None:
        """Rows of the head, else length of d2t, else config."""
        shape = self._shape("lm_head.weight", 2) or (self.tensors[self.names["d2t"]].shape if "d2t" in self.names else None)
        return shape[0] if shape else self.number("draft_vocab_size")

    @cached_property
    def v(self) -> int | None:
        """Length of t2d, else config, else rows of the embedding."""
        t2d = self.tensors[self.names["t2d"]].shape if "t2d" in self.names else ()
        if len(t2d) == 1:
            return t2d[0]
        embedding = self._shape("embed_tokens.weight", 2)
        return self.number("vocab_size") or (embedding[0] if embedding else None)

    @cached_property
    def h(self) -> int | None:
        shape = self._shape("fc.weight", 2) or self._shape("norm.weight", 1)
        return shape[0] if shape else self.number("hidden_size")

    @cached_property
    def ht(self) -> int | None:
        """target_hidden_size, else the drafter's own hidden size."""
        return self.number("target_hidden_size") or self.h

    @cached_property
    def layers(self) -> int:
        return len({name.split(".")[1] for name in self.names if name.startswith("layers.")})

    @cached_property
    def mla(self) -> bool:
        """Whether the attention is DeepSeek's (low-rank q and kv projections)."""
        return "layers.0.self_attn.kv_a_proj_with_mqa.weight" in self.names

    @cached_property
    def taps(self) -> Taps:
        fc = self._shape("fc.weight", 2)
        return read_taps(self._dialect, self.settings, fc[1] if fc else None, self.ht, self.location)

    def map_raw(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(d2t, t2d) as on disk, None where absent: neither checked nor converted."""
        d2t, t2d = (self.array(name) if name in self.names else None for name in ("d2t", "t2d"))
        return d2t, t2d

    def _settle(self) -> None:
        """Add to the settings what the weights say, and the defaults that remain, each with its source."""
        shape = {name: self.tensors[disk].shape for name, disk in self.names.items()}
        weights = {
            "hidden_size": ("fc.weight", shape.get("fc.weight", (None,))[:1]),
            "draft_vocab_size": ("lm_head.weight", shape.get("lm_head.weight", ())[:1]),
            "vocab_size": ("t2d", shape.get("t2d", ())[:1]),
            "num_hidden_layers": ("layers.*", (self.layers,)),
            "norm_before_fc": ("input_norm.weight", (True,) if "input_norm.weight" in shape else ()),
            "fc_norm": ("fc_norm.0.weight", (True,) if "fc_norm.0.weight" in shape else ()),
        }
        for key, (tensor, value) in weights.items():
            if value and value[0] is not None:
                self._add(key, value[0], f"weights ({tensor})")
        heads, hidden = self.setting("num_attention_heads"), self.setting("hidden_size")
        if type(heads) is int and type(hidden) is int and heads > 0:
            self.settings.setdefault("num_key_value_heads", Setting(heads, "default (num_attention_heads)"))
            self.settings.setdefault("head_dim", Setting(hidden // heads, "default (hidden_size / num_attention_heads)"))
        for key, (value, source) in DEFAULTS.items():
            self.settings.setdefault(key, Setting(value, source))

    def _add(self, key: str, value: Any, source: str) -> None:
        found = self.settings.get(key)
        extra = Setting(value, source)
        self.settings[key] = extra if found is None else found._replace(also=(*found.also, extra))


class VerifierCheckpoint(Checkpoint):
    """A verifier. Head and embedding are found by exact name, then by the shortest name that ends so (`language_model.`)."""

    kind = "verifier"

    def __init__(self, place: Place, tensors: dict[str, TensorInfo], config: dict[str, Any]):
        super().__init__(place, tensors, config)
        self._find("lm_head.weight")
        self._find("embed_tokens.weight")
        if (
            "embed_tokens.weight" in self.names
        ):  # the final norm stands beside the embedding; towers of other senses have norms of their own
            norm = self.names["embed_tokens.weight"].replace("embed_tokens", "norm")
            if norm in tensors:
                self.names["norm.weight"] = norm

    def _find(self, ending: str) -> None:
        exact = [name for name in (ending, f"model.{ending}") if name in self.tensors]
        found = exact or sorted((name for name in self.tensors if name.endswith(f".{ending}")), key=len)
        if found:
            self.names[ending] = found[0]

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding: no head on disk, none of its quantised parts, and no config that says otherwise."""
        return "lm_head.weight" not in self.names and not self._head_parts and self.setting("tie_word_embeddings") is not False

    @cached_property
    def _head_parts(self) -> list[str]:
        return [name for name in self.tensors if "lm_head." in name]

    @cached_property
    def head(self) -> str:
        """Disk name of the head [V, Ht], the embedding's when tied; InputError when it is quantised or missing."""
        if "lm_head.weight" in self.names:
            return self.names["lm_head.weight"]
        if self._head_parts:
            raise InputError(
                f"{self.location}: the head is quantised ({', '.join(self._head_parts[:4])}): expected lm_head.weight; dequantise it"
            )
        if not self.tied:
            raise InputError(
                f"{self.location} has no lm_head.weight though {self.settings['tie_word_embeddings'].source} is false: "
                "part of the verifier is missing; download all of it"
            )
        return self.embedding

    @cached_property
    def embedding(self) -> str:
        """Disk name of the embedding [V, Ht]."""
        return self.info("embed_tokens.weight").name

    @cached_property
    def final_norm(self) -> str:
        """Disk name of the final norm's weight [Ht]."""
        return self.info("norm.weight").name

    @cached_property
    def layers(self) -> int | None:
        """Decoder layers by config (weights may hold an extra prediction layer), else counted beside the embedding."""
        declared = self.number("num_hidden_layers")
        if declared:
            return declared
        prefix = self.names.get("embed_tokens.weight", "").removesuffix("embed_tokens.weight") + "layers."
        found = {name[len(prefix) :].split(".")[0] for name in self.tensors if name.startswith(prefix)}
        return len(found) or None

    @cached_property
    def hidden(self) -> int | None:
        shape = self._shape("embed_tokens.weight", 2) or self._shape("lm_head.weight", 2)
        return shape[1] if shape else self.number("hidden_size")

    @cached_property
    def vocab(self) -> int | None:
        shape = self._shape("lm_head.weight", 2) or self._shape("embed_tokens.weight", 2)
        return shape[0] if shape else self.number("vocab_size")


def open_checkpoint(path: str | Path) -> DrafterCheckpoint | VerifierCheckpoint:
    """Open a drafter or verifier: a folder, a weights file, or a Hugging Face id `owner/name` (`@revision` after it pins another commit).

    Reads JSON files and headers, no tensor data. Raises InputError for whatever is neither, saying what it is instead.
    """
    place = open_place(path)
    tensors = read_headers(place)
    config = place.json("config.json") if "config.json" in place.files else {}
    names = canonical_names(tensors) if len(tensors) <= LARGEST_DRAFTER else {}
    kind = family(tensors, names, read_settings(config))
    if kind == "eagle3":
        return DrafterCheckpoint(place, tensors, config, names)
    if kind == "verifier":
        return VerifierCheckpoint(place, tensors, config)
    raise InputError(
        f"{place.location} holds {kind}: expected an EAGLE-3 drafter (fc.weight over its taps, first layer of double width) or a verifier; "
        "give another folder",
        "wrong-model",
    )


def open_drafter(path: str | Path) -> DrafterCheckpoint:
    """Open an EAGLE-3 drafter, as `open_checkpoint`; InputError (code wrong-model) when it is a verifier or anything else."""
    opened = open_checkpoint(path)
    if not isinstance(opened, DrafterCheckpoint):
        raise InputError(
            f"{opened.location} holds a verifier ({opened.layers} layers, no fc.weight): expected an EAGLE-3 drafter; exchange the paths?",
            "wrong-model",
        )
    return opened


def open_verifier(path: str | Path) -> VerifierCheckpoint:
    """Open a verifier, as `open_checkpoint`; InputError (code wrong-model) when it is a drafter or anything else."""
    opened = open_checkpoint(path)
    if not isinstance(opened, VerifierCheckpoint):
        raise InputError(
            f"{opened.location} holds an EAGLE-3 drafter (dialect {opened.dialect}): expected its verifier here; exchange the two paths",
            "wrong-model",
        )
    return opened


def inspect(path: str | Path) -> dict[str, Any]:
    """What a checkpoint is, from headers, config and map alone; fields that make no sense for a verifier are None."""
    with collector_paused():
        return _describe(open_checkpoint(path))


def _describe(opened: Checkpoint) -> dict[str, Any]:
    canonical = {disk: name for name, disk in opened.names.items()}
    report: dict[str, Any] = {"kind": opened.kind, "dialect": None, "k": None, "v": None, "h": None, "ht": None, "layers": opened.layers}
    report |= {"taps": None, "mapping": None}
    if isinstance(opened, DrafterCheckpoint):
        taps, fields = opened.taps, ("present", "form", "sorted", "unique", "in_range", "t2d_agrees")
        mapping = describe_map(*opened.map_raw(), opened.k, opened.v)
        report |= {"dialect": opened.dialect, "k": opened.k, "v": opened.v, "h": opened.h, "ht": opened.ht}
        report["taps"] = {"count": taps.count, "ids": list(taps.ids) if taps.ids else None, "source": taps.source, "reading": taps.reading}
        report["mapping"] = {field: mapping[field] for field in fields}
    else:
        report |= {"v": opened.vocab, "ht": opened.hidden}
    report["tensors"] = [
        {"name": t.name, "canonical": canonical.get(t.name), "shape": list(t.shape), "dtype": t.dtype} for t in opened.tensors.values()
    ]
    return report


def write_checkpoint(
    folder: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], Iterable[Any]]], config: dict[str, Any], shard_bytes: int | None = None
) -> list[Path]:
    """Write config.json and model.safetensors into a folder, streaming; returns the weights files.

    tensors: (name, dtype in safetensors spelling, shape, chunks), as `weights.write_safetensors` takes them; `weights.entries` makes them
    from arrays. shard_bytes: start another shard before a file would hold more; then an index is written too. For a result that appears
    whole or not at all, hand in the working folder of `runs.atomic_folder`.
    """
    shards: list[list[Any]] = [[]]
    filled = total = 0
    for entry in tensors:
        size = math.prod(entry[2]) * DTYPES[entry[1]].bits // 8
        if shard_bytes is not None and shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled, total = filled + size, total + size
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": total},
            "weight_map": {entry[0]: name for name, shard in zip(names, shards, strict=True) for entry in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return [folder / name for name in names]
