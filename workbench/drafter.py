"""The EAGLE-3 drafter: its layers, the training-time unroll, and the same layers step by step with a cache.

Notable: row t of a document holds the embedding of x[t+1] and the verifier's tap states at t, and predicts x[t+2]; its teacher is the
verifier's distribution at t+1. At TTT step k the row's token and teacher move k further left, its rope position k further right, its
hidden input is its own previous output, and it attends to the step-0 keys of its document up to itself plus its *own* keys of steps
1..k. An unsupervised row matters to a loss only through step-0 keys and values, so all else is computed on the needed rows alone.
Module names are the canonical tensor names, so a state dict maps one to one. Knows nothing about files, losses or training.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.errors import InputError
from workbench.unroll import Batch, Unrolled, unroll

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class LatentAttention:
    """Widths of DeepSeek's multi-head latent attention, as Kimi-type drafters use it; names as in their configs."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that shapes a drafter or changes what its weights compute. `rope` has the keys of transformers' rope_parameters."""

    hidden: int  # H
    target_hidden: int  # Ht
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int  # K
    vocab: int  # V
    taps: int = 3  # A
    layers: int = 1
    rms_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    rope_interleaved: bool = False  # pairs (0, 1), (2, 3) ... as DeepSeek, instead of halves as Llama
    max_positions: int = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # rows back that a query sees among step-0 keys, itself included
    norm_before_residual: bool = False  # the first layer's residual is hidden_norm's output
    norm_before_fc: bool = False  # input_norm over the concatenated taps
    fc_norm: bool = False  # one norm a tap
    norm_output: bool = False  # the state fed to the next step is the final norm's output (engines' and speculators' sense)
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise InputError("drafter config sets norm_before_fc and fc_norm: they exclude each other; keep the one the weights have")
        if self.latent is None and self.heads % self.kv_heads:
            raise InputError(f"drafter config has {self.heads} heads for {self.kv_heads} key/value heads: expected a multiple")
        if self.rope.get("rope_type", "default") not in ROPE_TYPES:
            raise InputError(f"rope type {self.rope['rope_type']!r} is not supported: expected one of {', '.join(ROPE_TYPES)}")


class RMSNorm(nn.RMSNorm):
    """In the weight's type: under autocast a norm stays in float32, as the residual stream does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Rope(nn.Module):
    """Rotary angles by transformers' own formulas; `default` is `linear` with factor 1, which also knows partial rotation."""

    def __init__(self, config: DrafterConfig):
        from transformers import PreTrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        super().__init__()
        parameters = {"rope_type": "default", "rope_theta": 10000.0, **config.rope}
        if parameters["rope_type"] == "default":
            parameters |= {"rope_type": "linear", "factor": 1.0}
        width = config.latent.qk_rope_head_dim if config.latent else config.head_dim
        with torch.device("cpu"):
            theirs = PreTrainedConfig(
                rope_parameters=parameters,
                head_dim=width,
                hidden_size=config.hidden,
                num_attention_heads=config.heads,
                max_position_embeddings=config.max_positions,
            )
            frequencies, self.factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [..., rotated / 2] in float32 of `positions` [...]."""
        angles = positions.unsqueeze(-1).float() * self.frequencies.float()
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotate(x: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate the first dims of x [..., n, D] by angles [..., rotated / 2]; an interleaved x comes out as halves (q and k alike)."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in rope)
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Projections of grouped-query attention; the attending itself is up to the caller."""

    def __init__(self, config: DrafterConfig, width: int):
        super().__init__()
        self.config = config
        self.scale = config.head_dim**-0.5
        bias, per_head = config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * per_head, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * per_head, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * per_head, bias=bias)
        self.o_proj = nn.Linear(config.heads * per_head, config.hidden, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(per_head, eps=config.rms_eps)
            self.k_norm = RMSNorm(per_head, eps=config.rms_eps)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., width] -> [..., G, g, D] with G key/value heads."""
        q = self.q_proj(x).unflatten(-1, (self.config.heads, -1))
        q = rotate(self.q_norm(q) if self.config.qk_norm else q, rope, self.config.rope_interleaved)
        return q.unflatten(-2, (self.config.kv_heads, -1))

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., width] -> keys [..., G, D], values [..., G, E]."""
        k = self.k_proj(x).unflatten(-1, (self.config.kv_heads, -1))
        k = rotate(self.k_norm(k) if self.config.qk_norm else k, rope, self.config.rope_interleaved)
        return k, self.v_proj(x).unflatten(-1, (self.config.kv_heads, -1))


class MultiHeadLatentAttention(nn.Module):
    """DeepSeek's attention with low-rank queries and keys/values, expanded: every head has its own keys (G = heads, g = 1)."""

    def __init__(self, config: DrafterConfig, width: int):
        super().__init__()
        self.config, self.sizes = config, (sizes := config.latent)
        head = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        self.scale = head**-0.5 * _yarn_scale(config.rope) ** 2
        bias, eps = config.attention_bias, config.rms_eps
        if sizes.q_lora_rank is None:
            self.q_proj = nn.Linear(width, config.heads * head, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, sizes.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, config.heads * head, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, config.heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(config.heads * sizes.v_head_dim, config.hidden, bias=bias)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., width] -> [..., heads, 1, nope + rope]."""
        q = self.q_proj(x) if self.sizes.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.config.heads, -1))
        plain, turned = q.split([self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], -1)
        return torch.cat([plain, rotate(turned, rope, self.config.rope_interleaved)], -1).unsqueeze(-2)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., width] -> keys [..., heads, nope + rope], values [..., heads, v]; the rotated part is shared by all heads."""
        latent, turned = self.kv_a_proj_with_mqa(x).split([self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim], -1)
        turned = rotate(turned.unsqueeze(-2), rope, self.config.rope_interleaved)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.config.heads, -1))
        plain, v = kv.split([self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], -1)
        return torch.cat([plain, turned.expand(*plain.shape[:-1], -1)], -1), v


