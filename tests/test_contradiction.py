"""The contradiction rule on the numbers that founded it, on one seeded case a rule, and silent on healthy runs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.accept import expected_accept_length, geometric
from workbench.contradiction import (
    Served,
    coverage_hidden,
    decay_too_steep,
    loss_sum,
    loss_worse_than_uniform,
    metric_contradiction,
    metric_convention,
    not_the_drafter,
    round_cost_disagrees,
    rows_in_place,
    speed_break_even,
    warm_start_low,
)
from workbench.findings import Finding, verdict, worst_first

K = 32_000
SCRATCH = Served("from scratch", 2.0, 3, tokens_per_s=60, baseline_tokens_per_s=82, drafter="own")
PUBLIC = Served("predecessor's drafter", 1.5, 3, tokens_per_s=52, baseline_tokens_per_s=82, drafter="public")


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


# ------------------------------------------------------------------------------------------------ the founding numbers


def test_founding_loss_is_worse_than_uniform_and_null_like() -> None:
    """17.80, 19.59, 20.25 against ln 32,000 = 10.37: worse than uniform at every step, far enough to be unrelated rows."""
    (finding,) = loss_worse_than_uniform([17.80, 19.59, 20.25], K, "first metrics")
    assert (finding.code, finding.severity) == ("loss-worse-than-uniform", "error")
    assert finding.evidence["steps"] == [0, 1, 2]
    assert finding.evidence["uniform"] == pytest.approx(10.37, abs=0.005)
    assert finding.evidence["null_like"]
    assert finding.evidence["suspects"][0] == "labels follow another map than the head rows"
    assert "17.80" in finding.title
    assert "10.37" in finding.title
    assert "workbench doctor" in finding.remedy


def test_founding_training_contradicts_serving() -> None:
    """full_acc 0.065, 0, 0 predicts 1.065 while the same weights served 1.5: suspect the data path, not the weights."""
    (finding,) = metric_contradiction([0.065, 0.0, 0.0], PUBLIC, "first metrics")
    assert finding.severity == "error"
    assert finding.evidence["predicted"] == pytest.approx(1.065)
    assert "suspect the data path of training, not the weights" in finding.title
    assert finding.evidence["suspects"][0] == "labels follow another map than the head rows"


def test_founding_rows() -> None:
    """252 of 32,000 rows keep their token against 25,750 shared ones; 6,250 have no counterpart."""
    (finding,) = rows_in_place(252, 25_750, K, "map")
    assert (finding.code, finding.evidence["missing"]) == ("head-row-order", 6250)
    assert all(number in finding.title for number in ("252 of 32,000", "25,750", "6,250"))
    assert "workbench remap" in finding.remedy


def test_founding_accuracy_after_the_cure_is_still_in_the_wiring_range() -> None:
    """24 % after the cure and the 38 % plateau point to wiring, the first 6.5 % to the head; 24 % still contradicts the served 1.5."""
    (cured,) = warm_start_low(0.24, "after remap")
    assert "24.0%" in cured.title
    assert "wiring fault" in cured.title
    assert "features unrelated (another verifier or layer)" in cured.evidence["suspects"]
    assert "replay check" in cured.remedy
    assert "wiring fault" in warm_start_low(0.38, "plateau")[0].title
    assert "rows follow another map" in warm_start_low(0.065, "first metrics")[0].title
    assert codes(metric_contradiction(0.24, PUBLIC, "after remap", "marginal")) == ["metric-contradiction"]


def test_founding_plateau_agrees_with_serving_and_the_scratch_drafter_does_not() -> None:
    """38 % predicts 1.58, measured 1.5: silent. 74.7 % predicts 2.72, measured 2.0, which needs 0.544 a step: contradiction."""
    assert expected_accept_length(0.38, "marginal", 3).value == pytest.approx(1.58, abs=0.005)
    assert metric_contradiction(0.38, PUBLIC, "plateau", "marginal") == []
    (finding,) = metric_contradiction(0.747, SCRATCH, "validation", "marginal")
    assert finding.evidence["predicted"] == pytest.approx(2.72, abs=0.005)
    assert finding.evidence["needed_rate"] == pytest.approx(0.544, abs=0.0005)
    assert "2.72" in finding.title
    assert "worse served than trained" in finding.title
    assert "forecast" in finding.remedy


def test_founding_speeds_could_not_win() -> None:
    """Round costs 2.73 and 2.37 are the break-even accept lengths: 0.655 to 0.750 acceptance a step, above what was reached."""
    (scratch,), (public,) = speed_break_even(SCRATCH, "served"), speed_break_even(PUBLIC, "served")
    assert [round(f.evidence["break_even"], 2) for f in (scratch, public)] == [2.73, 2.37]
    assert [f.evidence["needed_rate"] for f in (public, scratch)] == pytest.approx([0.655, 0.750], abs=0.002)
    assert scratch.evidence["break_even"] > SCRATCH.accept_length
    assert "2.73" in scratch.title


def test_founding_round_costs_disagree() -> None:
    """2.73 and 2.37 are 15 % apart, more than the rounding of 2.0 and 1.5 allows (2.66-2.80 against 2.29-2.44)."""
    (finding,) = round_cost_disagrees([SCRATCH, PUBLIC], "served")
    assert "2.73 and 2.37" in finding.title
    assert "15%" in finding.title
    assert np.ravel(finding.evidence["intervals"]) == pytest.approx([2.66, 2.80, 2.29, 2.44], abs=0.006)


def test_founding_case_as_a_whole() -> None:
    """All of it together: errors, the worst first, and every finding can be written as JSON."""
    import json

    found = worst_first(
        [
            *speed_break_even(SCRATCH, ""),
            *round_cost_disagrees([SCRATCH, PUBLIC], ""),
            *warm_start_low(0.24, ""),
            *rows_in_place(252, 25_750, K, ""),
            *metric_contradiction([0.065, 0.0, 0.0], PUBLIC, ""),
            *loss_worse_than_uniform([17.80, 19.59, 20.25], K, ""),
        ]
    )
    assert verdict(found) == "errors"
    assert codes(found)[:3] == ["head-row-order", "metric-contradiction", "loss-worse-than-uniform"]
    assert json.loads(json.dumps([finding.to_json() for finding in found]))[0]["severity"] == "error"
    assert not_the_drafter([SCRATCH, PUBLIC], "") == []


# ------------------------------------------------------------------------------------------------ one seeded case a rule


def test_loss_sum() -> None:
    """A total of 18 over steps of 6 is explained; alone, 18 is said to be perhaps a sum; no step above ln K and none below are its case."""
    (known,) = loss_sum(18.0, [5.9, 6.0, 6.1], K, "log")
    assert (known.code, known.severity, known.evidence["known"]) == ("loss-sum", "note", True)
    (unknown,) = loss_sum(18.0, [], K, "log")
    assert "perhaps" in unknown.title
    assert loss_sum(57.6, [17.8, 19.6, 20.3], K, "log") == []
    assert loss_sum(57.6, [], K, "log") == []
    assert loss_sum(7.7, [2.5, 2.6, 2.6], K, "log") == []


def test_metric_convention_readings() -> None:
    """No bonus token, conditional rates, older SGLang's rate, numbers of two measurements, mean for pooled: each said, each converted."""
    chain = [0.6, 0.36, 0.216]
    cases = [
        (Served("a", 0.93), {}, "leaves out the bonus token", 1.93),
        (Served("b", 1.176, prefix=tuple(chain)), {}, "leaves out the bonus token", 2.176),
        (Served("c", 2.176, prefix=(0.6, 0.6, 0.6)), {}, "conditional", 2.176),
        (Served("d", 3.0, prefix=tuple(chain)), {}, "not of one measurement", 2.176),
        (Served("e", 2.17), {"accept_rate": 0.54}, "older SGLang", 0.39),
        (Served("f", 2.17), {"accept_rate": 0.9}, "no known convention", 0.39),
        (Served("g", 2.17, error=0.02), {"mean": 2.4}, "mean over requests", 2.17),
    ]
    for served, more, text, value in cases:
        (finding,) = metric_convention(served, "x", **more)
        assert text in finding.title
        assert finding.evidence["converted"] == pytest.approx(value, abs=0.005)
    assert metric_convention(Served("h", 2.17, prefix=(0.6, 0.35, 0.22)), "x", accept_rate=0.39, mean=2.18) == []


