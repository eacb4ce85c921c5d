"""Objectives and metrics of a drafter as pure functions; sums and totals until the last moment.

Notable: p is the verifier's distribution, q the drafter's, both over the K draft tokens in row order. Objectives renormalise p over
those K tokens, as every trainer does; `alpha` and `acc` never do: they use the verifier's full distribution over V. Logits [T, K]
are never kept: `score` goes through teacher rows in chunks and forms the gradient beside the loss. Metrics are float64 pairs
[sum, total], to be added over batches and processes and divided by `ratios`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.unroll import Unrolled

CHUNK = 128  # pairs whose logits are held at once: near full matmul speed, and at K = 32,000 some 16 MB each for a handful of arrays
LEAST_OVERLAP = 1e-5  # below it -log(alpha) is flat, as in speculators

Metrics = dict[str, Tensor]


def kl(q: Tensor, p: Tensor, cross: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q), speculators' default."""
    return cross - entropy, q - p


def soft_ce(q: Tensor, p: Tensor, cross: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of q under p: KL plus p's entropy, with KL's gradient (SpecForge, EAGLE)."""
    return cross, q - p


def lk(q: Tensor, p: Tensor, cross: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum_v min(p, q) (LK loss, arXiv 2602.23881)."""
    alpha, grad = _overlap(q, p)
    slope = torch.where(alpha > LEAST_OVERLAP, -1 / alpha, 0.0)
    return -alpha.clamp_min(LEAST_OVERLAP).log(), grad * slope.unsqueeze(-1)


def lk_hybrid(q: Tensor, p: Tensor, cross: Tensor, entropy: Tensor, eta: float = 3.0) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w) TV with w = exp(-eta alpha), w held constant in the gradient (same paper, its best eta)."""
    alpha, grad = _overlap(q, p)
    weight = torch.exp(-eta * alpha)
    push = (q - p).mul_(weight.unsqueeze(-1)).sub_(grad.mul_((1 - weight).unsqueeze(-1)))
    return weight * (cross - entropy) + (1 - weight) * (1 - alpha), push


def _overlap(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance sum_v min(p, q) within the draft vocabulary [n], and its gradient in the draft logits [n, K]."""
    below = torch.where(q <= p, q, 0.0)
    return torch.minimum(q, p).sum(-1), below.sub_(q * below.sum(-1, keepdim=True))


# Each takes q, p [n, K], the cross entropy -sum p log q [n] and p's entropy [n], and returns the loss of each row [n] beside its gradient
# in the draft logits [n, K].
OBJECTIVES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"kl": kl, "soft_ce": soft_ce, "lk": lk, "lk_hybrid": lk_hybrid}


class Vocabulary(NamedTuple):
    """The verifier's whole head, for metrics that need its full distribution."""

    head: Tensor  # [V, Ht]
    ids: Tensor  # [K] token id of each draft row


class Scores(NamedTuple):
    """What became of each pair of an `Unrolled`; the last four are None without a `Vocabulary`."""

    loss: Tensor  # [P] objective, unweighted
    pred: Tensor  # [P] drafter's top draft row
    label: Tensor  # [P] verifier's top draft row
    hit: Tensor | None = None  # [P] the drafter's top token is the verifier's top of all V
    inside: Tensor | None = None  # [P] that token is in the draft vocabulary
    alpha: Tensor | None = None  # [P] sum_v min(p, q) with the full p
    covered: Tensor | None = None  # [P] p(draft vocabulary)


def totals(loss_mask: Tensor, steps: int) -> Tensor:
    """Supervised positions of each TTT step [S]: the denominators of loss_k. Known before anything is computed."""
    return torch.stack([loss_mask[:, k:].sum() for k in range(steps)])


