"""Tiny drafters and batches, and the unroll written out with its [T, S * T] mask: what the fast one must equal."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.drafter import Drafter, DrafterConfig

TINY = DrafterConfig(
    hidden=16, target_hidden=12, intermediate=24, heads=4, kv_heads=2, head_dim=6, draft_vocab=20, vocab=32, taps=2
)  # fmt: skip
VARIANTS = {
    "plain": {},
    "two layers": {"layers": 2},
    "three layers, window": {"layers": 3, "sliding_window": 4},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "fc_norm, bias, qk_norm": {"fc_norm": True, "attention_bias": True, "qk_norm": True},
    "partial interleaved rope": {"rope": {"rope_theta": 100.0, "partial_rotary_factor": 0.67}, "rope_interleaved": True},
    "llama3 rope": {
        "rope": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16}
    },
}  # fmt: skip


def make_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """A drafter in float64 whose norms are not all ones."""
    torch.manual_seed(seed)
    drafter = Drafter(config).double()
    for name, parameter in drafter.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return drafter


def make_batch(config: DrafterConfig, mask: Tensor, documents: Tensor, seed: int = 0) -> SimpleNamespace:
    torch.manual_seed(seed)
    height, width = mask.shape
    return SimpleNamespace(
        next_ids=torch.randint(config.vocab, (height, width)),
        taps=torch.randn(height, width, config.taps * config.target_hidden, dtype=torch.float64),
        loss_mask=mask,
        positions=torch.arange(1, width + 1).expand(height, width),
        documents=documents,
    )


def dense_unroll(drafter: Drafter, batch: SimpleNamespace, steps: int) -> Tensor:
    """Post-norm outputs [S, B, T, H] with the [T, S * T] mask written out: the definition the fast unroll must equal."""
    config, (height, width) = drafter.config, batch.next_ids.shape
    row = torch.arange(width)
    causal = (row[:, None] >= row) & (row[:, None] - row < (config.sliding_window or width))
    same = (batch.documents[:, :, None] == batch.documents[:, None]) & (batch.documents[:, :, None] != -1)
    mask = (causal & same) | torch.eye(width, dtype=torch.bool)  # [B, T, T]
    hidden, outputs = drafter.fuse(batch.taps), []
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in drafter.layers]
    for step in range(steps):
        embeds = drafter.embed_tokens(F.pad(batch.next_ids, (0, steps))[:, step : step + width])
        rope = drafter.rope(batch.positions + step)
        for layer, past in zip(drafter.layers, kept, strict=True):
            x, residual = layer.enter(embeds, hidden)
            past.append(layer.self_attn.keys_values(x, rope))
            k, v = (torch.cat(parts, 1) for parts in zip(*past, strict=True))  # [B, (step + 1) T, G, D]
            q = layer.self_attn.queries(x, rope)  # [B, T, G, g, D]
            scores = torch.einsum("btGgd,bsGd->bGgts", q, k) * layer.self_attn.scale
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
            heads = torch.einsum("bGgts,bsGe->btGge", scores.softmax(-1), v)
            hidden = layer.leave(residual, heads.flatten(2))
        hidden, normed = drafter.finish(hidden)
        outputs.append(normed)
        mask = torch.cat([mask, torch.eye(width, dtype=torch.bool).expand(height, -1, -1)], -1)
    return torch.stack(outputs)
