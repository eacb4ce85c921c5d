"""What the curves of a training run give away: acceptance past its peak, resumes that restored too little, schedules of another length.

Notable: rules as in `contradiction`, on arrays of rows in order [N]. They look at medians and second differences, so that the noise of
single batches does not set them off.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workbench.findings import Finding

WINDOW = 8  # rows on each side of a jump of the loss
Array = np.ndarray[Any, Any]


def overfit(steps: ArrayLike, loss: ArrayLike, accept_length: ArrayLike, where: str) -> list[Finding]:
    """Evaluations: the training loss still falls while acceptance has peaked and come down by 2 % and beyond its noise."""
    step, falling, length = _told(steps, loss, accept_length)
    if len(length) < 5:
        return []
    peak, end = int(np.argmax(length)), float(np.mean(length[-2:]))
    noise = 1.4826 * float(np.median(np.abs(np.diff(length, 2)))) / math.sqrt(6)  # second differences see no slope
    lost = float(length[peak]) - end
    if peak > len(length) - 3 or lost < max(0.02 * float(length[peak]), 4 * noise) or falling[-1] > 0.99 * falling[peak]:
        return []
    title = f"Accept length peaked at {length[peak]:.2f} at step {step[peak]:,.0f} and ended at {end:.2f}, while the loss still fell"
    evidence = {"best_step": float(step[peak]), "best": float(length[peak]), "end": end, "loss": [float(falling[peak]), float(falling[-1])]}
    return [
        Finding("overfit", "warning", title, where, evidence, "Use the checkpoint of the peak; train fewer epochs, or on more samples.")
    ]


def resume_jump(steps: ArrayLike, lr: ArrayLike, loss: ArrayLike, where: str) -> list[Finding]:
    """Training rows: a step that goes back or leaps, a rate that rises again after it fell, a loss that leaps and stays."""
    series = {"step": np.asarray(steps, dtype=float), "lr": np.asarray(lr, dtype=float), "loss": np.asarray(loss, dtype=float)}
    step, rate, value = series.values()
    gap = np.diff(step)
    usual = float(np.median(gap[gap > 0])) if np.any(gap > 0) else math.inf
    jumps = [("step", i + 1) for i in map(int, np.flatnonzero((gap < 0) | (gap > 10 * usual)))]
    peak = np.maximum.accumulate(np.nan_to_num(rate))
    jumps += [("lr", i + 1) for i in map(int, np.flatnonzero((rate[1:] > 1.2 * rate[:-1]) & (rate[:-1] < 0.95 * peak[:-1])))]
    at = WINDOW
    while np.isfinite(value).all() and at <= len(value) - WINDOW:
        before, after = value[at - WINDOW : at], value[at : at + WINDOW]
        middle = float(np.median(before))
        if np.median(after) - middle > max(0.3 * abs(middle), 8 * float(np.median(np.abs(before - middle)))) and value[at] > middle:
            at = at + int(np.argmax(np.diff(value[at - 1 : at + WINDOW])))  # the row that leaps
            jumps.append(("loss", at))
            at += WINDOW
        at += 1
    if not jumps:
        return []
    shown = [
        {"what": what, "step": float(step[i]), "before": float(series[what][i - 1]), "after": float(series[what][i])} for what, i in jumps
    ]
    first = shown[0]
    what = f"{first['what']} jumps from {first['before']:g} to {first['after']:g} at step {first['step']:,.0f}"
    title = f"{what}, as after a resume that restored too little"
    suspects = [
        "optimiser or schedule state not loaded",
        "another checkpoint or map loaded than the one left",
        "the data order started again",
    ]
    evidence = {"jumps": shown[:10], "count": len(shown), "suspects": suspects}
    return [
        Finding("resume-jump", "error", title, where, evidence, "Resume with the trainer's own state, or train on from before the jump.")
    ]


def schedule_short(steps: ArrayLike, lr: ArrayLike, where: str) -> list[Finding]:
    """Rows of a finished training: the schedule ends long before it, or is made for a much longer one."""
    step, rate = _told(steps, lr)
    if len(rate) < 4 or step[-1] <= step[0]:
        return []
    peak = float(rate.max())
    floor = np.flatnonzero((rate <= 0.01 * peak) & (np.arange(len(rate)) > np.argmax(rate)))
    share = float((step[floor[0]] - step[0]) / (step[-1] - step[0])) if len(floor) else 1.0
    left = float(rate[-1]) / peak if peak else 1.0
    if share < 0.8:
        title = f"The learning rate has reached its end after {share:.0%} of training"
    elif 0.5 < left < 0.98:
        title = f"Training ends at {left:.0%} of its highest learning rate: the schedule is made for a longer one"
    else:
        return []
    evidence = {"share": share, "left": left, "suspects": ["schedule stepped per micro-batch under accumulation", "its total set by hand"]}
    return [Finding("schedule-short", "warning", title, where, evidence, "Set the schedule's total to the number of optimiser steps.")]


def _told(*series: ArrayLike) -> list[Array]:
    """The series where all of them have a number."""
    arrays = [np.asarray(one, dtype=np.float64) for one in series]
    keep = np.logical_and.reduce([np.isfinite(array) for array in arrays])
    return [array[keep] for array in arrays]