def score(
    unrolled: Unrolled,
    head: Tensor,
    teacher_states: Tensor,
    teacher: Tensor | Vocabulary,
    step_weights: Tensor,
    objective: str = "kl",
) -> tuple[Tensor, Scores]:
    """The weighted objective (a scalar, differentiable in hidden and head) and each pair's scores.

    head: lm_head's weight [K, H]. teacher_states: the verifier's states at `unrolled.teacher_rows` [M, Ht], *after* its final norm.
    teacher: its head rows of the draft vocabulary [K, Ht], or the whole `Vocabulary` (the full head's cost; evaluation).
    step_weights [S]: what a supervised pair of step k weighs, e.g. 0.8**k / totals[k]. Runs in autocast's dtype, softmax in float32.
    """
    weights = step_weights[unrolled.step] * unrolled.supervised
    rows, ids = teacher if isinstance(teacher, Vocabulary) else (teacher, None)
    operands = [unrolled.hidden, head, teacher_states.detach(), rows.detach()]
    if torch.is_autocast_enabled(head.device.type):
        operands = [operand.to(torch.get_autocast_dtype(head.device.type)) for operand in operands]
    wanted = torch.is_grad_enabled() and operands[0].requires_grad, torch.is_grad_enabled() and operands[1].requires_grad
    value, loss, pred, label, top, alpha, covered, _, _ = score_pairs(
        *operands, ids, unrolled.teacher, weights, unrolled.steps, objective, *wanted
    )
    if ids is None:
        return value, Scores(loss, pred, label)
    return value, Scores(loss, pred, label, ids[pred] == top, ids[label] == top, alpha, covered)


