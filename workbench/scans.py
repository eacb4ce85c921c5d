"""A drafter run over a replay under any wiring, and the differences between wirings, token by token.

Notable: a `Wiring` is everything that may be got wrong between weights and inputs; `Bench.run` evaluates one and returns what became of
each (chain, TTT step), so two wirings are compared on the same tokens. Only chains count whose S targets are all supervised and that stay
inside their document under every shift, so no reading changes which tokens are looked at.
The loss is KL against the verifier's TOP tokens, renormalised over the draft vocabulary as trainers do. Readings that change what is right
(another map, another teacher) are compared by `cost` instead, the cross-entropy of the verifier's top token: KL would reward a flat
teacher or a small vocabulary. A token without a row costs ln V.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbench.accept import bootstrap_ratio
from workbench.checkpoint import DrafterCheckpoint
from workbench.drafter import Drafter, DrafterConfig
from workbench.drafter_files import VOCABULARY, config_of
from workbench.errors import InputError
from workbench.replay import Replay, Top
from workbench.unroll import unroll

STEPS = 3
CHUNK = 512  # pairs whose logits are held at once
LEVEL = 0.998  # of the interval that decides: some fifty readings are tried
LEAST = 0.01  # nats a token below which a difference is no matter
INPUTS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # read the joined input of the first layer


@dataclass(frozen=True)
class Wiring:
    """How weights and inputs are put together. map, embedding, final_norm: names of what the bench holds."""

    config: DrafterConfig
    taps: tuple[int, ...]  # boundary that each block of fc reads
    norms: int = 1  # times the final norm is applied to the teacher's state
    token_shift: int = 0  # embedding of x[t+1+shift]
    label_shift: int = 0  # teacher at t+1+shift
    advance: int = 1  # rope positions a TTT step
    swapped: bool = False  # hidden state first, embedding second
    scale: float = 1.0  # of the tap states
    leak: bool = False  # all documents of the replay are one packed row, whose rows see those before them
    layout: str = "as stored"  # of the attention heads, by the names of `layouts`
    map: str = "offset"
    embedding: str = "own"
    final_norm: str = "own"

    @property
    def body(self) -> str:
        """All that the hidden states depend on, as a key."""
        return repr(replace(self, norms=1, label_shift=0, map=""))


class Outcome(NamedTuple):
    """What became of R chains of S steps, and the document of each chain, [R, S] and [R]."""

    loss: Tensor
    cost: Tensor
    hit: Tensor  # bool: the drafter's top token is the verifier's top of V
    alpha: Tensor  # sum min(p, q) over the verifier's TOP tokens
    pred: Tensor  # row
    document: Tensor

    def accept_length(self) -> float:
        """Simulated: 1 + the mean number of leading hits of a chain."""
        return 1 + float(self.hit.cumprod(1).sum(1).double().mean())

    def summary(self) -> dict[str, float]:
        """loss: nats a token, mean over TTT steps; accuracy and alpha at the first step; simulated accept length over all."""
        first = {"accuracy": self.hit, "alpha": self.alpha}
        means = {name: float(x[:, 0].double().mean()) for name, x in first.items()}
        return {"loss": float(self.loss.double().mean()), **means, "accept_length": self.accept_length()}


@dataclass(frozen=True)
class Difference:
    """A wiring less another on the same tokens: nats a token, its 95 % interval (bootstrap over sequences), the one that decides (LEVEL),
    and the verdict."""

    loss: float
    low: float
    high: float
    sure: tuple[float, float]
    accept_length: float
    verdict: str  # better | worse | undecidable: too small or too uncertain; what lies in the interval may be so
    chains: int


def difference(new: Outcome, old: Outcome, by_cost: bool = False) -> Difference:
    """`new` less `old`, paired. by_cost: what is right differs between the two, so only the verifier's top token counts."""
    gap = (new.cost - old.cost if by_cost else new.loss - old.loss).double().mean(1)  # [R]
    _, place = old.document.unique(return_inverse=True)
    count = torch.bincount(place).double()
    total = torch.zeros_like(count).index_add_(0, place, gap)
    mean = float(total.sum() / count.sum())
    (low, high), sure = (bootstrap_ratio(total.numpy(), count.numpy(), draws=4000, level=level).tolist() for level in (0.95, LEVEL))
    verdict = "better" if sure[1] < 0 and mean < -LEAST else "worse" if sure[0] > 0 and mean > LEAST else "undecidable"
    return Difference(mean, low, high, (sure[0], sure[1]), new.accept_length() - old.accept_length(), verdict, len(gap))


