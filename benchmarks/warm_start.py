"""Every way to start a drafter on another vocabulary and verifier, on the lab: held-out figures after 0, 25 and 100 steps, over seeds.

    python benchmarks/warm_start.py [--seeds 3] [--free] [--accept 16] [--inits verifier stitch ...]

All starts of a seed train on the same batches of the successor's answers (256 tokens a step, lr 1e-4, cosine) and are measured on the same
held-out answers: cross-entropy and full_acc of TTT step 0, simulated accept length with 3 draft tokens. --accept N also decodes N held-out
prompts at the end, 48 tokens each, for the ways that are compared there (MEASURED): the accept length that is real. --free takes, in place
of the lab's parent (whose head began as the verifier's rows), one that this script trains from a random head on the predecessor's answers,
and compares initialisers only.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from workbench import lab, warm_start
from workbench.accept import measure as measured_accept_length
from workbench.checkpoint import open_verifier
from workbench.decode import Pair, speculate
from workbench.draft_trees import StaticTree
from workbench.drafter_files import Start, eagle_form, new_drafter, write_drafter
from workbench.extract import default_taps, extract
from workbench.mapfiles import read_map
from workbench.remap import INITS
from workbench.runs import RunFolder, atomic_folder
from workbench.states import read_states
from workbench.train import train
from workbench.train_settings import TrainSettings
from workbench.verifier import Teacher, load_verifier

MARKS = (25, 100)
STEP_TOKENS, HELD_OUT, DRAFT_TOKENS = 256, 1024, 3
OTHER_WAYS = ("keep", "naive", "scratch")
MEASURED = (*OTHER_WAYS, "verifier", "stitch")
FREE = {"tokens": 40_000, "steps": 600, "length": 512}


def free_parent(work: Path) -> Path:
    """A drafter with the parent's map whose head began at random: its rows are in a basis of their own. Made once a cache folder."""
    folder = work / "free-parent"
    if folder.exists():
        return folder
    location = str(lab.predecessor_folder())
    verifier, teacher, vocab_map = open_verifier(location), Teacher.load(location), read_map(lab.DATA / "map-parent")
    texts = warm_start.answers(str(lab.DATA / "answers-predecessor.jsonl"), "train", location, FREE["tokens"])
    taps = default_taps(verifier.layers)
    with tempfile.TemporaryDirectory() as states:
        for _ in extract(load_verifier(location), texts, Path(states) / "states", "specforge", taps, torch.float32):
            pass
        drafter = new_drafter(verifier, teacher, vocab_map, len(taps), 0)
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.lm_head.weight, std=float(drafter.lm_head.weight.detach().std()))
        settings = TrainSettings(rows=1, length=FREE["length"], lr=2e-3, max_steps=FREE["steps"], epochs=100)
        for record in train(drafter, vocab_map, teacher, read_states(Path(states) / "states"), settings):
            if record.step % 50 == 0:
                print(f"free parent: step {record.step}, full_acc {record.full_acc_k[0]:.3f}", file=sys.stderr)
    with atomic_folder(folder) as out:
        write_drafter(out, drafter, vocab_map, eagle_form(drafter.config, taps))
    return folder


def follow(case: warm_start.Case, begun: warm_start.Begun, settings: TrainSettings) -> list[warm_start.Measured]:
    """Measures of a start at step 0 and at each of MARKS."""
    start, found = begun.start, [warm_start.measure(case, begun, DRAFT_TOKENS)]
    for record in train(start.drafter, start.vocab_map, case.teacher, case.training, settings):
        if record.step in MARKS:
            found.append(warm_start.measure(case, begun, DRAFT_TOKENS))
    return found


def accept_length(case: warm_start.Case, start: Start, model: torch.nn.Module, prompts: list[list[int]]) -> float:
    """Tokens a verify pass, decoded greedily."""
    ids = torch.tensor(start.vocab_map.ids)
    pair = Pair(model, start.drafter.eval(), ids, case.checkpoint.taps.boundaries(case.verifier.layers))
    answers = list(speculate(pair, prompts, StaticTree.chain(DRAFT_TOKENS), 48))
    return measured_accept_length([answer.accepted for answer in answers], [len(answer.passes) for answer in answers]).pooled


