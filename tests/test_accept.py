"""Accept-length arithmetic against hand computation, limits, brute force and simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.accept import (
    CONVENTIONS,
    best_draft_tokens,
    bootstrap_ratio,
    compare_round_costs,
    conditional_rates,
    constant_rate,
    convert,
    coverage_ceiling,
    distinct_experts,
    expected_accept_length,
    expert_traffic,
    geometric,
    measure,
    prefix_counts,
    prefix_rates,
    read_sglang_rate,
    round_cost,
    round_cost_of_times,
    rounding_of,
    tree_accept_length,
    with_coverage,
)
from workbench.errors import InputError

unit = st.floats(0, 1)
rates = st.lists(unit, min_size=1, max_size=6)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_joint_rates_give_exactly_the_accept_length_of_the_passes(steps: int, passes: int, seed: int) -> None:
    """1 + the sum of prefix rates equals the mean over passes of 1 + leading hits, counted one by one."""
    hits = np.random.default_rng(seed).random((passes, steps)) < 0.6
    leading = [next((k for k in range(steps) if not row[k]), steps) for row in hits]
    estimate = expected_accept_length(prefix_rates(hits))
    assert estimate.value == pytest.approx(1 + np.mean(leading))
    assert estimate.low == estimate.value == estimate.high


@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_marginal_bounds_hold_whatever_the_dependence(steps: int, passes: int, seed: int) -> None:
    """The true accept length lies within the bounds from each step's own accuracy, also when steps depend on each other."""
    rng = np.random.default_rng(seed)
    hits = (rng.random((passes, steps)) < 0.5) ^ (rng.random((passes, 1)) < rng.random())
    truth = expected_accept_length(prefix_rates(hits)).value
    estimate = expected_accept_length(hits.mean(0), "marginal")
    assert estimate.low - 1e-9 <= truth <= estimate.high + 1e-9
    assert estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9


@given(rates)
def test_conditional_and_prefix_rates_are_two_forms_of_one_thing(conditional: list[float]) -> None:
    """From conditional to prefix and back changes nothing; the accept length is the same from both."""
    prefix = np.cumprod(conditional)
    back = conditional_rates(prefix)
    alive = np.concatenate([[1.0], prefix[:-1]]) > 1e-200
    assert back[alive] == pytest.approx(np.array(conditional)[alive], rel=1e-6, abs=1e-12)
    assert expected_accept_length(prefix).value == pytest.approx(expected_accept_length(conditional, "conditional").value)


def test_a_target_that_ends_early_leaves_the_denominator() -> None:
    """By hand: 2 passes of 2 steps, the second pass has no target at step 1: S_0 = 1/2, S_1 = 1/1."""
    assert prefix_rates([[True, True], [False, True]], [[True, True], [True, False]]).tolist() == [0.5, 1.0]


def test_published_numbers() -> None:
    """A single rate of 0.38 with 3 drafts predicts 1.58 and 0.747 predicts 2.72; vLLM's logged .650/.410/.250 is 2.31."""
    assert expected_accept_length(0.38, "conditional", 3).value == pytest.approx(1.58, abs=0.005)
    assert expected_accept_length(0.747, "marginal", 3).value == pytest.approx(2.72, abs=0.005)
    assert expected_accept_length([0.65, 0.41, 0.25]).value == pytest.approx(2.31)


@pytest.mark.parametrize(
    ("given_rates", "kind", "drafts"),
    [([0.5, 1.2], "joint", None), ([0.2, 0.5], "joint", None), (0.5, "conditional", None), (0.5, "joint", 3), ([0.5], "guess", None)],
)
def test_rates_that_cannot_be_are_refused(given_rates: object, kind: str, drafts: int | None) -> None:
    """Percent, rising prefix rates, a rate without a length and an unknown kind each get one sentence."""
    with pytest.raises(InputError):
        expected_accept_length(given_rates, kind, drafts)


