"""Curves on the status page of the Tinker server, in memory only."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

POINTS = 300
"""Most points of a curve; the oldest are dropped."""
RATE_SECONDS = 5.0
"""Seconds between two points of a rate."""


def _points() -> deque[float]:
    return deque(maxlen=POINTS)


@dataclass(slots=True)
class RunCurves:
    """One run's curves, newest point last."""

    # loss:sum per datum of each forward_backward
    losses: deque[float] = field(default_factory=_points)
    num_losses: int = 0  # since the server started, those that the curve has dropped included
    grad_norms: deque[float] = field(default_factory=_points)  # of each optim_step
    num_steps: int = 0  # successful, since the server started


@dataclass(slots=True)
class Rates:
    """Growth of counters per second. Every `add` but the first adds a point to each curve."""

    before: tuple[float, Mapping[str, float]] | None = None  # arguments of the last `add`
    per_second: dict[str, deque[float]] = field(default_factory=dict)  # curve by name of the counter

    def add(self, now: float, counters: Mapping[str, float]) -> None:
        """add(10, {"tokens": 100}), add(15, {"tokens": 150}) -> per_second {"tokens": [10.0]}. now:
        seconds.
        """
        if self.before is not None:
            then, former = self.before
            for name, value in counters.items():
                curve = self.per_second.setdefault(name, _points())
                curve.append((value - former[name]) / (now - then))
        self.before = (now, dict(counters))
