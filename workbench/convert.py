"""Write a drafter in another tool's dialect: names, what is stored beside the layers, and the config that the tool really reads.

Notable:
* No number changes; what the tool cannot express is refused (targets.py).
* Tap ids have two meanings and two places. At the top level, where vLLM and speculators look, id k is boundary h_k; under `eagle_config`,
  where SGLang and SpecForge look, id i is the output of layer i, h_(i+1). Folders for engines carry both, so that one serves in both.
* Rope stands in three spellings (`rope_parameters`, `rope_theta`, `rope_scaling`), because each reader knows one of them.
* speculators takes its teacher from the verifier's path in the config, and the embedding from the file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier, write_checkpoint
from workbench.errors import InputError
from workbench.mapping import VocabMap
from workbench.runs import atomic_folder, check_destination, sha256_flushed
from workbench.targets import TARGETS, Facts, Target, check
from workbench.weights import stored_pieces

SPECULATORS = "0.9.0"  # the version whose config is written
TOKENS = 3  # drafted at a time where the drafter's config does not say
# settings that are written anew, or that mean nothing outside the dialect they come from; all others are kept
REWRITTEN = {
    *("architectures", "model_type", "auto_map", "transformers_version", "tap_ids", "target_model_type", "verifier", "speculative_tokens"),
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_hidden_layers"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_norm", "layer_types", "sliding_window", "torch_dtype"),
    *("use_sliding_window", "max_window_layers", "speculators_model_type", "speculators_version", "embed_requires_grad", "dtype"),
    *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular"),
    *("parallel_draft_step", "num_aux_hidden_states", "tie_word_embeddings", "bias"),
}


def convert(
    drafter: str | Path | DrafterCheckpoint,
    to: str,
    *,
    verifier: str | Path | VerifierCheckpoint,
    out: str | Path,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write `drafter` for a tool (a name of TARGETS) into the new folder `out`; returns from, to, boundaries, renamed, notes, out, sha256.

    Raises InputError, with nothing written, for what the tool cannot express.
    """
    out = check_destination(Path(out))
    if to not in TARGETS:
        raise InputError(f"unknown target --to {to!r}: expected one of {', '.join(TARGETS)}")
    source = drafter if isinstance(drafter, DrafterCheckpoint) else open_drafter(drafter)
    model = verifier if isinstance(verifier, VerifierCheckpoint) else open_verifier(verifier)
    target, facts = TARGETS[to], check(source, model, TARGETS[to])
    names = {name: _name(name, source, target) for name in source.names}
    with atomic_folder(out) as folder:
        tensors = _entries(source, model, target, facts, names, progress)
        (weights,) = write_checkpoint(folder, tensors, written_config(source, model, target, facts))
        digest = sha256_flushed(weights)
    return {
        "from": source.dialect,
        "to": to,
        "boundaries": list(facts.boundaries),
        "renamed": sum(names[name] != disk for name, disk in source.names.items()),
        "notes": list(facts.notes),
        "out": str(out),
        "sha256": digest,
    }


def _name(canonical: str, source: DrafterCheckpoint, target: Target) -> str:
    """The tool's name of a tensor; `layers.{i}` is read wherever more than one layer is."""
    if target.name in ("speculators", "modelopt") or source.layers > 1:
        return canonical
    return canonical.replace("layers.0.", "midlayer.")


def _vocabulary(source: DrafterCheckpoint, model: VerifierCheckpoint, facts: Facts) -> int:
    """V as the tool must be told: rows of the verifier's head, which may be padded, unless an embedding of its own says otherwise."""
    return source.info("embed_tokens.weight").shape[0] if facts.keeps_embedding else model.vocab


