"""The golden replay held against a drafter: which wiring its weights were made for, as findings with numbers and a cure.

Notable: finding codes are the doctor's. A finding is a change that is better beyond doubt on top of those found before it; readings that
stay undecidable are in the table with the interval that bounds them, and are no finding. Where the replay holds logits of the drafter
itself, from a run that is trusted, a wiring that brings them back is exact evidence, also for what acceptance cannot decide.
"""

from pathlib import Path
from typing import Any

import torch

from workbench.checkpoint import open_drafter
from workbench.findings import Finding
from workbench.readings import SCREEN, Ranked, combine, readings, scan
from workbench.replay import Progress, read_replay
from workbench.scans import LEAST, LEVEL, Bench
from workbench.texts import signed

ROUNDING = 0.1  # RMS of logits: two implementations in bfloat16 differ by less
REMEDIES = {
    "taps-shifted": "feed it these boundaries: set the tap ids as the serving engine reads them (see `workbench forecast`)",
    "taps-order": "join the taps in this order: permute the column blocks of fc.weight or the tap ids",
    "concat-swapped": "exchange the two halves of the columns of the first layer's q, k and v projections",
    "label-shift": "align ids, states and labels: row t holds token t+1, the taps of t and the teacher's state of t+1",
    "norm-teacher": "say whether the stored last state is before or after the final norm, and apply the norm exactly once",
    "norm-recycled": "set norm_output to what the drafter was trained with",
    "norm-residual": "set norm_before_residual to what the drafter was trained with; SGLang knows only false",
    "rope-theta": "set rope_theta, in every spelling of the config, to what the drafter was trained with",
    "rope-partial": "set partial_rotary_factor to what the drafter was trained with",
    "rope-layout": "reorder the rows of the q and k projections within each head from one layout to the other",
    "position-shift": "advance the positions by one with each draft step, as in training",
    "doc-leak": "mask attention by document when training on packed texts: an engine sees one text at a time",
    "attn-layout": "put the heads' rows of q, k and v (columns of o) into the order in which the config's reader takes them",
    "embed-random": "leave the drafter's own embedding out, so that it shares the verifier's",
    "feature-scale": "scale fc.weight by this factor, or feed the states as they were in training",
    "norm-final": "restore norm.weight from the run that trained the head",
    "head-row-order": "put the head's rows into the order of the map: `workbench remap`, from the map that the head was trained with",
    "map-absolute": "write d2t as offsets: d2t - arange(K)",
    "map-first-k": "put the map that the head was trained with beside it: d2t is missing or zero",
}


