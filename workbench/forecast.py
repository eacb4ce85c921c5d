"""What each engine will make of a drafter: boundaries it captures, embedding, head, map and norms it uses, defaults it takes, launch line.

Notable: engines read different keys of one config and drop in silence what they do not know (read in the source of vLLM 0.32 and 0.33,
SGLang 0.5.23, speculators 0.9.0 and TensorRT-LLM of 2026; targets.py holds what the converter must refuse). Id k is boundary h_k in vLLM
and speculators, the output of layer k (h_(k+1)) in SGLang and TensorRT-LLM; vLLM's V2 runner reads ids at the top level only, SGLang only
those under `eagle_config`, TensorRT-LLM none at all. Engines join states in the order of layers. Headers, config and a few rows are read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier
from workbench.errors import InputError
from workbench.shards import collector_paused
from workbench.targets import ADDS_ONE_TO_ONE

REFUSED = "nothing: "  # begins the line among the defaults that says why an engine stops
ENGINES = ("vllm-v1", "vllm-v2", "sglang", "tensorrt-llm", "speculators")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NEEDS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}  # what a flag is worth nothing without
SGLANG_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")  # it picks the class by `architectures`, vLLM by the method
IDS = "eagle_aux_hidden_state_layer_ids"
TOKENS = 3  # drafted at a time where the config does not say
SAMPLE = 64  # embedding rows compared
DIFFERENT = ("boundaries", "embedding", "head", "map", "norms")


def forecast(drafter: str | Path | DrafterCheckpoint, verifier: str | Path | VerifierCheckpoint) -> dict[str, Any]:
    """{"engines": {engine: {boundaries, embedding, head, map, norms, ignored, defaults_taken, launch}}}.

    boundaries: h_k in the order of fc's blocks, None where the engine cannot read the checkpoint. norms: each flag as the engine applies
    it. ignored: tensors and keys that it drops.
    Raises InputError when drafter and verifier do not belong together.
    """
    with collector_paused():
        d = drafter if isinstance(drafter, DrafterCheckpoint) else open_drafter(drafter)
        m = verifier if isinstance(verifier, VerifierCheckpoint) else open_verifier(verifier)
    if not m.layers or (m.hidden and d.ht and m.hidden != d.ht):
        raise InputError(
            f"{d.location} was made for a verifier of width {d.ht}, {m.location} has width {m.hidden} and {m.layers} layers: give its own"
        )
    own = _own_embedding(d, m)
    return {"engines": {engine: _engine(engine, d, m, own) for engine in ENGINES}}


def refusals(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Why each engine that cannot load the drafter stops. engines: of a forecast."""
    stuck = {name: told["defaults_taken"] for name, told in engines.items() if told["boundaries"] is None}
    return {name: next(line for line in lines if line.startswith(REFUSED)).removeprefix(REFUSED) for name, lines in stuck.items()}


def _engine(engine: str, d: DrafterCheckpoint, m: VerifierCheckpoint, own: str) -> dict[str, Any]:
    defaults: list[str] = []
    norms = _norms(engine, d, defaults)
    reason = _unreadable(engine, d, norms)
    defaults += [f"{REFUSED}{reason}"] if reason else []
    boundaries = None if reason else _boundaries(engine, d, m, defaults)
    ignored = [disk for canonical, disk in d.names.items() if ignores(engine, canonical, d, norms)]
    known = set(d.names.values())
    ignored += [name for name in d.tensors if name not in known]
    ignored += [key for key, used in _keys(d, engine) if not used]
    return {
        "boundaries": boundaries,
        "embedding": _embedding(engine, d, m, own),
        "head": _head(engine, d, m, defaults),
        "map": _map(engine, d, m, defaults),
        "norms": norms,
        "ignored": ignored,
        "defaults_taken": defaults,
        "launch": _launch(engine, d, m),
    }


# ---- what it cannot load at all


def _unreadable(engine: str, d: DrafterCheckpoint, norms: Mapping[str, bool]) -> str | None:
    """Why an engine stops at the checkpoint; None when it loads it."""
    if engine == "sglang" and speculators_config(d):
        return "SGLang has no reader for a speculators config; write one with `workbench convert --to sglang`"
    listed = d.config.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else None
    if engine == "sglang" and named not in SGLANG_CLASSES:
        return f"`architectures` names {named}, where SGLang wants {SGLANG_CLASSES[0]}; `workbench convert --to sglang` writes it"
    canonical = {disk: name for name, disk in d.names.items()}
    stop = next((disk for disk in d.tensors if refuses(engine, disk, canonical.get(disk), norms)), None)
    return f"vLLM stops at {stop}, for which its model has no place; take it out, or set the flag that it belongs to" if stop else None


def refuses(engine: str, disk: str, canonical: str | None, norms: Mapping[str, bool]) -> bool:
    """Whether an engine stops at a tensor that its model has no place for. vLLM does; others drop it in silence."""
    unknown = canonical is None and not any(part in disk for part in ("t2d", "d2t", "mask_hidden", "rotary_emb"))
    return engine.startswith("vllm") and (unknown or ((canonical or "").startswith("fc_norm.") and not norms["fc_norm"]))


