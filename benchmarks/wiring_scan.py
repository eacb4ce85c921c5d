"""Seeded wiring faults on the lab's parent drafter: which reading `replay check` names first, by how much, and in what time.

    python benchmarks/wiring_scan.py [--tokens 1900] [--pairs 10] [--only TEXT] [--out FILE.json]

Needs the lab (`workbench lab fetch`). The replay is recorded once from the predecessor and the held-out answers and kept in the cache
folder. A fault counts as found when the reading that undoes it comes first and is better beyond doubt; of a pair of faults both must be in
the combination. What the replay cannot decide must be called so and nothing else found. Single faults are ranked (one scan), the clean
drafter and pairs run the whole check.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from tests.wiring_faults import FAULTS, Fault, seed_drafter, undone
from workbench import lab
from workbench.checkpoint import open_drafter
from workbench.readings import combine, scan
from workbench.replay import Replay, read_replay, record, write_replay
from workbench.scans import Bench
from workbench.verifier import Teacher

ROOT = Path(__file__).parents[1]
DRAFTER = ROOT / "data" / "lab" / "parent-drafter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--pairs", type=int, default=10, help="random pairs of faults")
    parser.add_argument("--only", default="", help="only faults with this in their name, and no pairs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    verifier = lab.fetch(print)
    replay = recorded(verifier, given.tokens)
    embedding = Teacher.load(verifier).embedding.weight
    clean = Bench.open(replay, open_drafter(DRAFTER))
    rows = []
    print("| fault | accept length | named first | nats (95 %) | second | s | found |\n|---|---|---|---|---|---|---|")
    if not given.only:
        began = time.perf_counter()
        ranked = scan(clean, clean.base)
        kept = combine(clean, ranked)
        rows.append(row("none (clean)", clean, ranked, not kept, time.perf_counter() - began))
    for name, fault in FAULTS.items():
        if given.only in name:
            bench = faulty(replay, [fault], embedding)
            began = time.perf_counter()
            ranked = scan(bench, bench.base)
            undoing = next(r for r in ranked if r.reading.name.startswith(wanted(fault, clean)))
            found = undoing is ranked[0] if fault.decidable else ranked[0].difference.verdict != "better"
            found &= undoing.difference.verdict == ("better" if fault.decidable else "undecidable")
            rows.append(row(name, bench, ranked, found, time.perf_counter() - began))
    for names in pairs(given.pairs) if not given.only else []:
        bench = faulty(replay, [FAULTS[name] for name in names], embedding)
        began = time.perf_counter()
        ranked = scan(bench, bench.base)
        kept = [r.reading.name for r in combine(bench, ranked)]
        found = len(kept) == 2 and all(any(k.startswith(wanted(FAULTS[n], clean)) for k in kept) for n in names)
        rows.append(row(" + ".join(names), bench, ranked, found, time.perf_counter() - began, " + ".join(kept)))
    print(f"\n{sum(r['found'] for r in rows)} of {len(rows)} found")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))


def recorded(verifier: Path, tokens: int) -> Replay:
    """The replay of the held-out answers, recorded once."""
    path = lab.cache_folder() / f"replay-{tokens}.safetensors"
    if not path.is_file():
        write_replay(record(verifier, ROOT / "data" / "lab" / "answers-predecessor.jsonl", tokens, "heldout", progress=print), path)
    return read_replay(path)


def faulty(replay: Replay, faults: list[Fault], embedding) -> Bench:
    """The parent drafter and the replay with the faults in them."""
    for fault in faults:
        replay = fault.replay(replay) if fault.replay else replay
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.open(replay, open_drafter(seed_drafter(open_drafter(DRAFTER), Path(folder) / "d", faults, embedding)))
    for fault in faults:
        bench.base = fault.wiring(bench.base) if fault.wiring else bench.base
    return bench


def wanted(fault: Fault, clean: Bench) -> str:
    return undone(fault, clean.base.taps, clean.base.config.rope["rope_theta"])


def pairs(count: int) -> list[tuple[str, str]]:
    """Random pairs of faults of different kinds, the same every time; a pair of taps or of maps would be one fault."""
    kinds = {name: fault.undone.split(" ")[0] for name, fault in FAULTS.items() if fault.decidable}
    every = [(a, b) for a in kinds for b in kinds if a < b and kinds[a] != kinds[b]]
    return random.Random(0).sample(every, count)


def row(name: str, bench: Bench, ranked: list, found: bool, seconds: float, kept: str = "") -> dict:
    """One line of the table, printed and returned."""
    first, second = ranked[:2]
    d, base = first.difference, bench.run(bench.base).accept_length()
    told = {"fault": name, "accept_length": base, "first": kept or first.reading.name, "verdict": d.verdict, "loss": d.loss}
    told |= {"ci95": [d.low, d.high], "second": second.reading.name, "second_loss": second.difference.loss}
    told |= {"seconds": round(seconds, 1), "found": bool(found)}
    print(
        f"| {name} | {base:.2f} | {told['first']} ({d.verdict}) | {d.loss:+.3f} ({d.low:+.3f} .. {d.high:+.3f}) | "
        f"{second.reading.name} {second.difference.loss:+.3f} | {seconds:.0f} | {'yes' if found else 'NO'} |",
        flush=True,
    )
    return told


if __name__ == "__main__":
    main()