class _Scene(NamedTuple):
    """Of each token [N] its place within its document and that document's number, and the chains [R] that count, by token."""

    positions: Tensor
    documents: Tensor
    chains: Tensor


@dataclass
class _Batch:
    next_ids: Tensor
    taps: Tensor
    loss_mask: Tensor
    positions: Tensor
    documents: Tensor


class _Rope(nn.Module):
    """Rotary angles whose positions advance by another amount a TTT step: an unroll asks once a step, in order."""

    def __init__(self, rope: nn.Module, advance: int):
        super().__init__()
        self.rope, self.advance, self.asked = rope, advance, 0

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.rope(positions + (self.advance - 1) * (self.asked - 1))


@dataclass
class Bench:
    """A drafter's weights and a replay, ready to be run under any wiring. maps: target id of each row [P, K], one line a part of the
    documents (dealt in turn), -1 where a row has none."""

    replay: Replay
    state: dict[str, Tensor]
    base: Wiring
    maps: dict[str, Tensor]
    embeddings: dict[str, Tensor]  # rows of the tokens that occur [U, H]
    norms: dict[str, Tensor]
    _hidden: dict[Any, Tensor] = field(default_factory=dict)
    _modules: dict[str, Drafter] = field(default_factory=dict)

    @classmethod
    def open(cls, replay: Replay, drafter: DrafterCheckpoint) -> "Bench":
        """The drafter as its checkpoint says it is wired. replay: complete. Raises InputError for what does not fit together."""
        config = config_of(drafter)
        width, layers = next(iter(replay.states.values())).shape[1], replay.layers
        if config.target_hidden != width:
            raise InputError(f"the replay's states are {width} wide, {drafter.location} takes {config.target_hidden}: another verifier's")
        taps = drafter.taps.boundaries(layers)
        if set(taps) - set(replay.states):
            raise InputError(f"{drafter.location} is fed boundaries {list(taps)}, the replay has {sorted(replay.states)}: record those")
        state = {name: drafter.tensor(name).float() for name in drafter.names if name not in (*VOCABULARY, "embed_tokens.weight")}
        bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
        if bad:
            raise InputError(f"{drafter.location}: {bad[0]} holds numbers that are not finite: the checkpoint is damaged; export it again")
        used, rows = replay.embedding
        embeddings = {"verifier": rows.float()} if rows.shape[1] == config.hidden else {}
        if "embed_tokens.weight" in drafter.names:
            embeddings["own"] = drafter.tensor("embed_tokens.weight", rows=used.numpy()).float()
        if not embeddings:
            raise InputError(
                f"{drafter.location} is {config.hidden} wide, its verifier {rows.shape[1]}, and it has no embedding of its own"
            )
        norms = {"own": state["norm.weight"], "ones": torch.ones_like(state["norm.weight"])}
        if replay.norm is not None and replay.norm.shape == norms["own"].shape:
            norms["verifier"] = replay.norm.float()
        maps = {name: torch.from_numpy(ids)[None] for name, ids in map_readings(drafter, replay.v).items()}
        first = Wiring(
            config=replace(config, vocab=len(used)),
            taps=taps,
            norms=replay.norms,
            map=next(iter(maps)),
            embedding="own" if "own" in embeddings else "verifier",
        )
        return cls(replay, state, first, maps, embeddings, norms)

    def run(self, wiring: Wiring, most: int | None = None, steps: int = STEPS) -> Outcome:
        """Evaluate a wiring on all chains, or on the first `most` of each document."""
        scene = self.scene(most)
        key = (wiring.body, most, steps)
        if key not in self._hidden:
            if len(self._hidden) > 3:
                self._hidden.pop(next(iter(self._hidden)))
            self._hidden[key] = self._unrolled(wiring, scene, steps)
        at = (scene.chains + 1 + wiring.label_shift)[:, None] + torch.arange(steps)  # [R, S]
        document = scene.documents[scene.chains]
        lines, top = self.maps[wiring.map], Top(*(column[at.flatten()] for column in self.replay.teacher[wiring.norms]))
        part = (document % len(lines)).repeat_interleave(steps)
        found = [torch.empty(at.numel(), dtype=kind) for kind in (torch.float32, torch.float32, torch.bool, torch.float32, torch.int64)]
        for p, line in enumerate(lines):
            for some in (part == p).nonzero()[:, 0].split(CHUNK):
                values = _score(self._hidden[key][some], self.state["lm_head.weight"], line, Top(*(x[some] for x in top)), self.replay.v)
                for whole, value in zip(found, values, strict=True):
                    whole[some] = value
        return Outcome(*(x.view(-1, steps) for x in found), document)

    @torch.inference_mode()
    def off_record(self, wiring: Wiring, most: int | None = None) -> float:
        """RMS difference to the drafter's logits that the replay holds, over their tokens and all TTT steps."""
        self.run(wiring, most)
        chains, row_of = self.scene(most).chains, _row_of(self.maps[wiring.map][0], self.replay.v)
        hidden = self._hidden[wiring.body, most, STEPS].unflatten(0, (-1, STEPS))  # [R, S, H]
        gaps = []
        for step, (tokens, logits) in self.replay.drafted.items():
            rows = row_of[tokens[chains].clamp_min(0)].masked_fill(tokens[chains] < 0, -1)  # [R, kept]
            weights = self.state["lm_head.weight"][rows.clamp_min(0)]  # [R, kept, H]
            ours = torch.einsum("rkh,rh->rk", weights, hidden[:, step])
            gaps.append((ours - logits[chains]).square()[rows >= 0])
        return float(torch.cat(gaps).mean().sqrt())

    @torch.inference_mode()
    def _unrolled(self, wiring: Wiring, scene: _Scene, steps: int) -> Tensor:
        """Inputs of the head [R * S, H]."""
        where, n = torch.searchsorted(self.replay.embedding[0], self.replay.ids), len(self.replay.ids)
        taps = torch.cat([self.replay.states[k] for k in wiring.taps], 1).float() * wiring.scale  # [N, A * Ht]
        shifted = (torch.arange(n) + 1 + wiring.token_shift).clamp(0, n - 1)
        wanted = torch.zeros(n, dtype=torch.bool)
        wanted[scene.chains] = True
        mask = torch.stack([wanted.roll(k) for k in range(steps)]).any(0)  # chains end inside their document: nothing wraps
        positions, documents = (torch.arange(n), torch.zeros_like(scene.documents)) if wiring.leak else (scene.positions, scene.documents)
        parts = (where[shifted], taps, mask, positions + 1, documents)
        out = unroll(self._drafter(wiring), _Batch(*(x[None] for x in parts)), steps)
        rank = torch.full((n,), -1)
        rank[scene.chains] = torch.arange(len(scene.chains))
        place = rank[out.start[out.chain]]
        hidden = out.hidden.new_empty(len(scene.chains) * steps, out.hidden.shape[1])
        hidden[(place * steps + out.step)[place >= 0]] = out.hidden[place >= 0]
        return hidden

    def _drafter(self, wiring: Wiring) -> Drafter:
        """The module under a wiring; its embedding has the rows of the replay's tokens alone."""
        key = repr((wiring.config, wiring.swapped, wiring.final_norm, wiring.embedding, wiring.layout))
        if key not in self._modules:
            state = {**self.state, "norm.weight": self.norms[wiring.final_norm]}
            if wiring.layout != "as stored":
                _rearrange(state, wiring.config, *layouts(wiring.config)[wiring.layout])
            for name in (f"layers.0.self_attn.{part}.weight" for part in INPUTS):
                if wiring.swapped and name in state:
                    state[name] = torch.cat(state[name].chunk(2, 1)[::-1], 1)
            self._modules = {key: Drafter.from_state(wiring.config, state, self.embeddings[wiring.embedding])}
        drafter = self._modules[key]
        rope = drafter.rope.rope if isinstance(drafter.rope, _Rope) else drafter.rope
        drafter.rope = _Rope(rope, wiring.advance)
        return drafter

    def scene(self, most: int | None = None) -> _Scene:
        """Which chains count, `most` of each document at most; InputError when none does."""
        replay, n = self.replay, torch.arange(len(self.replay.ids))
        number = replay.documents
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), replay.ends[:-1]])
        mask = torch.nn.functional.pad(replay.loss_mask, (0, STEPS + 1))
        counted = (replay.ends[number] - n > STEPS + 1) & torch.stack([mask[n + 1 + k] for k in range(STEPS)]).all(0)
        if not counted.any():
            raise InputError(f"no answer of the replay is long enough for {STEPS} draft tokens: record more tokens")
        if most is not None:
            before = counted.cumsum(0)
            first = torch.cat([torch.zeros(1, dtype=torch.int64), before])[starts][number]  # counted ahead of the document
            counted &= before - first <= most
        return _Scene(n - starts[number], number, counted.nonzero()[:, 0])


