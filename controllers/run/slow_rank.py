"""Finds the rank of the trainer that the others wait for."""

import statistics
from collections.abc import Sequence

SLOW = 1.5  # times the median of the other ranks
STEPS = 3  # in a row, after which the run says that a rank is slow, or is no longer


class SlowRank:
    def __init__(self) -> None:
        self._slow: int | None = None  # the rank that the last line called slow; None: none
        self._candidate: int | None = None  # the slow rank of the last step
        self._num_steps = 0  # in a row with the same candidate

    def step(self, seconds: Sequence[float | None]) -> tuple[dict[str, float], str]:
        """(metrics, a line or ""). seconds: by rank, of a token without waits; None: unknown.

        >>> SlowRank().step([1.0, 1.0, 1.2, 2.1])
        ({'ranks/slowest': 3, 'ranks/slowest_ratio': 2.1}, '')
        """
        measured = {rank: value for rank, value in enumerate(seconds) if value}
        if len(measured) < 2:
            return {}, ""
        slowest = max(measured, key=lambda rank: measured[rank])
        ratio = measured.pop(slowest) / statistics.median(measured.values())
        return {"ranks/slowest": slowest, "ranks/slowest_ratio": ratio}, self._news(slowest, ratio)

    def _news(self, slowest: int, ratio: float) -> str:
        candidate = slowest if ratio >= SLOW else None
        self._num_steps = self._num_steps + 1 if candidate == self._candidate else 1
        self._candidate = candidate
        if candidate == self._slow or self._num_steps < STEPS:
            return ""
        former = self._slow
        self._slow = candidate
        if candidate is None:
            return f"rank {former} of the trainer is no longer slow"
        return f"rank {candidate} of the trainer is slow: {ratio:.1f} times the median of the other ranks, which wait for it"
