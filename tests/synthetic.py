"""Cheap checkpoints for tests: drafters in every dialect and verifiers, tiny with random numbers or real-sized and sparse.

    folder = write_drafter(tmp_path / "d", Drafter("specforge", taps=5))        tiny, random, written whole
    folder = write_drafter(tmp_path / "k", replace(KIMI_DRAFTER, dialect="eagle"), sparse=True)   Kimi-K2 size, no data but the map
    folder = write_verifier(tmp_path / "v", Verifier(shards=3, prefix="language_model."))

To seed a fault, take `drafter_values(d)` and `drafter_config(d)`, change them, and hand them to `write_drafter(..., values=, config=)`.
Values are float32, int64 or bool arrays by disk name; floats are stored as `dtype` of the shape, bfloat16 unless said otherwise.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.checkpoint import write_checkpoint
from workbench.dialects import DIALECTS
from workbench.weights import DTYPES, bfloat16_bits, entries, write_safetensors

DIALECT_NAMES = tuple(DIALECTS)
Declared = dict[str, tuple[str, tuple[int, ...]]]  # disk name: (dtype, shape)


@dataclass(frozen=True)
class Drafter:
    """Shape of a drafter. ht None: as h. embedding None: as in the dialect. n: layers of its verifier. k = v: full vocabulary."""

    dialect: str = "eagle"
    k: int = 16
    v: int = 64
    h: int = 16
    ht: int | None = None
    layers: int = 1
    taps: int = 3
    n: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    inter: int = 32
    mla: bool = False
    fc_norm: bool = False
    input_norm: bool = False
    embedding: bool | None = None
    dtype: str = "BF16"


KIMI_DRAFTER = Drafter(k=32000, v=163840, h=7168, n=61, heads=64, kv_heads=64, head_dim=128, inter=18432)


@dataclass(frozen=True)
class Verifier:
    """Shape of a verifier (Llama names). prefix: before every name, with the config under text_config. experts: a layer, 0 for dense."""

    v: int = 64
    h: int = 16
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    inter: int = 32
    experts: int = 0
    tied: bool = False
    prefix: str = ""
    shards: int = 1
    dtype: str = "BF16"


KIMI_VERIFIER = Verifier(v=163840, h=7168, layers=61, heads=64, kv_heads=64, head_dim=128, inter=2048, experts=384, shards=62)


# ---- drafters


def tap_boundaries(d: Drafter) -> list[int]:
    """The boundaries h_k that the drafter is wired to: 2, n//2, n-3 for three taps, else spread evenly over 1..n."""
    return [2, d.n // 2, d.n - 3] if d.taps == 3 else [int(b) for b in np.linspace(1, d.n, d.taps).round()]


def drafter_declared(d: Drafter) -> Declared:
    """Every tensor of the drafter: {disk name: (dtype, shape)}."""
    f = d.dtype
    ht = d.ht or d.h
    declared: Declared = {"fc.weight": (f, (d.h, d.taps * ht))}
    if d.fc_norm:
        declared |= {f"fc_norm.{i}.weight": (f, (ht,)) for i in range(d.taps)}
    if d.input_norm:
        declared["input_norm.weight"] = (f, (d.taps * ht,))
    for i in range(d.layers):
        prefix = DIALECTS[d.dialect].layer_prefix if i == 0 else f"layers.{i}."
        shapes = _attention(d.heads, d.kv_heads, d.head_dim, d.h, 2 * d.h if i == 0 else d.h, d.mla) | _mlp(d.h, d.inter)
        shapes |= {"input_layernorm": (d.h,), "post_attention_layernorm": (d.h,)} | ({"hidden_norm": (d.h,)} if i == 0 else {})
        declared |= {f"{prefix}{part}.weight": (f, shape) for part, shape in shapes.items()}
    declared |= {"norm.weight": (f, (d.h,)), "lm_head.weight": (f, (d.k, d.h))}
    if d.embedding if d.embedding is not None else DIALECTS[d.dialect].saves_embedding:
        declared["embed_tokens.weight"] = (f, (d.v, d.h))
    if d.k != d.v or d.dialect == "specforge":  # SpecForge registers its buffers also for a full vocabulary
        declared["d2t"] = ("I64", (d.k,))
        if d.dialect not in ("modelopt", "torchspec"):
            declared["t2d"] = ("BOOL", (d.v,))
    return declared


def _attention(heads: int, kv_heads: int, head_dim: int, h: int, inputs: int, mla: bool) -> dict[str, tuple[int, ...]]:
    if mla:  # rotary part as wide as half a head, low ranks as a fifth and a fourteenth of h, as in DeepSeek
        rotary, q_rank, kv_rank = head_dim // 2, max(2, h * 3 // 14), max(2, h // 14)
        return {
            "self_attn.q_a_proj": (q_rank, inputs),
            "self_attn.q_a_layernorm": (q_rank,),
            "self_attn.q_b_proj": (heads * (head_dim + rotary), q_rank),
            "self_attn.kv_a_proj_with_mqa": (kv_rank + rotary, inputs),
            "self_attn.kv_a_layernorm": (kv_rank,),
            "self_attn.kv_b_proj": (heads * 2 * head_dim, kv_rank),
            "self_attn.o_proj": (h, heads * head_dim),
        }
    kv = (kv_heads * head_dim, inputs)
    return {
        "self_attn.q_proj": (heads * head_dim, inputs),
        "self_attn.k_proj": kv,
        "self_attn.v_proj": kv,
        "self_attn.o_proj": (h, heads * head_dim),
    }


def _mlp(h: int, inter: int, prefix: str = "mlp.") -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate_proj": (inter, h), f"{prefix}up_proj": (inter, h), f"{prefix}down_proj": (h, inter)}


def drafter_config(d: Drafter) -> dict[str, Any]:
    """config.json as the dialect's own tool writes it."""
    dialect = DIALECTS[d.dialect]
    ids = [b - dialect.id_shift for b in tap_boundaries(d)]
    layer = {
        "model_type": "llama",
        "vocab_size": d.v,
        "hidden_size": d.h,
        "intermediate_size": d.inter,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    if d.mla:
        layer |= {"model_type": "kimi_k2", "q_lora_rank": max(2, d.h * 3 // 14), "kv_lora_rank": max(2, d.h // 14)}
        layer |= {"qk_nope_head_dim": d.head_dim, "qk_rope_head_dim": d.head_dim // 2, "v_head_dim": d.head_dim}
    architecture = dialect.architectures[-1 if d.mla else 0]
    norms = {key: True for key, present in (("fc_norm", d.fc_norm), ("norm_before_fc", d.input_norm)) if present}
    widths = {"target_hidden_size": d.ht} if d.ht else {}
    if d.dialect == "speculators":
        verifier = {"name_or_path": "owner/verifier", "architectures": ["LlamaForCausalLM"]}
        methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
        return (
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.9.0",
                "draft_vocab_size": d.k,
                "norm_before_residual": False,
                "eagle_aux_hidden_state_layer_ids": ids,
                "speculators_config": {
                    "algorithm": "eagle3",
                    "proposal_methods": methods,
                    "default_proposal_method": "greedy",
                    "verifier": verifier,
                },
                "transformer_layer_config": layer | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            }
            | norms
            | widths
        )
    config = {"architectures": [architecture], **layer, "draft_vocab_size": d.k, "rope_theta": 10000.0} | norms | widths
    if d.dialect == "angelslim":
        return config | {"aux_hidden_states_layer_ids": ids, "target_model_type": "llama"}
    if d.dialect == "torchspec" and d.k == d.v:
        del config["draft_vocab_size"]
    if d.dialect != "eagle":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return config


def ascending_map(k: int, v: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A random clean map: d2t offsets int64 [K] over ascending ids, and t2d bool [V]."""
    ids = np.sort(np.random.default_rng(seed).choice(v, k, replace=False))
    t2d = np.zeros(v, bool)
    t2d[ids] = True
    return ids - np.arange(k), t2d


def drafter_values(d: Drafter, seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers for every tensor by disk name: norms near 1, matrices small, and a clean map."""
    return _values(drafter_declared(d), seed, ascending_map(d.k, d.v, seed))


def write_drafter(
    folder: Path,
    d: Drafter | None = None,
    *,
    seed: int = 0,
    values: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
    sparse: bool = False,
) -> Path:
    """Write a drafter folder and return it. values, config: in place of `drafter_values`, `drafter_config`. sparse: no data but the map."""
    d = d or Drafter()
    config = dict(drafter_config(d) if config is None else config)
    if not sparse:
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, stored(drafter_values(d, seed) if values is None else values, d.dtype), config)
        return folder
    d2t, t2d = ascending_map(d.k, d.v, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_sparse(folder / "model.safetensors", drafter_declared(d), {"d2t": d2t, "t2d": t2d})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- verifiers


def verifier_declared(m: Verifier) -> Declared:
    """Every tensor of the verifier: {disk name: (dtype, shape)}."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (m.v, m.h)}
    for i in range(m.layers):
        layer = _attention(m.heads, m.kv_heads, m.head_dim, m.h, m.h, mla=False)
        layer |= {"input_layernorm": (m.h,), "post_attention_layernorm": (m.h,)}
        if m.experts and i:
            for e in range(m.experts):
                layer |= _mlp(m.h, m.inter, f"mlp.experts.{e}.")
        else:
            layer |= _mlp(m.h, m.inter)
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in layer.items()}
    shapes["model.norm"] = (m.h,)
    if not m.tied:
        shapes["lm_head"] = (m.v, m.h)
    return {f"{m.prefix}{name}.weight": (m.dtype, shape) for name, shape in shapes.items()}


def verifier_config(m: Verifier) -> dict[str, Any]:
    """config.json of a Llama, or of a wrapper with text_config when the names have a prefix."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": m.v,
        "hidden_size": m.h,
        "intermediate_size": m.inter,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": m.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {"architectures": ["WrappedForConditionalGeneration"], "model_type": "wrapped", "text_config": config} if m.prefix else config


def verifier_values(m: Verifier, seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers for every tensor by disk name."""
    return _values(verifier_declared(m), seed, None)


def write_verifier(folder: Path, m: Verifier | None = None, *, seed: int = 0, sparse: bool = False) -> Path:
    """Write a verifier folder, in `shards` files with an index when more than one, and return it. sparse: headers only, no data."""
    m = m or Verifier()
    declared, values, weight_map = verifier_declared(m), {} if sparse else verifier_values(m, seed), {}
    folder.mkdir(parents=True, exist_ok=True)
    names = list(declared)
    for s in range(m.shards):
        file = f"model-{s + 1:05}-of-{m.shards:05}.safetensors" if m.shards > 1 else "model.safetensors"
        part = names[len(names) * s // m.shards : len(names) * (s + 1) // m.shards]
        weight_map |= dict.fromkeys(part, file)
        if sparse:
            write_sparse(folder / file, {name: declared[name] for name in part}, {})
        else:
            write_safetensors(folder / file, stored({name: values[name] for name in part}, m.dtype))
    if m.shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(verifier_config(m)))
    return folder


# ---- files


def write_sparse(path: Path, declared: Declared, filled: Mapping[str, np.ndarray]) -> Path:
    """A safetensors file of full size whose data are holes that read as zeros, save the tensors in `filled`."""
    header, at = {}, 0
    for name, (dtype, shape) in sorted(declared.items(), key=lambda item: -DTYPES[item[1][0]].bits):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + _nbytes(dtype, shape)]}
        at += _nbytes(dtype, shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        for name, array in filled.items():
            if name in header:
                os.pwrite(file.fileno(), array.tobytes(), 8 + len(text) + header[name]["data_offsets"][0])
    return path


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].bits // 8


def _values(declared: Declared, seed: int, vocabulary: tuple[np.ndarray, np.ndarray] | None) -> dict[str, np.ndarray]:
    rng, values = np.random.default_rng(seed), {}
    for name, (dtype, shape) in declared.items():
        if dtype in ("I64", "BOOL"):
            values[name] = vocabulary[dtype == "BOOL"]
        elif len(shape) == 1:
            values[name] = np.exp(0.1 * rng.standard_normal(shape, np.float32))
        else:
            values[name] = rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[1]))
    return values


def stored(values: Mapping[str, np.ndarray], dtype: str) -> Iterator[tuple[str, str, tuple[int, ...], list[np.ndarray]]]:
    """Values as `write_safetensors` and `write_checkpoint` take them: float32 as `dtype`, the rest as it is."""
    for name, value in values.items():
        if value.dtype == np.float32:
            yield name, dtype, value.shape, [bfloat16_bits(value) if dtype == "BF16" else value.astype(DTYPES[dtype].numpy)]
        else:
            yield from entries({name: value})
