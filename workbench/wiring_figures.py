"""The figures and tables of notebook 2: an `Inspection` in, an `Exhibit` out.

Notable: a difference below zero is a gain, everywhere: the other wiring costs fewer nats than the present one. The flow is in
wiring_flow.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from workbench import figures, inspector, wiring
from workbench.figures import Column, Exhibit, missing, plot, plot_text, table, trace
from workbench.findings import SEVERITIES
from workbench.forecast import DIFFERENT, differences, refusals
from workbench.inspector import Inspection
from workbench.loss_accept_figures import next_steps as next_commands
from workbench.readings import SCAN
from workbench.scans import LEAST, LEVEL, Outcome
from workbench.texts import percent, signed

SHOWN = {"better": (figures.VERMILLION, "diamond"), "worse": (figures.BLUE, "circle"), "undecidable": (figures.GREY, "circle-open")}
SCALE = [[0, figures.VERMILLION], [0.5, "#f3f3f3"], [1, figures.BLUE]]
CLIP = 1.0  # nats at which the heat map's colours end
MATTERS = 0.05  # nats a token that a reading must be able to gain for a longer replay to be worth its time
LEGIBLE = 40  # boundaries; more cells are too narrow for their number


def findings(i: Inspection) -> Exhibit:
    """What doctor and replay found, the worst first."""
    found, tried = i.doctor.findings, f"{i.checks} checks and {len(i.ranked)} other readings of the wiring"
    if not found:
        return Exhibit("No fault found", f"{tried} have nothing to say against this drafter.", None)
    counts = [(sum(f.severity == severity for f in found), severity) for severity in reversed(SEVERITIES)]
    said = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n)
    columns = [Column("severity", "mark"), Column("code", "value"), Column("what"), Column("where", "value"), Column("cure", "value")]
    lines = [[f.severity, f.code, f.title, f.where, f.remedy] for f in found]
    return table(f"{said}: {found[0].title}", f"By {tried}.", columns, lines)


def cures(i: Inspection) -> Exhibit:
    """The next command of each finding."""
    if not i.doctor.findings:
        return Exhibit("Nothing has to be cured", "what else applies to this drafter stands at the end.", None)
    return next_commands(i.doctor.findings)


def skipped(i: Inspection) -> Exhibit:
    """Checks that had no input, by what they need."""
    needs = i.doctor.unseen()
    if not needs:
        return Exhibit("Nothing was skipped", f"all {i.checks} checks ran.", None)
    sentence = "workbench doctor takes these inputs; what was skipped is not known to be sound."
    lines = [[need, ", ".join(codes)] for need, codes in sorted(needs.items(), key=lambda item: -len(item[1]))]
    columns = [Column("needs", "value"), Column("faults that were not looked for", "value")]
    return table(f"{i.checks} checks ran, {len(i.doctor.skipped)} had no input", sentence, columns, lines)


# ---- consumers ------------------------------------------------------------------------------------------------------------------


def engines(i: Inspection) -> Exhibit:
    """What each engine feeds and uses, a line a field, those in which engines differ first; nothing of engines that cannot load it."""
    stuck, told = refusals(i.engines), differences(i.engines)
    order = sorted(DIFFERENT, key=lambda name: name not in i.differ)
    lines = [
        [name, "differ" if name in i.differ else "agree", *("–" if e in stuck else _told(said[name]) for e, said in i.engines.items())]
        for name in order
    ]
    lines += [["defaults taken", "", *("; ".join(engine["defaults_taken"]) or "–" for engine in i.engines.values())]]
    alike = f"All engines {'that can load it ' * bool(stuck)}feed and use the same"
    title = f"Engines differ in {len(i.differ)} of {len(DIFFERENT)} things: {', '.join(i.differ)}" if i.differ else alike
    columns = [Column("what"), Column("engines", "mark"), *(Column(engine, "value") for engine in i.engines)]
    sentence = f"{told[i.differ[0]]}." if i.differ else "Boundaries, embedding, head, map and norms agree."
    refused = f" {', '.join(stuck)} cannot load it." if stuck else ""
    return table(title, f"{sentence}{refused}", columns, lines)


def launch(i: Inspection) -> Exhibit:
    """The command that starts each engine with this drafter, or why there is none."""
    stuck = refusals(i.engines)
    lines = [[engine, stuck.get(engine, told["launch"])] for engine, told in i.engines.items()]
    title = f"{', '.join(stuck)} cannot load this drafter" if stuck else f"All {len(lines)} engines can load this drafter"
    sentence = "Each line agrees with what its engine reads above; a reason stands where there is none."
    return table(title, sentence, [Column("engine"), Column("launch", "value")], lines)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(flag for flag, on in value.items() if on) or "usual"
    return ", ".join(f"h_{k}" for k in value) if isinstance(value, list) else str(value)


def consumers(i: Inspection, rows: int) -> Exhibit:
    """Every tensor and what becomes of it in each consumer, those that engines treat differently first."""
    order = sorted(i.tensors, key=lambda row: (row["fits"] is not False, len(inspector.treatments(row)) == 1))
    differing = [row["canonical"] or row["name"] for row in order if len(inspector.treatments(row)) > 1]
    lines = [
        [row["name"] or "–", row["canonical"] or "unknown", row["role"], "–" if row["shape"] is None else str(row["shape"]),
         "–" if row["fits"] is None else "yes" if row["fits"] else f"no: {row['expected']}",
         *(row["consumers"][consumer] for consumer in wiring.CONSUMERS)]
        for row in order[:rows]
    ]  # fmt: skip
    named = f": {', '.join(differing[:4])}{' ...' if len(differing) > 4 else ''}" if differing else ""
    title = f"Engines treat {len(differing)} of {len(order)} tensors differently{named}"
    sentence = (
        "missing: something else is taken for it in silence; initialised: made anew; shared: the verifier's; refused: loading stops. "
    )
    sentence += "finetune-from copies weights under new names and leaves d2t and t2d out."
    columns = [Column("in the file", "value"), Column("canonical", "value"), Column("role"), Column("shape"), Column("fits")]
    return table(title, sentence, [*columns, *(Column(consumer) for consumer in wiring.CONSUMERS)], lines, len(order), search=True)


# ---- states ---------------------------------------------------------------------------------------------------------------------


def boundaries(i: Inspection) -> Exhibit:
    """RMS, loudest channel and similarity between neighbours, over the verifier's boundaries."""
    found = inspector.boundary_statistics(i.replay)
    if len(found) < 2:
        return missing("States at each boundary", "the replay has one boundary: record more of them.")
    x = [one.k for one in found]
    near = [(b.cosine, a.k, b.k) for a, b in pairwise(found)]
    step, a, b = min(near)
    lines = [
        ("RMS", [one.rms for one in found], figures.BLUE, "solid", "y"),
        ("loudest channel", [one.loudest for one in found], figures.ORANGE, "dash", "y"),
        ("cosine with the boundary before", [None, *(one.cosine for one in found[1:])], figures.GREEN, "solid", "y2"),
    ]
    text = [f"h_{one.k}: channel {one.channel}" for one in found]
    look = {"mode": "lines+markers", "marker": {"size": 5}, "text": text, "hovertemplate": "%{text}<br>%{y:.3f}"}
    traces = [
        trace("scatter", x=x, y=values, name=name, line={"color": colour, "dash": dash}, yaxis=axis, **look)
        for name, values, colour, dash, axis in lines
    ]
    upright = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": figures.GREY, "dash": "dot"}}
    marks = [{**upright, "x0": k, "x1": k} for k in (i.bench.base.taps if i.bench else ())]
    low, high = (pick(found, key=lambda one: one.rms) for pick in (min, max))
    title = f"Neighbouring states are least alike from h_{a} to h_{b}: cosine {step:.2f}; RMS {low.rms:.2g} at h_{low.k}, "
    title += f"{high.rms:.2g} at h_{high.k}"
    sentence = (
        f"Medians over {len(i.replay.ids):,} tokens. Where neighbours are alike (up to {max(near)[0]:.3f}) a tap one off costs little "
    )
    sentence += "and hides well; dotted lines: the taps as wired."
    axes = {"yaxis": {"domain": [0.46, 1], "type": "log", "title": {"text": "size"}}, "xaxis": {"anchor": "y2"}}
    axes["yaxis2"] = {"domain": [0, 0.36], "title": {"text": "cosine"}}
    return plot(title, sentence, traces, "boundary k (h_k)", height=460, shapes=marks, **axes)


