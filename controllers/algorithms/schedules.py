"""Learning rates as functions of the step, without state, so a resumed run gets the same.

The first step is 1. In a linear warm-up of W steps, step n has n / W of the full rate.
"""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "linear_warmup_cosine", "linear_warmup_linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`schedule(step)` is the learning rate of this step.

    The first step after the warm-up still has the full rate, step total_steps + 1 min_ratio of it.

    Schedule(kind="constant", learning_rate=1.0, warmup_steps=2, total_steps=9) -> 0.5, 1.0, 1.0, …

    Schedule(kind="linear_warmup_linear", learning_rate=1.0, total_steps=4) -> 1.0, 0.75, 0.5, 0.25,
    0.0, 0.0, …
    """

    kind: Kind
    learning_rate: float
    warmup_steps: int = 0
    total_steps: int
    min_ratio: float = 0.0

    def __call__(self, step: int) -> float:
        rate = self.learning_rate * self._warmup(step)
        if self.kind == "constant":
            return rate
        return rate * (self.min_ratio + (1 - self.min_ratio) * self._decay(step))

    def _warmup(self, step: int) -> float:
        return min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0

    def _decay(self, step: int) -> float:
        """1 up to the first step after the warm-up, 0 after total_steps."""
        done = max(0, step - 1 - self.warmup_steps)  # steps of decay before this one
        progress = min(1.0, done / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "linear_warmup_cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1 - progress


@dataclass(kw_only=True)
class ScheduleConfig:
    kind: Kind = "constant"
    """Shape after the linear warm-up: constant, half a cosine, or a line."""
    learning_rate: float = 1e-6
    """The highest learning rate."""
    warmup_steps: int = 0
    """Steps of the linear warm-up."""
    total_steps: int | None = None
    """Last step of the decay. None: the run's steps."""
    min_ratio: float = 0.0
    """Rate after the decay, as a share of the highest; none with "constant"."""

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
        """total_steps: of the run. Raises ValueError if a field is out of range."""
        self.validate()
        return Schedule(
            kind=self.kind,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            total_steps=total_steps if self.total_steps is None else self.total_steps,
            min_ratio=self.min_ratio,
        )
