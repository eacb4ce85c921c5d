"""The contradiction rule: when the numbers contradict each other, suspect the data path.

Notable: every rule is a plain function on numbers that returns the findings it makes, mostly none. `evidence["suspects"]` lists causes in
the order in which to look, `remedy` names the next command (capitals stand for the user's own paths). Thresholds are set so that healthy
runs stay silent; they are constants here, each with its reason. Losses are in nats, rates in 0..1, accept lengths with the bonus token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from workbench.accept import (
    Estimate,
    compare_round_costs,
    conditional_rates,
    constant_rate,
    expected_accept_length,
    round_cost,
    rounding_of,
    with_coverage,
)
from workbench.findings import Finding

NULL_EXCESS = 1.0  # nats above ln K; a fresh head lies some tenths above (half the variance of its logits)
WARM_START_LEAST = 0.40  # a drafter on its verifier's successor kept 0.52 to 0.62 in experiments, broken inputs gave 0.12 to 0.38
LEAST_KEPT = 0.7  # share of predicted drafts that serving may keep, for other text and teacher forcing; a healthy card keeps 0.81
LEAST_GAP = 0.15  # tokens per pass below which two accept lengths are never a contradiction
USUAL_COVERAGE = 0.95  # 32,000 of 163,840 tokens usually cover 0.97 to 0.99
STEEP = 0.5  # c_k over c_0; EAGLE without training-time test falls from 0.71 to 0.52, young EAGLE-3 drafters to 0.55 of c_0
ALIVE = 0.3  # accuracy of step 0 below which the later steps say nothing

DOCTOR = "workbench doctor DRAFTER --verifier VERIFIER --parent PARENT --mapping MAP --states STATES"
REPLAY = (
    "workbench replay record --verifier VERIFIER --prompts PROMPTS --out FILE, then workbench replay check --replay FILE --drafter DRAFTER"
)
FORECAST = "workbench forecast DRAFTER --verifier VERIFIER"
ACCEPT = "workbench accept --drafter DRAFTER --verifier VERIFIER --prompts PROMPTS --draft-tokens 1"

SIGNATURES = {  # accuracy of step 0 under one fault, 0.74 without (a small verifier and drafter): orders of magnitude, no measurement
    "head rows off by one": 0.0,
    "head random": 0.001,
    "free head overwritten by the verifier's rows": 0.03,
    "head rows permuted": 0.06,
    "features zero": 0.12,
    "token shift missing": 0.15,
    "embedding rows permuted": 0.20,
    "features unrelated (another verifier or layer)": 0.25,
    "last half of the head rows shifted": 0.38,
}


@dataclass(frozen=True)
class Served:
    """One measurement of a served drafter. error: half-width of accept_length; by default what its decimals leave open. cost_ci: interval
    of its round cost, where that is known."""

    name: str
    accept_length: float
    draft_tokens: int = 3
    tokens_per_s: float | None = None
    baseline_tokens_per_s: float | None = None
    prefix: tuple[float, ...] = ()
    accepted: float | None = None
    passes: float | None = None
    drafter: str = ""
    error: float | None = None
    cost_ci: tuple[float, float] | None = None

    @property
    def half_width(self) -> float:
        return rounding_of(self.accept_length) if self.error is None else self.error


# ------------------------------------------------------------------------------------------------ training


def loss_worse_than_uniform(losses: Sequence[float], draft_vocabulary: int, where: str, null_loss: float | None = None) -> list[Finding]:
    """losses: loss_k of each TTT step. Not for the first steps of a drafter from scratch, which start slightly above ln K.

    null_loss: what unrelated labels would cost this head (logsumexp minus mean of its logits); shown for comparison.
    """
    uniform = math.log(draft_vocabulary)
    worse = [k for k, loss in enumerate(losses) if loss > uniform + 0.005]
    if not worse:
        return []
    excess = max(losses) - uniform
    suspects = [
        "labels follow another map than the head rows",
        "map read as absolute ids, or missing",
        "labels, ids and states are off by one against each other",
        "teacher head, norm or stored states of another verifier",
        "learning rate so high that a good start was lost",
    ]
    title = f"Loss {losses[worse[0]]:.2f} at TTT step {worse[0]} is worse than guessing uniformly, ln {draft_vocabulary:,} = {uniform:.2f}"
    if excess >= NULL_EXCESS:
        title += ": null-like, sure and wrong as rows unrelated to their labels are; more training is no cure"
    evidence = {"losses": list(losses), "uniform": uniform, "steps": worse, "excess": excess, "null_like": excess >= NULL_EXCESS}
    return [Finding("loss-worse-than-uniform", "error", title, where, {**evidence, "null_loss": null_loss, "suspects": suspects}, DOCTOR)]


def loss_sum(loss: float, losses: Sequence[float], draft_vocabulary: int, where: str, steps: int = 3) -> list[Finding]:
    """A total that reads as worse than uniform although no step is. losses: loss_k where known, else the total is split over `steps`."""
    uniform, each = math.log(draft_vocabulary), list(losses) or [loss / steps] * steps
    if loss <= uniform or max(each) > uniform:
        return []
    shown = ", ".join(f"{x:.2f}" for x in each)
    title = f"Loss {loss:.2f} is {'' if losses else 'perhaps '}the sum over {len(each)} TTT steps: {shown}, below ln K = {uniform:.2f}"
    evidence = {"loss": loss, "per_step": each, "uniform": uniform, "known": bool(losses)}
    return [Finding("loss-sum", "note", title, where, evidence, "Compare loss_0, not the total, with ln K and between runs.")]


def rows_in_place(same_position: int, shared: int, draft_vocabulary: int, where: str) -> list[Finding]:
    """A warm start whose rows were kept while the map changed: tokens shared as sets, but not at the same rows."""
    if same_position >= 0.99 * shared:
        return []
    missing = draft_vocabulary - shared
    title = (
        f"Only {same_position:,} of {draft_vocabulary:,} rows keep their token, although {shared:,} tokens are shared: "
        f"rows have to move, {missing:,} to be made"
    )
    evidence = {"same_position": same_position, "shared": shared, "missing": missing, "k": draft_vocabulary}
    return [Finding("head-row-order", "error", title, where, evidence, "workbench remap PARENT --to MAP --verifier VERIFIER --out DIR")]


def warm_start_low(accuracy: float, where: str) -> list[Finding]:
    """Accuracy of step 0 at a warm start's first evaluation, or where it stopped improving, below what drift of the verifier explains."""
    if accuracy >= WARM_START_LEAST:
        return []
    nearest = sorted(SIGNATURES, key=lambda fault: abs(SIGNATURES[fault] - accuracy))[:3]
    fault, remedy = ("a head whose rows follow another map", DOCTOR) if accuracy < 0.1 else ("a wiring fault", REPLAY)
    title = (
        f"Accuracy {accuracy:.1%} of a warm start is in the range of {fault}; a changed verifier alone keeps {WARM_START_LEAST:.0%} or more"
    )
    suspects = ["the figure averages all TTT steps and step 0 is higher", *nearest, "taps one boundary off, reversed or with another norm"]
    evidence = {"accuracy": accuracy, "signatures": {name: SIGNATURES[name] for name in nearest}, "suspects": suspects}
    return [Finding("warm-start-low", "warning", title, where, evidence, remedy)]


