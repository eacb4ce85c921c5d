"""A drafter as a module from its checkpoint, a new one for a verifier, and a module back into files.

Notable: weights are float32 in the module whatever they are on disk. A drafter is written in the form it was read in (`Form`: the names,
config and type of its checkpoint), a new one in EAGLE's (`midlayer.`, d2t, t2d, no embedding, bfloat16). The embedding is the
verifier's unless the checkpoint has its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier, write_checkpoint
from workbench.drafter import Drafter, DrafterConfig, LatentAttention
from workbench.errors import InputError
from workbench.extract import default_taps
from workbench.mapfiles import map_from_tensors, read_map
from workbench.mapping import VocabMap
from workbench.verifier import Teacher
from workbench.weights import entries

VOCABULARY = ("d2t", "t2d")


@dataclass(frozen=True)
class Form:
    """How a drafter is written: {canonical name: disk name} of all that is kept, config.json, and the weights' torch dtype."""

    names: dict[str, str]
    config: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, checkpoint: DrafterCheckpoint) -> "Form":
        """The form that a checkpoint has."""
        return cls(dict(checkpoint.names), checkpoint.config, checkpoint.tensor("norm.weight").dtype)

    def with_embedding(self) -> "Form":
        """The same, but the embedding is kept: what a drafter whose embedding was trained needs."""
        return replace(self, names={"embed_tokens.weight": "embed_tokens.weight", **self.names})


def config_of(checkpoint: DrafterCheckpoint) -> DrafterConfig:
    """What shapes the drafter, from its tensors where these tell, else from its config; InputError when neither does."""
    shape = {name: checkpoint.info(name).shape for name in checkpoint.names}
    if "fc.weight" not in shape or checkpoint.taps.count is None:
        raise InputError(f"{checkpoint.location} has no fc.weight that is a whole number of taps wide: expected an EAGLE-3 drafter's")
    if "lm_head.weight" not in shape:
        raise InputError(f"{checkpoint.location} has no lm_head.weight: expected a drafter with a head; copy the verifier's rows into it")
    config = _from_settings(checkpoint, checkpoint.setting, checkpoint.taps.count)
    layers = [name for name in shape if name.endswith("mlp.gate_proj.weight")]
    return replace(
        config,
        intermediate=shape[layers[0]][0] if layers else config.intermediate,
        qk_norm="layers.0.self_attn.q_norm.weight" in shape,
        attention_bias="layers.0.self_attn.q_proj.bias" in shape or "layers.0.self_attn.o_proj.bias" in shape,
        # SpecForge calls "norm_output" what every drafter does before its head; engines mean the state that is recycled
        norm_output=config.norm_output and checkpoint.dialect != "specforge",
        latent=_latent(checkpoint) if checkpoint.mla else None,
        rope_interleaved=checkpoint.mla and checkpoint.setting("rope_interleave") is not False,
    )


def _from_settings(checkpoint: DrafterCheckpoint, setting: Any, taps: int) -> DrafterConfig:
    needed = {"hidden": checkpoint.h, "target_hidden": checkpoint.ht, "draft_vocab": checkpoint.k, "vocab": checkpoint.v}
    needed |= {"heads": setting("num_attention_heads"), "kv_heads": setting("num_key_value_heads"), "head_dim": setting("head_dim")}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise InputError(
            f"{checkpoint.location}: config.json does not say {', '.join(missing)}: put the drafter's config beside its weights"
        )
    rope = {**(setting("rope_scaling") or {"rope_type": "default"}), "rope_theta": setting("rope_theta")}
    if setting("partial_rotary_factor") != 1.0:
        rope["partial_rotary_factor"] = setting("partial_rotary_factor")
    sliding = "sliding_attention" in (setting("layer_types") or [])
    return DrafterConfig(
        **needed,
        intermediate=setting("intermediate_size") or 0,
        taps=taps,
        layers=checkpoint.layers,
        rms_eps=setting("rms_norm_eps"),
        rope=rope,
        max_positions=setting("max_position_embeddings") or 2048,
        hidden_act=setting("hidden_act"),
        sliding_window=setting("sliding_window") if sliding else None,
        norm_before_residual=bool(setting("norm_before_residual")),
        norm_before_fc="input_norm.weight" in checkpoint.names,
        fc_norm="fc_norm.0.weight" in checkpoint.names,
        norm_output=bool(setting("norm_output")),
    )