def spread(values: list[float], digits: int) -> str:
    """Median, and the range where there is one."""
    low, middle, high = (f"{x:.{digits}f}" for x in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def row(name: str, runs: list[list[warm_start.Measured]], accepts: list[float]) -> str:
    """A line of the table: every figure of one start over the seeds."""
    cells = [name]
    for at in range(len(MARKS) + 1):
        measured = [run[at] for run in runs]
        cells += [spread([m.cross[0] for m in measured], 2), spread([m.found["full_acc_0"] for m in measured], 3)]
        cells += [spread([m.accept_length for m in measured], 2)]
    return "| " + " | ".join([*cells, spread(accepts, 2) if accepts else "-"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--accept", type=int, default=0)
    parser.add_argument("--inits", nargs="*", default=[init for init in INITS if init != "auto"])
    options = parser.parse_args()
    drafter = str(free_parent(lab.cache_folder())) if options.free else ""
    sizes = {"tokens": HELD_OUT, "train_tokens": STEP_TOKENS * MARKS[-1]}
    case = warm_start.open_case(drafter, "", str(lab.successor_folder()), "", **sizes, progress=lambda line: print(line, file=sys.stderr))
    model = load_verifier(case.inputs["verifier"]) if options.accept else None
    prompts = held_out_prompts(case, options.accept)
    runs: dict[str, list[list[warm_start.Measured]]] = {}
    accepts: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        settings = TrainSettings(max_steps=MARKS[-1], epochs=MARKS[-1], length=STEP_TOKENS, rows=1, lr=1e-4, seed=seed)
        for name in [*([] if options.free else OTHER_WAYS), *options.inits]:
            way = name if name in OTHER_WAYS else "remapped"
            carried = "" if way == name else warm_start.carry(case, RunFolder(), name, seed)["out"]
            begun = warm_start.begin(case, way, carried, seed)
            runs.setdefault(name, []).append(follow(case, begun, settings))
            if options.accept and name in MEASURED:
                accepts.setdefault(name, []).append(accept_length(case, begun.start, model, prompts))
            last = runs[name][-1]
            print(f"seed {seed} {name}: " + ", ".join(f"{m.cross[0]:.2f} nats, {m.accept_length:.2f}" for m in last), file=sys.stderr)
    marks = "".join(f" nats @ {n} | full_acc_0 @ {n} | accept @ {n} |" for n in (0, *MARKS))
    print(f"| start |{marks} measured accept |\n|{'---|' * (3 * len(MARKS) + 5)}")
    for name, found in runs.items():
        print(row(name, found, accepts.get(name, [])))
    if "naive" in runs:
        naive = runs["naive"][0][0]
        print(f"\nln K {math.log(naive.k):.2f}; naive start {naive.cross[0]:.2f} nats, null {naive.null[0]:.2f}")
    print(json.dumps({"pairs": {"verifier beaten at 25 steps": beaten(runs)}}))


def beaten(runs: dict[str, list[list[warm_start.Measured]]]) -> dict[str, int]:
    """Seeds on which an initialiser has a lower loss than the verifier's rows after 25 steps."""
    if "verifier" not in runs:
        return {}
    return {
        name: sum(ours[1].cross[0] < theirs[1].cross[0] for ours, theirs in zip(found, runs["verifier"], strict=True))
        for name, found in runs.items()
        if name not in (*OTHER_WAYS, "verifier")
    }


def held_out_prompts(case: warm_start.Case, number: int) -> list[list[int]]:
    """Prompts of the held-out answers, as ids."""
    texts: list[Any] = warm_start.answers(case.inputs["chats"], "heldout", case.inputs["verifier"], 10**9)[:number] if number else []
    return [text.ids[: int(text.loss_mask.nonzero()[0][0])].tolist() for text in texts]


if __name__ == "__main__":
    main()