def coverage_hidden(full_acc: Sequence[float], coverage: float, where: str) -> list[Finding]:
    """Accuracy measured inside the draft vocabulary (speculators' full_acc_k) while that vocabulary covers little."""
    if coverage >= USUAL_COVERAGE:
        return []
    corrected = with_coverage(full_acc, coverage).tolist()
    title = (
        f"Accuracy {full_acc[0]:.1%} leaves out the {1 - coverage:.0%} of tokens outside the draft vocabulary: {corrected[0]:.1%} of all"
    )
    evidence = {"coverage": coverage, "full_acc": list(full_acc), "corrected": corrected, "accept_length": 1 + sum(corrected)}
    return [
        Finding("coverage-hidden", "warning", title, where, evidence, "workbench map --counts COUNTS --size K --include special --out DIR")
    ]


def decay_too_steep(prefix: Sequence[float], where: str) -> list[Finding]:
    """prefix S_k of training or serving: step 0 fine, later steps dead."""
    rates = conditional_rates(prefix)
    dead = [k for k in range(1, len(rates)) if prefix[k - 1] > 0.1 and rates[k] < STEEP * rates[0]]
    if not dead or rates[0] < ALIVE:
        return []
    suspects = [
        "recycled state post-norm where trained pre-norm, or the reverse",
        "positions do not advance with the draft step, or partial rotary ignored",
        "the cache of draft steps: later ones do not see the earlier ones",
        "trained on one step only",
    ]
    title = f"Acceptance falls from {rates[0]:.0%} at step 0 to {rates[dead[0]]:.0%} at step {dead[0]}: the recurrence is broken"
    evidence = {"prefix": list(prefix), "conditional": rates.tolist(), "steps": dead, "suspects": suspects}
    return [Finding("decay-too-steep", "error", title, where, evidence, REPLAY)]


