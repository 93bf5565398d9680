"""Numbers about a Service and its members, for monitoring, collected without a call to an actor."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from controllers.service.open_step import AttachedClient

Outcome = Literal["answered", "failed", "left"]
"""answered: the client got an answer. failed: it got an error. left: it left first."""


class CallCounts:
    """Counts attached clients' calls by actor and endpoint."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str, Outcome]] = Counter()
        self.seconds: Counter[tuple[str, str]] = Counter()  # of ended calls, waits included
        self.running: Counter[str] = Counter()  # by actor, waiting calls included

    @contextmanager
    def call(self, client: AttachedClient, name: str) -> Iterator[None]:
        """Count the client's call in the body."""
        member = client.member
        began = monotonic()
        outcome: Outcome = "failed"
        self.running[member] += 1
        try:
            yield
            outcome = "answered"
        finally:
            self.running[member] -= 1
            self.ended[member, name, "left" if client.has_left else outcome] += 1
            self.seconds[member, name] += monotonic() - began  # type: ignore[assignment]  # Counter is typed for int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberNumbers:
    policy_version: int | None  # None: not reported yet
    restarts: int = 0
    step_open_for: float = 0.0  # seconds; 0: no open step
    silent: Mapping[str, float] = field(default_factory=dict)  # seconds since the last sign of life, by process


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNumbers:
    up_for: float  # seconds
    clients: Mapping[str, int]  # attached, by actor
    waiting: Mapping[str, int]  # calls that wait for another client's step, by actor
    calls: CallCounts
    members: Mapping[str, MemberNumbers]
