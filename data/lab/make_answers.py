"""Write answers-predecessor.jsonl or answers-successor.jsonl: a verifier's own greedy answers.

    python data/lab/make_answers.py predecessor|successor [--processes 2] [--limit 256] [--out FOLDER]

The predecessor answers every prompt, the successor 640 of them (every held-out one, and an even share of each slice's others).
float32, at most 160 new tokens. `answer_ids` are the exact ids that the verifier wrote, `messages` the chat with the answer's text as its
last turn, `ended` what ended the answer: "end" (the end token, included in the ids), "length", or "loop": small models repeat themselves
without end when decoded greedily, so an answer is cut as soon as its last 16 tokens stood in it before. About 10 minutes a verifier on two
cores, one single-threaded process each; finished answers wait in the cache folder, so an interrupted run goes on where it stopped.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import torch

from workbench import lab
from workbench.runs import atomic_file
from workbench.tokens import load_tokenizer
from workbench.verifier import greedy, load_verifier

MAX_NEW_TOKENS = 160
LOOP = 16
BATCH = 32
SUCCESSOR_PROMPTS = 640  # every held-out prompt and an even share of each slice's others; the predecessor answers all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", choices=["predecessor", "successor"])
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many answer at the same time, one thread each")
    parser.add_argument("--limit", type=int, help="answer at most so many prompts in this run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where prompts.jsonl is and the answers go")
    args = parser.parse_args()

    folder = lab.fetch(print) if args.verifier == "predecessor" else lab.successor_folder(print, args.out / "successor.safetensors")
    prompts = read_lines(args.out / "prompts.jsonl")
    if args.verifier == "successor":
        prompts = evenly(prompts, SUCCESSOR_PROMPTS)
    partial = lab.cache_folder() / f"answers-{folder.name}-{lab.sha256(args.out / 'prompts.jsonl')[:8]}.partial"
    partial.mkdir(exist_ok=True)
    done = finished(partial)
    todo = [prompt for prompt in prompts if prompt["id"] not in done][: args.limit]
    shares = [(folder, todo[i :: args.processes], partial / f"{len(done)}-{i}.jsonl") for i in range(args.processes)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.starmap(answer_all, shares)
    done = finished(partial)
    if len(done) == len(prompts):
        with atomic_file(args.out / f"answers-{args.verifier}.jsonl", replace=True) as out:
            out.write_text("".join(to_line(done[prompt["id"]]) for prompt in prompts), encoding="utf-8")
        shutil.rmtree(partial)
    print(f"{len(done)} of {len(prompts)} prompts answered")


def evenly(prompts: list[dict], count: int) -> list[dict]:
    """`count` of the prompts in their order: all held-out ones, and of the others the first ones of every slice in turn."""
    slices: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        if prompt["split"] != "heldout":
            slices[prompt["slice"]] = slices.get(prompt["slice"], 0) + 1
        ranked.append((0 if prompt["split"] == "heldout" else slices[prompt["slice"]], i))
    return [prompts[i] for i in sorted(i for _, i in sorted(ranked)[:count])]


def finished(partial: Path) -> dict[str, dict]:
    """The answers that earlier runs have left, by id."""
    return {line["id"]: line for file in sorted(partial.iterdir()) for line in read_lines(file)}


def answer_all(folder: Path, prompts: list[dict], partial: Path) -> None:
    """Answer `prompts` batch by batch, shortest first, each batch appended to `partial` as soon as it is there."""
    torch.set_num_threads(1)
    tokenizer, model = load_tokenizer(folder), load_verifier(folder)
    ids = {p["id"]: tokenizer.apply_chat_template(p["messages"], add_generation_prompt=True, return_dict=False) for p in prompts}
    prompts = sorted(prompts, key=lambda p: len(ids[p["id"]]))
    began, tokens = time.monotonic(), 0
    for start in range(0, len(prompts), BATCH):
        chunk = prompts[start : start + BATCH]
        answers = greedy(model, [ids[p["id"]] for p in chunk], MAX_NEW_TOKENS, {tokenizer.eos_token_id}, BATCH, loops)
        with open(partial, "a", encoding="utf-8") as out:
            for prompt, answer in zip(chunk, answers, strict=True):
                ended = "end" if answer[-1] == tokenizer.eos_token_id else "loop" if loops(answer) else "length"
                turn = {"role": "assistant", "content": tokenizer.decode(answer[:-1] if ended == "end" else answer)}
                out.write(to_line({**prompt, "messages": [*prompt["messages"], turn], "ended": ended, "answer_ids": answer}))
        tokens += sum(map(len, answers))
        print(f"{start + len(chunk)} of {len(prompts)} prompts, {tokens / (time.monotonic() - began):.0f} tokens/s", flush=True)


def loops(answer: list[int]) -> bool:
    """Whether the last LOOP tokens stood in the answer before."""
    tail = answer[-LOOP:]
    return any(answer[i : i + LOOP] == tail for i in range(len(answer) - LOOP))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def to_line(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