def tap_heat(i: Inspection, taps: Sequence[int] | None = None) -> Exhibit:
    """Each tap over all boundaries, the others as wired. taps: boundaries marked, default as wired."""
    if i.bench is None:
        return missing("Each tap over all boundaries", f"{i.why}.")
    wired, line = i.bench.base.taps, list(range(len(i.cells)))
    best = i.cells.argmin(1)
    gains = [(float(row[at]), slot, i.boundaries[at]) for slot, (row, at) in enumerate(zip(i.cells, best, strict=True))]
    gain, slot, k = min(gains)
    title = f"No tap reads better elsewhere: the most that a move gains is {max(-gain, 0):.3f} nats"
    if gain < -LEAST:
        best_move = (*wired[:slot], k, *wired[slot + 1 :])
        sure = any(r.difference.verdict == "better" and r.reading.change.get("taps") == best_move for r in i.ranked)
        title = f"Tap {slot} reads {'better' if sure else 'no worse'} from h_{k} than from h_{wired[slot]}: {gain:+.2f} nats"
        title += "" if sure else ", which these tokens cannot decide"
    moved = [(s, a, b) for s, (a, b) in enumerate(zip(wired, taps or wired, strict=True)) if a != b]
    if moved:
        alone = [f"tap {s} at h_{b} for h_{a}: {i.cells[s, i.boundaries.index(b)]:+.2f} nats" for s, a, b in moved]
        title = f"Moved alone, {'; '.join(alone)}"
    far = abs(np.array(i.boundaries) - np.array(wired)[:, None])  # [A, boundaries]
    harm = "; ".join(f"tap {s} {signed(max(row[d == 1], default=0.0))}" for s, (row, d) in enumerate(zip(i.cells, far, strict=True)))
    sentence = f"Loss at the first draft token less that of the present wiring, on {SCAN} tokens of each text at most, fewer than "
    sentence += "the readings below have; orange gains, "
    sentence += f"blue costs, colours end at {CLIP:g} nat. One boundary off changes at most: {harm} nats."
    legible, marked = len(i.boundaries) <= LEGIBLE, [{a, b} for a, (*_, b) in zip(taps or wired, gains, strict=True)]
    text = [
        [_short(z) if legible and k not in under else "" for k, z in zip(i.boundaries, row, strict=True)]
        for row, under in zip(i.cells, marked, strict=True)
    ]
    heat = trace(
        "heatmap", x=list(i.boundaries), y=line, z=i.cells.astype(np.float32), zmin=-CLIP, zmax=CLIP, colorscale=SCALE, xgap=1, ygap=2,
        colorbar={"title": {"text": "nats"}, "thickness": 12}, hovertemplate="%{y} from h_%{x}: %{z:+.3f} nats<extra></extra>",
        text=text, texttemplate="%{text}", textfont={"size": 9},
    )  # fmt: skip
    now = ("as wired" if taps is None else "now", list(taps or wired), "square-open", 20)
    ink = {"color": figures.INK, "line": {"width": 2}}
    spots = [
        trace("scatter", x=x, y=line, mode="markers", name=name, hoverinfo="skip", marker={"symbol": symbol, "size": size, **ink})
        for name, x, symbol, size in (now, ("best", [b for *_, b in gains], "star-open", 11))
    ]
    axis = {"tickvals": line, "ticktext": [f"tap {s} (h_{b})" for s, b in enumerate(wired)], "autorange": "reversed", "showgrid": False}
    return plot(title, sentence, [heat, *spots], "boundary k (h_k)", height=150 + 48 * len(line), yaxis=axis, hovermode="closest")


