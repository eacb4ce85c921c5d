"""Attention of a few query rows over the keys of their document, without a mask of all rows by all keys.

Notable: queries may be any sorted choice of rows (those a loss can see), keys are all rows. Work is cut into blocks of neighbouring
queries; a block reads only the key span that it can see, so packed documents never meet and nothing of size T x T is kept: the
backward recomputes each block from the log-sum-exp. Output *and* log-sum-exp carry gradients, hence `merge` can add further keys
exactly. Both passes are opaque operators, so torch.compile sees one node whatever the batch.

Rows-last layout: q [G, R, g, D], k [G, N, D], v [G, N, E] with G key/value heads, g query heads a key head, R query rows, N key rows.
"""

import torch
from torch import Tensor

BLOCK = 128  # query rows a block: large enough for full matmul speed, small enough that a block's scores stay in a CPU's cache


def plan_blocks(first: Tensor, last: Tensor) -> Tensor:
    """Cut sorted query rows into blocks [n, 4] of (query start, query end, key start, key end), on the CPU.

    `first`, `last` [R]: the key span, both ends included, that each query sees; both ascending. A block ends after BLOCK rows, or
    where the next query's keys begin behind its own (another document) once it holds a quarter of that.
    """
    first, last = first.tolist(), last.tolist()
    blocks, start = [], 0
    for row in range(1, len(first) + 1):
        size = row - start
        apart = row < len(first) and first[row] > last[row - 1]
        if row == len(first) or size == BLOCK or (apart and size >= BLOCK // 4):
            blocks.append((start, row, first[start], last[row - 1] + 1))
            start = row
    return torch.tensor(blocks, dtype=torch.int64).reshape(-1, 4)


@torch.library.custom_op("workbench::span_attention", mutates_args=())
def span_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, blocks: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over keys first..last: output [G, R, g, E] and log-sum-exp [G, R, g] (at least float32)."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    for a, b, lo, hi in blocks.tolist():
        scores = _scores(q[:, a:b], k[:, lo:hi], first[a:b] - lo, last[a:b] - lo, scale)  # [G, m * g, n]
        block_lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = scores.sub_(block_lse).exp_().to(v.dtype)
        out[:, a:b] = torch.bmm(weights, v[:, lo:hi]).view_as(out[:, a:b])
        lse[:, a:b] = block_lse.view_as(lse[:, a:b])
    return out, lse


@torch.library.custom_op("workbench::span_attention_backward", mutates_args=())
def span_attention_backward(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    first: Tensor, last: Tensor, blocks: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v. With P the weights: dS = P * (dO v' - rowsum(dO * O) + dLSE)."""
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.zeros_like(k, dtype=lse.dtype, memory_format=torch.contiguous_format)
    grad_v = torch.zeros_like(v, dtype=lse.dtype, memory_format=torch.contiguous_format)
    offset = grad_lse - (grad_out.to(lse.dtype) * out).sum(-1)  # [G, R, g]
    for a, b, lo, hi in blocks.tolist():
        query, grad = q[:, a:b].flatten(1, 2), grad_out[:, a:b].flatten(1, 2)  # [G, m * g, D], [G, m * g, E]
        weights = _scores(q[:, a:b], k[:, lo:hi], first[a:b] - lo, last[a:b] - lo, scale)
        weights.sub_(lse[:, a:b].flatten(1).unsqueeze(-1)).exp_()  # [G, m * g, n]
        grad_v[:, lo:hi] += torch.bmm(weights.to(v.dtype).mT, grad)
        grad_scores = torch.bmm(grad, v[:, lo:hi].mT).to(lse.dtype)
        grad_scores.add_(offset[:, a:b].flatten(1).unsqueeze(-1)).mul_(weights).mul_(scale)
        grad_scores = grad_scores.to(q.dtype)
        grad_q[:, a:b] = torch.bmm(grad_scores, k[:, lo:hi]).view_as(grad_q[:, a:b])
        grad_k[:, lo:hi] += torch.bmm(grad_scores.mT, query)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, first: Tensor, last: Tensor, scale: float) -> Tensor:
    """Scaled scores [G, m * g, n] of q [G, m, g, D] over k [G, n, D], -inf outside first..last [m]; at least float32."""
    groups, rows, width, _ = q.shape
    scores = torch.bmm(q.flatten(1, 2), k.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    key = torch.arange(k.shape[1], device=k.device)
    hidden = (key < first[:, None]) | (key > last[:, None])  # [m, n]
    scores.view(groups, rows, width, -1).masked_fill_(hidden[:, None], -torch.inf)
    return scores


@span_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, blocks: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@span_attention_backward.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, first, last, blocks, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, first, last, blocks, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, first, last, blocks)


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor):  # type: ignore[no-untyped-def]
    grads = span_attention_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None, None


span_attention.register_autograd(_backward, setup_context=_keep)


def merge(out: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Widen each query's softmax by J keys of its own: keys [G, R, J, D], values [G, R, J, E] -> output [G, R, g, E].

    Exact: the finished part counts as one more key whose score is its log-sum-exp and whose value is its output.
    """
    scores = torch.einsum("Grgd,Grjd->Grgj", q, keys).to(lse.dtype) * scale
    weights = torch.softmax(torch.cat([lse.unsqueeze(-1), scores], -1), -1).to(out.dtype)
    return weights[..., :1] * out + torch.einsum("Grgj,Grje->Grge", weights[..., 1:], values)
