"""The drafter's layers against transformers' own, step by step against the unroll, and what it refuses."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dense_unroll import TINY, VARIANTS, dense_unroll, make_batch, make_drafter
from workbench.drafter import Cache, Drafter, LatentAttention
from workbench.errors import InputError


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_step_by_step_equals_the_unroll(options: dict) -> None:
    """Accepted rows into the cache, then drafts on their own outputs: the unroll's outputs at every start row, all in float64."""
    config, steps = replace(TINY, **options), 3
    drafter, batch = make_drafter(config), make_batch(config, torch.ones(1, 9, dtype=torch.bool), torch.zeros(1, 9, dtype=torch.int64))
    expected = dense_unroll(drafter, batch, steps)[:, 0]  # [S, T, H]
    cache, hidden = Cache(), drafter.fuse(batch.taps)
    for row in range(9 - steps):
        at = slice(row, row + 1)
        output = drafter.step(batch.next_ids[:, at], hidden[:, at], batch.positions[:, at], cache)
        for step in range(steps):
            recycled, normed = drafter.finish(output)
            torch.testing.assert_close(normed[0, 0], expected[step, row], rtol=1e-9, atol=1e-11)
            ahead = slice(row + step + 1, row + step + 2)
            mask = own_mask(len(cache) + 1, row, config.sliding_window)
            output = drafter.step(batch.next_ids[:, ahead], recycled, batch.positions[:, at] + step + 1, cache, mask)
        cache.crop(row + 1)
        assert len(cache) == row + 1


def own_mask(keys: int, row: int, window: int | None) -> Tensor:
    """What a draft after `row` sees: the accepted rows within the window of that row, and all drafts so far."""
    key = torch.arange(keys)
    return ((key > row) | (key > row - (window or keys)))[None, None]


def test_several_rows_at_once_equal_one_by_one() -> None:
    """A prefill of many rows, causal by default, equals row after row; so does a batch of two prompts."""
    drafter = make_drafter(replace(TINY, layers=2, sliding_window=3))
    batch = make_batch(drafter.config, torch.ones(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.int64))
    hidden = drafter.fuse(batch.taps)
    whole = drafter.step(batch.next_ids, hidden, batch.positions, Cache())
    for prompt in range(2):
        cache = Cache()
        one = [
            drafter.step(batch.next_ids[[prompt], t : t + 1], hidden[[prompt], t : t + 1], batch.positions[[prompt], t : t + 1], cache)
            for t in range(6)
        ]
        torch.testing.assert_close(torch.cat(one, 1)[0], whole[prompt], rtol=1e-9, atol=1e-11)


def test_tree_mask_keeps_branches_apart() -> None:
    """Two drafts at one depth, each hidden from the other, come out as if each had been drafted alone."""
    drafter = make_drafter(TINY)
    batch = make_batch(TINY, torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.int64))
    cache = Cache()
    recycled, _ = drafter.finish(drafter.step(batch.next_ids, drafter.fuse(batch.taps), batch.positions, cache))
    last, ids, position = recycled[:, -1:], torch.tensor([[3, 7]]), torch.tensor([[5, 5]])
    mask = torch.tensor([[[True] * 4 + [True, False], [True] * 4 + [False, True]]])
    both = drafter.step(ids, last.expand(-1, 2, -1), position, cache, mask)
    for branch in range(2):
        cache.crop(4)
        alone = drafter.step(ids[:, branch : branch + 1], last, position[:, :1], cache)
        torch.testing.assert_close(both[:, branch], alone[:, 0], rtol=1e-9, atol=1e-11)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": VARIANTS["llama3 rope"]["rope"],
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_later_layers_equal_transformers_llama(rope: dict) -> None:
    """A layer behind the first is transformers' Llama decoder layer (whose norms round to float32), for every kind of rope."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    config = replace(TINY, layers=2, rope=rope, attention_bias=True)
    drafter = make_drafter(config)
    theirs_config = LlamaConfig(
        hidden_size=config.hidden, intermediate_size=config.intermediate, num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_eps, rope_parameters=dict(rope),
        attention_bias=True, max_position_embeddings=config.max_positions, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaDecoderLayer(theirs_config, 0).double()
    theirs.load_state_dict(drafter.layers[1].state_dict())
    hidden, positions = torch.randn(1, 11, config.hidden, dtype=torch.float64), torch.arange(3, 14)[None]
    mask = torch.full((11, 11), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(hidden, attention_mask=mask, position_embeddings=LlamaRotaryEmbedding(theirs_config)(hidden, positions))
    torch.testing.assert_close(run_layer(drafter, 1, hidden, positions), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_lora_rank", [None, 10])
@pytest.mark.parametrize("interleaved", [True, False])
def test_latent_attention_equals_transformers_deepseek(q_lora_rank: int | None, interleaved: bool) -> None:
    """Latent attention is transformers' DeepSeek-V3 attention, under a stretched rope with its softmax correction."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3Config,
        DeepseekV3RotaryEmbedding,
    )

    rope = {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.7}
    sizes = LatentAttention(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=q_lora_rank)
    config = replace(TINY, layers=2, rope=rope, rope_interleaved=interleaved, latent=sizes, rms_eps=1e-6)
    drafter = make_drafter(config)
    theirs_config = DeepseekV3Config(
        hidden_size=config.hidden, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_lora_rank, kv_lora_rank=8,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, rope_parameters=rope, rope_interleave=interleaved,
        attn_implementation="eager", max_position_embeddings=config.max_positions,
    )  # fmt: skip
    theirs, ours = DeepseekV3Attention(theirs_config, 0).double(), drafter.layers[1].self_attn
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(1, 11, config.hidden, dtype=torch.float64), torch.arange(3, 14)[None]
    mask = torch.full((11, 11), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=DeepseekV3RotaryEmbedding(theirs_config)(x, positions), attention_mask=mask)
    q, (k, v) = ours.queries(x, drafter.rope(positions)).flatten(2, 3), ours.keys_values(x, drafter.rope(positions))
    heads = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True, scale=ours.scale)
    torch.testing.assert_close(ours.o_proj(heads.transpose(1, 2).flatten(2)), expected, rtol=1e-5, atol=1e-5)


