"""Write answers-predecessor.jsonl or answers-successor.jsonl: the verifier's own greedy answer to every prompt.

    python data/lab/make_answers.py predecessor|successor [--limit 256] [--out FOLDER]

float32, at most 160 new tokens. `answer_ids` are the exact ids that the verifier wrote, `messages` the chat with the answer's text as its
last turn, `ended` what ended the answer: "end" (the end token, included in the ids), "length", or "loop": small models repeat themselves
without end when decoded greedily, so an answer is cut as soon as its last 16 tokens stood in it before. About 15 minutes a verifier on two
quiet cores; finished answers wait in the cache folder, so an interrupted run, or one of several with --limit, goes on where it stopped.
"""

import argparse
import json
import time
from pathlib import Path

from workbench import lab
from workbench.runs import atomic_file
from workbench.tokens import load_tokenizer
from workbench.verifier import greedy, load_verifier

MAX_NEW_TOKENS = 160
LOOP = 16
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", choices=["predecessor", "successor"])
    parser.add_argument("--limit", type=int, help="answer at most so many prompts in this run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where prompts.jsonl is and the answers go")
    args = parser.parse_args()

    folder = lab.fetch(print) if args.verifier == "predecessor" else lab.successor_folder(print, args.out / "successor.safetensors")
    prompts = read_lines(args.out / "prompts.jsonl")
    partial = lab.cache_folder() / f"answers-{folder.name}-{lab.sha256(args.out / 'prompts.jsonl')[:8]}.partial.jsonl"
    done = {line["id"]: line for line in read_lines(partial)} if partial.is_file() else {}
    todo = [prompt for prompt in prompts if prompt["id"] not in done][: args.limit]
    done |= answer_all(folder, todo, partial)
    if len(done) == len(prompts):
        with atomic_file(args.out / f"answers-{args.verifier}.jsonl", replace=True) as out:
            out.write_text("".join(to_line(done[prompt["id"]]) for prompt in prompts), encoding="utf-8")
        partial.unlink()
    print(f"{len(done)} of {len(prompts)} prompts answered")


def answer_all(folder: Path, prompts: list[dict], partial: Path) -> dict[str, dict]:
    """Answer `prompts` batch by batch, shortest first, each batch appended to `partial` as soon as it is there."""
    tokenizer, model = load_tokenizer(folder), load_verifier(folder)
    ids = {p["id"]: tokenizer.apply_chat_template(p["messages"], add_generation_prompt=True, return_dict=False) for p in prompts}
    prompts = sorted(prompts, key=lambda p: len(ids[p["id"]]))
    answered: dict[str, dict] = {}
    began, tokens = time.monotonic(), 0
    for start in range(0, len(prompts), BATCH):
        chunk = prompts[start : start + BATCH]
        answers = greedy(model, [ids[p["id"]] for p in chunk], MAX_NEW_TOKENS, {tokenizer.eos_token_id}, BATCH, loops)
        with open(partial, "a", encoding="utf-8") as out:
            for prompt, answer in zip(chunk, answers, strict=True):
                ended = "end" if answer[-1] == tokenizer.eos_token_id else "loop" if loops(answer) else "length"
                turn = {"role": "assistant", "content": tokenizer.decode(answer[:-1] if ended == "end" else answer)}
                line = {**prompt, "messages": [*prompt["messages"], turn], "ended": ended, "answer_ids": answer}
                answered[prompt["id"]] = line
                out.write(to_line(line))
        tokens += sum(map(len, answers))
        print(f"{start + len(chunk)} prompts, {tokens} tokens, {tokens / (time.monotonic() - began):.0f} tokens/s", flush=True)
    return answered


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
