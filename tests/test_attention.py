"""Span attention against plain softmax attention over the keys each query may see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench import attention
from workbench.attention import merge, plan_blocks, span_attention

SCALE = 0.6


def tensors(rows: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q [2, R, 3, 4], k [2, N, 4], v [2, N, 5], wanting gradients."""
    torch.manual_seed(rows)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((2, rows, 3, 4), (2, keys, 4), (2, keys, 5))]


def plain(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the mask written out."""
    key = torch.arange(k.shape[1])
    seen = (key >= first[:, None]) & (key <= last[:, None])  # [R, N]
    scores = (torch.einsum("Grgd,Gnd->Grgn", q, k) * SCALE).masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("Grgn,Gne->Grge", scores.softmax(-1), v), scores.logsumexp(-1)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_output_lse_and_gradients_equal_plain_attention(data: st.DataObject) -> None:
    """Any documents, any choice of queries, any block size: output, log-sum-exp and the gradients of both."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    start = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths))
    rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, len(start) - 1), min_size=1))))
    first, last = start[rows], rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", data.draw(st.integers(1, 8)))
        blocks = plan_blocks(first, last)
    assert blocks[:, 0].tolist() == [0, *blocks[:-1, 1].tolist()], "blocks cover the queries in order"
    assert blocks[-1, 1] == len(rows)
    inputs = tensors(len(rows), len(start))
    ours, expected = span_attention(*inputs, first, last, blocks, SCALE), plain(*inputs, first, last)
    weights = [torch.randn_like(part) for part in expected]
    grads = [torch.autograd.grad(sum((o * w).sum() for o, w in zip(pair, weights, strict=True)), inputs) for pair in (ours, expected)]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*grads)


def test_merge_adds_keys_exactly() -> None:
    """Own keys merged by log-sum-exp equal one softmax over all keys, with the same gradients."""
    rows, first, last = 6, torch.zeros(6, dtype=torch.int64), torch.arange(6)
    q, k, v = tensors(rows, rows)
    own_k, own_v = (torch.randn(2, rows, 2, width, dtype=torch.float64, requires_grad=True) for width in (4, 5))
    out, lse = span_attention(q, k, v, first, last, plan_blocks(first, last), SCALE)
    merged = merge(out, lse, q, own_k, own_v, SCALE)
    for row in range(rows):
        keys, values = torch.cat([k[:, : row + 1], own_k[:, row]], 1), torch.cat([v[:, : row + 1], own_v[:, row]], 1)
        weights = (torch.einsum("Ggd,Gnd->Ggn", q[:, row], keys) * SCALE).softmax(-1)
        torch.testing.assert_close(merged[:, row], weights @ values)
    assert torch.autograd.gradcheck(
        lambda *inputs: merge(*span_attention(*inputs[:3], first, last, plan_blocks(first, last), SCALE), inputs[0], *inputs[3:], SCALE),
        (q, k, v, own_k, own_v),
    )


def test_blocks_break_where_documents_do() -> None:
    """A block ends at its size, and between documents once it is worth a matmul; so many short documents share one."""
    first = torch.tensor([0] * 40 + [40] * 200 + [240, 241, 242])
    blocks = plan_blocks(first, torch.arange(243)).tolist()
    assert blocks == [[0, 40, 0, 40], [40, 168, 40, 168], [168, 240, 40, 240], [240, 243, 240, 243]]
    assert plan_blocks(torch.arange(20), torch.arange(20)).tolist() == [[0, 20, 0, 20]]
    assert plan_blocks(torch.zeros(0), torch.zeros(0)).shape == (0, 4)


def test_the_operator_keeps_torchs_rules() -> None:
    """Shapes for tracing, autograd registration and aliasing hold as torch's own checker wants them; no memory of T x T is returned."""
    first = torch.zeros(5, dtype=torch.int64)
    last = torch.arange(5)
    torch.library.opcheck(span_attention, (*tensors(5, 5), first, last, plan_blocks(first, last), SCALE))


def test_half_precision_accumulates_in_float32() -> None:
    """bfloat16 inputs give bfloat16 outputs and a float32 log-sum-exp close to exact ones."""
    first, last = torch.zeros(40, dtype=torch.int64), torch.arange(40)
    inputs = [part.detach() for part in tensors(40, 40)]
    out, lse = span_attention(*(part.bfloat16() for part in inputs), first, last, plan_blocks(first, last), SCALE)
    expected, expected_lse = plain(*inputs, first, last)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out - expected).norm() < 0.01 * expected.norm()
    assert (lse - expected_lse).norm() < 0.01 * expected_lse.norm()
