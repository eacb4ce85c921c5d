"""What a training run is told, and what it tells: settings, step records, the learning rate. Imports nothing heavy."""

import dataclasses
import math
from dataclasses import dataclass, fields
from typing import Any

from workbench.params import in_range, parameter

OBJECTIVES = ["kl", "soft_ce", "lk", "lk_hybrid"]  # those of losses.py, named here so that reading settings never waits for torch


@dataclass(frozen=True)
class TrainSettings:
    """What a run is told. Defaults suit a drafter from scratch; for fine-tuning take a tenth of the learning rate."""

    ttt_steps: int = parameter(3, "TTT steps unrolled in training and evaluation: draft tokens that are simulated", minimum=1, maximum=16)
    objective: str = parameter("kl", "loss at each TTT step", choices=OBJECTIVES)
    step_decay: float = parameter(1.0, "weight of TTT step k is this to the power k", minimum=0.01, maximum=1.0)
    length: int = parameter(1024, "tokens of a packed row; a longer sample is a row of its own", minimum=2)
    rows: int = parameter(4, "packed rows a step, over all processes", minimum=1)
    epochs: int = parameter(10, "passes over the states", minimum=1)
    max_steps: int = parameter(0, "end after so many steps; 0 = after the epochs", minimum=0)
    lr: float = parameter(1e-3, "highest learning rate", minimum=0.0, maximum=1.0)
    schedule: str = parameter("cosine", "how the learning rate falls after the warm-up", choices=["cosine", "linear", "constant"])
    warmup: float = parameter(0.03, "share of the steps in which the learning rate rises", minimum=0.0, maximum=1.0)
    weight_decay: float = parameter(0.01, "AdamW's decay of matrices", minimum=0.0, maximum=10.0)
    beta2: float = parameter(0.95, "AdamW's memory of squared gradients", minimum=0.0, maximum=0.99999)
    clip: float = parameter(1.0, "largest gradient norm; 0 = any", minimum=0.0)
    head: str = parameter("trained", "whether lm_head is trained", choices=["trained", "frozen"])
    embedding: str = parameter("frozen", "whether the embedding is trained (the drafter then keeps its own)", choices=["frozen", "trained"])
    eval_every: int = parameter(0, "steps between evaluations on held-out states; 0 = an epoch", minimum=0)
    patience: int = parameter(0, "end after so many evaluations without a longer simulated accept length; 0 = never", minimum=0)
    save_every: int = parameter(0, "steps between checkpoints beside those of evaluations; 0 = none", minimum=0)
    precision: str = parameter("float32", "arithmetic of matrix products", choices=["float32", "bfloat16"])
    seed: int = parameter(0, "order of the samples", minimum=0)

    def __post_init__(self) -> None:
        for member in fields(self):
            in_range(member, getattr(self, member.name))


@dataclass(frozen=True)
class StepRecord:
    """What one step, or one evaluation after it, came to. Lists are one number a TTT step; None where it was not measured.

    Definitions are those of `losses.metrics`: loss_k, full_acc_k and cond_acc_k are speculators'; acc_k, alpha_k, coverage and
    accept_length_simulated (with the bonus token) use the verifier's full vocabulary and are measured in evaluations only.
    loss: sum over k of step_decay**k * loss_k. step counts updates of the weights done; tokens and seconds add up over a whole run.
    """

    phase: str  # "train" or "held-out"
    step: int
    epoch: float
    loss: float
    loss_k: list[float]
    full_acc_k: list[float]
    cond_acc_k: list[float]
    acc_k: list[float] | None
    alpha_k: list[float] | None
    coverage: float | None
    accept_length_simulated: float | None
    best: bool | None  # an evaluation's: the longest simulated accept length so far
    lr: float | None
    grad_norm: float | None
    tokens: int
    tokens_per_s: float
    seconds: float

    def scalars(self) -> dict[str, float]:
        """Every number by name, `train/loss_0` and the like."""
        numbers: dict[str, float] = {}
        for name, value in dataclasses.asdict(self).items():
            for k, number in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(number, int | float) and name != "step":
                    numbers[f"{self.phase}/{name.removesuffix('_k')}_{k}" if isinstance(value, list) else f"{self.phase}/{name}"] = number
        return numbers

    def to_json(self) -> dict[str, Any]:
        """As a line of metrics.jsonl; a number that does not exist (nothing supervised) is null."""
        return {name: _finite(value) for name, value in dataclasses.asdict(self).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """The rate of step 0, 1, ... of so many: a linear rise over the warm-up, then the schedule, which would reach 0 at `steps`."""
    rising = round(settings.warmup * steps)
    if step < rising:
        return settings.lr * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return settings.lr * shape[settings.schedule]