def test_coverage_hidden() -> None:
    """70 % inside a vocabulary that covers 80 % is 56 % of all tokens; at 98 % nothing is said."""
    (finding,) = coverage_hidden([0.7, 0.5], 0.8, "log")
    assert finding.evidence["corrected"] == pytest.approx([0.56, 0.32])
    assert finding.evidence["accept_length"] == pytest.approx(1.88)
    assert coverage_hidden([0.7, 0.5], 0.98, "log") == []


def test_decay_too_steep() -> None:
    """A live first position with dead later ones is the recurrence; a weak first position says nothing; published decays are silent."""
    (finding,) = decay_too_steep([0.7, 0.05, 0.0], "served")
    assert finding.evidence["steps"] == [1]
    assert finding.evidence["suspects"][0].startswith("recycled state")
    for healthy in (
        [0.065, 0, 0],
        [0.648, 0.419, 0.278],
        [0.799, 0.517, 0.306],
        [0.51, 0.23, 0.10],
        [0.614, 0.253, 0.085],
        [0.71, 0.40, 0.21],
        [],
    ):
        assert decay_too_steep(healthy, "x") == []


def test_not_the_drafter() -> None:
    """Longer drafts with fewer accepted tokens, identical counters after a change, and random prompts clear the drafter."""
    short, long = Served("n=2", 1.89, 2), Served("n=4", 1.70, 4)
    (finding,) = not_the_drafter([long, short], "bench")
    assert "no drafter does" in finding.title
    assert not_the_drafter([short, Served("n=4", 2.08, 4)], "bench") == []
    before = Served("before", 1.6747, 3, accepted=616, passes=913, prefix=(0.41, 0.19, 0.07))
    after = Served("after", 1.6747, 3, accepted=616, passes=913, prefix=(0.41, 0.19, 0.07))
    assert "identical counters" in not_the_drafter([before, after], "bench")[0].title
    assert "random tokens" in not_the_drafter([before], "bench", prompt_entropy=0.995)[0].title
    assert not_the_drafter([before], "bench", prompt_entropy=0.6) == []