def _yarn_scale(rope: dict[str, Any]) -> float:
    """DeepSeek's correction of the softmax temperature under a stretched rope (mscale_all_dim), applied to q and k each."""
    factor, weight = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class MLP(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, config: DrafterConfig):
        from transformers.activations import ACT2FN

        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer in the parts between which rows are chosen: `enter`, the attention's projections, `leave`."""

    def __init__(self, config: DrafterConfig, index: int):
        super().__init__()
        self.first, self.norm_before_residual = index == 0, config.norm_before_residual
        attention = Attention if config.latent is None else MultiHeadLatentAttention
        self.self_attn = attention(config, config.hidden * (2 if self.first else 1))
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden, eps=config.rms_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, eps=config.rms_eps)
        if self.first:
            self.hidden_norm = RMSNorm(config.hidden, eps=config.rms_eps)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input [..., 2H or H] and residual [..., H]; the first layer reads the embedding, then the hidden state."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), normed], -1), normed if self.norm_before_residual else hidden

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [..., H], attended heads [..., heads * E] -> the layer's output [..., H]."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """An EAGLE-3 drafter. The embedding is frozen always; the head can be frozen with `lm_head.requires_grad_(False)`.

    `embedding` [V, H]: the verifier's, shared not copied; without it the drafter owns one.
    """

    def __init__(self, config: DrafterConfig, embedding: Tensor | None = None):
        super().__init__()
        self.config = config
        wide = config.taps * config.target_hidden
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden, _weight=embedding)
        self.fc = nn.Linear(wide, config.hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(wide, eps=config.rms_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden, eps=config.rms_eps) for _ in range(config.taps))
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden, eps=config.rms_eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        self.rope = Rope(config)
        self.embed_tokens.requires_grad_(False)

    @classmethod
    def from_state(cls, config: DrafterConfig, state: dict[str, Tensor], embedding: Tensor | None = None) -> "Drafter":
        """A drafter around the tensors of `state` (canonical names; used as they are, not copied; d2t and t2d are not its business).

        Raises InputError for missing, unknown or wrongly shaped tensors.
        """
        with torch.device("meta"):
            drafter = cls(config)
        state = {name: tensor for name, tensor in state.items() if name not in ("d2t", "t2d")}
        if embedding is not None:
            state["embed_tokens.weight"] = embedding
        try:
            drafter.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise InputError(f"the drafter's tensors do not fit its config: {' '.join(str(error).split())}") from error
        drafter.embed_tokens.requires_grad_(False)
        return drafter

    def fuse(self, taps: Tensor) -> Tensor:
        """Tap states [..., A * Ht] in tap order -> first hidden input [..., H]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, taps.chunk(self.config.taps, -1), strict=True)], -1)
        return self.fc(taps)

    def finish(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Last layer's output [..., H] -> (state recycled into the next step, input of lm_head), both [..., H]."""
        normed = self.norm(output)
        return (normed if self.config.norm_output else output), normed

    def forward(self, batch: Batch, steps: int) -> Unrolled:
        """`unroll`, as the module's forward so that wrappers (data parallel, autocast, compile) see it."""
        return unroll(self, batch, steps)

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, cache: "Cache", mask: Tensor | None = None) -> Tensor:
        """Run R new rows [B, R] on top of `cache`, which grows by them; returns the last layer's output [B, R, H], before the norm.

        Accepted tokens: ids x[t+1] with hidden = fuse(taps at t). Drafted tokens: ids the draft, hidden = finish(output)[0] of the
        row before. `mask` [B, R, cached + R] is true where a row may look; by default rows see the cache and each other causally.
        """
        embeds, rope = self.embed_tokens(ids), self.rope(positions)
        for index, layer in enumerate(self.layers):
            x, residual = layer.enter(embeds, hidden)
            keys, values = cache.append(index, *layer.self_attn.keys_values(x, rope))  # [B, n + R, G, D]
            q = layer.self_attn.queries(x, rope).flatten(2, 3)  # [B, R, heads, D]
            if mask is None:
                mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool, device=q.device)
                mask = mask.tril(keys.shape[1] - q.shape[1])[None]
                if self.config.sliding_window is not None:
                    mask = mask.triu(keys.shape[1] - q.shape[1] - self.config.sliding_window + 1)
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
                attn_mask=mask.unsqueeze(1), scale=layer.self_attn.scale, enable_gqa=True,
            )  # fmt: skip
            hidden = layer.leave(residual, attended.transpose(1, 2).flatten(2))
        return hidden


class Cache:
    """Keys [B, n, G, D] and values [B, n, G, E] of each layer, for `Drafter.step`."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def append(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new rows to layer `index`; returns all its keys and values."""
        if index == len(self.layers):
            self.layers.append((keys, values))
        else:
            old = self.layers[index]
            self.layers[index] = torch.cat([old[0], keys], 1), torch.cat([old[1], values], 1)
        return self.layers[index]

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` rows."""
        self.layers = [(keys[:, :length], values[:, :length]) for keys, values in self.layers]