def _entries(
    source: DrafterCheckpoint,
    model: VerifierCheckpoint,
    target: Target,
    facts: Facts,
    names: dict[str, str],
    progress: Callable[[str], None],
) -> Iterator[tuple]:
    """Every tensor for the writer: the drafter's under new names, the map anew, the verifier's embedding where the tool wants one."""
    left_out = {"d2t", "t2d"} | (set() if facts.keeps_embedding else {"embed_tokens.weight"})
    for canonical, disk in source.names.items():
        if canonical not in left_out:
            info = source.tensors[disk]
            progress(disk if disk == names[canonical] else f"{disk} -> {names[canonical]}")
            yield names[canonical], info.dtype, info.shape, stored_pieces(source.place, info)
    if target.embedding == "saved" and not facts.keeps_embedding:
        info = model.info("embed_tokens.weight")
        yield "embed_tokens.weight", info.dtype, info.shape, stored_pieces(model.place, info)
    placed = VocabMap(facts.vocab_map.ids, _vocabulary(source, model, facts))
    if placed.k < placed.v or target.name == "specforge":  # SpecForge wants both even for a full vocabulary, vLLM fails on them
        yield "d2t", "I64", (placed.k,), [placed.d2t]
        if target.t2d:
            yield "t2d", "BOOL", (placed.v,), [placed.t2d]


# ---- config


def written_config(source: DrafterCheckpoint, model: VerifierCheckpoint, target: Target, facts: Facts) -> dict[str, Any]:
    """The whole config.json for a tool."""
    layer = _layer(source, _vocabulary(source, model, facts), target, facts)
    if target.name == "speculators":
        return _speculators_config(source, model, facts, layer)
    config = {"architectures": [_architecture(source, target, facts)], **layer, "draft_vocab_size": facts.vocab_map.k}
    if source.ht != source.h:
        config["target_hidden_size"] = source.ht  # left out otherwise: SGLang takes any value that is there, even null
    config |= {flag: value for flag, value in facts.flags.items() if flag in target.can}
    if "top" in target.ids:
        config["eagle_aux_hidden_state_layer_ids"] = list(facts.boundaries)
    if "nested" in target.ids:
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in facts.boundaries],
        }
    if target.name == "modelopt":
        config["eagle_config"] |= {
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        }
    return config


def _architecture(source: DrafterCheckpoint, target: Target, facts: Facts) -> str:
    if source.mla:
        return "Eagle3DeepseekV2ForCausalLM"
    if facts.qk_norm:
        return "Eagle3Qwen3ForCausalLM"
    return "LlamaForCausalLM" if target.name == "eagle" else "LlamaForCausalLMEagle3"


def _layer(source: DrafterCheckpoint, v: int, target: Target, facts: Facts) -> dict[str, Any]:
    """The part that a plain transformers config holds: sizes, norms, rope in every spelling, window."""
    kept = {name: setting.value for name, setting in source.settings.items() if name not in REWRITTEN}
    if source.mla and source.settings["head_dim"].source.startswith("default"):
        del kept["head_dim"]  # latent attention has head sizes of its own
    theta, scaling, partial = (source.setting(name) for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"))
    rotated = {"partial_rotary_factor": partial} if partial != 1.0 else {}
    layer = {
        "model_type": source.setting("model_type") if source.mla else "qwen3" if facts.qk_norm else "llama",
        **kept,
        "vocab_size": v,
        "num_hidden_layers": source.layers,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta, **rotated},
        "rope_theta": theta,
        **({"rope_scaling": scaling} if scaling else {}),
        **rotated,
        "tie_word_embeddings": False,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16"}.get(source.info("norm.weight").dtype, "float32"),
    }
    if facts.window is not None and target.name != "sglang":
        layer |= {"sliding_window": facts.window, "use_sliding_window": True, "layer_types": source.setting("layer_types")}
    elif target.name == "speculators":
        layer["layer_types"] = ["full_attention"] * source.layers
    return layer


def _speculators_config(source: DrafterCheckpoint, model: VerifierCheckpoint, facts: Facts, layer: dict[str, Any]) -> dict[str, Any]:
    tokens = source.setting("speculative_tokens") or TOKENS
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": facts.vocab_map.k,
        **facts.flags,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(facts.boundaries),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": model.location, "architectures": model.config.get("architectures") or []},
        },
        "transformer_layer_config": layer,
        "dtype": layer["torch_dtype"],
    }
