"""The unroll over needed rows against the dense definition: outputs, gradients, and which pairs it names."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.dense_unroll import TINY, VARIANTS, dense_unroll, make_batch, make_drafter
from workbench.drafter import Drafter, LatentAttention


def pairs_of(dense: Tensor, unrolled) -> Tensor:
    return dense.flatten(1, 2)[unrolled.step, unrolled.start[unrolled.chain]]


def assert_equal_with_gradients(drafter: Drafter, batch: SimpleNamespace, steps: int) -> None:
    unrolled = drafter(batch, steps)
    dense = pairs_of(dense_unroll(drafter, batch, steps), unrolled)
    torch.testing.assert_close(unrolled.hidden, dense, rtol=1e-9, atol=1e-11)
    trained = [p for p in drafter.parameters() if p.requires_grad and p is not drafter.lm_head.weight]
    weight = torch.randn_like(dense)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), trained) for out in (unrolled.hidden, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_unroll_equals_the_dense_definition(options: dict) -> None:
    """Outputs and every gradient equal the masked dense form: packed documents, padding, mask holes, several batch rows."""
    config = replace(TINY, **options)
    documents = torch.tensor([[0] * 9 + [1] * 7 + [-1] * 2, [5] * 4 + [7] * 14])
    mask = torch.rand(2, 18, generator=torch.Generator().manual_seed(1)) < 0.5
    assert_equal_with_gradients(make_drafter(config), make_batch(config, mask & (documents != -1), documents), steps=3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_unroll_equals_the_dense_definition_on_random_layouts(data: st.DataObject) -> None:
    """The same for any mask, any cut into documents, any number of steps and layers."""
    width = data.draw(st.integers(1, 14))
    mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=width, max_size=width))])
    documents = torch.tensor([data.draw(st.lists(st.booleans(), min_size=width, max_size=width))]).cumsum(1)
    config = replace(TINY, layers=data.draw(st.integers(1, 2)))
    steps = data.draw(st.integers(1, 4))
    if mask.any():
        assert_equal_with_gradients(make_drafter(config), make_batch(config, mask, documents), steps)


def test_an_unsupervised_batch_gives_nothing() -> None:
    """No supervised token, no pairs, and nothing breaks."""
    batch = make_batch(TINY, torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.int64))
    unrolled = make_drafter(TINY)(batch, 3)
    assert unrolled.hidden.shape == (0, TINY.hidden)
    assert len(unrolled.teacher_rows) == len(unrolled.start) == 0


def test_unroll_by_hand() -> None:
    """Mask 0 1 0 0 with two steps: three chains' worth of work, the pairs named with their teacher rows."""
    batch = make_batch(TINY, torch.tensor([[False, True, False, False]]), torch.zeros(1, 4, dtype=torch.int64))
    unrolled = make_drafter(TINY)(batch, 2)
    assert unrolled.start.tolist() == [0, 1]  # row 0 for its step 1, whose teacher is row 1
    assert unrolled.anchored.tolist() == [False, True]
    assert unrolled.room.tolist() == [4, 3]
    assert unrolled.teacher_rows[unrolled.teacher].tolist() == [1, 1]
    assert unrolled.step.tolist() == [0, 1]
    assert unrolled.chain.tolist() == [1, 0]
    assert unrolled.supervised.tolist() == [True, True]


def test_latent_attention_unrolls() -> None:
    """A Kimi-type first layer goes through the unroll as the dense definition says."""
    sizes = LatentAttention(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=10)
    config = replace(TINY, kv_heads=4, latent=sizes, rope_interleaved=True)
    mask = torch.rand(1, 15, generator=torch.Generator().manual_seed(2)) < 0.6
    assert_equal_with_gradients(make_drafter(config), make_batch(config, mask, torch.tensor([[0] * 8 + [1] * 7])), steps=3)


def test_bf16_autocast_is_close_to_fp32() -> None:
    """Under bf16 autocast the unroll gives fp32's outputs and gradients up to bf16's rounding."""
    drafter = make_drafter(replace(TINY, layers=2)).float()
    batch = make_batch(TINY, torch.ones(1, 12, dtype=torch.bool), torch.zeros(1, 12, dtype=torch.int64))
    batch.taps = batch.taps.float()
    weight = torch.randn(12 * 2 - 1, TINY.hidden)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden = drafter(batch, 2).hidden
        (hidden.float() * weight).sum().backward()
        results.append((hidden.float(), drafter.fc.weight.grad))
        drafter.zero_grad()
    for plain, rounded in zip(*results, strict=True):
        assert (plain - rounded).norm() < 0.03 * plain.norm()


def test_compiled_equals_eager() -> None:
    """torch.compile traces the unroll whatever the batch, and gives the same numbers."""
    drafter = make_drafter(TINY)
    compiled = torch.compile(drafter, backend="aot_eager")
    for seed, width in ((0, 9), (1, 14)):
        mask = torch.rand(1, width, generator=torch.Generator().manual_seed(seed)) < 0.5
        batch = make_batch(TINY, mask, (torch.arange(width) // 5)[None])
        torch.testing.assert_close(compiled(batch, 2).hidden, drafter(batch, 2).hidden, rtol=1e-9, atol=1e-11)
