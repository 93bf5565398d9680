"""`Service` has the attached clients, and runs their calls on the actors."""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from controllers.service.members import Member
from controllers.service.open_step import AttachedClient

logger = logging.getLogger(__name__)

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
        began = time.monotonic()
        outcome: Outcome = "failed"
        self.running[member] += 1
        try:
            yield
            outcome = "answered"
        finally:
            self.running[member] -= 1
            self.ended[member, name, "left" if client.has_left else outcome] += 1
            self.seconds[member, name] += time.monotonic() - began  # type: ignore[assignment]  # Counter is typed for int


class Service:
    """All calls to the actors go through it, on the event loop of this process's clients."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        """members: by the names that clients ask for, such as "trainer" and "generator"."""
        self.members = members
        self.clients: dict[int, AttachedClient] = {}
        self.calls = CallCounts()
        self.started = time.time()
        self.last_left = time.monotonic()
        self._numbers = itertools.count(1)
        self._leaving: set[asyncio.Task[None]] = set()

    def attach(self, name: str, member: str) -> AttachedClient:
        """Add a client of `member`. name: for logs. Raises ValueError if there is no such actor."""
        if member not in self.members:
            raise ValueError(f"this service has no {member}; it has {', '.join(self.members)}")
        client = AttachedClient(number=next(self._numbers), name=name, member=member)
        self.clients[client.number] = client
        logger.info("%s is attached to the %s", client, member)
        return client

    async def call(self, number: int, endpoint: str, arguments: Sequence[object], step_wait: float) -> list[object]:
        """The answers of all ranks to a call of an attached client. Raises RuntimeError for a client that has left.

        number: number of the client. step_wait: seconds that the call may wait for the end of another client's step.
        """
        client = self.clients.get(number)
        if client is None:
            raise RuntimeError(f"client {number} of the service has left, so {endpoint} was not run")
        client.num_calls += 1
        with self.calls.call(client, endpoint):
            return await self.members[client.member].run(client, endpoint, arguments, step_wait)

    def leave(self, client: AttachedClient) -> None:
        """Forget a client whose connection has ended, and undo its unfinished work."""
        if client.has_left:
            return
        client.has_left = True
        self.last_left = time.monotonic()
        self.clients.pop(client.number, None)
        for waiting in list(client.waiting):
            waiting.cancel()
        logger.info("%s has left after %d calls", client, client.num_calls)
        leaving = asyncio.ensure_future(self.members[client.member].leave(client))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def idle_seconds(self) -> float:
        """Since the last client left, or since the start; 0 while one is attached."""
        return 0.0 if self.clients else time.monotonic() - self.last_left

    async def describe(self) -> dict[str, object]:
        """State of actors and clients, as JSON values."""
        members = {name: await member.describe() for name, member in self.members.items()}
        clients = [
            {
                "client": str(client),
                "member": client.member,
                "calls": client.num_calls,
                "attached_for_seconds": round(time.time() - client.since, 1),
            }
            for client in self.clients.values()
        ]
        return {"up_for_seconds": round(time.time() - self.started, 1), "members": members, "clients": clients}