# ------------------------------------------------------------------------------------------------ training against serving

SERVED_BETTER = [
    "labels follow another map than the head rows",
    "labels, ids and loss mask are shifted against the states",
    "teacher head or norm, or stored states, of another verifier",
    "the served drafter is not the trained one",
]
SERVED_WORSE = [
    "accuracy is of step 0 alone, or teacher-forced on other text",
    "accuracy was computed inside the draft vocabulary",
    "raw text in one, chat template in the other",
    "sampling when served, argmax in training",
    "the engine feeds other taps or norms, or replaced head or embedding",
]


def predict(rates: float | Sequence[float], draft_tokens: int, kind: str = "joint") -> Estimate:
    """Accept length that a training's rates predict. A single accuracy of step 0 (kind "marginal") stands for every step; steps beyond the
    trained ones are taken to go on as the last one did."""
    values = [rates] if isinstance(rates, (int, float)) else list(rates)
    last = float(conditional_rates(values)[-1])
    values += [values[-1] * last ** (n + 1) if kind == "joint" else values[-1] for n in range(draft_tokens - len(values))]
    return expected_accept_length(values, kind, draft_tokens)


def metric_contradiction(rates: float | Sequence[float], served: Served, where: str, kind: str = "joint") -> list[Finding]:
    """Accept length that training predicts (see `predict`) against the served one."""
    predicted = predict(rates, served.draft_tokens, kind)
    gap, kept = served.accept_length - predicted.value, (served.accept_length - 1) / max(predicted.value - 1, 1e-9)
    if abs(gap) <= max(LEAST_GAP, served.half_width) or LEAST_KEPT <= kept <= 1 / LEAST_KEPT:
        return []
    side = "better served than trained, so suspect the data path of training, not the weights" if gap > 0 else "worse served than trained"
    title = f"Training predicts accept length {predicted.value:.2f}, {served.name} has {served.accept_length:g}: {side}"
    evidence = {
        "rates": rates if isinstance(rates, (int, float)) else list(rates),
        "kind": kind,
        "predicted": predicted.value,
        "bounds": [predicted.low, predicted.high],
        "measured": served.accept_length,
        "needed_rate": constant_rate(min(max(served.accept_length, 1), served.draft_tokens + 1), served.draft_tokens),
        "suspects": SERVED_BETTER if gap > 0 else SERVED_WORSE,
    }
    return [Finding("metric-contradiction", "error", title, where, evidence, DOCTOR if gap > 0 else f"{FORECAST}, then {REPLAY}")]


# ------------------------------------------------------------------------------------------------ serving


def metric_convention(served: Served, where: str, accept_rate: float | None = None, mean: float | None = None) -> list[Finding]:
    """Numbers of one measurement that fit each other only under another convention; each with the number converted.

    mean: the mean over requests where accept_length is pooled. accept_rate: as printed beside accept_length.
    """
    length, n, error, rates = served.accept_length, served.draft_tokens, served.half_width, np.array(served.prefix)
    readings: list[tuple[str, float]] = []
    allowed = error + 0.0006 * len(rates) + 1e-9
    if length < 1 - 1e-9 or (len(rates) and abs(rates.sum() - length) <= allowed):
        readings.append(("accept length leaves out the bonus token", length + 1))
    elif len(rates) and abs(1 + rates.sum() - length) > allowed:
        chain = 1 + float(np.cumprod(rates).sum())
        conditional = abs(chain - length) <= allowed
        text = "per-position rates are conditional, not cumulative" if conditional else "accept length and rates are not of one measurement"
        readings.append((text, chain if conditional else 1 + float(rates.sum())))
    if accept_rate is not None and abs(accept_rate - (length - 1) / n) > 0.005 + error / n + 1e-9:
        old = abs(accept_rate - length / (n + 1)) <= 0.005 + error / (n + 1) + 1e-9
        text = "accept rate is accept length / num_draft_tokens (older SGLang)" if old else "accept rate fits no known convention"
        readings.append((text, (length - 1) / n))
    if mean is not None and abs(mean - length) > max(0.05, error):
        readings.append((f"the mean over requests, {mean:.2f}, is not the pooled accept length, which throughput follows", length))
    remedy = "Compare numbers only after conversion: accept length with the bonus token, pooled over verify passes."
    return [
        Finding("metric-convention", "note", f"{served.name}: {text}; converted: {value:.3g}", where, {"converted": value}, remedy)
        for text, value in readings
    ]