# ---- boundaries


def _block(d: DrafterCheckpoint, name: str) -> Mapping[str, Any]:
    block = d.config.get(name)
    return block if isinstance(block, Mapping) else {}


def speculators_config(d: DrafterCheckpoint) -> bool:
    """Whether config.json is one of speculators' own."""
    return "speculators_model_type" in d.config


def _keys(d: DrafterCheckpoint, engine: str) -> list[tuple[str, bool]]:
    """Keys with tap ids, and the two flags that engines differ about, each with whether this engine reads it."""
    vllm, sglang, speculators = engine.startswith("vllm"), engine == "sglang", engine == "speculators"
    found = {
        IDS: (d.config.get(IDS), vllm or (speculators and speculators_config(d))),
        f"eagle_config.{IDS}": (_block(d, "eagle_config").get(IDS), sglang or (engine == "vllm-v1" and d.config.get(IDS) is None)),
        "aux_hidden_states_layer_ids": (d.config.get("aux_hidden_states_layer_ids"), False),
        "norm_before_residual": (d.config.get("norm_before_residual") or None, not sglang and engine != "tensorrt-llm"),
    }
    return [(key, used) for key, (value, used) in found.items() if value is not None]


def _boundaries(engine: str, d: DrafterCheckpoint, m: VerifierCheckpoint, defaults: list[str]) -> list[int]:
    n = m.layers
    usual = [2, n // 2, n - 3]
    top, nested = (_ids(ids, d) for ids in (d.config.get(IDS), _block(d, "eagle_config").get(IDS)))
    if engine == "sglang":
        family = str(m.setting("model_type") or "")
        if nested is None:
            defaults.append(f"boundaries {usual}: no ids under eagle_config")
            return usual
        shift = 1 if not family.startswith(ADDS_ONE_TO_ONE) or nested[0] == 1 else 0
        return sorted(i + shift for i in nested)
    if engine == "tensorrt-llm":
        defaults.append(f"boundaries {usual}: no ids are read from a checkpoint; eagle3_layers_to_capture (outputs of layers) sets others")
        return usual
    read = top if engine != "vllm-v1" or top is not None else nested
    if engine == "speculators" and not speculators_config(d):
        read = None
    if read is not None:
        return read if engine == "speculators" else sorted(read)
    if engine == "speculators":
        why = "only ids in a config of speculators' own are read"
    else:
        why = "no ids at the top level" + (" (those under eagle_config are not read)" if nested is not None else "")
    defaults.append(f"boundaries {usual}: {why}")
    return usual


def _ids(ids: Any, d: DrafterCheckpoint) -> list[int] | None:
    if ids is not None and (not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids)):
        raise InputError(f"{d.location}: tap ids are {ids!r}: expected a list of layer numbers such as [2, 30, 58]; mend the config")
    return ids


# ---- norms


def _norms(engine: str, d: DrafterCheckpoint, defaults: list[str]) -> dict[str, bool]:
    """The four flags as the engine applies them."""
    top, nested = d.config, _block(d, "eagle_config")
    norms = {flag: bool(top.get(flag)) for flag in FLAGS}
    if engine == "sglang" or engine.startswith("vllm"):
        norms["norm_before_fc"] = bool(nested.get("norm_before_fc", top.get("norm_before_fc")))
    if engine.startswith("vllm") and speculators_config(d) and "norm_before_residual" not in top:
        norms["norm_before_residual"] = True
        defaults.append("norm_before_residual True: the key is missing from a speculators config")
    if engine == "sglang":
        norms["norm_before_residual"] = False
        norms["fc_norm"] = bool(top.get("fc_norm") or top.get("use_aux_norm"))
    if engine == "tensorrt-llm":
        norms["norm_before_residual"] = False
        norms["norm_before_fc"] = bool(nested.get("norm_before_fc"))
        norms["norm_output"] = bool(top.get("norm_output") or nested.get("return_hidden_post_norm"))
    if d.mla and engine != "speculators":
        norms["norm_before_fc"] = False
    for flag, tensor in NEEDS.items():
        if norms[flag] and tensor not in d.names:
            defaults.append(f"{flag} with weights of ones: the flag is set and there is no {tensor}")
    return norms


# ---- tensors


def ignores(engine: str, canonical: str, d: DrafterCheckpoint, norms: Mapping[str, bool]) -> bool:
    """Whether an engine drops a tensor that the drafter has."""
    if canonical == "t2d":
        return engine != "speculators"
    if canonical == "embed_tokens.weight":
        return engine in ("sglang", "tensorrt-llm") and d.h == d.ht
    if canonical == "input_norm.weight":
        return not norms["norm_before_fc"]
    if canonical.startswith("fc_norm."):
        return not norms["fc_norm"]
    if engine == "sglang":
        later = canonical.endswith("input_layernorm.weight") and not canonical.startswith("layers.0.")  # it wants hidden_norm there
        return later or canonical.endswith(("_proj.bias", "q_norm.weight", "k_norm.weight"))
    return False


