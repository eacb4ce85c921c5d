"""The figures and tables of notebook 3: starts as measured numbers in, an `Exhibit` out.

Notable: losses are shown against their two yardsticks, ln K (guessing) and the null (rows and labels unrelated), because a loss without
one says nothing. Cross-entropy is compared with them; `loss_k` in the tables is the KL that trainers print.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench import figures, overlap_figures
from workbench.figures import Column, Exhibit, missing, plot, table, trace
from workbench.lineage import HeadRows, lineage, misalignment_index
from workbench.overlap import MOVED, NEW, OUTSIDE, RIGHT
from workbench.texts import percent
from workbench.train_settings import StepRecord
from workbench.warm_start import HEALTHY, LEAKY, Case, Measured, Trained

STYLE = {  # of each way to start: colour, dash, marker
    "keep": (figures.GREY, "dot", "square"),
    "naive": (figures.VERMILLION, "solid", "diamond"),
    "remapped": (figures.BLUE, "solid", "circle"),
    "scratch": (figures.GREEN, "dash", "triangle-up"),
}
CLOSE = 0.05  # of the null


def origin(case: Case) -> Exhibit:
    """What the parent's head is made of, seen from the new verifier, and how its map and the child's compare."""
    verifier, c = HeadRows(case.verifier, case.verifier.head), case.view.comparison
    found = lineage(HeadRows(case.checkpoint, "lm_head.weight", case.parent), verifier, case.parent)
    shared, rows = len(c.shared_ids), min(c.a.k, c.b.k)
    evidence = found.evidence
    lines = [
        ["head rows looked at", f"{evidence['rows']:,} of {evidence['k']:,}"],
        ["median cosine with the verifier's rows", "widths differ" if evidence["cosine"] is None else f"{evidence['cosine']:.3f}"],
        ["left unexplained by a linear map of the verifier's rows", percent(evidence["unexplained"])],
        ["tokens shared by the two maps", f"{shared:,} of {c.b.k:,}"],
        ["rows that mean the same token in both", f"{c.same_position:,} of {rows:,}"],
    ]
    sentence = f"The head is {found.verdict}: {found.sentence}. Parent and child share {shared:,} of {c.b.k:,} tokens, but "
    sentence += f"{c.same_position:,} of {rows:,} rows mean the same token."
    return table(f"The parent's head is {found.verdict}", sentence, [Column("what"), Column("found", "value")], lines)


def naive(before: Measured | None, case: Case) -> Exhibit:
    """The naive start against guessing and against the null."""
    if before is None:
        needs = f"the parent's head has {case.parent.k:,} rows, the child's map {case.child.k:,}: no trainer loads one under the other."
        return missing("The naive start", needs)
    cross, null, bound = before.cross[0], before.null[0], math.log(before.k)
    gap = abs(cross - null) / null
    title = f"The naive start costs {cross:.2f} nats a label; guessing costs ln K = {bound:.2f}, unrelated rows {null:.2f}"
    if cross > bound:
        near = f", and within {percent(gap)} of what unrelated rows would cost" if gap < CLOSE else ""
        sentence = f"Worse than guessing{near}: suspect the data path, not the weights. The labels follow the child's map, the rows the "
        sentence += "parent's."
    else:
        sentence = f"Better than guessing: {percent(before.found['full_acc_0'])} of the first draft tokens are right as the rows stand."
    return _against_chance(title, sentence, {"naive": before})


def remapped(before: Measured | None, after: Measured) -> Exhibit:
    """The remapped start beside the naive one."""
    bound, right = math.log(after.k), percent(after.found["full_acc_0"])
    title = f"With its rows moved the drafter costs {after.cross[0]:.2f} nats a label; guessing costs ln K = {bound:.2f}"
    sentence = f"{right} of the first draft tokens are right, and the simulated accept length is {after.accept_length:.2f}"
    if before is not None:
        title = f"Moving the rows takes a label from {before.cross[0]:.2f} to {after.cross[0]:.2f} nats; guessing costs ln K = {bound:.2f}"
        sentence += f" (before: {percent(before.found['full_acc_0'])} and {before.accept_length:.2f})"
    if before is not None and after.cross[0] < min(before.cross[0], before.null[0]):
        index = misalignment_index(before.cross[0], before.null[0], after.cross[0])
        sentence += f". Misalignment of the naive start: {index:.2f}, where 0 is this one and 1 rows that have nothing to do with labels"
    sentence += "."
    if "leak" in after.found:
        sentence += f" Made rows take {percent(after.found['leak'])} of the probability beyond their due; among the carried rows alone a "
        sentence += f"label costs {after.found['shared_only']:.2f} nats."
    return _against_chance(title, sentence, {"naive": before, "remapped": after})


def _against_chance(title: str, sentence: str, measured: Mapping[str, Measured | None]) -> Exhibit:
    """Cross-entropy at each TTT step with its null, and ln K."""
    traces = []
    for way, m in measured.items():
        if m is None:
            continue
        steps, bound = [f"TTT step {k}" for k in range(len(m.cross))], math.log(m.k)
        null = {"name": f"{way}: null", "line": {"color": STYLE[way][0], "dash": "dot"}, "marker": {"symbol": "line-ew-open", "size": 11}}
        traces += [_line(way, steps, m.cross), {**_line(way, steps, m.null), **null}]
    return plot(title, sentence, traces, "", "cross-entropy (nats a label)", height=380, **_guessing(bound))


def _line(way: str, x: list[Any], y: list[float]) -> dict[str, Any]:
    """Losses in a way's colour, dash and marker."""
    colour, dash, symbol = STYLE[way]
    style = {"line": {"color": colour, "dash": dash, "width": 2}, "marker": {"symbol": symbol, "size": 8, "color": colour}}
    return trace("scatter", x=x, y=y, mode="lines+markers", name=way, hovertemplate="%{x}: %{y:.2f} nats", **style)