def _latent(checkpoint: DrafterCheckpoint) -> LatentAttention:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    missing = [name for name in names if checkpoint.number(name) is None]
    if missing:
        raise InputError(f"{checkpoint.location}: config.json does not say {', '.join(missing)}, which latent attention needs")
    q_rank = checkpoint.number("q_lora_rank") if "layers.0.self_attn.q_a_proj.weight" in checkpoint.names else None
    return LatentAttention(*(checkpoint.number(name) for name in names), q_lora_rank=q_rank)


def load_drafter(checkpoint: DrafterCheckpoint, embedding: Tensor | None = None) -> Drafter:
    """The drafter as a module in float32. embedding: the verifier's [V, H], used when the checkpoint has none of its own."""
    config = config_of(checkpoint)
    kept = [name for name in checkpoint.names if name not in VOCABULARY]
    state = {name: checkpoint.tensor(name).float() for name in kept}
    bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if bad:
        raise InputError(f"{checkpoint.location}: {bad[0]} holds numbers that are not finite: the checkpoint is damaged; export it again")
    if "embed_tokens.weight" in state:
        return Drafter.from_state(config, state)
    if embedding is None:
        raise InputError(f"{checkpoint.location} has no embedding of its own: its verifier's is needed; give the verifier")
    return Drafter.from_state(config, state, fitting_embedding(config, embedding, checkpoint.location))


def fitting_embedding(config: DrafterConfig, embedding: Tensor, where: str) -> Tensor:
    """The verifier's embedding [V, H] as float32, or InputError when it is not what the drafter was made for."""
    v, width = embedding.shape
    if v < config.vocab or width != config.hidden:
        raise InputError(
            f"{where} was made for a verifier with V = {config.vocab} and embeddings of width {config.hidden}, this one has V = {v} and "
            f"width {width}: give the drafter's own verifier"
        )
    return embedding[: config.vocab].float()


