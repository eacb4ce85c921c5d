"""What each tool can express of a drafter, and the reason for what it cannot.

Notable: a tool that cannot express a thing drops it in silence: SGLang ignores tensors and flags that it does not know, speculators'
converter drops norms with a warning. Each entry was read in the tool's source (vLLM 0.32 and 0.33, SGLang 0.5.23, speculators 0.9.0,
SpecForge 0.2.0, ModelOpt and EAGLE of 2026); the plain drafter that all of them take has one layer of Llama's kind, three ascending taps,
a sorted map, and no norm but the usual ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint
from workbench.errors import InputError
from workbench.initialise import CHUNK
from workbench.mapfiles import map_from_tensors
from workbench.mapping import VocabMap
from workbench.weights import narrow, widen


class Target(NamedTuple):
    """A tool. can: features beyond the plain drafter. ids: where tap ids go. embedding: saved always, kept when own, or dropped."""

    name: str
    title: str
    can: frozenset[str]
    ids: tuple[str, ...]
    embedding: str
    t2d: bool = True


_NORMS = {"norm_before_fc", "fc_norm", "norm_output"}
_RICH = _NORMS | {"norm_before_residual", "layers", "bias", "qk_norm", "window", "taps"}
TARGETS = {
    t.name: t
    for t in (
        Target("eagle", "EAGLE", frozenset(), ("top",), "dropped"),
        Target("sglang", "SGLang", frozenset(_NORMS | {"mla", "unsorted", "window", "taps"}), ("top", "nested"), "dropped"),
        Target("vllm", "vLLM", frozenset(_RICH | {"mla", "unsorted"}), ("top", "nested"), "kept"),
        Target("speculators", "speculators", frozenset(_RICH), ("top",), "saved"),
        Target("specforge", "SpecForge", frozenset({"fc_norm"}), ("nested",), "dropped"),
        Target("modelopt", "ModelOpt", frozenset({"layers", "mla", "taps", "unsorted"}), ("nested",), "dropped", t2d=False),
    )
}
REASONS = {
    "norm_before_residual": "it knows no norm_before_residual and always adds the state before the norm",
    "norm_before_fc": "it has no norm over the joined taps (input_norm.weight) and would leave it out",
    "fc_norm": "it has no norm on each tap (fc_norm) and would leave it out",
    "norm_output": "it always recycles the state before the final norm, and this drafter was trained on the state after it",
    "layers": "it takes a single layer in the form that others write (the norms of further layers have other names there)",
    "mla": "it knows Llama's attention only, and this drafter has DeepSeek's",
    "bias": "it has no biases in the attention's projections",
    "qk_norm": "it has no norms on queries and keys and would leave them out",
    "window": "its config has no sliding window, and this drafter was trained with one",
    "taps": "it takes three taps only",
    "unsorted": "its teacher's rows are in ascending order of ids, these are not: sort them with `workbench remap DRAFTER --to DRAFTER`",
}
ADDS_ONE_TO_ONE = ("deepseek", "kimi_k2", "glm4_moe_lite")  # verifiers for which SGLang adds one to tap ids only if the first is 1


@dataclass(frozen=True)
class Facts:
    """What a drafter is, as far as tools differ about it. boundaries: of its taps; window: rows, or None; flags: the four norm settings."""

    vocab_map: VocabMap
    boundaries: tuple[int, ...]
    flags: dict[str, bool]
    window: int | None
    qk_norm: bool
    keeps_embedding: bool
    notes: tuple[str, ...]


def check(source: DrafterCheckpoint, model: VerifierCheckpoint, target: Target) -> Facts:
    """The facts of a drafter for its conversion; InputError for what the target cannot express, with the reason."""
    _check_pair(source, model)
    vocab_map = map_from_tensors(*source.map_raw(), source.k, source.v, source.location)
    if (model.vocab or 0) < vocab_map.v:
        raise InputError(
            f"{source.location} has a target vocabulary of {vocab_map.v}, {model.location} has {model.vocab} rows: give its own verifier"
        )
    flags = {
        "norm_before_residual": bool(source.setting("norm_before_residual")),
        "norm_before_fc": "input_norm.weight" in source.names,
        "fc_norm": "fc_norm.0.weight" in source.names,
        # what SpecForge calls norm_output is the final norm before the head, which every drafter has
        "norm_output": bool(source.setting("norm_output")) and source.dialect != "specforge",
    }
    window = source.setting("sliding_window") if "sliding_attention" in (source.setting("layer_types") or []) else None
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in source.names)
    boundaries = source.taps.boundaries(model.layers)
    present = {
        **flags,
        "layers": source.layers > 1,
        "mla": source.mla,
        "bias": any(name.endswith("_proj.bias") for name in source.names),
        "qk_norm": qk_norm,
        "window": window is not None,
        "taps": len(boundaries) != 3,
        "unsorted": not vocab_map.is_sorted,
    }
    lacking = [feature for feature, has in present.items() if has and feature not in target.can]
    if source.mla and flags["norm_before_fc"]:
        lacking.append("norm_before_fc")  # vLLM's and SGLang's DeepSeek drafters have no input_norm
    if lacking:
        raise InputError(f"{source.location} cannot be written for {target.title}: {REASONS[lacking[0]]}")
    if target.name == "speculators" and source.h != source.ht:
        raise InputError(
            f"{source.location} cannot be written for speculators: it wants drafters as wide as the verifier ({source.ht}), this one is "
            f"{source.h} wide"
        )
    _check_boundaries(source, model, target, boundaries)
    notes = []
    if target.name == "sglang" and window is not None:
        notes.append(f"SGLang reads no window from the config: serve with --speculative-draft-window-size {window}")
    keeps = _keeps_embedding(source, model, target)
    if "embed_tokens.weight" in source.names and not keeps:
        notes.append("own embedding left out: it equals the verifier's, which is used")
    return Facts(vocab_map, boundaries, flags, window, qk_norm, keeps, tuple(notes))


def _check_pair(source: DrafterCheckpoint, model: VerifierCheckpoint) -> None:
    """The verifier is the drafter's, and the drafter has nothing that no tool knows."""
    if "lm_head.weight" not in source.names:
        raise InputError(f"{source.location} has no lm_head.weight: expected a drafter with a head of its own; export it with one")
    if model.hidden != source.ht or not model.layers:
        raise InputError(
            f"{source.location} was made for a verifier of width {source.ht}, {model.location} has width {model.hidden} and {model.layers} "
            "layers: give the drafter's own verifier"
        )
    odd = {source.names[name] for name in ("fc.bias", "lm_head.bias") if name in source.names}
    unknown = sorted((set(source.tensors) - set(source.names.values())) | odd)
    if unknown:
        raise InputError(
            f"{source.location} holds {', '.join(unknown[:3])}, which no EAGLE-3 tool reads: expected a drafter without them; remove them"
        )