def check(
    replay_path: str | Path, drafter_path: str | Path, verifier_path: str | Path | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """The drafter under every reading of its wiring on a replay: tokens, sequences, base, readings (best first), combination, findings.

    recorded: only where the replay holds the drafter's logits: by how much they are missed as wired (RMS), and under which reading least.

    base: loss (nats a token, mean over TTT steps), accuracy and alpha at the first step, simulated accept length; delta_loss, ci95 and
    sure, the interval that decides, are paired with it. verifier_path: only needed for a replay that was recorded without. Raises
    InputError when they do not fit together.
    """
    replay = read_replay(replay_path).complete(verifier_path)
    checkpoint = open_drafter(drafter_path)
    bench = Bench.open(replay, checkpoint)
    base = bench.run(bench.base).summary()
    ranked = scan(bench, bench.base, progress)
    kept = combine(bench, ranked, progress)
    rows = [
        {
            "name": r.reading.name,
            "delta_loss": r.difference.loss,
            "ci95": [r.difference.low, r.difference.high],
            "sure": r.difference.sure,
            "accept_length": base["accept_length"] + r.difference.accept_length,
            "verdict": r.difference.verdict,
        }
        for r in ranked
    ]
    findings = [as_finding(bench, r, checkpoint.location) for r in kept]
    told = recorded(bench, kept) if replay.drafted else None
    if told and told["reading"]:
        findings.append(_off_record(told, checkpoint.location))
    return {
        "tokens": len(replay.ids),
        "sequences": len(replay.ends),
        "base": base,
        "readings": rows,
        "combination": [r.reading.name for r in kept],
        "findings": [finding.to_json() for finding in findings],
        **({"recorded": {key: told[key] for key in ("off", "reading", "left")}} if told else {}),
    }


def recorded(bench: Bench, kept: list[Ranked]) -> dict[str, Any]:
    """off: RMS miss of the recorded logits with the changes found; where that is more than rounding, `reading` (None: no single change
    brings them back) with its code and what is `left`."""
    wiring = bench.base
    for one in kept:
        wiring = one.reading.applied(wiring)
    off = bench.off_record(wiring)
    told: dict[str, Any] = {"off": off, "reading": None, "code": None, "left": None}
    if off > ROUNDING:
        missed = [(bench.off_record(reading.applied(wiring), SCREEN), reading) for reading in readings(bench, wiring)]
        left, best = min(missed, key=lambda pair: pair[0])
        if left < off / 10:
            told |= {"reading": best.name, "code": best.code, "left": left}
    return told


def _off_record(told: dict[str, Any], where: str) -> Finding:
    title = f"The recorded logits come from another wiring: {told['reading']} (missed by {told['off']:.3f}, then {told['left']:.4f})"
    evidence = {"reading": told["reading"], "rms_as_wired": told["off"], "rms_under_reading": told["left"]}
    return Finding(told["code"], "error", title, where, evidence, REMEDIES[told["code"]])


def as_finding(bench: Bench, found: Ranked, where: str) -> Finding:
    """A change that the weights ask for, under the doctor's code, with its numbers and its cure."""
    reading, gain = found.reading, found.difference
    code, taps = reading.code, reading.change.get("taps", bench.base.taps)
    if taps != bench.base.taps:  # a change found second is named by what it comes to
        code = "taps-order" if sorted(taps) == sorted(bench.base.taps) else "taps-shifted"
    if code == "embed-random":
        code = _embedding_code(bench)
    if code == "head-row-order":
        read, k = reading.change["map"], len(bench.state["lm_head.weight"])
        first_k = torch.equal(bench.maps[bench.base.map][0], torch.arange(k))  # no map, or one of zeros, and K < V
        code = "map-absolute" if read == "absolute" else "map-first-k" if first_k and "rolled" not in read else code
    evidence = {
        "reading": reading.name,
        "delta_loss": gain.loss,
        "ci95": [gain.low, gain.high],
        "accept_length_gain": gain.accept_length,
        "chains": gain.chains,
        "wired": {"taps": list(bench.base.taps), "map": bench.base.map, "rope": bench.base.config.rope},
    }
    title = f"The weights fit another wiring: {reading.name} ({gain.loss:+.2f} nats a token, accept length {gain.accept_length:+.2f})"
    return Finding(code, "error", title, where, evidence, REMEDIES.get(code, REMEDIES[reading.code]))


def _embedding_code(bench: Bench) -> str:
    """embed-rotated when the own rows are the verifier's in another order or basis, else embed-random."""
    own, theirs = (bench.embeddings[name].double() for name in ("own", "verifier"))
    inner = [x[:256] @ x[:256].T for x in (own, theirs)]
    rotated = bool((inner[0] - inner[1]).norm() < 0.05 * inner[1].norm())
    moved = torch.cdist(own, theirs).min(1).values < 0.02 * own.norm(dim=1)  # rows that are some other token's
    return "embed-rotated" if rotated or float(moved.double().mean()) > 0.02 else "embed-random"


def check_text(result: dict[str, Any], shown: int = 15) -> str:
    """The check as lines for people."""
    base = result["base"]
    lines = [
        f"{result['tokens']:,} tokens in {result['sequences']} sequences: loss {base['loss']:.3f}  accuracy {base['accuracy']:.3f}  "
        f"alpha {base['alpha']:.3f}  accept length {base['accept_length']:.3f}",
        f"{'reading':<48} {'nats':>8} {f'{100 * LEVEL:.1f} % interval':>18} {'accept':>7}  verdict",
    ]
    for r in result["readings"][:shown]:
        interval = " .. ".join(map(signed, r["sure"]))
        lines.append(f"{r['name']:<48} {signed(r['delta_loss']):>8} {interval:>18} {r['accept_length']:>7.3f}  {r['verdict']}")
    lines += [f"... and {len(result['readings']) - shown} more (--json has all)"] if len(result["readings"]) > shown else []
    lines.append(f"decided: by more than {LEAST:g} nats, the interval on one side of 0 ({100 * LEVEL:.1f} %, because so many are tried)")
    if "recorded" in result and result["recorded"]["reading"] is None:
        off = result["recorded"]["off"]
        told = "are brought back" if off <= ROUNDING else "are not brought back by any one change: other weights, or several faults"
        lines.append(f"the drafter's recorded logits {told} (missed by {off:.4f})")
    lines += [f"{f['code']}: {f['title']}\n  {f['remedy']}" for f in result["findings"]] or ["no other wiring fits better"]
    return "\n".join(lines)