def _short(nats: float) -> str:
    """Two digits, which a narrow cell has room for."""
    return f"{nats:.1f}" if abs(nats) >= 0.995 else f"{nats:.2f}".replace("0.", ".").replace("-.00", ".00")


# ---- readings -------------------------------------------------------------------------------------------------------------------


def ranked(i: Inspection, rows: int) -> Exhibit:
    """The best readings with their intervals; below zero is a gain."""
    if i.bench is None:
        return missing("Readings", f"{i.why}.")
    shown, best = i.ranked[:rows], i.ranked[0]
    better = [r for r in i.ranked if r.difference.verdict == "better"]
    gain = f"{signed(best.difference.loss)} nats ({' to '.join(map(signed, best.difference.sure))})"
    title = f"No other wiring fits better: of {len(i.ranked)} readings the best, {best.reading.name}, changes {gain}"
    if better:
        title = f"{len(better)} of {len(i.ranked)} readings fit better, first of all {best.reading.name}: {gain}"
    traces = []
    for verdict, (colour, symbol) in SHOWN.items():
        here = [r.difference for r in shown if r.difference.verdict == verdict]
        error = {
            "type": "data",
            "array": [d.sure[1] - d.loss for d in here],
            "arrayminus": [d.loss - d.sure[0] for d in here],
            "thickness": 1.2,
        }
        names = [plot_text(r.reading.name) for r in shown if r.difference.verdict == verdict]
        traces.append(trace("scatter", x=[d.loss for d in here], y=names, mode="markers", name=verdict, error_x=error,
                            marker={"color": colour, "symbol": symbol, "size": 9}, hovertemplate="%{y}: %{x:+.3f} nats"))  # fmt: skip
    order = [plot_text(r.reading.name) for r in shown]
    axis = {"categoryorder": "array", "categoryarray": order, "autorange": "reversed"}
    b = i.base
    sentence = (
        f"As wired: loss {b['loss']:.3f}, {percent(b['accuracy'])} of first draft tokens right, alpha {b['alpha']:.3f}, simulated accept "
    )
    sentence += f"length {b['accept_length']:.2f}. Paired on the same tokens; bars: {100 * LEVEL:.1f} % over "
    sentence += f"{len(i.replay.ends)} texts. Other texts have another accept length: only numbers of the same texts compare."
    zero = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": figures.GREY}}
    return plot(title, sentence, traces, "change of loss (nats a token)", height=120 + 22 * len(shown), yaxis=axis,
                shapes=[zero], hovermode="closest")  # fmt: skip