def _guessing(bound: float) -> dict[str, Any]:
    """A dotted line at ln K, and an axis that begins at 0."""
    return {**figures.level({f"guessing: ln K = {bound:.2f}": bound}), "yaxis": {"rangemode": "tozero"}, "hovermode": "closest"}


def rows(case: Case, carried: dict[str, Any]) -> Exhibit:
    """Where the rows of the new head come from, by number and by what the answers ask for."""
    kept, moved, made = (carried[name] for name in ("rows_same_position", "rows_moved", "rows_initialised"))
    by_rows = 100 * np.array([kept, moved, made, 0]) / carried["rows_total"]
    by_mass = 100 * case.view.label_shares()
    names = ("kept in place", "moved", f"made ({carried['init']})", "no row: outside the vocabulary")
    shown = ["tokens of the answers", "rows of the head"]
    traces = [
        overlap_figures.bar(shown, np.array([by_mass[n], by_rows[n]], np.float32), name, n, f"%{{y}}: %{{x:.2f}} %, {name}")
        for n, name in zip((RIGHT, MOVED, NEW, OUTSIDE), names, strict=True)
    ]
    shares = ", ".join(f"{by_mass[n]:.1f}" for n in (RIGHT, MOVED, NEW))
    title = f"{kept:,} rows stay, {moved:,} move, {made:,} are made: {shares} % of the answers' tokens"
    old, new, _ = (choice["coverage"] for choice in carried["alternatives"])
    sentence = f"Missing rows by {carried['init']}: {carried['init_reason']}. Of the answers' tokens, to train on and held out, the "
    sentence += f"child's vocabulary covers {percent(new)}, the parent's {percent(old)}: no training can pass what its vocabulary covers."
    return plot(title, sentence, traces, "share (%)", height=240, barmode="stack", legend={"traceorder": "normal"})


