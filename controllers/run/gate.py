"""A gate is a step and a reward. The first validation at or after the step must reach the reward, or else the run ends.

This module compares a measured reward with the gate. validation.py measures this reward on held-out problems, and calls
it the accuracy.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Self

from controllers.observe.run_folder import Record

MISSED_STATUS = 3
"""Exit status of a run that missed its gate."""
METRIC = "validation/accuracy"


class GateMissedError(Exception):
    """The run's accuracy is below the reward of its gate, or the run has ended without the validation that the gate needs."""


class Gate:
    """The first validation at or after `step` must have an accuracy of at least `reward`. Later validations do not count.

    Checkpoints do not store `is_passed`. A resumed run reads it from its metrics with `recall`.
    """

    def __init__(self, step: int, reward: float) -> None:
        self.step, self.reward = step, reward
        self.is_passed = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """parse("40:0.9") returns Gate(40, 0.9). Raises ValueError for a text of another form."""
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

    def recall(self, records: Iterable[Record]) -> None:
        """Find out whether the run has passed the gate already. records: the lines of metrics.jsonl.

        A run that has missed its gate ends. If it is resumed, its next validation decides. So the gate is passed if any
        recorded validation at or after the gate's step reached the reward.
        """
        for record in records:
            found = record.get(METRIC)
            if record["step"] >= self.step and isinstance(found, float) and found >= self.reward:
                self.is_passed = True

    def check(self, step: int, metrics: Mapping[str, object]) -> None:
        """Compare the accuracy in the metrics of a step with the gate. Raises GateMissedError if the accuracy is too low.

        Does nothing before the gate's step, for metrics without an accuracy, and after the gate is passed.
        """
        found = metrics.get(METRIC)
        if self.is_passed or step < self.step or not isinstance(found, float):
            return
        if not found >= self.reward:
            raise GateMissedError(f"{METRIC} is {found:.4f} after step {step}; the gate needs at least {self.reward:g}")
        self.is_passed = True

    def end(self) -> None:
        """Call this when the run has ended. Raises GateMissedError if no validation came at or after the step of the gate."""
        if not self.is_passed:
            raise GateMissedError(
                f"the run has ended without a validation at or after step {self.step}, but the gate needs one"
            )
