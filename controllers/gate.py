"""A gate: the held-out reward that a run must have reached by some step. A run that misses it ends there. Measures nothing."""

import math
from collections.abc import Mapping
from typing import Self

MISSED_STATUS = 3
"""Exit status of a run that missed its gate."""
METRIC = "validation/accuracy"


class GateMissedError(Exception):
    """The run has not reached the reward of its gate."""


class Gate:
    """The accuracy of the first validation at or after `step` must be at least `reward`. Later validations do not count."""

    def __init__(self, step: int, reward: float) -> None:
        self.step, self.reward = step, reward
        self.is_passed = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """parse("40:0.9") -> Gate(40, 0.9). Raises ValueError for another text."""
        step, colon, reward = text.partition(":")
        try:
            found = cls(int(step), float(reward))
        except ValueError:
            found = None
        if found is None or not colon or found.step < 0 or not math.isfinite(found.reward):
            raise ValueError(
                f"gate={text!r}; it must be STEP:REWARD, a step of at least 0 and a finite reward, such as 40:0.9"
            )
        return found

    def check(self, step: int, metrics: Mapping[str, object]) -> None:
        """Look at the metrics of a step. Raises GateMissedError if they miss the gate."""
        found = metrics.get(METRIC)
        if self.is_passed or step < self.step or not isinstance(found, float):
            return
        if not found >= self.reward:
            raise GateMissedError(
                f"{METRIC} is {found:.4f} after step {step}; the gate asks for at least {self.reward:g}"
            )
        self.is_passed = True

    def end(self) -> None:
        """Raises GateMissedError if the run has ended without a validation that the gate asks for."""
        if not self.is_passed:
            raise GateMissedError(
                f"the run has ended without a validation at or after step {self.step}, which the gate asks for"
            )