def starts(measured: Mapping[str, Measured | None], title: str = "") -> Exhibit:
    """Losses, accuracies and simulated accept length of starts on the held-out answers."""
    known = {name: m for name, m in measured.items() if m is not None}
    steps = range(len(next(iter(known.values())).cross))
    columns = [Column("start"), Column("cross-entropy, step 0", "number"), *(Column(f"loss_{k}", "number") for k in steps)]
    columns += [Column(f"full_acc_{k} (%)", "number") for k in steps]
    columns += [Column("acc_0 of all V (%)", "number"), Column("labels covered (%)", "number"), Column("simulated accept length", "number")]
    lines = [
        [name, round(m.cross[0], 2)]
        + [round(m.found[f"loss_{k}"], 2) for k in steps]
        + [round(100 * m.found[name], 1) for name in (*(f"full_acc_{k}" for k in steps), "acc_0", "coverage")]
        + [round(m.accept_length, 2)]
        for name, m in known.items()
    ]
    best = max(known, key=lambda name: known[name].accept_length)
    title = title or f"Of {len(known)} starts, {best} accepts most: {known[best].accept_length:.2f} tokens a verify pass (bonus included)"
    entropy = known[best].cross[0] - known[best].found["loss_0"]
    sentence = f"{known[best].supervised:,} supervised tokens of held-out answers; labels covered: the share of these. "
    sentence += f"loss_k is KL, as trainers print it: cross-entropy less the verifier's own entropy (about {entropy:.1f} nats), which "
    sentence += "no training takes away. Losses under different maps are over different tokens and do not compare; acc_0 and accept "
    sentence += "length do: a token outside the draft vocabulary counts as a miss."
    return table(title, sentence, columns, lines)


def curves(records: Mapping[str, Sequence[StepRecord]], k: int) -> Exhibit:
    """The loss of each step of training, the same batches for every start. k: rows of the largest head."""
    losses = {way: [record.loss_k[0] for record in run] for way, run in records.items()}
    traces = [_line(way, [record.step for record in records[way]], values) for way, values in losses.items()]
    ends = ", ".join(f"{way} {values[0]:.2f} → {values[-1]:.2f}" for way, values in losses.items())
    title = f"loss_0 over {max(map(len, losses.values()))} steps of training: {ends}"
    sentence = "KL in nats, as trainers print it, of each batch before its step. Single batches are noisy: the held-out table decides."
    return plot(title, sentence, traces, "step", "loss_0 (nats)", height=400, **_guessing(math.log(k)))


def outcome(trained: Mapping[str, Trained]) -> Exhibit:
    """Every trained start on the held-out answers, before and after."""
    measured = {}
    for way, t in trained.items():
        measured |= {f"{way}, at the start": t.before, f"{way}, after {len(t.records)} steps": t.after}
    lead = ", ".join(f"{way} {t.before.accept_length:.2f} → {t.after.accept_length:.2f}" for way, t in trained.items())
    return starts(measured, f"Simulated accept length on held-out answers: {lead}")


def next_steps(measured: Mapping[str, Measured | None], trained: Mapping[str, Trained]) -> Exhibit:
    """What to do about a drafter that starts and trains as this one."""
    naive, remapped, keep = (measured[way] for way in ("naive", "remapped", "keep"))
    bound = math.log(remapped.k)
    leaky, sound = remapped.found.get("leak", 0.0) > LEAKY, remapped.found["full_acc_0"] >= HEALTHY
    best = max([t.after.accept_length for way, t in trained.items() if way == "remapped"], default=remapped.accept_length)
    steps = [
        (
            naive is not None and naive.cross[0] > bound,
            "The naive start is worse than guessing: train from the folder 'remapped', never from the parent's.",
        ),
        (
            leaky,
            f"Made rows take more than {100 * LEAKY:.0f} % of the probability: another init, or some steps that train these rows alone.",
        ),
        (
            not leaky and not sound,
            "Remapped, less than a third of the first draft tokens are right: before training, see what the drafter is fed (notebook 2).",
        ),
        (
            keep.accept_length >= best,
            f"With its own vocabulary (keep, {keep.accept_length:.2f}) the untrained parent accepts no less than the remapped drafter "
            f"now ({best:.2f}): train keep too (parameter ways) before the new vocabulary is chosen.",
        ),
        (
            sound and not leaky,
            "The remapped start is sound: workbench extract, workbench train --drafter REMAPPED, then workbench accept.",
        ),
    ]
    return figures.advice(steps)
