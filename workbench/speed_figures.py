"""What acceptance is worth: figures of round costs, break-even and the best number of draft tokens.

Notable: the same functions draw the static page of notebook 4 and its live controls. Runs of one baseline are drawn in tokens/s, runs of
several in multiples of their own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench import figures
from workbench.accept import constant_rate, round_cost
from workbench.contradiction import Served
from workbench.evidence import Sweep
from workbench.figures import Column, Exhibit, level, missing, plot, plot_text, table, trace

GIVE_RUNS = "give serving logs (serving), runs with accept_length, tokens_per_s and a baseline, or a drafter to decode with now."


def served(runs: Sequence[Served]) -> Exhibit:
    """Every run with its round cost."""
    if not runs:
        return missing("Runs", GIVE_RUNS)
    lines = []
    for run in runs:
        cost = _cost(run)
        needed = constant_rate(cost, run.draft_tokens) if cost and 1 <= cost <= run.draft_tokens + 1 else None
        speed = [run.tokens_per_s and round(run.tokens_per_s, 1), run.baseline_tokens_per_s and round(run.baseline_tokens_per_s, 1)]
        gain = [cost and round(run.accept_length / cost, 2), cost and round(cost, 2), _range(run), needed and round(100 * needed, 1)]
        lines.append([run.name, run.draft_tokens, round(run.accept_length, 2), round(run.half_width, 2), *speed, *gain])
    costs = [f"{cost:.2f}" for run in runs if (cost := _cost(run))]
    heads = dict.fromkeys(("draft tokens", "accept length", "±", "tokens/s", "without", "speed-up", "round cost R"), "number")
    heads |= {"95 %": "value", "needed (%)": "number"}
    title = f"A round costs {' and '.join(costs)} plain steps" if costs else "No run tells what a round costs"
    sentence = (
        "R = accept length × tokens/s without / with speculation: the accept length to break even; needed: acceptance of each draft token."
    )
    return table(title, sentence, [Column("run"), *(Column(head, kind) for head, kind in heads.items())], lines)


def break_even(runs: Sequence[Served]) -> Exhibit:
    """Throughput against accept length: what each run's rounds would give, and where that meets plain decoding."""
    known = [run for run in runs if _cost(run)]
    if not known:
        return missing("Break-even", GIVE_RUNS)
    one = len({run.baseline_tokens_per_s for run in known}) == 1
    unit, most = ("tokens/s" if one else "times plain decoding"), max(run.draft_tokens for run in known) + 1
    traces = []
    for n, run in enumerate(known):
        base, (colour, dash) = (run.baseline_tokens_per_s if one else 1.0), figures.line_style(n)
        x = np.linspace(1, run.draft_tokens + 1, 25)
        hover = {"hovertemplate": f"accept length %{{x:.2f}}: %{{y:.3g}} {unit}"}
        traces.append(drawn(x, base * x / _cost(run), f"rounds of {run.name}", line={"color": colour, "dash": dash}, **hover))
        here, error = {"size": 12, "color": colour}, {"type": "data", "array": [run.half_width]}
        y = [base * run.accept_length / _cost(run)]
        traces.append(drawn([run.accept_length], y, run.name, mode="markers", marker=here, error_x=error, **hover))
        if _cost(run) <= most:
            meets = {"mode": "markers+text", "text": [f"{_cost(run):.2f}"], "textposition": "bottom right", "showlegend": not n}
            traces.append(drawn([_cost(run)], [base], "break-even", marker={"size": 11, "symbol": "x", "color": colour}, **meets, **hover))
    lost = [run for run in known if run.accept_length < _cost(run)]
    costs = [_cost(run) for run in known]
    spread = " to ".join(dict.fromkeys(f"{cost:.2f}" for cost in (min(costs), max(costs))))
    close = [run for run in known if run not in lost and run.accept_length - run.half_width < (run.cost_ci or [_cost(run)])[-1]]
    named, told = (lost, f"lose{'s' * (len(lost) == 1)} by drafting") if lost else (close, "may be on either side")
    verdict = f"{' and '.join(_short(run) for run in named)} {told}" if named else "all runs are above it"
    title, base = f"Break-even is accept length {spread}: {verdict}", known[0].baseline_tokens_per_s
    goal = [f"{base * 3 / cost:.0f}" for cost in sorted({min(costs), max(costs)}, reverse=True)]
    sentence = "; ".join(f"{run.name}: accept length {_short(run)}, break-even {_cost(run):.2f}{_within(run)}" for run in known) + "."
    sentence += f" At accept length 3 these rounds give {' to '.join(goal)} tokens/s; plain decoding gives {base:.3g}." if one else ""
    across = level({f"without speculation: {base:.3g} tokens/s": base} if one else {"without speculation": 1.0})
    return plot(title, sentence, traces, "accept length (bonus token included)", unit, height=440, yaxis={"rangemode": "tozero"}, **across)


