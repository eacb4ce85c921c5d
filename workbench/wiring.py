"""Every tensor of a drafter against what is expected of it, and what each consumer does with it. From headers and config alone.

Notable: consumers are our own module, the engines of forecast.py, and `finetune-from`: a trainer that copies weights under new names and
leaves out d2t and t2d, as speculators users do by hand. A tensor that is expected and absent is a row too, without a name on disk.
"""

import re
from typing import Any

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint
from workbench.forecast import ENGINES, forecast, ignores, refuses, speculators_config

CONSUMERS = ("workbench", *ENGINES, "finetune-from")
ROLES = {
    "fc.weight": "joins the taps",
    "input_norm.weight": "norm over the joined taps",
    "norm.weight": "final norm",
    "lm_head.weight": "head",
    "embed_tokens.weight": "embedding",
    "d2t": "draft row to token, as an offset",
    "t2d": "marks the tokens that have a row",
}
PARTS = {
    "input_layernorm": "norm of the embedding (later layers: of the state)",
    "hidden_norm": "norm of the state",
    "post_attention_layernorm": "norm before the MLP",
    "self_attn": "attention",
    "mlp": "MLP",
}


def expected(d: DrafterCheckpoint) -> dict[str, tuple[int | None, ...]]:
    """Canonical names and shapes that config and sizes ask for; None for a size that nothing tells."""
    h, ht, k, v = d.h, d.ht, d.k, d.v
    heads, kv_heads, width, inner = (d.setting(n) for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
    taps = d.taps.count or len(d.taps.ids or (0, 0, 0))
    shapes: dict[str, tuple[int | None, ...]] = {"fc.weight": (h, taps * ht if ht else None)}
    if d.setting("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * ht if ht else None,)
    if d.setting("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (ht,) for i in range(taps)}
    for i in range(max(d.layers, 1)):
        layer, inputs = f"layers.{i}.", (h * 2 if h and i == 0 else h)
        attention = _latent(d, inputs) if d.mla else _grouped(heads, kv_heads, width, h, inputs)
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, h) for name in ("gate", "up")} | {f"{layer}mlp.down_proj.weight": (h, inner)}
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if i == 0 else ()))
        shapes |= {f"{layer}{name}.weight": (h,) for name in norms}
    shapes |= {"norm.weight": (h,), "lm_head.weight": (k, h), "embed_tokens.weight": (v, h)}
    return shapes | ({"d2t": (k,), "t2d": (v,)} if k != v else {})


def _product(*sizes: int | None) -> int | None:
    total = 1
    for size in sizes:
        if size is None:
            return None
        total *= size
    return total


def _grouped(heads: int | None, kv_heads: int | None, width: int | None, h: int | None, inputs: int | None) -> dict[str, Any]:
    q, kv = _product(heads, width), _product(kv_heads, width)
    return {"q_proj": (q, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs), "o_proj": (h, q)}


def _latent(d: DrafterCheckpoint, inputs: int | None) -> dict[str, Any]:
    heads, q_rank, kv_rank, plain, turned, value = (
        d.setting(n) for n in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    head = plain + turned if plain is not None and turned is not None else None
    low = {"q_a_proj": (q_rank, inputs), "q_a_layernorm": (q_rank,), "q_b_proj": (_product(heads, head), q_rank)}
    return {
        **(low if q_rank is not None else {"q_proj": (_product(heads, head), inputs)}),
        "kv_a_proj_with_mqa": (kv_rank + turned if kv_rank and turned else None, inputs),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (_product(heads, plain + value if plain and value else None), kv_rank),
        "o_proj": (d.h, _product(heads, value)),
    }


def table(d: DrafterCheckpoint, m: VerifierCheckpoint) -> list[dict[str, Any]]:
    """One row a tensor: name (None: absent), canonical (None: unknown), role, shape, expected, fits, dtype, and `consumers`.

    consumers: {consumer: loaded | renamed | ignored | missing | initialised | shared | refused}; missing is taken for granted as something
    else, initialised is made anew, shared is the verifier's. Raises InputError as `forecast` does.
    """
    told = forecast(d, m)["engines"]
    wanted, canonical_of = expected(d), {disk: name for name, disk in d.names.items()}
    rows = []
    for name, info in d.tensors.items():
        canonical = canonical_of.get(name)
        want = wanted.get(canonical) if canonical else None
        rows.append(
            {
                "name": name,
                "canonical": canonical,
                "role": role(canonical),
                "shape": list(info.shape),
                "expected": list(want) if want else None,
                "fits": _fits(info.shape, want),
                "dtype": info.dtype,
                "consumers": {c: _found(c, name, canonical, d, told) for c in CONSUMERS},
            }
        )
    for canonical, want in wanted.items():
        if canonical not in d.names:
            absent = {"name": None, "canonical": canonical, "role": role(canonical), "shape": None, "expected": list(want), "fits": None}
            rows.append({**absent, "dtype": None, "consumers": {c: _absent(c, canonical, d) for c in CONSUMERS}})
    return rows


def role(canonical: str | None) -> str:
    """What a tensor does, in words."""
    if canonical is None:
        return "unknown"
    if canonical.startswith("fc_norm."):
        return f"norm of tap {canonical.split('.')[1]}"
    layer = re.match(r"layers\.(\d+)\.(\w+)", canonical)
    return f"layer {layer[1]}: {PARTS.get(layer[2], layer[2])}" if layer else ROLES.get(canonical, canonical)


def _fits(shape: tuple[int, ...], want: tuple[int | None, ...] | None) -> bool | None:
    """Whether a shape is the expected one where that is known; None for a tensor that nothing asks for."""
    return None if want is None else len(shape) == len(want) and all(b is None or a == b for a, b in zip(shape, want, strict=True))


def _found(consumer: str, disk: str, canonical: str | None, d: DrafterCheckpoint, told: dict[str, Any]) -> str:
    if consumer in told and refuses(consumer, disk, canonical, told[consumer]["norms"]):
        return "refused"
    if canonical is None:
        return "ignored"
    if consumer == "finetune-from" and canonical in ("d2t", "t2d"):
        return "ignored"
    if consumer in told and ignores(consumer, canonical, d, told[consumer]["norms"]):
        return "ignored"
    midlayer = canonical.replace("layers.0.", "midlayer.")
    own = {"tensorrt-llm": midlayer, "sglang": midlayer if d.mla else canonical}
    return "loaded" if disk == own.get(consumer, canonical) or canonical in ("d2t", "lm_head.weight") else "renamed"


def _absent(consumer: str, canonical: str, d: DrafterCheckpoint) -> str:
    """What a consumer puts in the place of a tensor that it would expect."""
    trains = consumer in ("speculators", "finetune-from")
    if canonical == "embed_tokens.weight":
        return "initialised" if trains else "shared"
    if canonical == "lm_head.weight":
        sized = consumer == "sglang" and d.config.get("draft_vocab_size") is not None
        return "missing" if consumer == "workbench" or sized else "initialised" if trains else "shared"
    if canonical == "t2d":
        return "missing" if consumer == "speculators" and speculators_config(d) else "ignored"
    return "initialised" if consumer == "finetune-from" and canonical != "d2t" else "missing"
