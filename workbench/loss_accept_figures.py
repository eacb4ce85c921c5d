"""The figures and tables of notebook 4: training and serving numbers in, an `Exhibit` out.

Notable: what training predicts is dashed, what was measured solid, in every figure. A section whose input was not given says what to
give. Intervals are drawn where they are known: bootstrap over requests, decimals of a number that was typed in, bounds of a prediction.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench import contradiction, figures
from workbench.accept import constant_rate
from workbench.evidence import Curve, Evidence, Promise
from workbench.figures import Column, Exhibit, level, missing, plot, plot_text, table, trace
from workbench.findings import SEVERITIES, Finding
from workbench.speed_figures import drawn, star

_MARKED = {"mode": "lines+markers", "marker": {"symbol": "circle", "size": 6}}  # one colour a log: markers tell its lines apart
_DIAMONDS = {"mode": "lines+markers", "marker": {"symbol": "diamond-open", "size": 8}}
POINTS = 300  # of a loss curve; more rows are averaged


def contradictions(e: Evidence, found: Sequence[Finding]) -> Exhibit:
    """The findings in words, the worst first, and what most of them suspect."""
    if not found and not (e.promises or e.curves or e.numbers.losses or e.numbers.accuracies):
        return missing("Nothing was compared", "what is measured alone contradicts nothing: give training logs (training) or numbers.")
    if not found:
        return Exhibit("No contradiction", "none of the rules has anything to say about these numbers.", None)
    counts = [(sum(f.severity == severity for f in found), severity) for severity in reversed(SEVERITIES)]
    said = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n)
    suspects = Counter(suspect for f in found for suspect in f.evidence.get("suspects", [])[:2])
    distrust = any(f.code in ("metric-contradiction", "loss-worse-than-uniform", "head-row-order") for f in found)
    title = f"{said}: {'the numbers contradict each other, so suspect the data path' if distrust else found[0].title}"
    first = "; ".join(suspect for suspect, _ in suspects.most_common(3))
    lines = [[f.severity, f.title, f.where, "; ".join(f.evidence.get("suspects", [])[:2])] for f in found]
    columns = [Column("severity", "mark"), Column("what"), Column("where", "value"), Column("look first at")]
    return table(title, f"Suspected most: {first}." if first else found[0].title + ".", columns, lines)


def next_steps(found: Sequence[Finding]) -> Exhibit:
    """The next command of each finding, once, in the order of the findings."""
    if not found:
        return missing("What to do next", "nothing has to be cleared up first; more prompts narrow the intervals.")
    because: dict[str, list[str]] = {}
    for finding in found:
        because.setdefault(finding.remedy, []).append(finding.code)
    lines = [[n + 1, remedy, ", ".join(dict.fromkeys(codes))] for n, (remedy, codes) in enumerate(because.items())]
    sentence = "Capitals stand for your own paths."
    return table(f"First: {lines[0][1]}", sentence, [Column("order", "number"), Column("next", "value"), Column("because of")], lines)


def curves(e: Evidence) -> Exhibit:
    """Loss and predicted accept length over training, one above the other, with the best of each."""
    if not e.curves:
        return missing("Training", "give training logs (training): run folders, console logs or TensorBoard event files.")
    traces: list[dict[str, Any]] = []
    said = []
    for n, c in enumerate(e.curves):
        colour, dash = figures.line_style(n)
        line = {"color": colour, "dash": dash, "width": 2}
        traces.append(drawn(*_thin(c), f"{c.name}: loss_0 in training", line={**line, "width": 1}))
        if len(c.at):
            lowest, best = _lowest(c), c.best
            known = np.isfinite(c.held_out)
            traces += (
                [drawn(c.at[known], c.held_out[known], f"{c.name}: loss_0 in evaluation", line=line, **_MARKED)] if known.any() else []
            )
            traces.append(drawn(c.at, c.accept_length, f"{c.name}: accept length in training", line=line, yaxis="y2", **_DIAMONDS))
            traces += [
                star(*lowest, f"{c.name}: lowest loss", colour),
                star(c.at[best], c.accept_length[best], f"{c.name}: best", colour, "y2"),
            ]
            said.append(
                f"{c.name}: in training accept length is highest at step {c.at[best]:,.0f}, {c.accept_length[best]:.2f}; loss_0 is lowest "
                f"at step {lowest[0]:,.0f}: {lowest[1]:.2f}"
            )
    served = {p.run.name: p.run for p in e.promises if p.name in [c.name for c in e.curves]}
    measured = "; ".join(f"{name} has {run.accept_length:.2f} ± {run.half_width:.2f}" for name, run in served.items())
    sentence = f"Measured: {measured}." if measured else "Nothing was served beside it: no figure here says what it accepts."
    bests = {c.name: c.accept_length[c.best] for c in e.curves if len(c.at)}
    apart = {p.name: p.predicted.value for p in e.promises if abs(p.predicted.value - bests.get(p.name, p.predicted.value)) > 0.005}
    for name, value in apart.items():
        sentence += f" {name} logs an accept length that it simulated pass by pass, which is drawn; its accuracies alone, below, predict "
        sentence += f"{value:.2f}."
    layout = {
        "yaxis": {"domain": [0.56, 1]},
        "yaxis2": {"domain": [0, 0.46], "title": {"text": "accept length"}},
        "xaxis": {"anchor": "y2"},
    }
    across = {f"{name}: measured {run.accept_length:.2f}": run.accept_length for name, run in served.items()}
    title = "; ".join(said) or "These logs have losses and no accuracy: they do not tell what would be accepted"
    return plot(title, sentence, traces, "step", "loss_0 (nats)", height=520, **level(across, "y2"), **layout)


def losses(e: Evidence) -> Exhibit:
    """loss_k against guessing and against what unrelated labels would cost."""
    given, trial = e.numbers.losses, e.trial
    lines = {"first metrics": given} if given else {}
    for c in e.curves:
        lines |= {f"{c.name}, {when}": row.tolist() for when, row in zip(("first evaluation", "last evaluation"), c.losses, strict=False)}
    if trial:
        lines |= {"cross-entropy on the answers decoded here": trial.cross, "null: labels unrelated to these rows": trial.null}
    if not lines:
        return missing("Loss against chance", "give losses (loss_k) and draft_vocabulary, a training log, or a drafter to decode with now.")
    bound = math.log(e.k)
    name, values = list(lines.items())[0 if given or e.settings.warm_start or not e.curves else 1]
    what = "Cross-entropy" if trial and values is trial.cross else "loss_0"
    if values[0] > bound:
        null = " and null-like, as labels unrelated to the rows are" if max(values) - bound >= contradiction.NULL_EXCESS else ""
        title = f"{what} = {values[0]:.2f} ({name}) is worse than guessing, ln {e.k:,} = {bound:.2f}{null}"
    else:
        title = f"{what} = {values[0]:.2f} ({name}) is better than guessing, ln {e.k:,} = {bound:.2f}"
    sentence = "No training makes up for labels that mean other rows; a loss means nothing without the line of guessing beside it. "
    sentence += f"Unrelated labels would cost this head {trial.null[0]:.2f}." if trial else "The null needs the head itself: give drafter."
    traces = []
    for n, (label, row) in enumerate(lines.items()):
        colour, dash = (figures.GREY, "dot") if label.startswith("null") else figures.line_style(n)
        steps = [f"TTT step {k}" for k in range(len(row))]
        traces.append(drawn(steps, row, label, line={"color": colour, "dash": dash}, mode="lines+markers"))
    guessing = level({f"guessing: ln K = {bound:.2f}": bound})
    return plot(title, sentence, traces, "", "loss (nats a label)", height=380, yaxis={"rangemode": "tozero"}, **guessing)


def positions(e: Evidence) -> Exhibit:
    """The share of verify passes that accept draft tokens 1..k: promised by training, simulated, measured."""
    lines: list[tuple[str, np.ndarray, str, Any]] = []
    lines += [(f"training: {p.name}", _prefix(p), "dash", None) for p in _named(e.promises)]
    if e.trial:
        lines.append(("simulated on the same answers", e.trial.simulated, "dot", None))
    for run in e.runs:
        own = e.trial is not None and run is e.runs[-1]
        error = {"array": e.trial.prefix_ci[1] - e.trial.prefix, "arrayminus": e.trial.prefix - e.trial.prefix_ci[0]} if own else None
        if run.prefix:
            lines.append((f"measured: {run.name}", np.array(run.prefix), "solid", error))
        elif 1 <= run.accept_length <= run.draft_tokens + 1:
            rate = constant_rate(run.accept_length, run.draft_tokens)
            lines.append((f"measured: {run.name}, if each step accepts alike", rate ** np.arange(1, run.draft_tokens + 1), "solid", None))
    if not lines:
        return missing("Acceptance by position", "give accuracies, a training log, serving logs, runs, or a drafter to decode with now.")
    traces = [
        drawn([f"draft token {k + 1}" for k in range(len(rates))], 100 * rates, name, mode="lines+markers",
              # what is simulated often equals what is measured, which is drawn over it
              opacity=0.5 if dash == "dot" else 1, line={"color": figures.COLOURS[n % 6], "dash": dash, "width": 5 if dash == "dot" else 2},
              marker={"symbol": "circle-open" if dash == "dot" else n % 6, "size": 14 if dash == "dot" else 8},
              error_y=None if error is None else {"type": "data", **{side: 100 * size for side, size in error.items()}})
        for n, (name, rates, dash, error) in enumerate(lines)
    ]  # fmt: skip
    last = lines[-1]
    title = f"{last[0]}: draft tokens 1 to {len(last[1])} are accepted in {', '.join(f'{100 * rate:.0f}' for rate in last[1])} % of passes"
    sentence = "Of all passes, those that accept this draft token and all before it."
    if e.trial:
        m = e.trial.measured
        sentence += f" {m.requests} prompts, {m.passes} passes; bars: 95 % over prompts; answers "
        sentence += (
            "equal those of plain decoding, token for token." if e.trial.lossless else "differ from plain decoding's (ties in rounding)."
        )
    return plot(title, sentence, traces, "", "share of passes (%)", height=400, yaxis={"rangemode": "tozero"})


def calibration(e: Evidence) -> Exhibit:
    """Accept length as predicted by training against as measured."""
    promises = list(e.promises)
    if e.trial:
        promises.append(Promise("simulated", e.trial.simulated.tolist(), e.runs[-1]))
    if not promises:
        return missing(
            "Predicted against measured", "give what belongs together: a run with its accuracy, or a training log and what served it."
        )
    wrong = [bool(contradiction.metric_contradiction(p.rates, p.run, p.name, p.kind)) for p in promises]
    x, y = [p.predicted.value for p in promises], [p.run.accept_length for p in promises]
    names = [f"{p.name}: {a:.2f} → {b:.2f} ± {p.run.half_width:.2f}" for p, a, b in zip(promises, x, y, strict=True)]
    reach = [1, max(*x, *y) + 0.2]
    traces = [drawn(reach, reach, "as predicted", line={"color": figures.GREY, "dash": "dot"})]
    for colour, symbol, name, kept in ((figures.BLUE, "circle", "not contradicted", False), (figures.VERMILLION, "x", "contradicts", True)):
        here = [i for i, bad in enumerate(wrong) if bad == kept]
        places = [("bottom " if i % 2 else "top ") + ("left" if 2 * x[i] > sum(reach) else "right") for i in here]
        bounds = [promises[i].predicted for i in here]
        style = {"marker": {"color": colour, "symbol": symbol, "size": 11}, "text": [plot_text(names[i]) for i in here]}
        across = {
            "type": "data",
            "array": [b.high - b.value for b in bounds],
            "arrayminus": [b.value - b.low for b in bounds],
            "thickness": 1,
        }
        upwards = {"type": "data", "array": [promises[i].run.half_width for i in here], "thickness": 1}
        traces.append(trace("scatter", x=[x[i] for i in here], y=[y[i] for i in here], mode="markers+text", name=name, error_x=across,
                            error_y=upwards, textposition=places, hovertemplate="%{text}", **style))  # fmt: skip
    title = (
        f"{sum(wrong)} of {len(promises)} predictions are contradicted: {', '.join(n for n, bad in zip(names, wrong, strict=True) if bad)}"
    )
    sentence = f"Predicted → measured: {'; '.join(names)}. Bars across: what an accuracy of the first step leaves open about later "
    sentence += "ones. Bars upwards: 95 % over prompts, or rounding."
    if not any(wrong):
        title = f"No prediction is contradicted: {'; '.join(names)}"
    if not e.promises:
        title = f"Training told nothing; simulated on the same answers → decoded: {names[0].partition(': ')[2]}"
    return plot(title, sentence, traces, "accept length predicted", "accept length measured", height=460, hovermode="closest")


# ---- pieces ---------------------------------------------------------------------------------------------------------------------


def _prefix(promise: Promise) -> np.ndarray:
    """Prefix rates of a promise; a single accuracy stands for every step."""
    if promise.kind == "joint":
        return np.array(promise.rates)
    return np.cumprod(promise.rates * (promise.run.draft_tokens if len(promise.rates) == 1 else 1))


def _named(promises: Sequence[Promise]) -> list[Promise]:
    """One promise a name: a log may speak of several runs."""
    return list({promise.name: promise for promise in promises}.values())


def _thin(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Step and loss in at most POINTS means of neighbours."""
    parts = min(POINTS, max(1, len(curve.step)))
    split = [np.array_split(values, parts) for values in (curve.step, curve.loss)]
    return tuple(np.array([part.mean() for part in some if len(part)], np.float32) for some in split)  # type: ignore[return-value]


def _lowest(curve: Curve) -> tuple[float, float]:
    """Step and value of the lowest loss_0: of evaluations where they tell it, else of training."""
    x, y = (curve.at, curve.held_out) if np.isfinite(curve.held_out).any() else _thin(curve)
    at = int(np.nanargmin(y))
    return float(x[at]), float(y[at])
