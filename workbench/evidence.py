"""What is known of a drafter's training and serving, from wherever it comes: the inputs of notebook 4.

Notable:
* Whatever is given is used: training logs, serving logs, plain numbers, a measurement made now; nothing at all means the lab's. What a
  missing input would have told, the figures say in its place.
* A *promise* is the accept length that training predicts of something that was served. The n-th training log speaks of the n-th serving
  log; a single one of all that have no accuracy of their own. Accuracies of a warm start speak of the drafter that it began with.
* Runs are of one setup (verifier, machine, batch): round costs and break-even lie on one axis.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench import audit, contradiction, lab
from workbench.accept import BestDrafts, Estimate, best_draft_tokens, constant_rate, round_cost, with_coverage
from workbench.contradiction import Served
from workbench.errors import InputError
from workbench.logs import read_log
from workbench.logtable import LogTable
from workbench.params import LossVsAccept, check, parameter
from workbench.texts import percent

if TYPE_CHECKING:
    from workbench.trial import Trial

Array = np.ndarray[Any, Any]
GIVEN = ("training", "serving", "drafter", "numbers", "runs")
FIRST = "first metrics"
SURE = 0.95  # of the samples in which a number of draft tokens must be best
FALLS = 0.05  # of a plain step: a round cost that falls by less is rounding


@dataclass(frozen=True)
class Numbers:
    """A training as somebody wrote it down: its first metrics, or those in question, and what came of them."""

    losses: list = parameter([], "loss_k at each TTT step")  # noqa: RUF009
    accuracies: list = parameter([], "full_acc_k at each TTT step")  # noqa: RUF009
    later: dict = parameter({}, "accuracy of step 0 later on, by name")  # noqa: RUF009
    same_position: int = parameter(0, "rows that mean the same token in the head and in the labels", minimum=0)
    shared: int = parameter(0, "tokens shared by the head's map and the labels'; 0: not known", minimum=0)


@dataclass(frozen=True)
class Run:
    """A run as somebody wrote it down; 0, "" or [] where something is not known."""

    accept_length: float = parameter(0.0, "tokens per verify pass, with the bonus token", minimum=0.01)
    name: str = parameter("", "what it was")
    tokens_per_s: float = parameter(0.0, "throughput", minimum=0.0)
    baseline_tokens_per_s: float = parameter(0.0, "throughput without speculation", minimum=0.0)
    accuracy: list = parameter([], "what training says: full_acc_k, or one accuracy for every step")  # noqa: RUF009
    draft_tokens: int = parameter(0, "draft tokens a pass, without the root", minimum=0)
    drafter: str = parameter("", "runs of the same drafter bear the same name")


class Promise(NamedTuple):
    """What training says of a served drafter: rates of a kind (see accept.BASIS), or one that stands for every step."""

    name: str
    rates: list[float]
    run: Served
    told: str = "joint"

    @property
    def kind(self) -> str:
        return self.told if len(self.rates) > 1 else "marginal"

    @property
    def predicted(self) -> Estimate:
        return contradiction.predict(self.rates, self.run.draft_tokens, self.kind)


class Curve(NamedTuple):
    """A training log: loss_0 [N] at step [N]; evaluations at [M] with their loss_0 (nan where not told), rates [M, S] of a kind and the
    accept length [M] that they predict.

    losses: loss_k of the first row that has all and of the last evaluation, or the last row where none was evaluated [0 or 2, S].
    """

    name: str
    step: Array
    loss: Array
    at: Array
    held_out: Array
    rates: Array
    kind: str
    accept_length: Array
    losses: Array

    @property
    def best(self) -> int:
        """The evaluation that predicts most."""
        return int(np.argmax(self.accept_length))


class Sweep(NamedTuple):
    """Prefix rates [S] and round costs [S+1] of 0..S draft tokens; measured: all of them were, none lies between two that were. samples:
    speed-ups in samples of the prompts [draws, S+1], where prompts were decoded here."""

    name: str
    prefix: Array
    costs: Array
    measured: bool
    samples: Array | None = None

    @property
    def best(self) -> BestDrafts:
        """The number of draft tokens that gains most."""
        return best_draft_tokens(self.prefix, self.costs)

    @property
    def falls(self) -> bool:
        """Whether a round gets cheaper with more draft tokens."""
        return bool((np.diff(self.costs[1:]) < -FALLS).any())

    @property
    def doubt(self) -> str:
        """Why the best number of draft tokens may be another one; "" where it is decided."""
        if self.samples is None:
            return "rounds cost less with more draft tokens, so these runs saw different machines: measure them in one go" * self.falls
        sure = float((self.samples.argmax(1) == self.best.draft_tokens).mean())
        told = f"these prompts cannot decide it, {self.best.draft_tokens} is best in {percent(sure)} of their samples: take more of them"
        return told * (sure < SURE)


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that was given or measured. k: draft vocabulary, 0 if unknown; runs: all that were served, the trial among them."""

    settings: LossVsAccept
    numbers: Numbers
    k: int
    logs: list[LogTable]
    curves: list[Curve]
    runs: list[Served]
    promises: list[Promise]
    trial: "Trial | None"
    inputs: dict[str, str]

    @property
    def sweeps(self) -> list[Sweep]:
        """What each drafter would gain with each number of draft tokens."""
        trial = self.trial
        own = [] if trial is None else [Sweep(trial.drafter, trial.prefix, trial.costs, True, trial.speedups)]
        others = self.runs[: len(self.runs) - len(own)]
        groups = [[run for run in others if run.drafter == name] for name in dict.fromkeys(run.drafter for run in others)]
        return [found for group in groups if (found := sweep(group))] + own