@given(unit, st.integers(1, 12))
def test_a_constant_rate_is_the_inverse_of_the_geometric_sum(rate: float, drafts: int) -> None:
    """constant_rate undoes geometric, whose limits are 1 (nothing accepted) and drafts + 1 (everything)."""
    assert geometric(constant_rate(geometric(rate, drafts), drafts), drafts) == pytest.approx(geometric(rate, drafts))
    assert geometric(0, drafts) == 1
    assert geometric(1, drafts) == drafts + 1


@given(rates)
def test_a_tree_of_one_child_each_is_a_chain(conditional: list[float]) -> None:
    """The tree formula on a chain equals the chain formula."""
    parents = list(range(-1, len(conditional) - 1))
    assert tree_accept_length(parents, conditional) == pytest.approx(expected_accept_length(conditional, "conditional").value)


def test_a_tree_against_a_walk() -> None:
    """By hand and by 40,000 random walks: root with children .5 and .3, the first with children .4 and .2."""
    parents, accept = [-1, -1, 0, 0], [0.5, 0.3, 0.4, 0.2]
    expected = tree_accept_length(parents, accept)
    assert expected == pytest.approx(1 + 0.5 + 0.3 + 0.5 * 0.4 + 0.5 * 0.2)
    rng = np.random.default_rng(0)
    first, second = rng.random(40_000), rng.random(40_000)
    walked = 1 + np.where(first < 0.5, 1 + (second < 0.6), first < 0.8)
    assert walked.mean() == pytest.approx(expected, abs=0.02)
    with pytest.raises(InputError):
        tree_accept_length([-1, -1], [0.7, 0.7])
    with pytest.raises(InputError):
        tree_accept_length([1, -1], [0.5, 0.5])


@given(st.floats(1, 5), st.sampled_from(sorted(CONVENTIONS)), st.sampled_from(sorted(CONVENTIONS)), st.integers(4, 9))
def test_conversion_between_any_two_conventions_returns(length: float, a: str, b: str, drafts: int) -> None:
    """House to a to b to house is the identity."""
    there = convert(convert(length, "eagle-tau", a, drafts), a, b, drafts)
    assert convert(there, b, "vllm-accept-length", drafts) == pytest.approx(length)


def test_one_measurement_in_everybodys_numbers() -> None:
    """Accept length 2.17 with 3 drafts: vLLM 39 %, SGLang old 0.54 and new 0.39, SpecForge 1.17."""
    values = {name: round(convert(2.17, "vllm-accept-length", name, 3), 2) for name in CONVENTIONS}
    assert values["vllm-acceptance-rate"] == 0.39
    assert values["sglang-accept-rate-old"] == 0.54
    assert values["sglang-accept-rate"] == 0.39
    assert values["specforge-simulated"] == values["torchspec-simulated"] == values["dflash-eal"] == 1.17
    with pytest.raises(InputError):
        convert(2.0, "vllm", "eagle-tau", 3)


def test_sglang_rate_is_decided_from_the_two_numbers() -> None:
    """Recorded lines: 2.17/0.54 is old with 4 draft tokens, 1.85/0.28 new with 4; 1.50/0.17 alone has a second reading."""
    old, new = read_sglang_rate(2.17, 0.54), read_sglang_rate(1.85, 0.28)
    assert old is not None
    assert new is not None
    assert (old.convention, old.draft_tokens, old.others) == ("sglang-accept-rate-old", 3, [])
    assert (new.convention, new.draft_tokens, new.others) == ("sglang-accept-rate", 3, [])
    single = read_sglang_rate(1.50, 0.17)
    assert single is not None
    assert (single.convention, single.draft_tokens, single.others) == ("sglang-accept-rate", 3, [("sglang-accept-rate-old", 8)])
    together = read_sglang_rate([1.50, 1.85, 1.0], [0.17, 0.28, 0.0])
    assert together is not None
    assert (together.draft_tokens, together.explained, together.others) == (3, 1.0, [])
    assert read_sglang_rate([1.0], [0.0]) is None  # says nothing
    assert read_sglang_rate([1.01], [0.9]) is None  # nothing fits


