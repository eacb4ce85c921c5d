"""A drafter on trial: prompts decoded with 0, 1, .., S draft tokens, and the same answers unrolled as training does it.

Notable:
* Each prompt is decoded with every number of draft tokens in turn, so that all of them see the same machine. Prefill is left out.
* The round cost of n draft tokens is the time of a verify pass with its drafting over that of a plain step: medians over the rounds of a
  prompt, then over prompts, so that what else the machine does in between decides nothing. Where its prompts disagree, intervals over
  prompts say so. Tokens/s are accept length over the time of a pass, what a long answer gets: in a short one the drafts that the last
  pass accepts behind its end weigh too much.
* Simulated and measured acceptance are of the same text, the verifier's own greedy answers. Training's prefix_k count every token alike;
  a verify pass starts only where the one before ended, more often where drafting is hard: the simulation walks the text as passes do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench.accept import Measured, bootstrap_ratio, measure, prefix_counts
from workbench.corpus import of_split, prompt_ids, read_prompts
from workbench.decode import Decoded, Pair, load_pair, speculate
from workbench.draft_trees import StaticTree
from workbench.errors import InputError
from workbench.lineage import null_loss
from workbench.packing import pack
from workbench.state_files import Sample
from workbench.stepper import judge
from workbench.tokens import load_tokenizer
from workbench.verifier import Teacher, capture, end_tokens, find_parts


@dataclass(frozen=True, eq=False)
class Trial:
    """What N prompts came to.

    rounds [N, S+1]: median seconds of a round with 0..S draft tokens, of each prompt whose answers have any; prefixes [N, S], passes [N]:
    of the same prompts, passes with S draft tokens that accept 1..k of them, and all. measured, prefix [S], prefix_ci [2, S]: with S draft
    tokens. lossless: all answers equal plain decoding's. cross, null: cross-entropy at each TTT step and what unrelated labels would cost,
    nats. simulated [S]: share of simulated passes that accept draft tokens 1..k.
    """

    drafter: str
    device: str
    k: int
    rounds: np.ndarray
    prefixes: np.ndarray
    passes: np.ndarray
    measured: Measured
    prefix: np.ndarray
    prefix_ci: np.ndarray
    lossless: bool
    cross: list[float]
    null: list[float]
    simulated: np.ndarray

    @property
    def costs(self) -> np.ndarray:
        """Round costs R_n [S+1], R_0 = 1."""
        return np.median(self.rounds / self.rounds[:, :1], axis=0)

    @property
    def costs_ci(self) -> np.ndarray:
        """Their 95 % intervals [2, S+1], bootstrap over prompts."""
        return np.quantile(self._resampled()[0], (0.025, 0.975), axis=0)

    @property
    def speedups(self) -> np.ndarray:
        """Speed-up with 0..S draft tokens in samples of the prompts with replacement [draws, S+1]."""
        costs, picks = self._resampled()
        prefix = self.prefixes[picks].sum(1) / self.passes[picks].sum(1)[:, None]  # [draws, S]
        return np.cumsum(np.column_stack([np.ones(len(picks)), prefix]), axis=1) / costs

    def _resampled(self, draws: int = 4000) -> tuple[np.ndarray, np.ndarray]:
        """Round costs [draws, S+1] of samples of the prompts, and which prompts those are [draws, N]."""
        picks = np.random.default_rng(0).integers(len(self.rounds), size=(draws, len(self.rounds)))
        return np.median((self.rounds / self.rounds[:, :1])[picks], axis=1), picks

    @property
    def seconds(self) -> np.ndarray:
        """Of a round [S+1]: a plain step's median over prompts, times the round costs."""
        return np.median(self.rounds[:, 0]) * self.costs