def _row_of(ids: Tensor, size: int) -> Tensor:
    """Row of each token [size] under a map [K], -1 where it has none."""
    row_of = torch.full((size,), -1)
    row_of[ids[ids >= 0]] = (ids >= 0).nonzero()[:, 0]
    return row_of


@torch.inference_mode()
def _score(hidden: Tensor, head: Tensor, ids: Tensor, top: Top, v: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, cost, hit, alpha, pred, all [n], of head inputs [n, H] with rows that stand for `ids` [K]."""
    logits = hidden @ head.T  # [n, K]
    lse = torch.logsumexp(logits, -1, keepdim=True)
    pred = logits.argmax(-1)
    rows = _row_of(ids, max(v, int(ids.max()) + 1, int(top.ids.max()) + 1))[top.ids]  # [n, M]
    known = rows >= 0
    log_q = (logits.gather(1, rows.clamp_min(0)) - lse).masked_fill(~known, -math.log(v))
    log_p = top.logits - top.lse[:, None]  # over V
    p = log_p.exp()
    inside = p * known
    mass = inside.sum(1, keepdim=True).clamp_min(1e-30)
    share = inside / mass
    loss = (share * (log_p - mass.log() - log_q)).sum(1)
    alpha = torch.minimum(p, log_q.exp()).mul(known).sum(1)
    return loss, -log_q[:, 0], (ids[pred] == top.ids[:, 0]), alpha, pred


def map_readings(drafter: DrafterCheckpoint, v: int) -> dict[str, np.ndarray]:
    """Target ids [K] of the head's rows under each way to read the checkpoint's map, engines' way first; -1 for an id outside V."""
    d2t, t2d = drafter.map_raw()
    k = drafter.k
    first = np.arange(k)
    found = {}
    if d2t is not None and d2t.shape == (k,):
        values = np.nan_to_num(d2t.real.astype(np.float64), nan=-1e15, posinf=-1e15).astype(np.int64)
        found = {"offset": values + first, "absolute": values}
    found["first K"] = first
    if t2d is not None and int(np.asarray(t2d).astype(bool).sum()) == k:
        found["t2d"] = np.flatnonzero(t2d)
    distinct: dict[str, np.ndarray] = {}
    for name, ids in found.items():
        ids = np.where((ids >= 0) & (ids < v), ids, -1)
        if not any(np.array_equal(ids, other) for other in distinct.values()):
            distinct[name] = ids
    return distinct


def layouts(config: DrafterConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Other orders that the attention's heads may have been meant in, each as (head blocks of q, k and v stacked [n + 2G], those of o [n]).

    Fused q, k and v are stored in one piece (all of q, all of k, all of v) or group by group (g query heads, their key, their value), and
    query head i reads key head i // g or, dealt in turn, i % G. An order that changes nothing for these sizes is left out.
    """
    n, g = config.heads, config.kv_heads
    if config.latent is not None:
        return {}
    heads, keys, values = torch.arange(n), n + torch.arange(g), n + g + torch.arange(g)
    by_group = torch.cat([heads.view(g, -1), keys[:, None], values[:, None]], 1).flatten()
    dealt = heads.view(-1, g).T.flatten()
    found = {
        "q, k and v fused by group, read in one piece": (by_group.argsort(), heads),
        "q, k and v fused in one piece, read by group": (by_group, heads),
        "query heads dealt to the key heads in turn": (torch.cat([dealt, keys, values]), dealt),
        "query heads taken from the key heads in turn": (torch.cat([dealt.argsort(), keys, values]), dealt.argsort()),
    }
    distinct: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (stack, out) in found.items():
        if not any(torch.equal(stack, other) for other in (torch.arange(n + 2 * g), *(s for s, _ in distinct.values()))):
            distinct[name] = stack, out
    return distinct


def _rearrange(state: dict[str, Tensor], config: DrafterConfig, stack: Tensor, out: Tensor) -> None:
    """Put the head blocks of every layer's q, k, v and o into another order, in `state` (its tensors stay as they are)."""
    parts, sizes = ("q_proj", "k_proj", "v_proj"), (config.heads, config.kv_heads, config.kv_heads)
    for layer in range(config.layers):
        attention = f"layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            if f"{attention}q_proj.{kind}" in state:
                rows = torch.cat([state[f"{attention}{part}.{kind}"] for part in parts]).unflatten(0, (-1, config.head_dim))[stack]
                for part, moved in zip(parts, rows.split(sizes), strict=True):
                    state[f"{attention}{part}.{kind}"] = moved.flatten(0, 1)
        columns = state[f"{attention}o_proj.weight"].unflatten(1, (-1, config.head_dim))[:, out]
        state[f"{attention}o_proj.weight"] = columns.flatten(1)


def tap_scan(bench: Bench, wiring: Wiring, most: int | None = None) -> tuple[list[int], np.ndarray]:
    """Each tap over all boundaries of the replay, the others as wired: (boundaries [n], gain or loss in nats [A, n]) at the first step."""
    boundaries = sorted(bench.replay.states)
    here = bench.run(wiring, most, 1)
    cells = np.zeros((len(wiring.taps), len(boundaries)))
    for slot, wired in enumerate(wiring.taps):
        for column, k in enumerate(boundaries):
            if k != wired:
                moved = replace(wiring, taps=(*wiring.taps[:slot], k, *wiring.taps[slot + 1 :]))
                cells[slot, column] = float((bench.run(moved, most, 1).loss - here.loss).double().mean())
    return boundaries, cells


@torch.inference_mode()
def with_drafter(bench: Bench, kept: int = 16) -> Replay:
    """The bench's replay with its drafter's own largest logits [N, kept] a TTT step at the tokens that they were drafted after."""
    bench.run(bench.base)
    hidden = bench._hidden[bench.base.body, None, STEPS]
    chains, ids = bench.scene().chains, bench.maps[bench.base.map][0]
    head = bench.state["lm_head.weight"]
    best = [(x @ head.T).topk(min(kept, len(ids)), -1) for x in hidden.split(CHUNK)]
    logits, rows = (torch.cat(part).unflatten(0, (-1, STEPS)) for part in zip(*best, strict=True))  # [R, S, kept]
    drafted = {}
    for step in range(STEPS):
        tokens = torch.full((len(bench.replay.ids), rows.shape[2]), -1)
        largest = torch.zeros(tokens.shape)
        tokens[chains], largest[chains] = ids[rows[:, step]], logits[:, step]
        drafted[step] = tokens, largest
    return replace(bench.replay, drafted=drafted)