@given(st.booleans(), st.integers(1, 16), st.lists(st.floats(0.02, 1), min_size=12, max_size=12, unique=True))
def test_a_log_of_either_convention_is_read_as_what_it_is(old: bool, drafts: int, shares: list[float]) -> None:
    """Lines printed to two decimals in one convention: the true reading explains every line."""
    lengths = [1 + share * drafts for share in shares]
    printed = [length / (drafts + 1) if old else (length - 1) / drafts for length in lengths]
    reading = read_sglang_rate(np.round(lengths, 2), np.round(printed, 2), rounding=0.0050001)
    assert reading is not None
    assert reading.explained == 1
    truth = ("sglang-accept-rate-old" if old else "sglang-accept-rate", drafts)
    assert truth in [(reading.convention, reading.draft_tokens), *reading.others]


def test_pooled_and_mean_differ_and_the_pooled_one_follows_the_tokens() -> None:
    """By hand: 0 of 1 pass and 27 of 9 passes: pooled 3.7, mean of requests 2.5; a request without passes is left out."""
    measured = measure([0, 27, 5], [1, 9, 0])
    assert (measured.pooled, measured.mean, measured.requests, measured.passes) == (pytest.approx(3.7), pytest.approx(2.5), 2, 10)
    with pytest.raises(InputError):
        measure([0], [0])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """200 experiments of 40 requests whose passes depend on each other: 95 % intervals cover the truth in 88 to 99 %."""
    rng, truth, covered = np.random.default_rng(1), 2.0, 0
    for seed in range(200):
        passes = rng.integers(20, 60, 40)
        accepted = rng.binomial(passes, np.clip(rng.normal(0.5, 0.15, 40), 0, 1)) * 2
        measured = measure(accepted, passes, draws=400, seed=seed)
        covered += measured.low <= truth <= measured.high
    assert 0.88 * 200 <= covered <= 0.99 * 200


def test_intervals_are_repeatable_and_shrink_to_nothing() -> None:
    """Same seed, same interval; equal requests leave no width; several numerators share one resampling."""
    assert bootstrap_ratio([1, 2, 3], [4, 5, 6], seed=3).tolist() == bootstrap_ratio([1, 2, 3], [4, 5, 6], seed=3).tolist()
    assert bootstrap_ratio([2, 2, 2], [4, 4, 4]).tolist() == [0.5, 0.5]
    wide = bootstrap_ratio([[1, 2], [2, 4], [3, 6]], [4, 5, 6])
    assert wide.shape == (2, 2)
    assert wide[:, 1] == pytest.approx(2 * wide[:, 0])


def test_a_histogram_becomes_counts_by_position() -> None:
    """297 passes with none accepted, 203, 106 and 67 with 1, 2 and 3: 376, 173 and 67 by position, 616 accepted."""
    counts = prefix_counts([297, 203, 106, 67])
    assert counts.tolist() == [376, 173, 67]
    assert counts.sum() == 203 + 2 * 106 + 3 * 67


@given(st.floats(0.01, 0.99), st.floats(0.001, 0.5), st.integers(1, 10))
def test_the_speed_up_is_leviathans(rate: float, draft_cost: float, drafts: int) -> None:
    """With a verify pass as dear as a decode step, AL / R equals (1 - a^(K+1)) / ((1 - a)(K c + 1))."""
    cost = round_cost_of_times(1.0, draft_cost, drafts, 1.0)
    assert geometric(rate, drafts) / cost == pytest.approx((1 - rate ** (drafts + 1)) / ((1 - rate) * (drafts * draft_cost + 1)))