def readings(i: Inspection) -> Exhibit:
    """Every reading: difference, interval, accept length, verdict."""
    if i.bench is None:
        return missing("All readings", f"{i.why}.")
    length = i.base["accept_length"]
    lines = []
    for reading, d in ((r.reading, r.difference) for r in i.ranked):
        verdict = "same" if d.sure == (0, 0) else d.verdict
        changed = [signed(d.loss), " .. ".join(map(signed, d.sure)), round(length + d.accept_length, 2)]
        lines.append([reading.name, *changed, d.chains, verdict])
    worse = sum(r.difference.verdict == "worse" for r in i.ranked)
    most = max(r.difference.chains for r in i.ranked)
    title = f"{worse} of {len(i.ranked)} readings fit worse, {inspector.undecided(i)} cannot be decided on {most:,} tokens"
    sentence = (
        f"Better or worse: the change is more than {LEAST:g} nats and its interval ({100 * LEVEL:.1f} %, because so many readings are "
    )
    sentence += "tried) does not hold 0. What cannot be decided is bounded by its interval, which a longer replay narrows. "
    sentence += f"Needed together: {', '.join(r.reading.name for r in i.kept)}." if i.kept else "No change is needed."
    columns = [
        Column("reading"),
        Column("nats a token", "value"),
        Column(f"{100 * LEVEL:.1f} % interval", "value"),
        Column("accept length", "number"),
    ]
    return table(title, sentence, [*columns, Column("tokens compared", "number"), Column("verdict", "mark")], lines, search=True)