def gather(settings: LossVsAccept, progress: Callable[[str], None]) -> Evidence:
    """Read what was given and measure what is asked for; InputError for numbers that cannot be."""
    nothing = not any(getattr(settings, name) for name in GIVEN)
    training = [str(path) for path in settings.training] or ([str(lab.DATA / "parent-drafter")] if nothing else [])
    numbers, entries = check(Numbers, settings.numbers), [check(Run, _mapping(entry)) for entry in settings.runs]
    rates = [*numbers.accuracies, *numbers.later.values(), *(rate for entry in entries for rate in entry.accuracy)]
    if not all(isinstance(number, int | float) and number >= 0 for number in (*numbers.losses, *rates)) or max(rates, default=0) > 1:
        raise InputError(f"losses must be numbers and accuracies in 0..1, got {numbers.losses} and {rates}; divide percentages by 100")
    if numbers.same_position > numbers.shared or (settings.draft_vocabulary and numbers.shared > settings.draft_vocabulary):
        raise InputError(
            f"same_position {numbers.same_position}, shared {numbers.shared}, draft_vocabulary {settings.draft_vocabulary}: none can be "
            "larger than the next"
        )
    logs = [_training_log(path) for path in training]
    runs = [_run(entry, settings) for entry in entries]
    names = [run.name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two runs are named {twice[0]!r}: give each a name of its own")
    if settings.warm_start not in ("", "yes", *names):
        raise InputError(f"warm_start = {settings.warm_start!r} is no run: expected one of {', '.join(names) or 'runs'}, or yes")
    served = [
        audit.served(read_log(path), Path(path).stem, None, settings.baseline_tokens_per_s or None, Path(path).stem)
        for path in settings.serving
    ]
    trial, inputs = _trial(settings, nothing, progress)
    own = [] if trial is None else [_served(trial)]
    recorded = [_recorded_k(path) for path in training]
    k = settings.draft_vocabulary or next(filter(None, recorded), trial.k if trial else 0)
    if not k and (logs or numbers.losses or numbers.shared):
        raise InputError("nothing tells how many draft tokens there are: give draft_vocabulary (K, 32000 for example)")
    curves = [curve(log, settings.coverage or 1.0) for log in logs]
    told = dict(zip(names, entries, strict=True))
    promises = [*_plain(numbers, settings.warm_start, told, runs), *_from_logs(settings.warm_start, told, curves, runs, [*served, *own])]
    given = {f"training {n}": path for n, path in enumerate(training)} | {f"serving {n}": p for n, p in enumerate(settings.serving)}
    return Evidence(settings, numbers, k, logs, curves, [*runs, *served, *own], promises, trial, given | inputs)


def _training_log(path: str) -> LogTable:
    log = read_log(path)
    if log.kind != "training":
        raise InputError(f"{path} is a log of serving ({log.source}): list it under serving")
    return log


def _mapping(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or "accept_length" not in entry:
        raise InputError(f"run {entry!r} has no accept_length: expected a mapping such as {{name: mine, accept_length: 2.0}}")
    return dict(entry)


def _run(entry: Run, settings: LossVsAccept) -> Served:
    name = entry.name or f"accept length {entry.accept_length:g}"
    baseline = entry.baseline_tokens_per_s or settings.baseline_tokens_per_s or None
    drafts = entry.draft_tokens or settings.draft_tokens
    return Served(name, entry.accept_length, drafts, entry.tokens_per_s or None, baseline, drafter=entry.drafter or name)


def _trial(settings: LossVsAccept, nothing: bool, progress: Callable[[str], None]) -> "tuple[Trial | None, dict[str, str]]":
    """Decode here and now, where a drafter is given or nothing is."""
    if not nothing and not settings.drafter:
        if settings.verifier or settings.prompts:
            raise InputError("verifier and prompts are for a measurement made now: give the drafter too")
        return None, {}
    from workbench.trial import try_out  # loads torch and transformers, which plain numbers do not need

    inputs = {
        "drafter": settings.drafter or str(lab.DATA / "parent-drafter"),
        "verifier": settings.verifier or str(lab.fetch(progress)),
        "prompts": settings.prompts or str(lab.DATA / "prompts.jsonl"),
    }
    return try_out(**inputs, count=settings.prompt_count, new_tokens=settings.new_tokens, draft_tokens=settings.draft_tokens,
                   progress=progress), inputs  # fmt: skip


def _served(trial: "Trial") -> Served:
    """The trial as one more run."""
    m = trial.measured
    length, error, name = round(m.pooled, 3), (m.high - m.low) / 2, f"{trial.drafter}, decoded here"
    speed, baseline = m.pooled / float(trial.seconds[-1]), 1 / float(trial.seconds[0])
    told = {"accepted": round((m.pooled - 1) * m.passes), "passes": m.passes, "cost_ci": tuple(trial.costs_ci[:, -1].tolist())}
    return Served(name, length, len(trial.prefix), speed, baseline, tuple(trial.prefix.tolist()), **told, drafter=name, error=error)


def _recorded_k(path: str) -> int:
    """K as the run.json of a training of ours has it, 0 where there is none."""
    folder = Path(path).expanduser()
    record = (folder if folder.is_dir() else folder.parent) / "run.json"
    try:
        return int(json.loads(record.read_text("utf-8"))["map"]["k"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def curve(log: LogTable, coverage: float) -> Curve:
    """The curves of a training log. coverage: of accuracies inside the draft vocabulary where the log does not tell it."""
    train, val = (log.rows(split) if (log.columns["split"] == split).any() else log for split in ("train", "val"))
    rates, kind = (val.steps("full_acc"), "joint") if val.steps("full_acc").size else (val.steps("acc"), "marginal")
    if kind == "joint":
        told = val.column("coverage")
        rates = np.array([with_coverage(row, c) for row, c in zip(rates, np.where(np.isfinite(told), told, coverage), strict=True)])
    keep = np.isfinite(rates).all(1) if rates.size else np.zeros(len(val), bool)
    predicted = 1 + (rates if kind == "joint" else np.cumprod(rates, 1)).sum(1) if rates.size else np.empty(len(val))
    simulated = val.column("accept_length_simulated")
    trained, evaluated = (rows[np.isfinite(rows).all(1)] if rows.size else rows for rows in (train.steps("loss"), val.steps("loss")))
    ends = [trained[0], (evaluated if len(evaluated) else trained)[-1]] if len(trained) else []
    first, there = train.column("loss_0"), np.isfinite(train.column("loss_0"))
    return Curve(
        Path(log.path).name,
        _axis(train)[there],
        first[there],
        _axis(val)[keep],
        val.column("loss_0")[keep],
        rates[keep] if rates.size else rates,
        kind,
        np.where(np.isfinite(simulated), simulated, predicted)[keep],
        np.array(ends),
    )


def _axis(table: LogTable) -> Array:
    """Steps, else epochs, else the number of the row."""
    return next((x for x in (table.column("step"), table.column("epoch")) if np.isfinite(x).all()), np.arange(len(table), dtype=float))


def _plain(numbers: Numbers, warm_start: str, told: Mapping[str, Run], runs: Sequence[Served]) -> list[Promise]:
    """Promises of numbers that were typed in."""
    own = [Promise(f"accuracy of {run.name}", told[run.name].accuracy, run) for run in runs if told[run.name].accuracy]
    of = [run for run in runs if (run.name == warm_start if warm_start else not told[run.name].accuracy)]
    stages = {FIRST: numbers.accuracies} if numbers.accuracies else {}
    stages |= {name: [rate] for name, rate in numbers.later.items()}
    return [Promise(name, rates, run) for run in of for name, rates in stages.items()] + own


def _from_logs(
    warm_start: str, told: Mapping[str, Run], curves: Sequence[Curve], runs: Sequence[Served], measured: Sequence[Served]
) -> list[Promise]:
    """Promises of training logs: the best evaluation of what was served after it, the first of what a warm start began with."""
    of = measured or [run for run in runs if not told[run.name].accuracy and run.name != warm_start]
    pairs = [(c, run) for c in curves for run in of] if len(curves) == 1 else zip(curves, of, strict=True) if len(curves) == len(of) else []
    found = [Promise(c.name, c.rates[c.best].tolist(), run, c.kind) for c, run in pairs if len(c.at)]
    start = [run for run in runs if run.name == warm_start]
    return [Promise(f"{c.name}, {FIRST}", c.rates[0].tolist(), run, c.kind) for c in curves for run in start if len(c.at)] + found


def sweep(runs: Sequence[Served]) -> Sweep | None:
    """Runs of one drafter: prefix rates of the one with most draft tokens, round costs between those measured on a straight line."""
    costs = {0: 1.0}
    most = None
    for run in sorted(runs, key=lambda run: run.draft_tokens):
        if run.tokens_per_s and run.baseline_tokens_per_s and 1 <= run.accept_length <= run.draft_tokens + 1:
            costs[run.draft_tokens] = round_cost(run.accept_length, run.tokens_per_s, run.baseline_tokens_per_s)
            most = run
    if most is None:
        return None
    every = np.arange(most.draft_tokens + 1)
    rate = constant_rate(most.accept_length, most.draft_tokens)
    prefix = np.array(most.prefix) if len(most.prefix) == most.draft_tokens else rate ** every[1:]
    return Sweep(most.drafter, prefix, np.interp(every, list(costs), list(costs.values())), len(costs) == len(every))