@given(rates, st.floats(0.01, 1), st.floats(1, 3))
def test_best_number_of_drafts_is_where_lengthening_stops_paying(conditional: list[float], draft_cost: float, verify: float) -> None:
    """The choice is the argmax over every number of drafts, 0 included, whose speed-up is 1; at the best, one draft fewer or more loses."""
    prefix = np.cumprod(conditional)
    costs = np.array([1.0, *(verify + draft_cost * n for n in range(1, len(prefix) + 1))])
    best, speedups = best_draft_tokens(prefix, costs)
    assert speedups[0] == 1
    assert speedups[best] == max((1 + prefix[:n].sum()) / costs[n] for n in range(len(costs)))
    for n in {best - 1, best} - {-1, len(prefix)}:  # S_n / (R_{n+1} - R_n) against AL_n / R_n
        gain, price = prefix[n] * costs[n], (costs[n + 1] - costs[n]) * (1 + prefix[:n].sum())
        assert gain >= price - 1e-9 if n == best - 1 else gain <= price + 1e-9


def test_dear_rounds_mean_no_speculation() -> None:
    """At R = 2.73 for any number of drafts, acceptance 0.544 loses: the best number is 0; costs must fit the rates."""
    assert best_draft_tokens(np.cumprod([0.544] * 3), [1, 2.73, 2.73, 2.73]).draft_tokens == 0
    with pytest.raises(InputError):
        best_draft_tokens([0.5, 0.3], [1, 2])


def test_coverage_is_a_ceiling() -> None:
    """Coverage 0.9 with 3 drafts allows 3.439; perfect prefix rates with that coverage reach it; full coverage changes nothing."""
    assert coverage_ceiling(0.9, 3) == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert 1 + with_coverage([1, 1, 1], 0.9).sum() == pytest.approx(coverage_ceiling(0.9, 3))
    assert with_coverage([0.7, 0.5], 1.0).tolist() == [0.7, 0.5]


def test_distinct_experts_against_drawing_them() -> None:
    """384 experts, 8 active: 8 for one token, 31 for four; and the formula equals the mean of random draws."""
    assert distinct_experts(1, 384, 8) == pytest.approx(8)
    assert distinct_experts(4, 384, 8) == pytest.approx(31, abs=0.05)
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(5) for e in rng.choice(24, 3, replace=False)}) for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(distinct_experts(5, 24, 3), rel=0.02)


def test_expert_traffic_of_a_large_mixture() -> None:
    """384 experts, 8 active, other weights of 4.1 experts: x1.65, x2.28, x2.90 for 1, 2, 3 drafts; 1 when all routing repeats."""
    traffic = [expert_traffic(n, 384, 8, 4.1) for n in (1, 2, 3)]
    assert traffic == pytest.approx([1.65, 2.28, 2.90], abs=0.005)
    assert expert_traffic(3, 384, 8, 4.1, overlap=0.3) == pytest.approx(2.34, abs=0.005)
    assert expert_traffic(3, 384, 8, 4.1, overlap=1.0) == pytest.approx(1)
    assert expert_traffic(3, 384, 8, 4.1, batch=256) == pytest.approx(1, abs=0.01)  # all experts are read anyway


@given(st.floats(1, 8), st.floats(1, 500), st.floats(1, 500))
def test_the_round_cost_is_the_break_even_accept_length(length: float, speed: float, baseline: float) -> None:
    """Speed-up is AL / R, so it is 1 exactly where the accept length equals R."""
    assert length / round_cost(length, speed, baseline) == pytest.approx(speed / baseline)
    assert round_cost(length, baseline, baseline) == pytest.approx(length)


def test_round_costs_of_one_setup_are_held_against_each_other() -> None:
    """2.0 at 60 and 1.5 at 52 over 82 tok/s: 2.73 and 2.37, 15 % apart, more than rounding allows; wider errors make them agree."""
    spread = compare_round_costs([(2.0, 60, 82), (1.5, 52, 82)])
    assert [round(cost, 2) for cost in spread.costs] == [2.73, 2.37]
    assert np.ravel(spread.intervals) == pytest.approx([2.66, 2.80, 2.29, 2.44], abs=0.006)
    assert f"{spread.apart:.0%}" == "15%"
    assert not spread.agree
    assert compare_round_costs([(2.0, 60, 82), (1.5, 52, 82)], [0.15, 0.15]).agree
    assert [rounding_of(x) for x in (2.0, 2.31, 2)] == pytest.approx([0.05, 0.005, 0.05])
