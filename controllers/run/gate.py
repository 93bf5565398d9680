"""A gate: the first evaluation at or after its step must reach its reward, or the run ends."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from controllers.observe.run_folder import Record

MISSED_STATUS = 3  # exit status of a run that missed its gate
METRIC = "eval/reward"


class GateMissedError(Exception):
    """The held-out reward is below the gate, or no evaluation came at or after its step."""


@dataclass
class Gate:
    """Only the first evaluation at or after `step` counts."""

    step: int
    reward: float
    is_passed: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """ "40:0.9" -> Gate(40, 0.9). Raises ValueError for another form."""
        step, _, reward = text.partition(":")
        with contextlib.suppress(ValueError):
            gate = cls(int(step), float(reward))
            if gate.step >= 0 and math.isfinite(gate.reward):
                return gate
        raise ValueError(
            f"gate={text!r}; it must be STEP:REWARD, a step of at least 0 and a finite reward, such as 40:0.9"
        )

    def recall(self, records: Iterable[Record]) -> None:
        """Of a resumed run: passed if any line of metrics.jsonl from the step on reached the reward."""
        for record in records:
            reward = record.get(METRIC)
            if record["step"] >= self.step and isinstance(reward, float) and reward >= self.reward:
                self.is_passed = True

    def check(self, step: int, metrics: Mapping[str, object]) -> None:
        """Raises GateMissedError if a step's held-out reward is too low."""
        reward = metrics.get(METRIC)
        if self.is_passed or step < self.step or not isinstance(reward, float):
            return
        if not reward >= self.reward:
            raise GateMissedError(
                f"{METRIC} is {reward:.4f} after step {step}; the gate needs at least {self.reward:g}"
            )
        self.is_passed = True

    def end(self) -> None:
        """Raises GateMissedError if the run has ended before an evaluation that counts."""
        if not self.is_passed:
            raise GateMissedError(
                f"the run has ended without an evaluation at or after step {self.step}, but the gate needs one"
            )