def test_contradiction_extends_short_unrolls_and_allows_noise() -> None:
    """Two trained steps against five drafts go on at the last rate; a published healthy card (.799/.517/.306 and 2.3) is silent."""
    served = Served("five drafts", geometric(0.7, 5), 5)
    assert metric_contradiction([0.7, 0.49], served, "x") == []
    assert metric_contradiction([0.8, 0.7], served, "x", "marginal") == []
    assert metric_contradiction([0.799, 0.517, 0.306], Served("card", 2.3), "x") == []
    assert codes(metric_contradiction([0.9, 0.8, 0.7], Served("fault", 1.2), "x")) == ["metric-contradiction"]
    assert metric_contradiction([0.02, 0.0, 0.0], Served("young", 1.05), "x") == []


# ------------------------------------------------------------------------------------------------ silence


@settings(deadline=None)
@given(st.floats(0.35, 0.9), st.floats(0.8, 1.0), st.floats(0.85, 1.1), st.floats(0.2, 1.5), st.integers(2000, 200_000))
def test_healthy_numbers_are_silent(first: float, decay: float, kept: float, cheapness: float, vocabulary: int) -> None:
    """A drafter whose conditional rates decay gently, whose serving keeps most of it, at costs where it wins: not one finding."""
    conditional = first * decay ** np.arange(3)
    prefix = np.cumprod(conditional)
    length = 1 + kept * prefix.sum()
    served = Served("run", length, 3, 80 * length / (1 + cheapness * (length - 1) / 2), 80, tuple(prefix * kept), error=0.001)
    other = Served("run 2", length * 1.01, 3, served.tokens_per_s and served.tokens_per_s * 1.01, 80, error=0.01)
    losses = [(1 - first) * math.log(vocabulary)] * 3
    found = [
        *loss_worse_than_uniform(losses, vocabulary, "x"),
        *decay_too_steep(prefix.tolist(), "x"),
        *metric_contradiction(prefix.tolist(), served, "x"),
        *metric_convention(served, "x", accept_rate=(length - 1) / 3, mean=length + 0.01),
        *speed_break_even(served, "x"),
        *round_cost_disagrees([served, other], "x"),
        *not_the_drafter([served, other], "x", 0.7),
        *coverage_hidden(prefix.tolist(), 0.98, "x"),
        *rows_in_place(vocabulary, vocabulary, vocabulary, "x"),
        *warm_start_low(max(first, 0.45), "x"),
    ]
    assert codes(found) == []