def _check_boundaries(source: DrafterCheckpoint, model: VerifierCheckpoint, target: Target, taps: tuple[int, ...]) -> None:
    where, n = f"{source.location} is fed boundaries {list(taps)}", model.layers
    if any(not 0 <= b <= n for b in taps) or len(set(taps)) < len(taps):
        raise InputError(f"{where}, but {model.location} has {n} layers: expected distinct ones of 0..{n}; give the drafter's own verifier")
    if target.name == "eagle" and taps != (2, n // 2, n - 3):
        raise InputError(f"{where}, and EAGLE always takes [2, {n // 2}, {n - 3}] of {n} layers: it cannot be written for EAGLE")
    if target.name in ("sglang", "vllm") and list(taps) != sorted(taps):
        raise InputError(
            f"{where}, and {target.title} joins states in the order of layers whatever the config says: it cannot be served there"
        )
    if target.name == "sglang" and (taps[0] == 0 or taps[-1] == n):
        raise InputError(f"{where}, and SGLang captures states between layers only, h_1 .. h_{n - 1}: it cannot be served there")
    family = str(model.setting("model_type") or "")
    if target.name == "sglang" and family.startswith(ADDS_ONE_TO_ONE) and taps[0] != 2:
        raise InputError(
            f"{where}, and for a {family} verifier SGLang adds one to tap ids only when the first is 1, so these would be read differently "
            "elsewhere: serve it in vLLM, or train with boundaries that begin at h_2"
        )


def _keeps_embedding(source: DrafterCheckpoint, model: VerifierCheckpoint, target: Target) -> bool:
    """Whether the drafter's own embedding goes into the result; InputError where a trained one would be lost."""
    own = "embed_tokens.weight" in source.names
    if not own or target.embedding != "dropped" or source.h != source.ht:  # of another width, every engine keeps it
        return own
    name, info = "embed_tokens.weight", source.info("embed_tokens.weight")
    for start in range(0, info.shape[0], CHUNK):
        part = slice(start, min(start + CHUNK, info.shape[0]))
        theirs = narrow(model.array(name, part).astype(np.float32), info.dtype)
        if not np.array_equal(widen(source.stored(name, part), info.dtype), widen(theirs, info.dtype)):
            raise InputError(
                f"{source.location} cannot be written for {target.title}, which always takes the verifier's embedding: this drafter has "
                "another one; train with the embedding frozen, or serve it in vLLM"
            )
    return False
