"""Accept-length arithmetic: what acceptance predicts, what it costs, and every engine's and trainer's way of counting it.

Notable: pure functions on numbers and numpy arrays. The house convention is the engines': *accept length* is tokens per verify pass
with the bonus token, 1 + S_0 + S_1 + ..., where S_k (a *prefix rate*) is the share of verify passes that accept draft tokens 0..k.
`draft_tokens` never counts the root: 3 here is vLLM's 3 and SGLang's 4. The *round cost R* is one draft-and-verify round in plain
decoding steps; speculation wins where the accept length is above R.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from workbench.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]


class Estimate(NamedTuple):
    """An accept length with the interval that the numbers behind it leave open, and what they are."""

    value: float
    low: float
    high: float
    basis: str


BASIS = {
    "joint": "joint prefix hits: exact for a chain on this text",
    "conditional": "product of conditional rates: exact if measured among passes still alive, a lower bound for speculators' cond_acc",
    "marginal": "product of each step's own accuracy: exact if steps are independent, else within the bounds",
    "alpha": "product of sampling acceptances sum min(p, q): at temperature 1; exact if steps are independent, else within the bounds",
}


def expected_accept_length(rates: ArrayLike, kind: str = "joint", draft_tokens: int | None = None) -> Estimate:
    """Accept length of a chain from per-step rates, step 0 first; a single rate needs `draft_tokens` and stands for every step.

    joint: S_k (vLLM's per-position rates, speculators' full_acc_k). conditional: S_k / S_{k-1} (cond_acc_k, EAGLE's n-alpha).
    marginal: each step on its own (acc_k of SpecForge, TorchSpec and EAGLE). alpha: acceptance under sampling (Leviathan et al.,
    arXiv 2211.17192). The bounds of both on S_k are Fréchet's. InputError for a rate outside 0..1, or for joint rates that rise.
    """
    if kind not in BASIS:
        raise InputError(f"rates of kind {kind!r} are not known: expected one of {', '.join(BASIS)}")
    values: Array = np.asarray(rates, dtype=np.float64)
    if values.ndim == 0:
        if draft_tokens is None or kind == "joint":
            raise InputError("one rate alone has no accept length: say that it is conditional, marginal or alpha, and give draft_tokens")
        values = np.full(draft_tokens, values)
    values = values[:draft_tokens]  # [S]
    if not np.all((values >= 0) & (values <= 1)):
        shown = ", ".join(f"{value:g}" for value in values)
        raise InputError(f"acceptance rates must lie in 0..1, got {shown}; divide percentages by 100")
    if kind == "joint":
        if np.any(np.diff(values) > 0.01):  # full_acc_k may rise a little: fewer positions have a target at later steps
            raise InputError("prefix rates cannot rise with the position: these look conditional or per step, say so with kind")
        low = high = prefix = values
    else:
        prefix = np.cumprod(values)
        first = values[:1].sum()  # S_k <= S_0, whatever the later steps do
        low, high = prefix, np.full(len(values), first)
        if kind != "conditional":
            low = np.maximum(0, np.cumsum(values) - np.arange(len(values)))
            high = np.minimum.accumulate(values)
    return Estimate(1 + float(prefix.sum()), 1 + float(low.sum()), 1 + float(high.sum()), BASIS[kind])


def prefix_rates(hits: ArrayLike, valid: ArrayLike | None = None) -> Array:
    """S_k [S] from hits [N, S]: draft token k of pass n was right. An out-of-vocabulary target is a miss and so breaks the chain.

    valid [N, S]: step k of pass n has a target at all (ends of answers); a step counts only where all before it do.
    """
    hit = np.asarray(hits, dtype=bool)
    counted = np.ones_like(hit) if valid is None else np.logical_and.accumulate(np.asarray(valid, dtype=bool), axis=1)
    alive = np.logical_and.accumulate(hit & counted, axis=1)
    return alive.sum(0) / np.maximum(counted.sum(0), 1)


def conditional_rates(prefix: ArrayLike) -> Array:
    """c_k = S_k / S_{k-1} [S]; 0 once nothing is alive."""
    after = np.asarray(prefix, dtype=np.float64)
    before = np.concatenate([[1.0], after])[:-1]
    return np.divide(after, before, out=np.zeros_like(after), where=before > 0)


def constant_rate(accept_length: float, draft_tokens: int) -> float:
    """The conditional acceptance c, equal at every step, that gives this accept length: 1 + c + ... + c^draft_tokens."""
    if not 1 <= accept_length <= draft_tokens + 1:
        raise InputError(f"accept length {accept_length:g} cannot come from {draft_tokens} draft tokens: expected 1..{draft_tokens + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if geometric(middle, draft_tokens) > accept_length else (middle, high)
    return (low + high) / 2


def geometric(rate: float, draft_tokens: int) -> float:
    """1 + c + ... + c^draft_tokens = (1 - c^(draft_tokens+1)) / (1 - c) (Leviathan et al.)."""
    return float(np.sum(float(rate) ** np.arange(draft_tokens + 1)))


def tree_accept_length(parents: Sequence[int], rates: ArrayLike) -> float:
    """1 + sum over nodes of the product of conditional acceptances on the way to it.

    parents [N]: index of each node's parent, -1 for the root, parents first. rates [N]: probability that this node is the accepted
    child, given that its parent is accepted; siblings exclude each other, so theirs sum to at most 1.
    """
    reach: list[float] = []
    below = np.zeros(len(parents) + 1)
    for node, (parent, rate) in enumerate(zip(parents, np.asarray(rates, dtype=np.float64), strict=True)):
        if not -1 <= parent < node:
            raise InputError(f"tree node {node} has parent {parent}: expected -1 (the root) or an earlier node")
        reach.append(float(rate) * (reach[parent] if parent >= 0 else 1.0))
        below[parent] += rate  # the root's children land in the last place
    if np.any(below > 1 + 1e-9):
        raise InputError("acceptances of the children of one tree node sum to more than 1: they exclude each other")
    return 1 + sum(reach)


# ------------------------------------------------------------------------------------------------ conventions


class Convention(NamedTuple):
    """How somebody counts: what the number is, and the way to the house's accept length and back (n: draft tokens without the root)."""

    meaning: str
    to_house: Callable[[float, int], float]
    from_house: Callable[[float, int], float]


def _with_bonus(meaning: str) -> Convention:
    return Convention(meaning, lambda x, n: x, lambda al, n: al)


def _without_bonus(meaning: str) -> Convention:
    return Convention(meaning, lambda x, n: x + 1, lambda al, n: al - 1)


def _per_draft(meaning: str) -> Convention:
    return Convention(meaning, lambda x, n: 1 + x * n, lambda al, n: (al - 1) / n)


CONVENTIONS = {
    "vllm-accept-length": _with_bonus("1 + accepted draft tokens / verify passes"),
    "vllm-acceptance-rate": _per_draft("accepted / drafted tokens, 0..1 (logged in percent)"),
    "sglang-accept-length": _with_bonus("accepted tokens with the bonus token / verify passes"),
    "sglang-accept-rate": _per_draft("accepted draft tokens / (passes × (num_draft_tokens - 1)): SGLang 0.5.23"),
    "sglang-accept-rate-old": Convention("accept length / num_draft_tokens", lambda x, n: x * (n + 1), lambda al, n: al / (n + 1)),
    "specforge-simulated": _without_bonus("sum of products of each step's accuracy, no bonus token"),
    "torchspec-simulated": _without_bonus("sum of products of each step's accuracy, no bonus token"),
    "speculators-full-acc-sum": _without_bonus("sum of full_acc_k, accuracy within the draft vocabulary, no bonus token"),
    "eagle-tau": _with_bonus("accepted draft tokens + 1, averaged over rounds (trees)"),
    "dflash-eal": _without_bonus("expected accepted draft tokens, no bonus token"),
}


def convert(value: float, source: str, to: str, draft_tokens: int) -> float:
    """A number of one convention in another; both are keys of CONVENTIONS, `draft_tokens` counts drafts without the root."""
    for name in (source, to):
        if name not in CONVENTIONS:
            raise InputError(f"convention {name!r} is not known: expected one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[to].from_house(CONVENTIONS[source].to_house(value, draft_tokens), draft_tokens)


class RateReading(NamedTuple):
    """Which of SGLang's two accept rates a log prints, and the draft tokens (without the root) that it implies."""

    convention: str
    draft_tokens: int
    explained: float  # share of lines that this reading explains within their rounding
    others: list[tuple[str, int]]  # readings that explain as many lines


def read_sglang_rate(lengths: ArrayLike, rates: ArrayLike, draft_tokens: int | None = None, rounding: float = 0.005) -> RateReading | None:
    """Decide old or new from (accept len, accept rate) pairs of log lines; None when no number of draft tokens fits any line.

    Each line is printed to two decimals, so a reading fits where some pair of true values rounds to both numbers. Of readings that
    fit equally many lines the one with the fewest draft tokens comes first: 1.50 and 0.17 alone are 3 drafts counted the new way
    or 8 counted the old way.
    """
    length, rate = (np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (lengths, rates))
    told = np.isfinite(length) & np.isfinite(rate) & ((length > 1 + rounding) | (rate > rounding))  # 1.00 and 0.00 say nothing
    length, rate = length[told], rate[told]
    low, high = np.maximum(rate - rounding, 1e-12), rate + rounding
    fits: list[tuple[int, int, str]] = []
    for n in [draft_tokens] if draft_tokens else range(1, 65):
        for name in ("sglang-accept-rate", "sglang-accept-rate-old"):
            shift, scale = (1, n) if name == "sglang-accept-rate" else (0, n + 1)
            fit = (length - rounding <= shift + high * scale) & (length + rounding >= shift + low * scale) & (length <= n + 1 + rounding)
            fits.append((-int(fit.sum()), n, name))
    best, n, name = min(fits)
    if best == 0:
        return None
    others = [(other, m) for count, m, other in sorted(fits) if count == best and (other, m) != (name, n)]
    return RateReading(name, n, -best / len(length), others)


# ------------------------------------------------------------------------------------------------ measuring


class Measured(NamedTuple):
    """Accept length over requests: pooled (what throughput follows), the mean of requests, and the pooled one's bootstrap interval."""

    pooled: float
    mean: float
    low: float
    high: float
    requests: int
    passes: int


def measure(accepted: ArrayLike, passes: ArrayLike, draws: int = 2000, seed: int = 0) -> Measured:
    """accepted, passes [N]: draft tokens accepted and verify passes of each request. Requests without a pass are left out.

    The interval (95 %) resamples requests, not passes: passes of one text depend on each other.
    """
    accept, count = (np.asarray(x, dtype=np.float64) for x in (accepted, passes))
    accept, count = accept[count > 0], count[count > 0]
    if not len(count):
        raise InputError("no request has a verify pass: speculation was off, or every answer was one token long")
    low, high = (1 + bootstrap_ratio(accept, count, draws, seed)).tolist()
    return Measured(float(1 + accept.sum() / count.sum()), float(np.mean(1 + accept / count)), low, high, len(count), int(count.sum()))


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, draws: int = 2000, seed: int = 0, level: float = 0.95) -> Array:
    """Percentile interval [2] of sum(numerators) / sum(denominators), resampling the N requests; [2, S] for numerators [N, S]."""
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    rng, n = np.random.default_rng(seed), len(bottom)
    block = max(1, 2**22 // n)  # resamples held at once
    parts = []
    for start in range(0, draws, block):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(block, draws - start))  # [draws, N]
        parts.append((weights @ top) / (weights @ bottom).reshape(-1, *[1] * (top.ndim - 1)))
    return np.quantile(np.concatenate(parts), [(1 - level) / 2, (1 + level) / 2], axis=0)


def prefix_counts(histogram: ArrayLike) -> Array:
    """Passes that accepted draft tokens 0..k, [S], from an engine's histogram [S+1] (index j: passes with j accepted drafts)."""
    return np.cumsum(np.asarray(histogram)[::-1])[::-1][1:]


# ------------------------------------------------------------------------------------------------ cost


def round_cost(accept_length: float, tokens_per_s: float, baseline_tokens_per_s: float) -> float:
    """R = accept length × baseline / speculative throughput: plain decoding steps a round takes, and the break-even accept length."""
    return accept_length * baseline_tokens_per_s / tokens_per_s


def round_cost_of_times(verify_s: float, draft_s: float, draft_tokens: int, decode_s: float, other_s: float = 0.0) -> float:
    """R = (verify + draft_tokens × draft step + the rest of a round) / plain decode step. Isolated timings miss the rest: be suspicious."""
    return (verify_s + draft_tokens * draft_s + other_s) / decode_s


def rounding_of(value: float) -> float:
    """Half a unit of the last decimal that a number shows, at least of one decimal: 0.05 for 2.0, 0.005 for 2.31."""
    decimals = len(repr(float(value)).partition(".")[2].partition("e")[0])
    return 0.5 * 10.0**-decimals


class BestDrafts(NamedTuple):
    """Number of draft tokens with the highest speed-up (0: do not speculate) and the speed-up of each number [S+1]."""

    draft_tokens: int
    speedups: Array

    @property
    def bound(self) -> str:
        """What a sentence adds where more draft tokens might be better still."""
        return ", the most that was tried" if self.draft_tokens == len(self.speedups) - 1 else ""


def best_draft_tokens(prefix: ArrayLike, costs: ArrayLike) -> BestDrafts:
    """prefix S_k [S] and round costs R_n [S+1] for n = 0..S draft tokens, R_0 = 1: the n that maximises (1 + S_0 + .. + S_{n-1}) / R_n."""
    gain = 1 + np.concatenate([[0.0], np.cumsum(np.asarray(prefix, dtype=np.float64))])
    cost = np.asarray(costs, dtype=np.float64)
    if gain.shape != cost.shape:
        raise InputError(f"{len(gain) - 1} prefix rates need {len(gain)} round costs (0 to {len(gain) - 1} draft tokens), got {len(cost)}")
    speedups = gain / cost
    return BestDrafts(int(np.argmax(speedups)), speedups)


def coverage_ceiling(coverage: float, draft_tokens: int) -> float:
    """Highest accept length of a draft vocabulary with this share of the verifier's tokens: 1 + C + C² + ... (independent misses)."""
    return geometric(coverage, draft_tokens)


def with_coverage(prefix: ArrayLike, coverage: float) -> Array:
    """Prefix rates measured inside the draft vocabulary [S], with targets outside it counted as breaks: S_k × C^(k+1)."""
    inside = np.asarray(prefix, dtype=np.float64)
    return inside * coverage ** (np.arange(len(inside)) + 1)


def distinct_experts(tokens: float, experts: int, active: int) -> float:
    """Experts touched by `tokens` tokens under uniform routing: E (1 - (1 - m/E)^t)."""
    return float(experts * (1 - (1 - active / experts) ** tokens))


def expert_traffic(draft_tokens: int, experts: int, active: int, other: float, batch: int = 1, overlap: float = 0.0) -> float:
    """Weights read by one verify pass over those of one decode step, both memory-bound: (w0 + N(B t)) / (w0 + N(B)).

    other: weights that every pass reads (attention, shared and dense layers), in units of one expert. overlap: share of routing that
    later tokens repeat, t = 1 + (1 - overlap) × draft_tokens.
    """
    width = 1 + (1 - overlap) * draft_tokens
    return (other + distinct_experts(batch * width, experts, active)) / (other + distinct_experts(batch, experts, active))


class CostSpread(NamedTuple):
    """Round costs of runs of one setup, the interval that rounding leaves each, and how far apart they are."""

    costs: list[float]
    intervals: list[tuple[float, float]]
    apart: float  # largest over smallest, of the two-decimal figures that a reader sees, minus 1
    agree: bool  # all intervals share a point


def compare_round_costs(runs: Sequence[tuple[float, float, float]], errors: Sequence[float | None] = ()) -> CostSpread:
    """runs: (accept length, tokens/s, baseline tokens/s) each. errors: half-width of each accept length; by default its rounding."""
    costs, intervals = [], []
    for at, (length, speed, baseline) in enumerate(runs):
        given = errors[at] if at < len(errors) else None
        error = rounding_of(length) if given is None else given
        costs.append(round_cost(length, speed, baseline))
        intervals.append((round_cost(length - error, speed, baseline), round_cost(length + error, speed, baseline)))
    shown = [round(cost, 2) for cost in costs]
    agree = max(low for low, _ in intervals) <= min(high for _, high in intervals)
    return CostSpread(costs, intervals, max(shown) / min(shown) - 1, agree)