def try_out(
    drafter: str, verifier: str, prompts: str, count: int, new_tokens: int, draft_tokens: int, progress: Callable[[str], None]
) -> Trial:
    """Decode the first `count` prompts of a file, of its held-out ones where it has splits, greedily and `new_tokens` far."""
    pair, records = load_pair(drafter, verifier), read_prompts(prompts)
    records = of_split(records, "heldout" if any(record.extra.get("split") for record in records) else "")[:count]
    tokenizer = None if all(record.prompt_ids for record in records) else load_tokenizer(verifier)
    ids = [prompt_ids(record, tokenizer) for record in records]
    chains = [StaticTree.chain(n) for n in range(draft_tokens + 1)]
    list(speculate(pair, ids[:1], chains[-1], 2))  # the first pass of a process is slow
    rounds = []
    for done in zip(*(speculate(pair, ids, chain, new_tokens, end_tokens(pair.verifier)) for chain in chains), strict=True):
        rounds.append(done)
        progress(f"{len(rounds)} of {len(ids)} prompts decoded with 0 to {draft_tokens} draft tokens")
    by_drafts = list(zip(*rounds, strict=True))  # [S+1][N]
    plain, most = by_drafts[0], by_drafts[-1]
    passes = np.array([len(done.passes) for done in most])
    measured = measure([done.accepted for done in most], passes)
    counts = np.array([prefix_counts(done.histogram) for done in most])  # [N, S]
    told = passes > 0
    cross, null, walked = simulate(pair, ids, [done.ids for done in plain], draft_tokens)
    return Trial(
        Path(drafter).name,
        str(pair.ids.device),
        len(pair.ids),
        round_seconds(by_drafts),
        counts[told],
        passes[told],
        measured,
        counts.sum(0) / passes.sum(),
        bootstrap_ratio(counts, passes),
        all(done.ids == first.ids for some in by_drafts for done, first in zip(some, plain, strict=True)),
        cross,
        null,
        np.array([(np.concatenate(walked) > k).mean() for k in range(draft_tokens)]),
    )


def round_seconds(by_drafts: Sequence[Sequence[Decoded]]) -> np.ndarray:
    """Median seconds of a round with 0..S draft tokens, prompt by prompt, [N, S+1]. by_drafts: [S+1][N] answers to the same prompts; those
    of one token have no round and are left out, InputError where there are no others."""
    some = [done for done in zip(*by_drafts, strict=True) if all(one.rounds_s for one in done)]
    if not some:
        raise InputError("every answer ends with its first token, so nothing tells what a round costs: give other prompts")
    return np.array([[np.median(one.rounds_s) for one in done] for done in some])


@torch.no_grad()
def simulate(
    pair: Pair, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], steps: int
) -> tuple[list[float], list[float], list[list[int]]]:
    """Cross-entropy and its null at each TTT step, and the drafts that each pass of each prompt accepts.

    answers: ids, the verifier's own greedy ones to these prompts.
    """
    samples, last = [], len(find_parts(pair.verifier).layers)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer], device=pair.ids.device)
        states = capture(pair.verifier, ids[None], {*pair.taps, last})
        taps = torch.stack([states[k][0] for k in pair.taps], 1)  # [T, A, Ht]
        samples.append(Sample(ids, torch.arange(len(ids)) >= len(prompt), taps, states[last][0]))
    batch = pack([[sample] for sample in samples], max(len(sample.ids) for sample in samples) - 1).to(pair.ids.device)
    judged = judge(batch, pair.drafter, Teacher.of(pair.verifier), pair.ids, steps)
    rows = pair.drafter.lm_head.weight.float().cpu().numpy()
    null = [null_loss(judged.unrolled.hidden[here].float().cpu().numpy(), rows) for here in judged.at]
    hits = judged.hit.new_zeros(len(judged.unrolled.start), steps)
    hits[judged.unrolled.chain, judged.unrolled.step] = judged.hit
    accepted = batch.next_ids.new_zeros(batch.next_ids.numel())
    accepted[judged.unrolled.start] = hits.long().cumprod(1).sum(1)
    lines = accepted.view_as(batch.next_ids).tolist()
    return judged.cross, null, [walk(line, len(p) - 1, len(p) + len(a) - 2) for line, p, a in zip(lines, prompts, answers, strict=True)]


def walk(accepted: Sequence[int], first: int, end: int) -> list[int]:
    """Drafts accepted by each verify pass, of accepted[row] for passes at every row: the next pass starts behind what was accepted."""
    passes = []
    while first < end:
        passes.append(accepted[first])
        first += accepted[first] + 1
    return passes
