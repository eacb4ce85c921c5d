"""One training step of an EAGLE-3 drafter (forward, backward, AdamW on one packed batch), ours beside speculators' eager CPU path.

    python benchmarks/train_step.py [--pairs 5] [--cases lab-2/3 ...] [--growth]

Every measurement is a process of its own; ours and theirs alternate in one schedule, so that a busy machine hits both. Reported are
medians over the pairs with the smallest and largest ratio, peak resident memory of the process, and the share of the machine's matmul
speed (measured in the same process, same threads) that the step's FLOP count amounts to. speculators lives in an environment of its own
(WORKBENCH_SPECULATORS_PYTHON, by default .venvs/speculators/bin/python). Documents are 256 tokens: a prompt, then a supervised answer.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
PEER = Path(os.environ.get("WORKBENCH_SPECULATORS_PYTHON", ROOT / ".venvs/speculators/bin/python"))
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, TAPS, VOCAB, DOCUMENT = 576, 9, 3, 64, 1536, 3, 49152, 256
LAB = {"tokens": 1024, "draft_vocab": 4096, "steps": 3, "supervised": 2 / 3}
CASES: dict[str, dict[str, Any]] = {
    "lab-2/3": LAB,
    "lab-1/3": LAB | {"supervised": 1 / 3},
    "large-2/3": LAB | {"tokens": 2048, "draft_vocab": 32000},
}
GROWTH: list[dict[str, Any]] = [
    *({"tokens": tokens} for tokens in (512, 1024, 2048, 4096)),
    *({"draft_vocab": rows} for rows in (1024, 16384, 32000)),
    *({"steps": steps} for steps in (1, 5, 7)),
]


# ---- the two sides -----------------------------------------------------------------------------------------------------------------------


def make_batch(case: dict[str, Any]) -> dict[str, Tensor]:
    """One packed row of random states; the last share of every document is supervised."""
    torch.manual_seed(0)
    tokens = case["tokens"]
    place = torch.arange(tokens) % DOCUMENT
    return {
        "next_ids": torch.randint(VOCAB, (1, tokens)),
        "taps": torch.randn(1, tokens, TAPS * HIDDEN),
        "teacher_state": torch.randn(1, tokens, HIDDEN),
        "loss_mask": (place >= DOCUMENT * (1 - case["supervised"]))[None],
        "positions": place[None] + 1,
        "documents": (torch.arange(tokens) // DOCUMENT)[None],
    }


def our_step(case: dict[str, Any]) -> Callable[[], Any]:
    from workbench.drafter import Drafter, DrafterConfig
    from workbench.losses import metrics, score, totals

    config = DrafterConfig(HIDDEN, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, case["draft_vocab"], VOCAB, taps=TAPS)
    drafter, norm, rows = Drafter(config), torch.nn.RMSNorm(HIDDEN), torch.randn(case["draft_vocab"], HIDDEN) * 0.05
    drafter.lm_head.requires_grad_(False)  # as theirs
    batch = SimpleNamespace(**make_batch(case))
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        unrolled = drafter(batch, case["steps"])
        with torch.no_grad():
            states = norm(batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows])
        value, scores = score(unrolled, drafter.lm_head.weight, states, rows, 1 / totals(batch.loss_mask, case["steps"]))
        value.backward()
        metrics(unrolled, scores)
        optimizer.step()
        optimizer.zero_grad()

    return step


def their_step(case: dict[str, Any]) -> Callable[[], Any]:
    sys.path.insert(0, str(ROOT / "tests/peers"))
    from speculators_step import build
    from speculators_step import step as forward

    layer = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    options = case | {"layer": layer, "taps": TAPS, "flags": {}, "decay": 1.0, "loss": "kl_div"}
    model = build(options)
    for parameter in (model.lm_head.weight, model.verifier_lm_head.weight, model.embed_tokens.weight):
        torch.nn.init.normal_(parameter, std=0.05)
    batch = make_batch(case)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        loss, _ = forward(model, batch, options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(case: dict[str, Any], theirs: bool) -> dict[str, float]:
    """Runs in the measuring process: one step to warm up, then the median of a few, with the matmul speed before and after."""
    step = (their_step if theirs else our_step)(case)
    step()
    speed, seconds = [matmul_speed()], []
    for _ in range(case["repeats"]):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    speed.append(matmul_speed())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": statistics.median(seconds), "peak_mb": peak, "gflops": statistics.mean(speed)}


def matmul_speed() -> float:
    """Median GFLOP/s of a matmul of the step's commonest shape."""
    a, b, seconds = torch.randn(1024, HIDDEN), torch.randn(2 * INTERMEDIATE, HIDDEN), []
    for _ in range(15):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * a.numel() * len(b) / statistics.median(seconds) / 1e9


