"""What speculative decoding of a set of prompts came to, wherever it ran, and the one way to say it.

Notable: tokens/s leave the prefill out: tokens behind an answer's first, over the time that they took, as engines log their generation
throughput. Prefix counts and accept length are defined in accept.py.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from workbench.accept import measure, prefix_counts
from workbench.decode import Decoded, Pair, speculate
from workbench.draft_trees import Shape, StaticTree


@dataclass(frozen=True)
class Run:
    """Answers (ids) of N prompts, and what they took.

    accepted, passes: draft tokens accepted and verify passes of each request, or of all together (one number) where an engine tells no
    more. prefix: passes that accepted draft tokens 0..k.
    """

    answers: list[list[int]]
    accepted: list[int]
    passes: list[int]
    prefix: list[int]
    tokens_per_s: float | None

    @classmethod
    def of(cls, done: Sequence[Decoded]) -> "Run":
        """Of our own decoding."""
        later, seconds = sum(len(d.ids) - 1 for d in done), sum(d.decode_s for d in done)
        return cls(
            [list(d.ids) for d in done],
            [d.accepted for d in done],
            [len(d.passes) for d in done],
            prefix_counts([sum(counts) for counts in zip(*(d.histogram for d in done), strict=True)]).tolist(),
            later / seconds if later else None,
        )


def decode(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    shape: Shape,
    max_new_tokens: int,
    eos: Collection[int],
    temperature: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Run, Run]:
    """Our own decoding of the prompts, with and without the drafter, prompt by prompt in turn so that both see the same machine."""
    with_drafter, plain = [], []
    settings = (max_new_tokens, eos, temperature)
    both = zip(speculate(pair, prompts, shape, *settings), speculate(pair, prompts, StaticTree(()), *settings), strict=True)
    began = time.monotonic()
    for spec, base in both:
        with_drafter.append(spec)
        plain.append(base)
        left = (time.monotonic() - began) / len(plain) * (len(prompts) - len(plain))
        passes = sum(len(d.passes) for d in with_drafter)
        progress(f"{len(plain)} of {len(prompts)} prompts, {passes} verify passes, about {timedelta(seconds=round(left))} to go")
    return Run.of(with_drafter), Run.of(plain)


def contract(run: Run, baseline: Run | None, draft_tokens: int, greedy: bool = True) -> dict[str, Any]:
    """The JSON of `workbench accept`; null where something was not measured, or (lossless) cannot be compared token by token.

    per_position: prefix rates. ci95: bootstrap over requests. lossless: answers equal those without the drafter, token for token.
    """
    measured = measure(run.accepted, run.passes)
    return {
        "prompts": len(run.answers),
        "verify_passes": measured.passes,
        "accept_length": measured.pooled,
        "ci95": [measured.low, measured.high] if len(run.passes) == len(run.answers) else None,
        "per_position": [count / measured.passes for count in run.prefix],
        "draft_tokens": draft_tokens,
        "tokens_per_s": run.tokens_per_s,
        "baseline_tokens_per_s": baseline.tokens_per_s if baseline else None,
        "lossless": run.answers == baseline.answers if baseline and greedy else None,
    }


def by_level(levels: Sequence[int], runs: Sequence[tuple[Run, Run | None]]) -> list[dict[str, Any]]:
    """`levels` in the JSON of `workbench accept`: what each number of requests at a time came to, with and without the drafter."""
    return [
        {
            "concurrency": level,
            "accept_length": measure(run.accepted, run.passes).pooled,
            "tokens_per_s": run.tokens_per_s,
            "baseline_tokens_per_s": baseline.tokens_per_s if baseline else None,
        }
        for level, (run, baseline) in zip(levels, runs, strict=True)
    ]
