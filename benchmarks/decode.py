"""Builtin speculative decoding beside plain decoding and transformers' own, in one process: python benchmarks/decode.py [--seconds N]

Needs the lab (`workbench lab fetch`). Every prompt is answered by each contestant in turn, so that all see the same machine; all answer
as far and, greedily, with the same tokens. Tokens/s leave the prefill out for ours; transformers' `generate` is timed with it, so both
kinds are compared with plain decoding of their own kind. Tokens behind an answer's first count.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from workbench import lab
from workbench.accept import best_draft_tokens, measure
from workbench.corpus import of_split, prompt_ids, read_prompts
from workbench.decode import Pair, load_pair, speculate
from workbench.draft_trees import Shape, StaticTree
from workbench.tokens import load_tokenizer
from workbench.trial import simulate

DRAFTER = lab.DATA / "parent-drafter"
OURS = {
    "plain": StaticTree(()),
    **{f"{n} draft tokens": StaticTree.chain(n) for n in (1, 2, 3, 4)},
}


def ours(pair: Pair, shape: Shape, tokens: int) -> Callable[[list[int]], tuple]:
    def answer(prompt: list[int]) -> tuple:
        done = next(speculate(pair, [prompt], shape, tokens))
        return done.ids, done.decode_s, len(done.passes) or tokens - 1, done.accepted

    return answer


def theirs(pair: Pair, tokens: int, lookup: int | None) -> Callable[[list[int]], tuple]:
    def answer(prompt: list[int]) -> tuple:
        ids = torch.tensor([prompt])
        kept = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0, "attention_mask": ids.ne(-1)}
        began = time.perf_counter()
        out = pair.verifier.generate(ids, **kept, **({"prompt_lookup_num_tokens": lookup} if lookup else {}))
        return tuple(out[0, len(prompt) :].tolist()), time.perf_counter() - began, 0, 0

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="no further prompt is begun after these")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    given = parser.parse_args()
    verifier = lab.fetch(print)
    pair, tokenizer = load_pair(DRAFTER, verifier), load_tokenizer(verifier)
    records = of_split(read_prompts(lab.DATA / "answers-predecessor.jsonl"), "heldout")
    waiting = [prompt_ids(record, tokenizer) for record in records]
    contestants = {name: ours(pair, shape, given.tokens) for name, shape in OURS.items()}
    contestants |= {"transformers' generate": theirs(pair, given.tokens, None)}
    contestants |= {"transformers' n-gram lookup, 3 tokens": theirs(pair, given.tokens, 3)}
    for answer in contestants.values():
        answer(waiting[0][:8])  # the first pass of a process is slow
    runs, prompts = {name: [] for name in contestants}, []
    began = time.perf_counter()
    while time.perf_counter() - began < given.seconds:
        prompts.append(waiting[len(prompts)])
        for name, answer in contestants.items():
            runs[name].append(answer(prompts[-1]))
        print(*(f"{some[-1][1]:.2f} s" for some in runs.values()), file=sys.stderr)
    seconds = {name: sum(run[1] for run in some) / max(1, sum(run[2] for run in some)) for name, some in runs.items()}
    print("| | tok/s | against plain (median, range over prompts) | accept length | round cost R = break-even | same answers |")
    print("|---|---|---|---|---|---|")
    for name, some in runs.items():
        base = runs["plain" if name in OURS else "transformers' generate"]
        ratios = [plain[1] / run[1] for plain, run in zip(base, some, strict=True)]
        speed = len(some) * (given.tokens - 1) / sum(run[1] for run in some)
        passes, cost = [run[2] for run in some], seconds[name] / seconds["plain"]
        drafts = name in OURS and name != "plain"
        length = f"{measure([run[3] for run in some], passes).pooled:.2f}" if drafts else ""
        told = f"{length} | {cost:.2f}" if drafts else " | "
        same = sum(run[0] == plain[0] for run, plain in zip(some, runs["plain"], strict=True))
        print(f"| {name} | {speed:.1f} | {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {told} | {same} of {len(some)} |")
    *_, walked = simulate(pair, prompts, [run[0] for run in runs["plain"]], 4)
    passes = [accepted for prompt in walked for accepted in prompt]
    prefix = [sum(accepted > k for accepted in passes) / len(passes) for k in range(4)]
    costs = [seconds[name] / seconds["plain"] for name in OURS]
    print(f"\nsimulated accept length with 3 draft tokens {1 + sum(prefix[:3]):.3f}; best number of draft tokens by these costs: ", end="")
    print(best_draft_tokens(prefix, costs))


if __name__ == "__main__":
    main()
