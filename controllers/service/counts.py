"""Numbers about a Service and its actors, for a program that monitors them. Collecting the numbers calls no actor.

Clients of other programs attach to the actors of a Service. A member is one of these actors: a model or the generator.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from controllers.service.open_step import Attached

Outcome = Literal["answered", "failed", "left"]
"""How a call ended. answered: the client got an answer. failed: the client got an error. left: the client left first."""


class CallCounts:
    """Counts the calls of attached clients, for each actor and endpoint."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str, Outcome]] = Counter()
        self.seconds: Counter[tuple[str, str]] = Counter()  # sum over all ended calls, waits included
        self.running: Counter[str] = Counter()  # by actor; includes calls that wait for another client's step to end

    @contextmanager
    def call(self, client: Attached, name: str) -> Iterator[None]:
        """Context manager that counts a call of this client. The call runs inside the context."""
        member, began = client.member, monotonic()
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
    """State of an actor, as far as the service knows it without a call to the actor."""

    policy_version: int | None  # None: the actor has not reported a version yet
    restarts: int = 0
    step_open_for: float = 0.0  # seconds; 0: no client has an open step
    silent: Mapping[str, float] = field(default_factory=dict)  # seconds since the last sign of life, by process


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNumbers:
    up_for: float  # seconds
    clients: Mapping[str, int]  # number of attached clients, by actor
    waiting: Mapping[str, int]  # number of calls that wait for the end of another client's step, by actor
    calls: CallCounts
    members: Mapping[str, MemberNumbers]