def new_config(verifier: VerifierCheckpoint, k: int, taps: int) -> DrafterConfig:
    """A one-layer EAGLE drafter with the verifier's sizes and rope, K rows and so many taps; InputError when a size is unknown."""
    number, setting = verifier.number, verifier.setting
    hidden, heads, intermediate = (number(name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    if not (hidden and heads and intermediate):
        raise InputError(
            f"{verifier.location}: config.json does not say hidden_size, num_attention_heads and intermediate_size, from which a new "
            "drafter takes its sizes: put the verifier's own config there"
        )
    rope = {**(setting("rope_scaling") or {"rope_type": "default"}), "rope_theta": setting("rope_theta") or 10000.0}
    return DrafterConfig(
        hidden=hidden,
        target_hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or hidden // heads,
        draft_vocab=k,
        vocab=verifier.vocab,
        taps=taps,
        rms_eps=setting("rms_norm_eps") or 1e-6,
        rope=rope,
        max_positions=number("max_position_embeddings") or 2048,
        hidden_act=setting("hidden_act") or "silu",
    )


def new_drafter(verifier: VerifierCheckpoint, teacher: Teacher, vocab_map: VocabMap, taps: int, seed: int) -> Drafter:
    """An untrained drafter that starts as the verifier's last layer on top of the last tap.

    Head rows are the verifier's; `fc` lets the last tap through; the layer has the verifier's weights wherever these have its shape, in
    attention for the hidden half of the input. What is left is random by `seed`, made small. The final norm is flat, and as quiet as
    gives logits a variance of 1: the verifier's own one makes a drafter that knows nothing sure of it (a loss far above ln K).
    """
    config = new_config(verifier, vocab_map.k, taps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config, fitting_embedding(config, teacher.embedding.weight, verifier.location))
    with torch.no_grad():
        rows = drafter.lm_head.weight.copy_(teacher.rows(torch.tensor(vocab_map.ids)))
        drafter.norm.weight.fill_(1 / rows.norm(dim=1).mean())
        drafter.fc.weight.mul_(0.1)[:, -config.hidden :] += torch.eye(config.hidden)
        _copy_last_layer(drafter.layers[0], verifier)
    return drafter


def _copy_last_layer(layer: nn.Module, verifier: VerifierCheckpoint) -> None:
    """The weights of the verifier's last layer, where it has them in the shape that the drafter's first layer needs."""
    ending = f"layers.{verifier.layers - 1}."
    for name, own in layer.named_parameters():
        theirs = "input_layernorm.weight" if name == "hidden_norm.weight" else name
        disk = next((disk for disk in verifier.tensors if disk.endswith(f".{ending}{theirs}")), None)
        if disk is None or name == "input_layernorm.weight" or verifier.info(disk).dtype not in ("F32", "F16", "BF16"):
            continue
        weight = verifier.tensor(disk).float()
        if weight.shape == own.shape:
            own.copy_(weight)
        elif weight.ndim == 2 and weight.shape == (own.shape[0], own.shape[1] // 2):
            own.mul_(0.3)[:, weight.shape[1] :] = weight


def eagle_form(config: DrafterConfig, taps: Sequence[int]) -> Form:
    """EAGLE's way to write a drafter that is fed by the boundaries `taps`."""
    # engines still read the two older spellings of rope
    older = {"rope_theta": config.rope["rope_theta"]}
    if config.rope["rope_type"] != "default":
        older["rope_scaling"] = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    flags = {name: True for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)}
    written = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": config.rope,
        **older,
        **flags,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    with torch.device("meta"):
        weights = [name for name in Drafter(config).state_dict() if name != "embed_tokens.weight"]
    vocabulary = VOCABULARY if config.draft_vocab < config.vocab else ()
    return Form({name: name.replace("layers.0.", "midlayer.") for name in (*weights, *vocabulary)}, written)


def write_drafter(folder: Path, drafter: Drafter, vocab_map: VocabMap, form: Form) -> None:
    """Write the drafter into a folder in a form: what its names list, floats in its dtype, d2t as offsets."""
    state = drafter.state_dict() | {"d2t": torch.tensor(vocab_map.d2t), "t2d": torch.tensor(vocab_map.t2d)}
    kept = {disk: state[name] for name, disk in form.names.items()}
    kept = {disk: tensor.to(form.dtype) if tensor.is_floating_point() else tensor for disk, tensor in kept.items()}
    write_checkpoint(folder, entries(kept), form.config)


def refuse_lossy_form(folder: Path, drafter: Drafter, vocab_map: VocabMap, form: Form) -> None:
    """InputError when what `write_drafter` wrote does not read back as the same drafter."""
    opened = open_drafter(folder)
    back = load_drafter(opened, drafter.embed_tokens.weight.cpu())
    own, read = drafter.state_dict(), back.state_dict()
    lost = [name for name in form.names if name in own and not torch.equal(read[name], own[name].cpu().to(form.dtype).float())]
    lost += [name for name in own.keys() - form.names.keys() if name != "embed_tokens.weight"]
    if back.config != drafter.config:
        lost.append("a setting")
    if map_from_tensors(*opened.map_raw(), opened.k, opened.v, opened.location) != vocab_map:
        lost.append("the map")
    if lost:
        raise InputError(f"written as {opened.dialect} the drafter comes back without {', '.join(lost[:3])}: convert it to another dialect")


class Start(NamedTuple):
    """What a training begins with."""

    drafter: Drafter
    vocab_map: VocabMap
    teacher: Teacher
    form: Form


def start(source: str, verifier: str, map_path: str, tap_ids: Sequence[int] | None, a: int, seed: int) -> Start:
    """The drafter at `source`, or a "new" one, for a verifier and states with `a` taps at boundaries `tap_ids` (None: not recorded).

    map_path: map of a new drafter, "full" for all of V; a drafter that exists has one and can be given no other here. Raises InputError
    for whatever does not fit together.
    """
    opened, teacher = open_verifier(verifier), Teacher.load(verifier)
    if source == "new":
        if not map_path:
            raise InputError("a new drafter needs a draft vocabulary: give --map (see `workbench map`), or `--map full` for all tokens")
        vocab_map = VocabMap(np.arange(opened.vocab), opened.vocab) if map_path == "full" else read_map(map_path)
        if vocab_map.v != opened.vocab:
            raise InputError(f"map {map_path} covers V = {vocab_map.v} tokens, the verifier has {opened.vocab}: give this verifier's map")
        drafter = new_drafter(opened, teacher, vocab_map, a, seed)
        return Start(drafter, vocab_map, teacher, eagle_form(drafter.config, tap_ids or default_taps(opened.layers)))
    checkpoint = open_drafter(source)
    vocab_map = map_from_tensors(*checkpoint.map_raw(), checkpoint.k, checkpoint.v, checkpoint.location)
    if map_path and read_map(map_path) != vocab_map:
        raise InputError(
            f"{map_path} is not the map that the head of {checkpoint.location} was trained with: labels through another map ask every row "
            "for another token; carry the drafter over first (`workbench remap`)"
        )
    fed = checkpoint.taps.boundaries(opened.layers)
    if tap_ids is not None and tuple(tap_ids) != fed:
        raise InputError(
            f"{checkpoint.location} is fed the boundaries {list(fed)}, the states hold {list(tap_ids)}: extract with "
            f"--taps {','.join(map(str, fed))}"
        )
    return Start(load_drafter(checkpoint, teacher.embedding.weight), vocab_map, teacher, Form.of(checkpoint))
