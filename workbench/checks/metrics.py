"""Logs of training and serving: alone, and against each other."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from workbench.audit import served, serving_findings, training_findings
from workbench.case import Case
from workbench.checks import check
from workbench.contradiction import Served, metric_contradiction
from workbench.errors import InputError
from workbench.findings import Finding
from workbench.logtable import LogTable

CURVES = ("overfit", "resume-jump", "schedule-short")


def training(case: Case) -> list[LogTable]:
    """The logs that are of a training run."""
    return [table for table in case.logs if table.kind == "training"]


def findings_of(case: Case, table: LogTable) -> list[Finding]:
    """What a training log gives away, with the coverage of the counts where they are there."""
    counted, vocab_map = case.counted, case.map.vocab_map
    coverage = vocab_map.coverage(counted.total) if counted is not None and vocab_map is not None and counted.total.any() else None
    return training_findings(table, case.k or 2, coverage, warm_start=case.parent is not None)


@check("loss-worse-than-uniform", "loss-sum", "warm-start-low", "coverage-hidden", "decay-too-steep", needs="logs")
def trained(case: Case) -> Iterable[Finding]:
    """Training logs against ln K, coverage and themselves."""
    for table in training(case):
        yield from (found for found in findings_of(case, table) if found.code not in CURVES)


def _served(case: Case) -> tuple[list[Served], str]:
    """Measurements of the serving logs; a log without speculation is the baseline of the others."""
    runs, baseline, where = [], None, "serving"
    for table in case.logs:
        if table.kind == "training":
            continue
        where = table.path
        if not table.pooled("accept_length") >= 0:
            speed = table.pooled("tokens_per_s")
            baseline = speed if speed > 0 else baseline
            continue
        try:
            runs.append(served(table, table.path))
        except InputError:  # the log tells no draft tokens: three, as both engines' examples have
            runs.append(served(table, table.path, draft_tokens=3))
    return [run if run.baseline_tokens_per_s else replace(run, baseline_tokens_per_s=baseline) for run in runs], where


@check("metric-convention", "decay-too-steep", "speed-break-even", "round-cost-disagrees", "not-the-drafter", needs="logs")
def serving(case: Case) -> Iterable[Finding]:
    """Serving logs, counters and answers, alone and against each other."""
    runs, where = _served(case)
    if runs:
        yield from serving_findings(runs, where)


@check("metric-contradiction", needs="logs")
def contradiction(case: Case) -> Iterable[Finding]:
    """The last evaluation of each training log against each serving measurement."""
    runs, _ = _served(case)
    for table in training(case):
        val = table.rows("val") if (table.columns["split"] == "val").any() else table
        for name, kind in (("full_acc", "joint"), ("acc", "marginal")):
            rates = val.steps(name)
            told = rates[np.isfinite(rates).all(1)] if rates.size else rates
            if told.size:
                for run in runs:
                    yield from metric_contradiction(np.clip(told[-1], 0, 1).tolist(), run, f"{table.path} and {run.name}", kind)
                break
