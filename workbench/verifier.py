"""The frozen verifier: load it, watch its residual stream, its final norm and head, its own greedy answers.

Notable: boundary k is the residual stream after k decoder layers. h_0 is what enters the first layer (the embeddings, scaled where a
model scales them), h_n what leaves the last one, *before* the final norm; transformers' own `hidden_states[-1]` is after it, so states
are taken by hooks on the layers, and only those asked for are kept. This is the only module that imports transformers' models.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workbench.checkpoint import open_verifier
from workbench.errors import InputError

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
transformers.utils.logging.disable_progress_bar()  # what takes long here says so itself
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class Parts(NamedTuple):
    """Where a causal LM keeps what an EAGLE-3 drafter is fed from, whatever it is nested in."""

    decoder: nn.Module  # embeds ids, runs the layers and the final norm
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear
    embedding: nn.Embedding


def find_parts(model: nn.Module) -> Parts:
    """The text decoder's layers, final norm, head and embedding of any transformers causal LM; InputError names what is missing."""
    layer_count = model.config.get_text_config().num_hidden_layers
    for decoder in model.get_decoder().modules():
        layers = next((m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == layer_count), None)
        norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
        if layers is not None and norm is not None:
            break
    else:
        raise InputError(
            f"{type(model).__name__} has no list of {layer_count} decoder layers beside a final norm "
            f"(looked for {', '.join(FINAL_NORMS)}): this architecture is not supported"
        )
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"{type(model).__name__} has no output head: expected a causal language model")
    return Parts(decoder, layers, norm, head, model.get_input_embeddings())


