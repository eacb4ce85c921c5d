"""The training-time unroll of an EAGLE-3 drafter over a packed batch, computing only what a loss can see.

Notable: row t of a document holds the embedding of x[t+1] and the verifier's tap states at t, and predicts x[t+2]; its teacher is the
verifier's distribution at t+1. At TTT step k the row's token and teacher move k further left, its rope position k further right, its
hidden input is its own previous output, and it attends to the step-0 keys of its document up to itself plus its *own* keys of steps
1..k. An unsupervised row matters only through its step-0 keys and values, so queries, MLPs, norms, head and all later steps run on
needed rows alone (in deeper drafters step 0 of all layers but the last runs on all visible rows). Exact, with the same gradients.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.attention import merge, plan_blocks, span_attention

if TYPE_CHECKING:
    from workbench.drafter import Drafter


class Batch(Protocol):
    """What the unroll reads of a packed batch, all [B, T, ...]; row t of a document stands for position t.

    Documents are runs of one id in `documents`; -1 is padding. `teacher_state` (h_n at t+1) is the objective's business.
    """

    next_ids: Tensor  # x[t+1]
    taps: Tensor  # [B, T, A * Ht], states at t
    loss_mask: Tensor  # bool, of token t+1
    positions: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Unrolled:
    """Final-norm outputs of the (chain, TTT step) pairs that a loss or a metric looks at, ordered by teacher row, then step.

    A chain is the S steps that start from one row; rows are flat indices b * T + t. P pairs, R chains, M distinct teacher rows.
    """

    hidden: Tensor  # [P, H] post-norm: the input of lm_head
    steps: int  # S
    step: Tensor  # [P] TTT step k
    chain: Tensor  # [P] index into start
    teacher: Tensor  # [P] index into teacher_rows, ascending
    supervised: Tensor  # [P] bool, loss mask of the teacher row: counts in the loss
    start: Tensor  # [R] flat row that the chain starts from
    anchored: Tensor  # [R] bool, loss mask of the start row: counts in prefix metrics
    room: Tensor  # [R] steps from the start row to the end of its packed row, itself included: step k exists where room > k
    teacher_rows: Tensor  # [M] flat row of batch.teacher_state that labels come from: start + step


def unroll(drafter: "Drafter", batch: Batch, steps: int) -> Unrolled:
    """Unroll `steps` TTT steps over a packed batch; exact, and differentiable in every trainable weight.

    As in speculators the shift runs over the whole packed row: the last rows of a document have their later steps' teachers in
    the next document, and count where that one's first tokens are supervised.
    """
    plan = _Plan.make(batch, steps, drafter.config.sliding_window)
    ids = F.pad(batch.next_ids, (0, steps))  # [B, T + S]
    positions = batch.positions.flatten()
    hidden = drafter.fuse(batch.taps.flatten(0, 1).index_select(0, plan.visible))  # [N, H]
    embeds = drafter.embed_tokens(batch.next_ids.flatten()[plan.visible])
    rope = drafter.rope(positions[plan.visible])
    caches = []
    for index, layer in enumerate(drafter.layers):
        spans = plan.needed if index == len(drafter.layers) - 1 else plan.every
        x, residual = layer.enter(embeds, hidden)
        keys, values = (part.transpose(0, 1).contiguous() for part in layer.self_attn.keys_values(x, rope))
        caches.append(_StepKeys(keys, values))
        chosen = [part if spans is plan.every else part.index_select(0, plan.rows) for part in (x, residual, *rope)]
        q = layer.self_attn.queries(chosen[0], (chosen[2], chosen[3]))  # [R, G, g, D]
        hidden = layer.leave(chosen[1], caches[-1].attend(q, spans, layer.self_attn.scale))
    outputs = []
    rows = plan.visible[plan.rows]  # [R] flat
    for step in range(steps):
        if step:
            embeds = drafter.embed_tokens(ids.flatten()[plan.padded_rows + step])
            rope = drafter.rope(positions[rows] + step)
            for layer, cache in zip(drafter.layers, caches, strict=True):
                x, residual = layer.enter(embeds, hidden)
                cache.append(*layer.self_attn.keys_values(x, rope))
                q = layer.self_attn.queries(x, rope)
                hidden = layer.leave(residual, cache.attend(q, plan.needed, layer.self_attn.scale))
        hidden, normed = drafter.finish(hidden)
        outputs.append(normed)
    return Unrolled(torch.cat(outputs).index_select(0, plan.pairs), **plan.labels)  # [S * R, H] -> [P, H]


class _StepKeys:
    """One layer's keys and values during an unroll: step 0 of all visible rows, and each needed row's own of later steps."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values  # [G, N, D], [G, N, E]
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Keys [R, G, D] and values [R, G, E] of one more step."""
        self.own_keys.append(keys.transpose(0, 1))
        self.own_values.append(values.transpose(0, 1))

    def attend(self, q: Tensor, spans: "_Spans", scale: float) -> Tensor:
        """q [R, G, g, D] -> attended heads [R, heads * E]."""
        q = q.transpose(0, 1).contiguous()  # [G, R, g, D]
        out, lse = span_attention(q, self.keys, self.values, spans.first, spans.last, spans.blocks, scale)
        if self.own_keys:
            out = merge(out, lse, q, torch.stack(self.own_keys, 2), torch.stack(self.own_values, 2), scale)
        return out.transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class _Spans:
    """Which step-0 keys each query sees: first..last [R] as indices into the visible rows, and the blocks that cover them."""

    first: Tensor
    last: Tensor
    blocks: Tensor

    @classmethod
    def make(cls, first: Tensor, last: Tensor) -> "_Spans":
        return cls(first, last, plan_blocks(first, last))


@dataclass(frozen=True)
class _Plan:
    """Which rows an unroll computes. Visible rows are those up to the last needed one of their document: only they can be seen."""

    visible: Tensor  # [N] flat rows that have keys at step 0
    rows: Tensor  # [R] needed rows as indices into `visible`: whatever any loss or metric looks at, at any step
    padded_rows: Tensor  # [R] the same rows as indices into ids padded to T + S
    needed: _Spans
    every: _Spans
    pairs: Tensor  # [P] indices into (step, needed row) flattened
    labels: dict[str, Tensor]

    @classmethod
    @torch.compiler.disable
    @torch.no_grad()
    def make(cls, batch: Batch, steps: int, window: int | None) -> "_Plan":
        """Plan from loss mask and documents [B, T]; waits for the device."""
        mask, documents = batch.loss_mask.bool(), batch.documents
        (height, width), device = mask.shape, mask.device
        supervised = torch.stack([F.pad(mask[:, k:], (0, min(k, width))) for k in range(steps)])  # [S, B, T]
        # speculators' cond_acc_k counts rows by whether all steps before k hit, supervised there or not
        inside = torch.arange(width, device=device) + torch.arange(steps, device=device)[:, None, None] < width  # [S, 1, T]
        earlier = torch.arange(steps, device=device)[:, None, None] < steps - 1
        looked_at = (supervised | (mask & inside & earlier)).flatten(1)  # [S, B * T]
        needed = looked_at.any(0)  # [B * T]

        row = torch.arange(height * width, device=device)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] == -1)  # a padding row sees only itself
        segment = starts.flatten().cumsum(0) - 1
        end = torch.full_like(row, -1).scatter_reduce_(0, segment, torch.where(needed, row, -1), "amax")  # [segments]
        visible = row <= end[segment]
        compact = visible.cumsum(0) - 1  # flat row -> index into visible
        start = torch.where(starts.flatten(), row, 0).cummax(0).values
        first, last = compact[start[visible]], compact[visible]
        if window is not None:
            first = torch.maximum(first, last - window + 1)

        flat = row[needed]  # [R] the chains' starts
        rows = compact[needed]
        chain = needed.cumsum(0) - 1  # flat row -> chain
        # pairs ordered by teacher row, then step, so that one chunk of teacher rows serves all its steps
        step, start_row = looked_at.nonzero(as_tuple=True)
        order = ((start_row + step) * steps + step).argsort()
        step, start_row = step[order], start_row[order]
        teacher_rows, teacher = (start_row + step).unique_consecutive(return_inverse=True)
        return cls(
            visible=row[visible],
            rows=rows,
            padded_rows=flat + flat // width * steps,
            needed=_Spans.make(first[rows], last[rows]),
            every=_Spans.make(first, last),
            pairs=step * len(rows) + chain[start_row],
            labels={
                "steps": steps,
                "step": step,
                "chain": chain[start_row],
                "teacher": teacher,
                "supervised": supervised.flatten(1)[step, start_row],
                "start": flat,
                "anchored": mask.flatten()[flat],
                "room": width - flat % width,
                "teacher_rows": teacher_rows,
            },
        )
