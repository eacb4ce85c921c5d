"""Objectives by hand and by autograd, the chunked score against the whole, metrics against the definitions written out."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.dense_unroll import TINY, make_batch, make_drafter
from workbench import losses
from workbench.losses import OBJECTIVES, Scores, Vocabulary, metrics, ratios, score, totals
from workbench.unroll import Unrolled

HALF, THREE_QUARTERS = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.75, 0.25]]).double().log()
BY_HAND = {  # q = (1/2, 1/2), p = (3/4, 1/4): overlap 3/4
    "kl": 0.75 * math.log(1.5) + 0.25 * math.log(0.5),
    "soft_ce": math.log(2),
    "lk": -math.log(0.75),
    "lk_hybrid": math.exp(-2.25) * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) + (1 - math.exp(-2.25)) * 0.25,
}


def objective(name: str, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """The objective of two distributions given as logs."""
    p = log_p.exp()
    return OBJECTIVES[name](log_q.exp(), p, -(p * log_q).sum(-1), -(p * log_p).sum(-1))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_by_hand(name: str) -> None:
    """Two tokens, by hand; and equal distributions cost nothing beyond p's entropy and push nowhere."""
    assert objective(name, HALF, THREE_QUARTERS)[0].item() == pytest.approx(BY_HAND[name])
    loss, grad = objective(name, THREE_QUARTERS, THREE_QUARTERS)
    assert loss.item() == pytest.approx(0.5623351446 if name == "soft_ce" else 0, abs=1e-9)
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_gradient_is_autograds(name: str) -> None:
    """The gradient that comes beside each loss is the derivative in the draft logits (the hybrid's weight held constant)."""
    torch.manual_seed(0)
    logits = torch.randn(7, 30, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(2 * torch.randn(7, 30, dtype=torch.float64), -1)
    log_q = torch.log_softmax(logits, -1)
    with torch.no_grad():
        value, grad = objective(name, log_q, log_p)
    loss, overlap = objective(name, log_q, log_p)[0], torch.minimum(log_q.exp(), log_p.exp()).sum(-1)
    if name == "lk_hybrid":
        weight = torch.exp(-3 * overlap).detach()
        loss = weight * objective("kl", log_q, log_p)[0] + (1 - weight) * (1 - overlap)
    torch.testing.assert_close(value, loss)
    torch.testing.assert_close(grad, torch.autograd.grad(loss.sum(), logits)[0])


def test_uniform_drafter_against_a_sure_teacher_costs_ln_k() -> None:
    """The yardstick of a loss: ln K. Confidently wrong costs far more, and LK stays finite there."""
    sure = torch.log_softmax(torch.tensor([[200.0, 0, 0, 0]]), -1)
    assert objective("kl", torch.full((1, 4), 0.25).log(), sure)[0].item() == pytest.approx(math.log(4))
    wrong = torch.log_softmax(torch.tensor([[0.0, 200, 0, 0]]), -1)
    assert objective("kl", wrong, sure)[0].item() == pytest.approx(200)
    assert objective("lk", wrong, sure)[0].item() == pytest.approx(-math.log(losses.LEAST_OVERLAP))


# ---- score -------------------------------------------------------------------------------------------------------------------------------


def setting(seed: int = 0, steps: int = 3, k: int = TINY.draft_vocab) -> SimpleNamespace:
    """A drafter unrolled over two packed rows, a verifier's head over V and a draft vocabulary of it, in float64."""
    torch.manual_seed(seed)
    mask = torch.rand(2, 13) < 0.6
    batch = make_batch(TINY, mask, torch.tensor([[0] * 6 + [1] * 7, [0] * 13]), seed)
    unrolled = make_drafter(TINY, seed)(batch, steps)
    head = torch.randn(TINY.vocab, TINY.target_hidden, dtype=torch.float64)
    ids = torch.randperm(TINY.vocab)[:k]
    return SimpleNamespace(
        mask=mask,
        unrolled=unrolled,
        lm_head=torch.randn(k, TINY.hidden, dtype=torch.float64, requires_grad=True),
        states=torch.randn(len(unrolled.teacher_rows), TINY.target_hidden, dtype=torch.float64),
        vocabulary=Vocabulary(head, ids),
        weights=torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)[:steps] / totals(mask, steps),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_score_in_chunks_equals_the_whole(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, per-pair scores and both gradients equal plain autograd over all logits at once, whatever the chunk."""
    monkeypatch.setattr(losses, "CHUNK", chunk)
    s = setting()
    rows = s.vocabulary.head[s.vocabulary.ids]
    z = (s.states @ rows.T)[s.unrolled.teacher]
    logits = s.unrolled.hidden @ s.lm_head.T
    each, grad = objective(name, torch.log_softmax(logits, -1), torch.log_softmax(z, -1))
    weights = s.weights[s.unrolled.step] * s.unrolled.supervised
    pushed = (grad.detach() * weights[:, None] * logits).sum()  # its gradients are the objective's
    expected = torch.autograd.grad(pushed, [s.unrolled.hidden, s.lm_head], retain_graph=True)

    value, scores = score(s.unrolled, s.lm_head, s.states, rows, s.weights, name)
    torch.testing.assert_close(value, (each * weights).sum())
    torch.testing.assert_close(torch.autograd.grad(2 * value, [s.unrolled.hidden, s.lm_head]), tuple(2 * g for g in expected))
    torch.testing.assert_close(scores.loss, each)
    assert torch.equal(scores.pred, logits.argmax(-1))
    assert torch.equal(scores.label, z.argmax(-1))
    assert scores.alpha is None


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_full_vocabulary_scores_are_those_of_the_full_distribution(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha, hit, inside and covered use p over all V; objective and labels are as with the draft rows alone."""
    monkeypatch.setattr(losses, "CHUNK", chunk)
    s = setting(1)
    head, ids = s.vocabulary
    p = (s.states @ head.T).softmax(-1)[s.unrolled.teacher]  # [P, V]
    q = torch.zeros_like(p)
    q[:, ids] = (s.unrolled.hidden @ s.lm_head.T).softmax(-1)
    value, scores = score(s.unrolled, s.lm_head, s.states, s.vocabulary, s.weights)
    torch.testing.assert_close(scores.alpha, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(scores.covered, p[:, ids].sum(-1))
    assert torch.equal(scores.hit, q.argmax(-1) == p.argmax(-1))
    assert torch.equal(scores.inside, torch.isin(p.argmax(-1), ids))
    assert 0 < scores.inside.sum() < len(scores.inside)
    rows_value, rows_scores = score(s.unrolled, s.lm_head, s.states, head[ids], s.weights)
    torch.testing.assert_close(value, rows_value)
    assert torch.equal(scores.label, rows_scores.label)


def test_a_frozen_head_gets_no_gradient_and_evaluation_none_at_all() -> None:
    """What is not wanted is not computed: a frozen head, and everything under no_grad."""
    s = setting()
    rows = s.vocabulary.head[s.vocabulary.ids]
    value, _ = score(s.unrolled, s.lm_head.detach(), s.states, rows, s.weights)
    assert torch.autograd.grad(value, s.unrolled.hidden)[0].abs().sum() > 0
    with torch.no_grad():
        value, _ = score(s.unrolled, s.lm_head, s.states, rows, s.weights)
    assert not value.requires_grad


def test_autocast_keeps_the_softmax_in_float32() -> None:
    """Under bf16 autocast the value stays float32 and close; gradients arrive in the parameters' own type."""
    s = setting()
    rows, hidden = s.vocabulary.head[s.vocabulary.ids].float(), s.unrolled.hidden.detach().float().requires_grad_()
    unrolled, head = Unrolled(**vars(s.unrolled) | {"hidden": hidden}), s.lm_head.detach().float().requires_grad_()
    exact, _ = score(unrolled, head, s.states.float(), rows, s.weights.float())
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = score(unrolled, head, s.states.float(), rows, s.weights.float())
    assert rough.dtype == torch.float32
    assert abs(rough - exact) < 0.03 * exact
    for ours, theirs in zip(*(torch.autograd.grad(value, [hidden, head]) for value in (rough, exact)), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_the_operator_keeps_torchs_rules() -> None:
    """Shapes for tracing, autograd registration and aliasing hold as torch's own checker wants them."""
    s = setting()
    for ids in (None, s.vocabulary.ids):
        rows = s.vocabulary.head if ids is not None else s.vocabulary.head[s.vocabulary.ids]
        weights = s.weights[s.unrolled.step] * s.unrolled.supervised
        hidden = s.unrolled.hidden.detach().requires_grad_()
        torch.library.opcheck(
            losses.score_pairs, (hidden, s.lm_head, s.states, rows, ids, s.unrolled.teacher, weights, 3, "kl", True, True)
        )


# ---- metrics -----------------------------------------------------------------------------------------------------------------------------


def test_totals_count_what_each_step_can_see() -> None:
    """Step k loses the first k positions of every packed row."""
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    assert totals(mask, 3).tolist() == [4, 2, 1]


def by_definition(mask: Tensor, steps: int, right: Tensor, hit: Tensor) -> dict[str, list[float]]:
    """speculators' counts as its text says them, over arrays right, hit [S, B, T] of every row, and prefix_k by counting chains."""
    out, width, alive = {}, mask.shape[1], mask.clone()
    for k in range(steps):
        seen, left = mask[:, k:], max(width - k, 0)
        before = alive[:, :left]
        total = before.sum().item()
        before &= right[k, :, :left]
        good = (before & seen).sum().item()
        out[f"full_acc_{k}"], out[f"cond_acc_{k}"] = [good, seen.sum().item()], [good, total]
        out[f"acc_{k}"] = [(hit[k, :, :left] & seen).sum().item(), seen.sum().item()]
        chains = [(b, t) for b in range(len(mask)) for t in range(left) if mask[b, t : t + k + 1].all()]
        out[f"prefix_{k}"] = [sum(all(hit[j, b, t] for j in range(k + 1)) for b, t in chains), len(chains)]
    return out


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_metrics_equal_their_definitions(data: st.DataObject) -> None:
    """full_acc, cond_acc, acc and prefix for any mask, any steps and any pattern of right and wrong, holes and row ends included."""
    height, width, steps = (data.draw(st.integers(1, high)) for high in (2, 9, 4))
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=height, max_size=height)))
    batch = make_batch(TINY, mask, torch.zeros(height, width, dtype=torch.int64))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    right, hit = (torch.rand(steps, height, width) < 0.7 for _ in range(2))
    unrolled = make_drafter(TINY)(batch, steps)
    where = unrolled.step, unrolled.start[unrolled.chain]
    pairs = len(unrolled.step)
    scores = Scores(
        loss=torch.rand(pairs), pred=torch.zeros(pairs), label=(~right.flatten(1)[where]).float(), hit=hit.flatten(1)[where],
        inside=torch.ones(pairs, dtype=torch.bool), alpha=torch.rand(pairs), covered=torch.rand(pairs),
    )  # fmt: skip
    ours = metrics(unrolled, scores)
    for name, pair in by_definition(mask, steps, right, hit).items():
        assert ours[name].tolist() == pair, name
    assert ours["loss_0"][0].item() == pytest.approx(scores.loss[(unrolled.step == 0) & unrolled.supervised].sum().item(), rel=1e-6)


def test_metrics_add_up_over_batches() -> None:
    """Sums of two batch rows measured apart are those of both together."""
    s = setting(2)
    _, scores = score(s.unrolled, s.lm_head, s.states, s.vocabulary, s.weights)
    together = metrics(s.unrolled, scores)
    apart: dict[str, Tensor] = {}
    row_of_pair, row_of_chain = s.unrolled.start[s.unrolled.chain] // 13, s.unrolled.start // 13
    for row in range(2):
        pick, chains = row_of_pair == row, row_of_chain == row
        renumber = chains.cumsum(0) - 1
        half = Unrolled(
            s.unrolled.hidden[pick], 3, s.unrolled.step[pick], renumber[s.unrolled.chain[pick]], s.unrolled.teacher[pick],
            s.unrolled.supervised[pick], s.unrolled.start[chains], s.unrolled.anchored[chains], s.unrolled.room[chains],
            s.unrolled.teacher_rows,
        )  # fmt: skip
        part = metrics(half, Scores(*(column[pick] for column in scores)))
        apart = {name: apart.get(name, 0) + pair for name, pair in part.items()}
    torch.testing.assert_close(apart, together)


def test_ratios_and_the_simulated_accept_length() -> None:
    """sum / total, nan where nothing was counted; accept length is 1 + joint prefix rates, the bonus token included."""
    sums = {"prefix_0": torch.tensor([6.0, 10.0]), "prefix_1": torch.tensor([2.0, 8.0]), "loss_0": torch.tensor([0.0, 0.0])}
    result = ratios(sums)
    assert result["accept_length"] == pytest.approx(1 + 0.6 + 0.25)
    assert math.isnan(result["loss_0"])
    assert "accept_length" not in ratios({"loss_0": torch.tensor([1.0, 2.0])})