def speed_break_even(served: Served, where: str) -> list[Finding]:
    """Speculation that is slower than none: the accept length is below the round cost R."""
    speed, baseline, n = served.tokens_per_s, served.baseline_tokens_per_s, served.draft_tokens
    if not speed or not baseline or speed >= baseline:
        return []
    cost = round_cost(served.accept_length, speed, baseline)
    needed = constant_rate(cost, n) if cost <= n + 1 else None
    wanted = f"{needed:.3f} acceptance a step" if needed else f"more than {n} draft tokens can give"
    title = f"{served.name}: break-even is accept length {cost:.2f} ({wanted}), so {served.accept_length:g} cannot win"
    suspects = [
        "too many draft tokens: a verify pass over more tokens reads more experts",
        "a slow draft step (tensor-parallel drafter, no graph, large head)",
        "large batches, where the verifier no longer waits for memory",
        "the accept length itself: see the other findings",
    ]
    evidence = {"round_cost": cost, "break_even": cost, "needed_rate": needed, "speed_up": speed / baseline, "suspects": suspects}
    return [
        Finding("speed-break-even", "warning", title, where, evidence, f"Measure with 1 and 2 draft tokens before any training: {ACCEPT}")
    ]


def round_cost_disagrees(runs: Sequence[Served], where: str) -> list[Finding]:
    """Runs of one setup with equally many draft tokens whose round costs differ by more than the accept lengths' decimals allow."""
    findings = []
    suspects = ["one accept length is counted in another way", "the drafters differ in cost", "other batch size, prompts or lengths"]
    for n in sorted({run.draft_tokens for run in runs}):
        group = [run for run in runs if run.draft_tokens == n and run.tokens_per_s and run.baseline_tokens_per_s]
        figures = [(run.accept_length, run.tokens_per_s or 0.0, run.baseline_tokens_per_s or 0.0) for run in group]
        if len(group) < 2 or (spread := compare_round_costs(figures, [run.half_width for run in group])).agree:
            continue
        costs = " and ".join(f"{cost:.2f}" for cost in spread.costs)
        title = f"Round costs {costs} of one setup are {spread.apart:.0%} apart, more than the accept lengths' rounding allows"
        evidence = {"runs": [run.name for run in group], "round_costs": spread.costs, "intervals": spread.intervals, "apart": spread.apart}
        remedy = f"Measure all of them in one go with the same prompts and batch: {ACCEPT}"
        findings.append(Finding("round-cost-disagrees", "warning", title, where, {**evidence, "suspects": suspects}, remedy))
    return findings


def not_the_drafter(runs: Sequence[Served], where: str, prompt_entropy: float | None = None) -> list[Finding]:
    """Figures that an engine or a benchmark explains. prompt_entropy: entropy of the prompts' tokens over the highest possible."""
    causes: list[tuple[str, str]] = []
    for a, b in combinations(sorted(runs, key=lambda run: run.draft_tokens), 2):
        if a.passes and (a.passes, a.accepted, a.prefix) == (b.passes, b.accepted, b.prefix):
            causes.append(
                (f"{a.name} and {b.name} have identical counters: what was changed between them has no effect", "compare their logs")
            )
        elif a.drafter == b.drafter and a.draft_tokens < b.draft_tokens and a.accept_length - a.half_width > b.accept_length + b.half_width:
            fall = f"from {a.accept_length:g} to {b.accept_length:g} with {b.draft_tokens} draft tokens instead of {a.draft_tokens}"
            causes.append((f"Accept length falls {fall}, which no drafter does", "run a chain of as many tokens, and another engine"))
    if prompt_entropy is not None and prompt_entropy > 0.97:
        causes.append(("The prompts are random tokens, on which acceptance says nothing", "measure on real prompts"))
    evidence = {"runs": {run.name: [run.draft_tokens, run.accept_length, run.passes] for run in runs}, "prompt_entropy": prompt_entropy}
    return [
        Finding("not-the-drafter", "note", text, where, evidence, f"Clear the engine and the benchmark first: {look}.")
        for text, look in causes
    ]
