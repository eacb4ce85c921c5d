"""Rules on training curves: one seeded fault each, and silence on healthy curves of every usual shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.curves import overfit, resume_jump, schedule_short


def schedule(kind: str, n: int, warm: int) -> np.ndarray:
    after = np.arange(n - warm) / max(1, n - warm - 1)
    falls = {"cosine": (1 + np.cos(np.pi * after)) / 2, "linear": 1 - after, "constant": np.ones(n - warm)}[kind]
    return 1e-4 * np.concatenate([np.arange(1, warm + 1) / max(warm, 1), falls])


@settings(deadline=None)
@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(40, 300), st.integers(0, 9), st.integers(1, 50), st.integers(0, 999))
def test_healthy_training_is_silent(kind: str, n: int, warm: int, every: int, seed: int) -> None:
    """Falling loss with 5 % noise, a usual schedule, regular steps, acceptance that saturates: not one finding."""
    rng = np.random.default_rng(seed)
    step = np.arange(n) * every
    loss = (2 + 6 * np.exp(-np.arange(n) / (n / 5))) * rng.normal(1, 0.05, n)
    assert resume_jump(step, schedule(kind, n, warm), loss, "x") == []
    assert schedule_short(step, schedule(kind, n, warm), "x") == []
    length = 3 - 1.5 * np.exp(-np.arange(20) / 5) + rng.uniform(-0.01, 0.01, 20)
    assert overfit(np.arange(20), np.linspace(5, 2, 20), length, "x") == []


def test_overfit_names_the_peak() -> None:
    """Loss 2.69 to 1.50, acceptance 3.28 up to 3.34 and down to 3.18: the peak's step; not when the loss rises too, or the peak is last."""
    step, loss = np.arange(1, 11) * 100, np.linspace(2.69, 1.50, 10)
    length = np.array([3.28, 3.30, 3.32, 3.34, 3.33, 3.30, 3.27, 3.23, 3.19, 3.18])
    (finding,) = overfit(step, loss, length, "run")
    assert (finding.code, finding.evidence["best_step"]) == ("overfit", 400)
    assert overfit(step, loss[::-1], length, "run") == []
    assert overfit(step, loss, np.sort(length), "run") == []
    assert overfit(step[:4], loss[:4], length[[3, 2, 1, 0]], "run") == []  # too few to tell
    noisy = length + np.where(np.arange(10) % 2, 0.2, -0.2)
    assert overfit(step, loss, noisy, "run") == []


def test_resume_jumps_of_rate_step_and_loss() -> None:
    """A rate that rises from 3e-5 to 1e-4, a step that goes back or leaps, a loss that leaps and stays: each named with its place."""
    n = 60
    step, rate, loss = np.arange(n), np.linspace(1e-4, 1e-5, n), np.linspace(4, 2, n)
    restarted = rate.copy()
    restarted[40:] = 1e-4
    (finding,) = resume_jump(step, restarted, loss, "log")
    assert (finding.code, finding.severity) == ("resume-jump", "error")
    assert finding.evidence["jumps"] == [{"what": "lr", "step": 40, "before": pytest.approx(rate[39]), "after": 1e-4}]
    back = step.copy()
    back[30:] -= 20
    assert [jump["what"] for jump in resume_jump(back, rate, loss, "log")[0].evidence["jumps"]] == ["step"]
    ahead = step.copy()
    ahead[30:] += 200
    assert resume_jump(ahead, rate, loss, "log")[0].evidence["jumps"][0]["step"] == 230
    leaps = loss.copy()
    leaps[33:] += 3
    (jump,) = resume_jump(step, rate, leaps, "log")[0].evidence["jumps"]
    assert (jump["what"], jump["step"]) == ("loss", 33)
    spike = loss.copy()
    spike[33] += 30
    assert resume_jump(step, rate, spike, "log") == []
    assert resume_jump(step, np.full(n, np.nan), np.full(n, np.nan), "log") == []
    assert resume_jump([], [], [], "log") == []


def test_schedule_of_another_length() -> None:
    """Stepped per micro-batch, a schedule ends at 25 % of training; made for four times the run, it ends at a high rate."""
    (short,) = schedule_short(np.arange(100), np.concatenate([schedule("linear", 25, 0), np.zeros(75)]), "log")
    assert (short.code, round(short.evidence["share"], 2)) == ("schedule-short", 0.24)
    (long,) = schedule_short(np.arange(100), schedule("cosine", 400, 4)[:100], "log")
    assert long.evidence["left"] == pytest.approx(0.86, abs=0.01)
    assert schedule_short([], [], "log") == []
    assert schedule_short(np.arange(9), np.full(9, np.nan), "log") == []
