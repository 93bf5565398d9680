"""The spans of a step in which actors work, as the controller measures them."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from controllers.observe.run_folder import Record

WORKERS = {
    "train": ("trainer",),
    "checkpoint": ("trainer",),
    "sync": ("trainer", "generator"),
    "sleep": ("generator",),
    "release": ("trainer",),
    "wake": ("trainer", "generator"),
    "generating": ("generator",),
    "evaluate": ("generator",),
    "reference": ("reference",),
    "values": ("critic",),
    "critic": ("critic",),
}
"""The actors that work in each phase; in others the controller works or waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    actor: str
    phase: str
    start: float  # seconds since the step began
    end: float


class Timeline:
    """Records spans; one that lasts beyond a step is divided."""

    def __init__(self) -> None:
        self._began = time.perf_counter()  # when the step began
        self._ended: list[Span] = []
        # (phase, start) of each open span, by the span's number. The start is the later of the span's beginning and the step's beginning.
        self._open: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """A phase in which actors work; not recorded if it is not in WORKERS."""
        number = next(self._numbers)
        self._open[number] = (phase, time.perf_counter())
        try:
            yield
        finally:
            self._end(*self._open.pop(number), time.perf_counter())

    def end_step(self) -> "StepTimeline":
        """The spans of the step that has ended."""
        now = time.perf_counter()
        for number, (phase, start) in self._open.items():
            self._end(phase, start, now)
            self._open[number] = (phase, now)
        step = StepTimeline(seconds=now - self._began, spans=self._ended)
        self._began = now
        self._ended = []
        return step

    def _end(self, phase: str, start: float, end: float) -> None:
        for actor in WORKERS.get(phase, ()):
            self._ended.append(Span(actor=actor, phase=phase, start=start - self._began, end=end - self._began))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    seconds: float
    spans: Sequence[Span]

    def busy(self) -> dict[str, float]:
        """Share of the step in which each actor worked: {"trainer": 0.6, …}"""
        shares = {}
        for actor in dict.fromkeys(span.actor for span in self.spans):
            working = 0.0
            until = 0.0
            for span in sorted((span for span in self.spans if span.actor == actor), key=lambda span: span.start):
                working += max(0.0, span.end - max(span.start, until))
                until = max(until, span.end)
            shares[actor] = working / self.seconds if self.seconds else 0.0
        return shares

    def record(self) -> Record:
        rows = [[span.actor, span.phase, round(span.start, 4), round(span.end, 4)] for span in self.spans]
        return {"seconds": round(self.seconds, 4), "spans": rows}
