"""How others write a drafter: names of tensors, places of settings, meaning of tap ids. One table, `DIALECTS`.

Notable: a dialect is told by tensors and config keys; the `architectures` string, which public heads often get wrong, only parts dialects
that agree in everything else. Canonical names are speculators' (`layers.{i}.`). Every setting keeps the place it came from and whatever
other places say about it; a value that nobody wrote has a source that begins with "default".
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.errors import InputError
from workbench.weights import TensorInfo


@dataclass(frozen=True)
class Dialect:
    """A way to write a drafter. id_shift: a tap id plus this is the boundary it means. ids_key: where the dialect writes tap ids."""

    name: str
    layer_prefix: str  # of layer 0
    id_shift: int
    ids_key: str | None
    saves_embedding: bool
    saves_t2d: bool
    architectures: tuple[str, ...]


DIALECTS = {
    d.name: d
    for d in (
        Dialect("eagle", "midlayer.", 0, None, False, True, ("LlamaForCausalLM",)),
        Dialect("specforge", "midlayer.", 1, "eagle_config.eagle_aux_hidden_state_layer_ids", False, True, ("LlamaForCausalLMEagle3",)),
        Dialect("speculators", "layers.0.", 0, "eagle_aux_hidden_state_layer_ids", True, True, ("Eagle3Speculator", "Eagle3DraftModel")),
        Dialect(
            "modelopt",
            "layers.0.",
            1,
            "eagle_config.eagle_aux_hidden_state_layer_ids",
            False,
            False,
            ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
        ),
        Dialect("angelslim", "midlayer.", 1, "aux_hidden_states_layer_ids", False, True, ("Eagle3LlamaForCausalLM",)),
        Dialect(
            "torchspec",
            "midlayer.",
            1,
            "eagle_config.eagle_aux_hidden_state_layer_ids",
            False,
            False,
            ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
        ),
    )
}


# ---- names of tensors

_PART = re.compile(
    r"(?:.*?\.)??(?:(?:midlayer|layers)\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)"
    r"|(?P<top>fc\.(?:weight|bias)|(?:input_)?norm\.weight|fc_norm\.\d+\.weight|lm_head\.(?:weight|bias)|embed_tokens\.weight|d2t|t2d))"
)
_RENAMED = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "draft_id_to_target_id": "d2t",
}


def canonical_name(name: str) -> str | None:
    """The canonical name of a drafter's tensor, None when it is no part of an EAGLE-3 drafter."""
    if name in _RENAMED:
        return _RENAMED[name]
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return match["top"] or f"layers.{int(match['layer'] or 0)}.{match['rest']}"


def canonical_names(names: Iterable[str]) -> dict[str, list[str]]:
    """{canonical: disk names}, several where they collide. Engines take whatever contains "d2t", so that counts when no name is exact."""
    names, found = list(names), {}
    for name in names:
        canonical = canonical_name(name)
        if canonical is not None:
            found.setdefault(canonical, []).append(name)
    for part in ("d2t", "t2d"):
        loose = [name for name in names if part in name]
        if part not in found and loose:
            found[part] = loose
    return found


# ---- settings

_NESTED = ("transformer_layer_config", "text_config", "llm_config", "language_config", "eagle_config", "")
_TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids", "aux_hidden_state_layer_ids")
_ROPE_BLOCKS = ("rope_parameters", "", "rope_scaling")


class Setting(NamedTuple):
    """A value, the dotted config key it came from (or "weights (...)", "default (...)"), and what every other place says."""

    value: Any
    source: str
    also: tuple["Setting", ...] = ()

    @property
    def disagrees(self) -> bool:
        """Whether two places give different values."""
        return any(other.value != self.value for other in self.also)


