"""Everything that notebook 2 shows of a drafter's wiring: opened inputs in, findings and numbers out.

Notable: the static part (doctor, forecast, tensors) needs headers only; the rest a replay. A drafter so damaged that it cannot run on the
replay still gets the static part: `bench` is None then, and `why` says what stands in the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench import lab, wiring
from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier
from workbench.checks import CHECKS
from workbench.corpus import read_prompts
from workbench.doctor import Diagnosis, diagnose, plain
from workbench.errors import InputError
from workbench.findings import Finding, verdict
from workbench.forecast import DIFFERENT, differences, forecast, refusals
from workbench.params import LayerWiring
from workbench.readings import SCAN, Ranked, combine, scan
from workbench.replay import Replay, Top, read_replay, record
from workbench.replay_check import as_finding
from workbench.runs import RunFolder
from workbench.scans import Bench, tap_scan
from workbench.texts import percent, signed

SAID = 0.9  # share of the replayed answers that a verifier itself must say; greedy answers of its own have 1

REPLAY_CHECK = "replay.readings"  # the doctor's check that is done here, with its numbers
STAGES = {  # of the flow: beginnings of the codes that point at it, and of the tensors that it holds
    "embedding": (("embed-", "label-shift", "template-", "answers-"), ("embed_tokens",)),
    "taps": (("taps-", "feature-scale", "states-"), ()),
    "fc": (("norm-ignored",), ("fc.", "input_norm", "fc_norm")),
    "join": (("concat-",), ("layers.0.input_layernorm", "layers.0.hidden_norm")),
    "layer": (("rope-", "position-shift", "norm-residual", "doc-leak", "attn-layout"), ("layers.",)),
    "norm": (("norm-final", "norm-recycled"), ("norm.",)),
    "head": (("head-", "norm-teacher", "coverage-", "loss-"), ("lm_head",)),
    "d2t": (("map-",), ("d2t", "t2d")),
}


class Boundary(NamedTuple):
    """Boundary k over the replay's tokens, medians: RMS, the loudest channel and its absolute value, cosine with the boundary before."""

    k: int
    rms: float
    channel: int
    loudest: float
    cosine: float  # nan for the first


class Stage(NamedTuple):
    """A stage of the flow: its rows of `wiring.table`, the findings that point at it, and its tensors that do not fit or are missing."""

    tensors: list[dict[str, Any]]
    findings: list[Finding]
    wrong: list[str]


@dataclass(frozen=True, eq=False)
class Inspection:
    """tensors: rows of `wiring.table`. engines: `forecast`'s. base: the drafter as wired. cells [A, boundaries]: nats, see `tap_scan`.

    ranked: every reading, best first; kept: those that are needed together. bench None, base and the last three empty: see `why`.
    """

    drafter: DrafterCheckpoint
    verifier: VerifierCheckpoint
    replay: Replay
    inputs: dict[str, str]
    tensors: list[dict[str, Any]]
    engines: dict[str, dict[str, Any]]
    doctor: Diagnosis
    bench: Bench | None
    why: str
    base: dict[str, float]
    ranked: Sequence[Ranked]
    kept: Sequence[Ranked]
    boundaries: Sequence[int]
    cells: np.ndarray

    @property
    def checks(self) -> int:
        """How many of the doctor's checks ran, the replay among them."""
        return len(CHECKS) - len(self.doctor.skipped)

    @property
    def differ(self) -> list[str]:
        """What comes out differently in the engines that can load it, of `forecast.DIFFERENT`."""
        stuck = refusals(self.engines)
        return list(differences({engine: told for engine, told in self.engines.items() if engine not in stuck}))

    @property
    def stages(self) -> dict[str, Stage]:
        """What is known of each stage of the flow."""
        found, taken = {}, set[int]()
        for name, (codes, prefixes) in STAGES.items():
            rows = [r for r in self.tensors if r["canonical"] and r["canonical"].startswith(prefixes) and id(r) not in taken]
            taken |= {id(r) for r in rows}
            wrong = [f"{r['name']} has another shape" for r in rows if r["fits"] is False]
            wrong += [f"{r['canonical']} is missing" for r in rows if r["consumers"]["workbench"] == "missing"]
            found[name] = Stage(rows, [f for f in self.doctor.findings if f.code.startswith(codes)], wrong)
        return found


def inspect(given: LayerWiring, progress: Callable[[str], None]) -> Inspection:
    """Open everything ("" means the lab's), record a replay where none is given, and ask every check and every reading."""
    inputs = {
        "drafter": given.drafter or str(lab.DATA / "parent-drafter"),
        "verifier": given.verifier or str(lab.fetch(progress)),
        "parent": given.parent,
        **({"replay": given.replay} if given.replay else {"prompts": given.prompts or str(lab.DATA / "answers-predecessor.jsonl")}),
    }
    d, m = open_drafter(inputs["drafter"]), open_verifier(inputs["verifier"])
    told = diagnose(inputs["drafter"], verifier=inputs["verifier"], parent=given.parent)
    static = {"drafter": d, "verifier": m, "inputs": inputs, "tensors": wiring.table(d, m), "engines": forecast(d, m)["engines"]}
    if given.replay:
        replay = read_replay(given.replay).complete(inputs["verifier"])
    else:
        named = any(prompt.extra.get("split") for prompt in read_prompts(inputs["prompts"]))
        replay = record(inputs["verifier"], inputs["prompts"], given.tokens, "heldout" if named else "", progress=progress)
    skipped = [one for one in told.skipped if one["check"] != REPLAY_CHECK]
    try:
        bench, why = Bench.open(replay, d), ""
        base = bench.run(bench.base).summary()
    except InputError as error:
        skipped.append({"check": REPLAY_CHECK, "needs": str(error)})
        empty = {"base": {}, "ranked": [], "kept": [], "boundaries": [], "cells": np.zeros((0, 0))}
        return Inspection(**static, replay=replay, doctor=Diagnosis(told.findings, skipped), bench=None, why=str(error), **empty)
    boundaries, cells = tap_scan(bench, bench.base, SCAN)
    ranked = scan(bench, bench.base, progress, scanned=(boundaries, cells))
    kept = combine(bench, ranked, progress)
    doctor = Diagnosis([*told.findings, *(as_finding(bench, r, d.location) for r in kept)], skipped)
    numbers = {"base": base, "ranked": ranked, "kept": kept, "boundaries": boundaries, "cells": cells}
    return Inspection(**static, replay=replay, doctor=doctor, bench=bench, why=why, **numbers)


