"""Logs to findings: which rules of `contradiction` and `curves` a table of figures can answer.

Notable: figures that a log does not hold leave their rules out; nothing is guessed in their place.
"""

from collections.abc import Sequence

import numpy as np

from workbench import contradiction, curves
from workbench.accept import measure
from workbench.contradiction import Served
from workbench.errors import InputError
from workbench.findings import Finding, worst_first
from workbench.logtable import LogTable


def served(
    table: LogTable, name: str, draft_tokens: int | None = None, baseline_tokens_per_s: float | None = None, drafter: str = ""
) -> Served:
    """One measurement from a serving log, counters or answers. InputError when the log tells no accept length or no draft tokens."""
    length, drafts = table.pooled("accept_length"), draft_tokens or table.pooled("draft_tokens")
    if not length >= 0:
        raise InputError(f"log {table.path} tells no accept length: speculation was off, or it is a training log; give a serving log")
    if not drafts >= 1:
        raise InputError(f"log {table.path} does not tell how many draft tokens a pass has: say it")
    passes, accepted = table.pooled("passes"), table.pooled("accepted")
    error = 0.005 if not passes > 0 else 0.0
    if table.kind == "requests":
        interval = measure(table.column("accepted"), table.column("passes"))
        error = (interval.high - interval.low) / 2
    speed, baseline = table.pooled("tokens_per_s"), table.pooled("baseline_tokens_per_s")
    return Served(
        name=name,
        accept_length=length,
        draft_tokens=round(drafts),
        tokens_per_s=speed if speed > 0 else None,
        baseline_tokens_per_s=baseline_tokens_per_s or (baseline if baseline > 0 else None),
        prefix=tuple(table.pooled(f"prefix_{k}") for k in range(table.steps("prefix").shape[1])),
        accepted=accepted if passes > 0 else None,
        passes=passes if passes > 0 else None,
        drafter=drafter,
        error=error,
    )


def training_findings(table: LogTable, draft_vocabulary: int, coverage: float | None = None, warm_start: bool = False) -> list[Finding]:
    """What a training log alone gives away. warm_start: its first rows are held to what a trained drafter must reach."""
    train, val = (table.rows(split) if (table.columns["split"] == split).any() else table for split in ("train", "val"))
    where, findings = table.path, []
    losses, total = train.steps("loss"), train.column("loss")
    told = losses[np.isfinite(losses).all(1)]
    if told.size:
        typical = told[0] if warm_start else np.median(told[len(told) // 2 :], axis=0)  # a drafter from scratch starts above ln K
        findings += contradiction.loss_worse_than_uniform(typical.tolist(), draft_vocabulary, where)
        if np.isfinite(total[-1]):
            findings += contradiction.loss_sum(float(total[-1]), told[-1].tolist(), draft_vocabulary, where)
    prefix = val.steps("full_acc")
    first = next((rates[0, 0] for rates in (val.steps("full_acc"), val.steps("acc")) if rates.size), np.nan)
    if warm_start and np.isfinite(first):
        findings += contradiction.warm_start_low(float(first), where)
    if prefix.size and np.isfinite(prefix[-1]).all():
        findings += contradiction.decay_too_steep(prefix[-1].tolist(), where)
        if coverage is not None and table.source == "speculators":
            findings += contradiction.coverage_hidden(prefix[-1].tolist(), coverage, where)
    simulated = val.column("accept_length_simulated")
    length = simulated if np.isfinite(simulated).any() else 1 + prefix.sum(1) if prefix.size else simulated
    main = losses[:, 0] if losses.shape[1] else total
    step = train.column("step")
    if np.isfinite(step).all() and len(step) > 1:
        order = np.argsort(step, kind="stable")
        falling = val.column("loss") if val is train else np.interp(val.column("step"), step[order], main[order])
        findings += curves.overfit(val.column("step"), falling, length, where)
        findings += curves.resume_jump(step, train.column("lr"), main, where)
        findings += curves.schedule_short(step, train.column("lr"), where)
    return worst_first(findings)


def serving_findings(runs: Sequence[Served], where: str = "serving") -> list[Finding]:
    """What measurements of one setup (verifier, machine, batch) give away, alone and against each other."""
    findings = [
        finding
        for run in runs
        for finding in (
            *contradiction.metric_convention(run, where),
            *contradiction.decay_too_steep(run.prefix, where),
            *contradiction.speed_break_even(run, where),
        )
    ]
    return worst_first([*findings, *contradiction.round_cost_disagrees(runs, where), *contradiction.not_the_drafter(runs, where)])
