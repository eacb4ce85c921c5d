"""Training numbers and acceptance of a drafter, held against each other: the findings and results of notebook 4.

Notable: the rules are those of contradiction.py, curves.py and audit.py; here is which numbers each of them is asked about.
"""

import math
from collections.abc import Sequence

from workbench import audit, contradiction
from workbench.contradiction import Served
from workbench.evidence import FIRST, Evidence
from workbench.findings import Finding, verdict, worst_first
from workbench.runs import RunFolder


def findings(e: Evidence) -> list[Finding]:
    """Everything that the numbers give away, the worst first."""
    given, numbers, found = e.settings, e.numbers, []
    if numbers.losses:
        found += contradiction.loss_worse_than_uniform(numbers.losses, e.k, FIRST)
    if numbers.shared:
        found += contradiction.rows_in_place(numbers.same_position, numbers.shared, e.k, "labels and head rows")
    for promise in e.promises:
        found += contradiction.metric_contradiction(promise.rates, promise.run, promise.name, promise.kind)
    if numbers.accuracies:
        found += contradiction.decay_too_steep(numbers.accuracies, FIRST)
        found += contradiction.coverage_hidden(numbers.accuracies, given.coverage, FIRST) if given.coverage else []
    if given.warm_start:
        stages = {FIRST: numbers.accuracies[0]} if numbers.accuracies else {}
        for name, rate in (stages | numbers.later).items():
            found += contradiction.warm_start_low(rate, name)
    for log in e.logs:
        found += audit.training_findings(log, e.k, given.coverage or None, bool(given.warm_start))
    return worst_first([*found, *audit.serving_findings(e.runs)])


def report(run: RunFolder, e: Evidence, found: Sequence[Finding]) -> None:
    """Headline numbers, warnings and findings into a run's results."""
    losses = e.numbers.losses or next((c.losses[0 if e.settings.warm_start else -1].tolist() for c in e.curves if len(c.losses)), [])
    if losses:
        run.record("loss_0", losses[0], f"nats at TTT step 0; guessing costs ln {e.k:,} = {math.log(e.k):.2f}", f"{losses[0]:.2f}")
    if e.numbers.shared:
        shown = f"{e.numbers.same_position:,} of {e.k:,}"
        run.record("same_position", e.numbers.same_position, f"rows keep their token; {e.numbers.shared:,} are shared", shown)
    if e.promises:
        far = max(e.promises, key=lambda p: abs(math.log(p.predicted.value / p.run.accept_length)))
        shown = f"{far.predicted.value:.2f} → {_length(far.run)}"
        run.record("accept_length", far.run.accept_length, f"accept length, predicted ({far.name}) → measured", shown)
        run.record("predicted", {p.name: p.predicted.value for p in e.promises})
    elif e.runs:
        run.record("accept_length", e.runs[-1].accept_length, f"accept length, measured ({e.runs[-1].name})", _length(e.runs[-1]))
    run.record("served", [{"name": r.name, "accept_length": r.accept_length, "half_width": r.half_width, "tokens_per_s": r.tokens_per_s,
                           "baseline_tokens_per_s": r.baseline_tokens_per_s} for r in e.runs])  # fmt: skip
    costs = [cost for one in e.sweeps for cost in one.costs[-1:].tolist()]
    if costs:
        shown = "–".join(f"{cost:.2f}" for cost in sorted({min(costs), max(costs)}))
        over = [f"{low:.2f} to {high:.2f}" for r in e.runs if r.cost_ci for low, high in [r.cost_ci]]
        within = f" ({', '.join(over)} with 95 %)" if over else ""
        run.record("break_even", costs, f"break-even accept length at these throughputs{within}", shown)
        one = max(e.sweeps, key=lambda one: one.best.speedups.max())
        best = one.best
        gain = f"{best.speedups[best.draft_tokens]:.2f} times plain decoding" if best.draft_tokens else "speculation does not pay"
        label = f"draft tokens a pass are best{best.bound}: {gain}{', not decided' * bool(one.doubt)}"
        run.record("best_draft_tokens", best.draft_tokens, label, str(best.draft_tokens))
    run.record("findings", [{"code": f.code, "severity": f.severity, "title": f.title} for f in found])
    run.record("finding_verdict", verdict(found))
    for sweep in e.sweeps:
        if sweep.doubt:
            run.warn(f"Best number of draft tokens of {sweep.name}: {sweep.doubt}.")
    for finding in found:
        if finding.severity != "note":
            run.warn(f"{finding.title}.")


def _length(run: Served) -> str:
    """An accept length with half the width of its interval, where that is known."""
    return f"{run.accept_length:.2f}" + (f" ± {run.half_width:.2f}" if run.half_width else "")