@torch.library.custom_op("workbench::score_pairs", mutates_args=())
def score_pairs(
    hidden: Tensor, head: Tensor, states: Tensor, rows: Tensor, ids: Tensor | None, teacher: Tensor, weights: Tensor,
    steps: int, objective: str, grad_hidden: bool, grad_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`score`'s work, opaque to torch.compile: (value, loss, pred, label, top, alpha, covered, d hidden, d head)."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    value, loss, pred, label, top, alpha, covered, d_hidden, d_head = _outputs(hidden, head, ids, grad_hidden, grad_head, exact)
    size = max(1, CHUNK // steps)  # teacher rows a chunk
    edges = range(0, len(states) + size, size)
    bounds = torch.searchsorted(teacher, torch.tensor(edges, device=teacher.device)).tolist()
    for first, a, b in zip(edges, bounds, bounds[1:], strict=False):
        at = teacher[a:b] - first
        z = (states[first : first + size] @ rows.T).to(exact)  # [c, K or V]
        if ids is not None:
            full = z.index_select(1, ids).sub_(torch.logsumexp(z, -1, keepdim=True)).exp_()  # [c, K] p over V
            top[a:b], covered[a:b] = z.argmax(-1)[at], full.sum(-1)[at]
            z = z.index_select(1, ids)
        label[a:b] = z.argmax(-1)[at]
        log_p = torch.log_softmax(z, -1)
        p = log_p.exp()
        entropy = -torch.linalg.vecdot(p, log_p)[at]
        p = p.index_select(0, at)  # [n, K]
        z = (hidden[a:b] @ head.T).to(exact)
        highest, pred[a:b] = z.max(-1)
        q = torch.softmax(z, -1)
        lse = highest - q.gather(1, pred[a:b, None]).squeeze(1).log()
        if ids is not None:
            alpha[a:b] = torch.minimum(full.index_select(0, at), q).sum(-1)
        loss[a:b], grad = OBJECTIVES[objective](q, p, lse - torch.linalg.vecdot(p, z), entropy)
        if grad_hidden or grad_head:
            grad = grad.mul_(weights[a:b].unsqueeze(-1)).to(hidden.dtype)
        if grad_hidden:
            d_hidden[a:b] = grad @ head
        if grad_head and hidden.dtype == exact:
            d_head.addmm_(grad.T, hidden[a:b])  # in place: [K, H] is large
        elif grad_head:
            d_head += grad.T @ hidden[a:b]
    value += (loss * weights).sum()
    return value, loss, pred, label, top, alpha, covered, d_hidden, d_head.to(head.dtype)


def _outputs(hidden: Tensor, head: Tensor, ids: Tensor | None, grad_hidden: bool, grad_head: bool, exact: torch.dtype) -> list[Tensor]:
    """Empty results of `score_pairs`; parts that are not asked for have no rows."""
    pairs, full = len(hidden), len(hidden) if ids is not None else 0
    rows = [hidden.new_empty(n, dtype=kind) for n, kind in ((pairs, exact), (pairs, torch.int64), (pairs, torch.int64))]
    wide = [hidden.new_empty(full, dtype=kind) for kind in (torch.int64, exact, exact)]
    d_hidden = hidden.new_empty(pairs if grad_hidden else 0, hidden.shape[1])
    d_head = head.new_zeros(len(head) if grad_head else 0, head.shape[1], dtype=exact)
    return [hidden.new_zeros((), dtype=exact), *rows, *wide, d_hidden, d_head]


@score_pairs.register_fake
def _(hidden, head, states, rows, ids, teacher, weights, steps, objective, grad_hidden, grad_head):  # type: ignore[no-untyped-def]
    *outputs, d_head = _outputs(hidden, head, ids, grad_hidden, grad_head, torch.promote_types(hidden.dtype, torch.float32))
    return *outputs, d_head.to(head.dtype)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.wanted = inputs[-2:]
    ctx.save_for_backward(*output[-2:])


def _backward(ctx, grad_value: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    grads = (saved * grad_value.to(saved.dtype) if want else None for saved, want in zip(ctx.saved_tensors, ctx.wanted, strict=True))
    return *grads, *[None] * 9


score_pairs.register_autograd(_backward, setup_context=_keep)


@torch.no_grad()
def metrics(unrolled: Unrolled, scores: Scores) -> Metrics:
    """Pairs [sum, total] (float64) of one batch, for each TTT step k.

    loss_k: objective over supervised pairs. full_acc_k: all steps 0..k hit the verifier's top *draft* token, among supervised pairs
    (speculators; the start row must be supervised too). cond_acc_k: the same hits among chains that hit all steps before, whether
    step k is supervised or not (speculators). With a `Vocabulary` also acc_k: step k alone hits the verifier's top token of V, one
    outside the draft vocabulary counts wrong (SpecForge). alpha_k: sum min(p, q), full p. prefix_k: all steps 0..k hit that top
    token, among chains supervised throughout; coverage: that token is in the draft vocabulary; covered_mass: p of that vocabulary.
    """
    supervised, steps = unrolled.supervised, unrolled.steps
    out: Metrics = {}

    def add(name: str, values: Tensor, among: Tensor) -> None:
        out[name] = torch.stack([values[among].sum(dtype=torch.float64), among.sum(dtype=torch.float64)])

    hit = scores.pred == scores.label
    alive = unrolled.anchored.clone()  # [R] hit at every step so far
    on_text = full_alive = torch.ones_like(alive)
    for k in range(steps):
        at = unrolled.step == k
        chain, counted = unrolled.chain[at], torch.zeros_like(alive)
        counted[chain] = supervised[at]
        before = alive & (unrolled.room > k)
        alive = _and(alive, chain, hit[at])
        add(f"loss_{k}", scores.loss, at & supervised)
        add(f"full_acc_{k}", alive, counted)
        out[f"cond_acc_{k}"] = torch.stack([out[f"full_acc_{k}"][0], before.sum(dtype=torch.float64)])
        if scores.hit is not None:
            on_text, full_alive = on_text & counted, _and(full_alive, chain, scores.hit[at])
            add(f"acc_{k}", scores.hit, at & supervised)
            add(f"alpha_{k}", scores.alpha, at & supervised)
            add(f"prefix_{k}", full_alive, on_text)
    if scores.hit is not None:
        labels = (unrolled.step == 0) & supervised
        add("coverage", scores.inside, labels)
        add("covered_mass", scores.covered, labels)
    return out


def _and(alive: Tensor, chain: Tensor, hit: Tensor) -> Tensor:
    """`alive` [R] restricted to the chains listed with a hit."""
    now = torch.zeros_like(alive)
    now[chain] = hit
    return alive & now


def ratios(sums: Metrics) -> dict[str, float]:
    """Each metric's sum / total (nan where nothing was counted), and from prefix_k `accept_length` = 1 + sum_k prefix_k.

    The simulated accept length counts the bonus token, as vLLM and SGLang do; it comes from joint prefix hits, not from a product.
    """
    out = {name: float(pair[0] / pair[1]) if pair[1] > 0 else float("nan") for name, pair in sums.items()}
    prefixes = [value for name, value in out.items() if name.startswith("prefix_")]
    if prefixes:
        out["accept_length"] = 1 + sum(prefixes)
    return out