# ---- what it should cost -----------------------------------------------------------------------------------------------------------------


def flops(case: dict[str, Any], theirs: bool) -> float:
    """Matmul FLOPs of one step: weights cost a product forward and two backward (one where no gradient of one operand is wanted).

    Theirs: all rows, every step over all earlier keys. Ours: supervised rows, and the step-0 keys of their own document.
    """
    tokens, k, steps = case["tokens"], case["draft_vocab"], case["steps"]
    rows = tokens if theirs else tokens * case["supervised"]
    fc, kv = TAPS * HIDDEN * HIDDEN, 2 * HIDDEN * 2 * KV_HEADS * HEAD_DIM
    rest = 2 * HIDDEN * HEADS * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    products = 2 * tokens * fc  # forward, weights; the states need no gradient
    products += 3 * (tokens + rows * (steps - 1)) * kv + 3 * rows * steps * rest
    products += rows * HIDDEN * k * (1 + 2 * steps)  # teacher once, then logits and their gradient to the state
    seen = sum(tokens * (step + 1) for step in range(steps)) if theirs else steps * DOCUMENT * (1 - case["supervised"] / 2)
    products += rows * seen * HEADS * HEAD_DIM * (6 if theirs else 7)  # scores and values; backward four, and ours once more scores
    return 2 * products


# ---- the schedule ------------------------------------------------------------------------------------------------------------------------


def measure(case: dict[str, Any], theirs: bool) -> dict[str, float]:
    command = [PEER if theirs else sys.executable, __file__, "--work", json.dumps(case | {"theirs": theirs})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a measurement failed: {' '.join(map(str, command))}\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"share": flops(case, theirs) / 1e9 / result["seconds"] / result["gflops"]}


def compare(name: str, case: dict[str, Any], pairs: int) -> str:
    """One table row: medians of ours and theirs, ratio of tokens/s with its spread over pairs, ratio of memory."""
    runs = [(measure(case, False), measure(case, True)) for _ in range(pairs)]
    ours, theirs = ({key: statistics.median(run[side][key] for run in runs) for key in runs[0][side]} for side in (0, 1))
    ratios = sorted(run[1]["seconds"] / run[0]["seconds"] for run in runs)
    shape = f"{case['tokens']} | {case['draft_vocab']} | {case['steps']} | {case['supervised']:.2f}"
    speeds = " | ".join(f"{case['tokens'] / side['seconds']:.0f} ({100 * side['share']:.0f} %)" for side in (ours, theirs))
    memory = f"{ours['peak_mb']:.0f} | {theirs['peak_mb']:.0f} | {ours['peak_mb'] / theirs['peak_mb']:.2f}"
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    expected = flops(case, True) / flops(case, False)
    return f"| {name} | {shape} | {speeds} | {spread} | {expected:.2f} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="steps timed in each process")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--growth", action="store_true", help="how time and memory grow with T, K and S, one pair each")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        case = json.loads(arguments.work)
        print(json.dumps(work(case, case.pop("theirs"))))
        return
    if not PEER.is_file():
        sys.exit(f"no Python with speculators at {PEER}: `make bench` sets one up; or set WORKBENCH_SPECULATORS_PYTHON")
    columns = ["case", "T", "K", "S", "supervised", "ours tok/s (of matmul)", "theirs tok/s (of matmul)", "tok/s ratio (spread)"]
    columns += ["FLOP ratio", "ours MB", "theirs MB", "MB ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for name in arguments.cases:
        print(compare(name, CASES[name] | {"repeats": arguments.repeats}, arguments.pairs), flush=True)
    if arguments.growth:
        for change in GROWTH:
            print(compare("growth", LAB | change | {"repeats": arguments.repeats}, 1), flush=True)


if __name__ == "__main__":
    main()