def run_layer(drafter: Drafter, index: int, hidden: Tensor, positions: Tensor) -> Tensor:
    """One layer alone, causal."""
    layer, rope = drafter.layers[index], drafter.rope(positions)
    x, residual = layer.enter(hidden, hidden)
    q, (k, v) = layer.self_attn.queries(x, rope).flatten(2, 3), layer.self_attn.keys_values(x, rope)
    heads = (part.transpose(1, 2) for part in (q, k, v))
    attended = F.scaled_dot_product_attention(*heads, is_causal=True, scale=layer.self_attn.scale, enable_gqa=True)
    return layer.leave(residual, attended.transpose(1, 2).flatten(2))


def test_state_dict_has_the_canonical_names() -> None:
    """Module names are the canonical tensor names, and nothing else is in the state dict."""
    names = set(Drafter(replace(TINY, layers=2, fc_norm=True)).state_dict())
    layer = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    expected = {f"layers.{i}.{part}.weight" for i in (0, 1) for part in layer} | {"layers.0.hidden_norm.weight"}
    expected |= {f"{part}.weight" for part in ("fc", "norm", "lm_head", "embed_tokens", "fc_norm.0", "fc_norm.1")}
    assert names == expected


def test_from_state_keeps_the_tensors() -> None:
    """Loaded tensors are used as they are; the verifier's embedding is shared, and never trained."""
    state = {name: tensor for name, tensor in make_drafter(TINY).state_dict().items() if name != "embed_tokens.weight"}
    embedding = torch.randn(TINY.vocab, TINY.hidden)
    drafter = Drafter.from_state(TINY, state | {"d2t": torch.zeros(3), "t2d": torch.zeros(3)}, embedding)
    assert drafter.fc.weight.data_ptr() == state["fc.weight"].data_ptr()
    assert drafter.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert not drafter.embed_tokens.weight.requires_grad
    assert drafter.fc.weight.requires_grad
    assert torch.isfinite(drafter.rope(torch.arange(3))[0]).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fc.weight": torch.zeros(2, 2)}, "fc.weight"),
        ({"extra.weight": torch.zeros(1)}, "extra.weight"),
        ({"norm.weight": None}, "norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict, says: str) -> None:
    """A missing, unknown or wrongly shaped tensor is named."""
    state = {name: tensor for name, tensor in (make_drafter(TINY).state_dict() | change).items() if tensor is not None}
    with pytest.raises(InputError, match=says):
        Drafter.from_state(TINY, state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"kv_heads": 3}, "4 heads for 3"),
        ({"rope": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
    ],
)
def test_configs_that_mean_nothing_are_refused(change: dict, says: str) -> None:
    """Contradictory or unsupported configs are one sentence."""
    with pytest.raises(InputError, match=says):
        replace(TINY, **change)
