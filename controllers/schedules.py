"""Learning rates as functions of the step. Hold no state: a resumed run asks for step n and gets what it would have got.

Steps count from 0. A warm-up of W steps ends on the full rate at step W - 1, and no step has a rate of 0 for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Schedule = Callable[[int], float]


def constant(learning_rate: float, *, warmup_steps: int = 0) -> Schedule:
    """constant(1.0, warmup_steps=2) -> 0.5, 1.0, 1.0, …"""
    return lambda step: learning_rate * _warmup(step, warmup_steps)


def linear_warmup_cosine(
    learning_rate: float, *, warmup_steps: int, total_steps: int, min_ratio: float = 0.0
) -> Schedule:
    """Half a cosine from the full rate at step W to min_ratio of it at total_steps, and there from then on."""

    def rate(step: int) -> float:
        decay = (1 + math.cos(math.pi * _progress(step, warmup_steps, total_steps))) / 2
        return learning_rate * _warmup(step, warmup_steps) * (min_ratio + (1 - min_ratio) * decay)

    return rate


def linear_warmup_linear(
    learning_rate: float, *, warmup_steps: int, total_steps: int, min_ratio: float = 0.0
) -> Schedule:
    """linear_warmup_linear(1.0, warmup_steps=0, total_steps=4) -> 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, …"""

    def rate(step: int) -> float:
        decay = 1 - _progress(step, warmup_steps, total_steps)
        return learning_rate * _warmup(step, warmup_steps) * (min_ratio + (1 - min_ratio) * decay)

    return rate


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """0 up to the end of the warm-up, 1 from total_steps on."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))


@dataclass(kw_only=True)
class ScheduleConfig:
    kind: Literal["constant", "linear_warmup_cosine", "linear_warmup_linear"] = "constant"
    """What follows the linear warm-up: the same rate, half a cosine, or a straight line."""
    learning_rate: float = 1e-6
    """The highest rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    total_steps: int | None = None
    """Step at which the decay ends; None: the run's last."""
    min_ratio: float = 0.0
    """The lowest rate as a share of the highest."""

    def validate(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise ValueError(f"learning_rate={self.learning_rate}; it must be finite and at least 0")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}; it must be at least 0")
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(f"min_ratio={self.min_ratio}; it must be between 0 and 1")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps={self.total_steps} must exceed warmup_steps={self.warmup_steps}")

    def build(self, total_steps: int) -> Schedule:
        """The rate of each step of a run of `total_steps`. Raises ValueError for a field out of range."""
        self.validate()
        if self.kind == "constant":
            return constant(self.learning_rate, warmup_steps=self.warmup_steps)
        decay = {"linear_warmup_cosine": linear_warmup_cosine, "linear_warmup_linear": linear_warmup_linear}[self.kind]
        last = total_steps if self.total_steps is None else self.total_steps
        return decay(self.learning_rate, warmup_steps=self.warmup_steps, total_steps=last, min_ratio=self.min_ratio)
