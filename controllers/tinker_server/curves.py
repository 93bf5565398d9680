"""Curves on the status page of the Tinker server. They are only in memory, so they begin anew when the server starts."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

POINTS = 300
"""Largest number of points of a curve. A full curve drops its oldest point for each new point."""
RATE_SECONDS = 5.0
"""Seconds between two points of a rate."""


def _points() -> deque[float]:
    return deque(maxlen=POINTS)


@dataclass(slots=True)
class RunCurves:
    """The curves of one training run, each with its newest point last."""

    # For each forward_backward: loss:sum divided by the number of datums. A datum is one training sequence of a request.
    losses: deque[float] = field(default_factory=_points)
    num_losses: int = 0  # since the server started, those that the curve has dropped included
    grad_norms: deque[float] = field(default_factory=_points)  # of each optim_step
    num_steps: int = 0  # successful optim_steps since the server started


@dataclass(slots=True)
class Rates:
    """Growth of counters per second. Every call of `add` except the first adds one point to the curve of each counter."""

    before: tuple[float, Mapping[str, float]] | None = None  # the arguments of the last call of `add`
    per_second: dict[str, deque[float]] = field(default_factory=dict)  # a curve for each name of a counter

    def add(self, now: float, counters: Mapping[str, float]) -> None:
        """now: a time in seconds. After add(10, {"tokens": 100}) and add(15, {"tokens": 150}), per_second is {"tokens": [10.0]}."""
        if self.before is not None:
            then, former = self.before
            for name, value in counters.items():
                curve = self.per_second.setdefault(name, _points())
                curve.append((value - former[name]) / (now - then))
        self.before = (now, dict(counters))
