"""Learning rates as functions of the step, without state, so a resumed run gets the same."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rl_actors.field_types import NaturalInt, NonNegativeFloat, Share, require_field_types


@dataclass(kw_only=True)
class ScheduleConfig:
    kind: Literal["constant", "linear_warmup_cosine", "linear_warmup_linear"] = "constant"
    """Shape after the linear warm-up: constant, half a cosine, or a line."""
    learning_rate: NonNegativeFloat = 1e-6
    """The highest learning rate."""
    warmup_steps: NaturalInt = 0
    """Steps of the linear warm-up."""
    total_steps: int | None = None
    """Last step of the decay. None: the run's steps."""
    min_ratio: Share = 0.0
    """Rate after the decay, as a share of the highest; none with "constant"."""

    def validate(self) -> None:
        require_field_types(self)
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps={self.total_steps} must exceed warmup_steps={self.warmup_steps}")

    def build(self, total_steps: int) -> Callable[[int], float]:
        """The learning rate by step; the first is 1. total_steps: of the run.

        In W warm-up steps, step n has n / W of the full rate. The first step after them still has
        the full rate, step total_steps + 1 min_ratio of it. linear_warmup_linear with learning_rate
        1, 4 steps -> 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, …
        """
        self.validate()
        return partial(self._rate, total_steps if self.total_steps is None else self.total_steps)

    def _rate(self, total_steps: int, step: int) -> float:
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        rate = self.learning_rate * warmup
        if self.kind == "constant":
            return rate
        done = max(0, step - 1 - self.warmup_steps)  # steps of decay before this one
        progress = min(1.0, done / max(1, total_steps - self.warmup_steps))
        decay = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "linear_warmup_cosine" else 1 - progress
        return rate * (self.min_ratio + (1 - self.min_ratio) * decay)