def load_verifier(path: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A frozen causal LM in evaluation mode, from a local folder or a Hugging Face id; InputError when there is none."""
    path = _located(path)
    with _load_errors(path):
        config = AutoConfig.from_pretrained(path)
        model = _auto_class(config).from_pretrained(path, dtype=dtype)
    return model.eval().requires_grad_(False)


@contextmanager
def watch(model: nn.Module, boundaries: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Within the block every forward of `model` leaves h_k [B, T, Ht] of its new positions in the yielded dict, for each boundary k."""
    layers = find_parts(model).layers
    wrong = [k for k in boundaries if not 0 <= k <= len(layers)]
    if wrong:
        raise InputError(f"boundary {wrong[0]} does not exist: this verifier has {len(layers)} layers, so boundaries 0..{len(layers)}")
    states: dict[int, Tensor] = {}

    def before_first(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        states[0] = args[0] if args else kwargs["hidden_states"]

    def after(k: int) -> Callable:
        def keep(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
            states[k] = output if isinstance(output, Tensor) else output[0]

        return keep

    hooks = [layers[k - 1].register_forward_hook(after(k)) for k in set(boundaries) if k > 0]
    if 0 in boundaries:
        hooks.append(layers[0].register_forward_pre_hook(before_first, with_kwargs=True))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def capture(model: nn.Module, ids: Tensor, boundaries: Collection[int], mask: Tensor | None = None) -> dict[int, Tensor]:
    """Hidden states {k: h_k [B, T, Ht]} of `ids` [B, T], aligned to the token they stand on; h_n is pre-norm.

    `mask` [B, T] is true on real tokens and allows padding on either side; states on padding are meaningless.
    """
    with watch(model, boundaries) as states:
        find_parts(model).decoder(input_ids=ids, use_cache=False, **_padding(mask))
    return {k: states[k] for k in boundaries}


class Teacher(nn.Module):
    """What a drafter learns from and shares: the verifier's final norm, head and embedding, without its layers."""

    def __init__(self, norm: nn.Module, head: nn.Linear, embedding: nn.Embedding):
        super().__init__()
        self.norm = norm
        self.head = head
        self.embedding = embedding

    @classmethod
    def of(cls, model: nn.Module) -> "Teacher":
        """The teacher in a loaded verifier; shares its weights."""
        _refuse_logit_transform(model.config)
        parts = find_parts(model)
        return cls(parts.norm, parts.head, parts.embedding)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "Teacher":
        """The teacher of a verifier folder or Hugging Face id; of its weights only head, final norm and embedding are read."""
        checkpoint = open_verifier(path)
        with _load_errors(checkpoint.location), torch.device("meta"):
            config = AutoConfig.from_pretrained(checkpoint.location, revision=checkpoint.revision)
            model = _auto_class(config).from_config(config, dtype=dtype)
        teacher = cls.of(model).requires_grad_(False)  # on meta: the right classes, no storage
        names = {"norm.weight": checkpoint.final_norm, "embedding.weight": checkpoint.embedding, "head.weight": checkpoint.head}
        weights = {name: checkpoint.tensor(disk).to(dtype) for name, disk in names.items() if not checkpoint.tied or name != "head.weight"}
        if checkpoint.tied:
            weights["head.weight"] = weights["embedding.weight"]
        for name, expected in teacher.state_dict().items():
            if name not in weights or weights[name].shape != expected.shape:
                found = list(weights[name].shape) if name in weights else "nothing"
                raise InputError(f"verifier {path}: its config asks for {name} of shape {list(expected.shape)}, its files hold {found}")
        teacher.load_state_dict(weights, assign=True)
        return teacher.requires_grad_(False)

    def logits(self, states: Tensor) -> Tensor:
        """Full logits [..., V] of pre-norm states h_n [..., Ht]."""
        return self.head(self.norm(states))

    def rows(self, ids: Tensor) -> Tensor:
        """Head rows [len(ids), Ht] of the tokens `ids`."""
        return self.head.weight[ids]


@torch.inference_mode()
def greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos: Collection[int],
    batch: int = 32,
    stop: Callable[[list[int]], bool] = lambda _: False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[list[int]]:
    """The verifier's own argmax continuation of each prompt (token ids), the end token included where one was written.

    An answer is over at a token in `eos`, when `stop` says so of what has been written, or after `max_new_tokens`.
    Prompts run in batches of similar length, padded on the left; rows that have ended are dropped from the cache as they pile up.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for i, answer in zip(rows, _greedy_batch(model, [prompts[i] for i in rows], max_new_tokens, set(eos), stop), strict=True):
            answers[i] = answer
        progress(f"answered {start + len(rows)} of {len(prompts)} prompts")
    return answers


def _greedy_batch(
    model: nn.Module, prompts: list[Sequence[int]], max_new_tokens: int, eos: set[int], stop: Callable[[list[int]], bool]
) -> list[list[int]]:
    device = model.device
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)  # [B, T], left padded
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache = DynamicCache(config=model.config.get_text_config())
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the answer that each row of the batch writes
    over = [False] * len(prompts)
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        ids = out.logits[:, -1:].argmax(-1)  # [B, 1]
        for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if not over[row]:
                answers[row].append(token)
                over[row] = token in eos or stop(answers[row])
        live = [b for b, row in enumerate(rows) if not over[row]]
        if not live:
            break
        if len(live) <= len(rows) * 3 // 4:
            keep = torch.tensor(live, device=device)
            cache.batch_select_indices(keep)
            ids, mask, rows = ids[keep], mask[keep], [rows[b] for b in live]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    return answers


def rewindable_cache(model: nn.Module) -> DynamicCache:
    """An empty cache from which rows can be taken back; InputError for a verifier whose layers forget (windows, recurrent states)."""
    cache = DynamicCache(config=model.config.get_text_config())
    forgetful = sorted({type(layer).__name__ for layer in cache.layers} - {"DynamicLayer"})
    if forgetful:
        raise InputError(f"this verifier's cache cannot be rewound ({', '.join(forgetful)}): measure it in an engine (--engine)")
    return cache


def end_tokens(model: nn.Module) -> frozenset[int]:
    """The tokens at which the model's own configuration ends an answer."""
    for config in (model.generation_config, model.config.get_text_config()):
        if config is not None and config.eos_token_id is not None:
            return frozenset([config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id)
    return frozenset()


def _padding(mask: Tensor | None) -> dict[str, Tensor]:
    """Attention mask and positions for a padded batch: positions count real tokens, whichever side the padding is on."""
    if mask is None:
        return {}
    mask = mask.long()
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def _auto_class(config: transformers.PreTrainedConfig) -> type:
    """Multimodal verifiers (Kimi-K2.5 class) wrap their text decoder and are registered apart from plain causal LMs."""
    return AutoModelForCausalLM if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def _refuse_logit_transform(config: transformers.PreTrainedConfig) -> None:
    for name in LOGIT_TRANSFORMS:
        if getattr(config.get_text_config(), name, None) not in (None, 1, 1.0):
            raise InputError(f"this verifier changes its logits after the head ({name} in its config): not supported as a teacher")


def _located(path: str | Path) -> str:
    """A folder with a config, or something that looks like a Hugging Face id; anything else is a typing error."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"verifier folder {folder} has no config.json: expected a transformers model folder")
        return str(folder)
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise InputError(f"no verifier at {path}: expected a transformers model folder or a Hugging Face id such as owner/name")
    return str(path)


@contextmanager
def _load_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"cannot load the verifier {path}: {reason}") from error