def read_settings(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Every value of a config by plain name, wherever it lives: the nested place first, the top level last, all of them kept.

    Names are the config's own keys, save `tap_ids` (three spellings), `rope_theta` / `rope_scaling` / `partial_rotary_factor` (three
    places each; scaling as one dictionary with `rope_type`), `verifier` and `speculative_tokens` (speculators). Nulls count as absent.
    """
    found: dict[str, list[Setting]] = {}

    def add(key: str, value: Any, source: str) -> None:
        if value is not None:
            found.setdefault(key, []).append(Setting(value, source))

    for place in _NESTED:
        block = config.get(place) if place else config
        if not isinstance(block, Mapping):
            continue
        dot = f"{place}." if place else ""
        for key, value in block.items():
            if key in _TAP_KEYS:
                add("tap_ids", value, dot + key)
            elif not isinstance(value, Mapping) and key not in ("rope_theta", "partial_rotary_factor", *_ROPE_BLOCKS):
                add(key, value, dot + key)
        for key, value, source in _rope(block):
            add(key, value, dot + source)
    for key, value, source in _speculators(config.get("speculators_config")):
        add(key, value, source)
    return {key: Setting(first.value, first.source, tuple(rest)) for key, (first, *rest) in found.items()}


def _rope(block: Mapping[str, Any]) -> Iterable[tuple[str, Any, str]]:
    """Rope settings of one config block: (name, value, key within the block)."""
    for name in _ROPE_BLOCKS:
        rope, dot = (block.get(name), f"{name}.") if name else (block, "")
        if isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping):  # one rope a layer type
            rope, dot = rope["full_attention"], f"{dot}full_attention."
        if not isinstance(rope, Mapping):
            continue
        yield "rope_theta", rope.get("rope_theta"), f"{dot}rope_theta"
        yield "partial_rotary_factor", rope.get("partial_rotary_factor"), f"{dot}partial_rotary_factor"
        if name and (rope.get("rope_type") or rope.get("type")):
            scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor", "type")}
            yield "rope_scaling", {**scaling, "rope_type": rope.get("rope_type") or rope["type"]}, dot.rstrip(".")


def _speculators(block: Any) -> Iterable[tuple[str, Any, str]]:
    """What only speculators writes: the verifier it was trained for, and how many tokens it drafts."""
    if not isinstance(block, Mapping):
        return
    verifier = block.get("verifier")
    if isinstance(verifier, Mapping):
        yield "verifier", verifier.get("name_or_path"), "speculators_config.verifier.name_or_path"
    methods = block.get("proposal_methods")
    if isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
        yield "speculative_tokens", methods[0].get("speculative_tokens"), "speculators_config.proposal_methods.0.speculative_tokens"


DEFAULTS: dict[str, tuple[Any, str]] = {
    "rope_theta": (10000.0, "default (transformers' Llama)"),
    "rms_norm_eps": (1e-6, "default (transformers' Llama)"),
    "hidden_act": ("silu", "default (transformers' Llama)"),
    "attention_bias": (False, "default (transformers' Llama)"),
    "partial_rotary_factor": (1.0, "default (all of a head is rotated)"),
    "tie_word_embeddings": (False, "default (drafters keep a head of their own)"),
    "norm_before_residual": (False, "default (EAGLE; vLLM takes True for a speculators config)"),
    "norm_before_fc": (False, "default (no input_norm.weight)"),
    "fc_norm": (False, "default (no fc_norm weights)"),
    "norm_output": (False, "default (EAGLE recycles the state before the norm)"),
    "use_aux_hidden_state": (True, "default (EAGLE-3)"),
}


# ---- recognition


def recognise(names: Mapping[str, str], settings: Mapping[str, Setting], full_vocabulary: bool) -> Dialect:
    """The dialect of an EAGLE-3 drafter. names: {canonical: disk}; settings: of its config alone; full_vocabulary: K = V."""
    layer = next((disk for canonical, disk in names.items() if canonical.startswith("layers.0.")), "")
    architectures = str(settings["architectures"].value) if "architectures" in settings else ""
    ids = settings["tap_ids"].source if "tap_ids" in settings else ""
    mapped = "d2t" in names or "t2d" in names
    if "speculators_model_type" in settings or any(s.source.startswith("transformer_layer_config") for s in settings.values()):
        name = "speculators"
    elif "midlayer" not in layer:
        name = "speculators" if "embed_tokens.weight" in names and ("t2d" in names or not mapped) else "modelopt"
    elif "aux_hidden_states_layer_ids" in ids or "target_model_type" in settings:
        name = "angelslim"
    elif "layers.0.self_attn.q_a_proj.weight" in names:
        name = "torchspec"  # the only one with midlayer names and DeepSeek's attention
    elif full_vocabulary and not mapped and ("draft_vocab_size" not in settings or "Eagle3" in architectures):
        name = "torchspec"
    elif _engine_ids(settings) is not None or ids == "eagle_aux_hidden_state_layer_ids":
        name = "eagle"  # written to be served: EAGLE's tensors and the config of engines
    elif ids.startswith("eagle_config") or not {"target_hidden_size", "fc_norm", "norm_output"}.isdisjoint(settings):
        name = "specforge"
    elif ids or "Eagle3" not in architectures:
        name = "eagle"
    else:
        name = "angelslim" if "Eagle3Llama" in architectures else "specforge"
    return DIALECTS[name]


def family(tensors: Mapping[str, TensorInfo], names: Mapping[str, list[str]], settings: Mapping[str, Setting]) -> str:
    """What a checkpoint is: "eagle3", "verifier", or a phrase that names what it is instead. tensors: by disk name."""
    listing = "\n".join(tensors) + "\n"  # one text: a large model has 70,000 names
    if "lora_" in listing:
        return "an adapter (LoRA), which has no meaning without its base model"
    if "medusa" in listing:
        return "a Medusa head"
    shape = {canonical: tensors[disk[0]].shape for canonical, disk in names.items()}
    layer = {part: shape.get(f"layers.0.{part}.weight", ()) for part in ("hidden_norm", "self_attn.o_proj")}
    inputs = next(
        (s[1] for part in ("q_proj", "q_a_proj", "qkv_proj") if len(s := shape.get(f"layers.0.self_attn.{part}.weight", ())) == 2), None
    )
    hidden = layer["self_attn.o_proj"][0] if layer["self_attn.o_proj"] else None
    fc = shape.get("fc.weight", ())
    wide = bool(layer["hidden_norm"]) or (inputs is not None and hidden is not None and inputs == 2 * hidden)
    if len(fc) == 2 and (inputs is not None or layer["hidden_norm"]):
        if wide or inputs not in (hidden, fc[0]):
            return "eagle3"
        if fc[1] == 2 * fc[0]:
            return "an EAGLE-1 or EAGLE-2 head (fc.weight joins one embedding and one state; no taps are fused)"
        return "a drafter of another family (fc.weight, but a first layer of plain width, as in DFlash)"
    if wide and "fc.weight" not in shape:
        if "use_aux_hidden_state" in settings and settings["use_aux_hidden_state"].value is False:
            return "eagle3"
        return "a draft layer without fc.weight, so no head that fuses three taps (EAGLE-1/2 or an incomplete EAGLE-3 head)"
    if "fc.weight" not in shape and "embed_tokens.weight\n" in listing:
        return "verifier"
    if "eh_proj" in listing or "enorm" in listing:
        return "an MTP head"
    if set(shape) and set(shape) <= {"d2t", "t2d"}:
        return "a vocabulary map without a drafter"
    return f"something else (tensors {', '.join(sorted(tensors)[:4]) or 'none'})"


# ---- taps


@dataclass(frozen=True)
class Taps:
    """The verifier states that a drafter is fed.

    count: taps by the width of fc (None when it is no multiple of the verifier's width). ids: as the config has them, else None.
    source: dotted config key, or "none". reading: what an id means here, in words. shift: id + shift is a boundary.
    """

    count: int | None
    ids: tuple[int, ...] | None
    source: str
    reading: str
    shift: int

    def boundaries(self, layers: int) -> tuple[int, ...]:
        """Boundaries h_k for a verifier of so many layers; the common default h_2, h_{n//2}, h_{n-3} when the config names none."""
        if self.ids is not None:
            return tuple(i + self.shift for i in self.ids)
        if self.count != 3:
            raise InputError(
                f"the drafter has {self.count} taps and no tap ids in its config: expected ids, for only three taps have a default"
            )
        return (2, layers // 2, layers - 3)


_READINGS = ("id k is boundary h_k (the residual stream after k layers)", "id i is the output of layer i, boundary h_{i+1}")


def _engine_ids(settings: Mapping[str, Setting]) -> Setting | None:
    """The top-level tap ids of a config with ids in both places as their readers take them: h_k there, one less under eagle_config."""
    if "tap_ids" not in settings or not settings["tap_ids"].source.startswith("eagle_config"):
        return None
    nested = settings["tap_ids"].value
    top = next((other for other in settings["tap_ids"].also if other.source == "eagle_aux_hidden_state_layer_ids"), None)
    both = top is not None and all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in (nested, top.value))
    return top if both and nested and top.value == [i + 1 for i in nested] else None


def read_taps(dialect: Dialect, settings: Mapping[str, Setting], fc_width: int | None, ht: int | None, where: str) -> Taps:
    """The taps of a drafter. fc_width: inputs of fc, None without fc. ht: hidden size of the verifier."""
    reading = f"{_READINGS[dialect.id_shift]}, as in {dialect.name}"
    if fc_width is None:
        return Taps(
            0,
            None,
            "none",
            "no fc.weight: the head is fed the verifier's last state alone (use_aux_hidden_state is false)",
            dialect.id_shift,
        )
    count = fc_width // ht if ht and fc_width % ht == 0 else None
    if "tap_ids" not in settings:
        reading = f"no ids in the config: every tool takes h_2, h_(n//2), h_(n-3) of n layers; an id would read: {reading}"
        return Taps(count, None, "none", reading, dialect.id_shift)
    engine = _engine_ids(settings)
    ids, source, _ = engine or settings["tap_ids"]
    if engine is not None:
        reading = f"{_READINGS[0]}, as vLLM reads it; the ids under eagle_config name the same states as SGLang reads them"
        return Taps(count, tuple(ids), source, reading, 0)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise InputError(f"{where}: {source} is {ids!r}: expected a list of layer numbers such as [2, 30, 58]; mend the config")
    if dialect.name == "eagle":
        reading += " (EAGLE itself fixes h_2, h_(n//2), h_(n-3) and reads no ids)"
    return Taps(count, tuple(ids), source, reading, dialect.id_shift)