def changed(before: Outcome, after: Outcome, words: str) -> Exhibit:
    """Two wirings on the same tokens, TTT step by TTT step. words: what was changed."""
    a, b = before.summary(), after.summary()
    title = f"{words}: loss {a['loss']:.2f} → {b['loss']:.2f}, first draft tokens right {percent(a['accuracy'])} → {percent(b['accuracy'])}"
    title += f", accept length {a['accept_length']:.2f} → {b['accept_length']:.2f}"
    steps = [f"step {k}" for k in range(before.loss.shape[1])]
    traces = []
    for name, out, colour, dash in (("as wired", before, figures.GREY, "dot"), ("now", after, figures.BLUE, "solid")):
        style = {"mode": "lines+markers", "line": {"color": colour, "dash": dash}, "x": steps, "name": name, "legendgroup": name}
        traces.append(trace("scatter", y=out.loss.mean(0).tolist(), hovertemplate="%{y:.3f} nats", **style))
        right = (100 * out.hit.float().mean(0)).tolist()
        traces.append(trace("scatter", y=right, xaxis="x2", yaxis="y2", showlegend=False, hovertemplate="%{y:.1f} %", **style))
    sentence = f"{len(before.loss)} draft chains, the same for both: enough to see a fault, too few to decide a small difference."
    panels = {"xaxis": {"domain": [0, 0.44]}, "xaxis2": {"domain": [0.56, 1], "anchor": "y2"}, "yaxis": {"rangemode": "tozero"}}
    panels["yaxis2"] = {"anchor": "x2", "title": {"text": "right (%)"}, "rangemode": "tozero"}
    return plot(title, sentence, traces, "TTT step", "loss (nats)", height=330, **panels)


def next_steps(i: Inspection) -> Exhibit:
    """What to do about a drafter that is wired as this one."""
    verdicts = {r.difference.verdict for r in i.ranked}
    open_ones = any(r.difference.verdict == "undecidable" and r.difference.low < -MATTERS for r in i.ranked)
    wrong, odd = any(f.severity != "note" for f in i.doctor.findings), bool(i.differ)
    stuck = refusals(i.engines)
    steps = [
        (
            "better" in verdicts,
            "Another wiring fits beyond doubt: change what the drafter is fed, not its weights, then run this page again.",
        ),
        (
            len(i.kept) > 1,
            f"{len(i.kept)} changes are needed together: make all of them before anything is measured.",
        ),
        (
            wrong and "better" not in verdicts,
            "The findings above have nothing to do with the wiring: cure them first, each names its command.",
        ),
        (
            odd,
            f"Engines read {', '.join(i.differ)} differently: where yours is the odd one, workbench convert writes what it reads as meant.",
        ),
        (
            open_ones,
            f"A reading that may gain more than {MATTERS:g} nats cannot be decided: record a longer replay (workbench replay record).",
        ),
        (
            i.bench is None,
            f"No reading could be tried: {i.why}.",
        ),
        (
            bool(stuck),
            f"{', '.join(stuck)} cannot load this drafter: workbench convert writes it in a form that it reads.",
        ),
        (
            i.bench is not None and not wrong and "better" not in verdicts,
            f"No other wiring fits better; {inspector.undecided(i)} of {len(i.ranked)} cannot be decided on these tokens. If acceptance is "
            "low, compare the maps (notebook 1), then what training said (notebook 4).",
        ),
    ]
    return figures.advice(steps)