def _own_embedding(d: DrafterCheckpoint, m: VerifierCheckpoint) -> str:
    """none, equal or own: by rows spread over the vocabulary, as the verifier's would be stored in the drafter's type."""
    if "embed_tokens.weight" not in d.names:
        return "none"
    rows, width = d.info("embed_tokens.weight").shape
    if "embed_tokens.weight" not in m.names or m.info("embed_tokens.weight").shape[1] != width:
        return "own"
    at = np.unique(np.linspace(0, min(rows, m.info("embed_tokens.weight").shape[0]) - 1, SAMPLE).astype(np.int64))
    own, theirs = (x.array("embed_tokens.weight", at).astype(np.float32) for x in (d, m))
    return "equal" if np.allclose(own, theirs, rtol=2**-7, atol=1e-6) else "own"


def _embedding(engine: str, d: DrafterCheckpoint, m: VerifierCheckpoint, own: str) -> str:
    if own != "none" and not ignores(engine, "embed_tokens.weight", d, dict.fromkeys(FLAGS, False)):
        return "own" if own == "own" else "verifier's (the own one is equal)"
    return "verifier's" if own != "own" else "verifier's (the own one is dropped, though it differs)"


def _head(engine: str, d: DrafterCheckpoint, m: VerifierCheckpoint, defaults: list[str]) -> str:
    if engine == "sglang" and d.config.get("draft_vocab_size") is None:
        if "draft_vocab_size" not in d.config:
            defaults.append("none: the config has no draft_vocab_size, which SGLang needs to be there")
        return "verifier's (draft_vocab_size is null or missing)"
    if "lm_head.weight" in d.names:
        return "own"
    if engine == "speculators":
        return "verifier's rows of t2d"
    if engine == "sglang":
        defaults.append("head of whatever was in memory: no lm_head.weight, and draft_vocab_size is set, so SGLang shares none")
        return "uninitialised"
    said = f"verifier's, first {d.k} rows" if d.k and m.vocab and d.k < m.vocab else "verifier's"
    defaults.append(f"head {said}: no lm_head.weight")
    return said


def _map(engine: str, d: DrafterCheckpoint, m: VerifierCheckpoint, defaults: list[str]) -> str:
    full = d.k is not None and d.k >= (d.v or m.vocab or 0)
    if engine == "speculators" and not full and not {"d2t", "t2d"} <= set(d.names):
        defaults.append("map: speculators wants d2t and t2d, one is missing; it builds the teacher from t2d")
    if "d2t" in d.names:
        return "none needed (full vocabulary)" if full else "d2t, offsets"
    if full:
        return "none needed (full vocabulary)"
    defaults.append(f"map: no d2t, so row i is read as token i, the first {d.k} ids")
    return f"identity: first {d.k} ids"


# ---- launch lines


def _launch(engine: str, d: DrafterCheckpoint, m: VerifierCheckpoint) -> str:
    tokens = d.setting("speculative_tokens") or TOKENS
    if engine.startswith("vllm"):
        runner = f"VLLM_USE_V2_MODEL_RUNNER={int(engine == 'vllm-v2')} "
        settings = {"method": "eagle3", "model": d.location, "num_speculative_tokens": tokens, "draft_tensor_parallel_size": 1}
        return f"{runner}vllm serve {m.location} --speculative-config '{json.dumps(settings)}'"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {m.location} --speculative-algorithm EAGLE3 --speculative-draft-model-path "
            f"{d.location} --speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
    if engine == "tensorrt-llm":
        return (
            f"trtllm-serve {m.location} --extra_llm_api_options eagle3.yaml  # speculative_config: {{decoding_type: Eagle, "
            f"max_draft_len: {tokens}, speculative_model_dir: {d.location}}}"
        )
    first = "" if speculators_config(d) else f"workbench convert {d.location} --to speculators --verifier {m.location} --out OUT && "
    return f"{first}speculators train --from-pretrained {'OUT' if first else d.location}"


def differences(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The fields in which engines differ, each with a sentence."""
    found = {}
    for name in DIFFERENT:
        groups: dict[str, list[str]] = {}
        for engine, told in engines.items():
            said = _applied(told) if name == "norms" else "cannot read it" if told[name] is None else str(told[name])
            groups.setdefault(said, []).append(engine)
        if len(groups) > 1:
            found[name] = f"{name}: " + "; ".join(f"{said} in {', '.join(who)}" for said, who in groups.items())
    return found


def _applied(told: Mapping[str, Any]) -> str:
    return ", ".join(flag for flag, on in told["norms"].items() if on) or "none beyond the usual"


def forecast_text(result: Mapping[str, Any]) -> str:
    """The forecast as lines for people, differences first."""
    lines = [f"engines differ in {line}" for line in differences(result["engines"]).values()] or ["all engines read this checkpoint alike"]
    for engine, told in result["engines"].items():
        lines += [f"\n{engine}"] + [f"  {name:<11} {told[name]}" for name in DIFFERENT[:-1]] + [f"  norms       {_applied(told)}"]
        lines += [f"  ignored     {', '.join(told['ignored'][:8])}"] if told["ignored"] else []
        lines += [f"  default     {line}" for line in told["defaults_taken"]] + [f"  launch      {told['launch']}"]
    return "\n".join(lines)