def best_drafts(sweeps: Sequence[Sweep]) -> Exhibit:
    """Speed-up with each number of draft tokens, none included."""
    if not sweeps:
        return missing("Best number of draft tokens", GIVE_RUNS)
    traces, said = [], []
    for n, one in enumerate(sweeps):
        found, colour, error = one.best, figures.COLOURS[n % 6], None
        if one.samples is not None:
            low, high = np.quantile(one.samples, (0.025, 0.975), axis=0)  # [S+1] each
            error = {"type": "data", "array": high - found.speedups, "arrayminus": found.speedups - low, "thickness": 1.2}
        style = {"line": {"color": colour, "dash": "solid" if one.measured else "dash"}, "mode": "lines+markers", "error_y": error}
        name = one.name if one.measured else f"{one.name} (partly interpolated)"
        traces.append(drawn(np.arange(len(found.speedups)), found.speedups, name, **style))
        traces.append(star(found.draft_tokens, found.speedups[found.draft_tokens], f"{one.name}: best", colour))
        said.append(f"{one.name}: {found.draft_tokens}{found.bound} ({found.speedups[found.draft_tokens]:.2f} times plain decoding)")
    doubts = [f"{one.name}: {one.doubt}" for one in sweeps if one.doubt]
    title = f"Best number of draft tokens{', not decided' * bool(doubts)}: {'; '.join(said)}"
    sentence = "Accept length over round cost; 0 is plain decoding. "
    sentence += "; ".join(f"{one.name}: round costs {', '.join(f'{cost:.2f}' for cost in one.costs)}" for one in sweeps) + "."
    sentence += f" {'. '.join(doubts)}." if doubts else ""
    if any(one.falls for one in sweeps if one.samples is not None):
        sentence += " A round that gets cheaper with more draft tokens is this machine's: it was busy, or its kernels prefer some widths."
    sentence += " Bars: 95 % over prompts." if any(one.samples is not None for one in sweeps) else ""
    if not all(one.measured for one in sweeps):
        sentence += " Dashed: every draft token is taken to cost alike; in a mixture of experts the first ones cost most. Measure 1 and 2."
    axis = {"dtick": 1, "rangemode": "tozero"}
    return plot(title, sentence, traces, "draft tokens a pass", "speed-up", height=400, xaxis=axis, **level({"plain decoding": 1.0}))


# ---- pieces, also of notebook 4's other figures ----------------------------------------------------------------------------------


def _cost(run: Served) -> float | None:
    """Round cost, None where the throughputs are not known."""
    told = run.tokens_per_s and run.baseline_tokens_per_s
    return round_cost(run.accept_length, run.tokens_per_s, run.baseline_tokens_per_s) if told else None


def _range(run: Served) -> str | None:
    """The interval of a round cost."""
    return f"{run.cost_ci[0]:.2f} to {run.cost_ci[1]:.2f}" if run.cost_ci else None


def _within(run: Served) -> str:
    return f" ({_range(run)} with 95 %, over prompts)" if run.cost_ci else ""


def _short(run: Served) -> str:
    return str(round(run.accept_length, 2))


def drawn(x: Any, y: Any, name: str, **style: Any) -> dict[str, Any]:
    """A named line, or points."""
    return trace("scatter", **{"x": x, "y": y, "name": plot_text(name), "mode": "lines", **style})


def star(x: float, y: float, name: str, colour: str, axis: str = "y") -> dict[str, Any]:
    """A best value, marked."""
    style = {"size": 15, "symbol": "star", "color": colour, "line": {"color": "#ffffff", "width": 1}}
    return trace("scatter", x=[x], y=[y], mode="markers", name=plot_text(name), marker=style, yaxis=axis, showlegend=False)