def boundary_statistics(replay: Replay) -> list[Boundary]:
    """One line a recorded boundary, in order. Medians, because the first tokens of a text can be a thousand times as loud as the rest."""
    found: list[Boundary] = []
    before = None
    for k in sorted(replay.states):
        state = replay.states[k].float()  # [N, Ht]
        loud = state.abs().median(0).values
        cosine = float("nan") if before is None else float(torch.cosine_similarity(before, state, -1).median())
        found.append(Boundary(k, float(state.square().mean(-1).sqrt().median()), int(loud.argmax()), float(loud.max()), cosine))
        before = state
    return found


def shortened(bench: Bench, tokens: int) -> Bench:
    """The same weights on the first documents of the replay, `tokens` or a little more, so that a run takes a moment."""
    replay = bench.replay
    ends = replay.ends[: int((replay.ends < tokens).sum()) + 1]
    n = int(ends[-1])
    short = replace(
        replay, ids=replay.ids[:n], loss_mask=replay.loss_mask[:n], ends=ends, states={k: x[:n] for k, x in replay.states.items()},
        teacher={m: Top(*(x[:n] for x in top)) for m, top in replay.teacher.items()}, drafted={},
    )  # fmt: skip
    return Bench(short, bench.state, bench.base, bench.maps, bench.embeddings, bench.norms)


def treatments(row: dict[str, Any]) -> set[str]:
    """What engines do with a tensor: a name that was changed and one that was not come to the same."""
    return {"loaded" if row["consumers"][e] == "renamed" else row["consumers"][e] for e in wiring.ENGINES}


def undecided(i: Inspection) -> int:
    """How many readings these tokens can neither refuse nor confirm."""
    return sum(r.difference.verdict == "undecidable" and r.difference.sure != (0, 0) for r in i.ranked)


def own_share(replay: Replay) -> float:
    """Share of the supervised tokens that are the verifier's own first choice after what stands before them; nan where there are none."""
    first = replay.teacher[replay.norms].ids[:-1, 0]  # [N - 1], said of the next token
    asked = replay.loss_mask[1:] & (replay.documents[1:] == replay.documents[:-1])
    return float((first == replay.ids[1:])[asked].float().mean())


def report(run: RunFolder, i: Inspection) -> None:
    """Headline numbers, warnings, findings and readings into a run's results."""
    found = i.doctor.findings
    codes = ", ".join(dict.fromkeys(f.code for f in found if f.severity != "note"))
    stuck = refusals(i.engines)
    label = f"faults{f': {codes}' if codes else ''}; {i.checks} checks ran{''.join(f'; {engine} cannot load it' for engine in stuck)}"
    run.record("faults", sum(f.severity != "note" for f in found), label)
    if i.bench is not None:
        best, length = i.ranked[0], i.base["accept_length"]
        label = f"simulated accept length as wired ({int(i.replay.loss_mask.sum()):,} tokens of answers)"
        run.record("accept_length", length, label, f"{length:.2f}")
        run.record("full_acc_0", i.base["accuracy"], "of the first draft tokens right", f"{100 * i.base['accuracy']:.0f} %")
        change = f"{best.reading.name}: {signed(best.difference.loss)} nats a token, {best.difference.verdict}"
        better = sum(r.difference.verdict == "better" for r in i.ranked)
        label = f"of {len(i.ranked)} other wirings fit better, {undecided(i)} cannot be decided; the best is {change}"
        run.record("best_reading", best.difference.loss, label, f"{better}")
        readings = [{"name": r.reading.name, "delta_loss": r.difference.loss, "ci95": [r.difference.low, r.difference.high],
                     "accept_length": length + r.difference.accept_length, "verdict": r.difference.verdict} for r in i.ranked]  # fmt: skip
        run.record("readings", plain(readings))
        run.record("combination", [r.reading.name for r in i.kept])
    which = f": {', '.join(i.differ)}" if i.differ else ""
    label = f"of {len(DIFFERENT)} things come out differently in the engines that load it{which}"
    run.record("engines_differ", len(i.differ), label)
    run.record("findings", [{"code": f.code, "severity": f.severity, "title": f.title} for f in found])
    run.record("finding_verdict", verdict(found))
    for one in found:
        if one.severity != "note":
            run.warn(f"{one.title}.")
    if i.bench is not None and (share := own_share(i.bench.replay)) < SAID:
        run.warn(
            f"Only {percent(share)} of the replayed answers are this verifier's own first choice: they are sampled or another model's. "
            "Numbers of this page compare readings; what would be accepted is told by the verifier's own answers alone."
        )
    for engine, reason in stuck.items():
        run.warn(f"{engine} cannot load this drafter: {reason}.")
