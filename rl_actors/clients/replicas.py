"""`Restarts`, which limits restarts, and `Replica`, a generator of a Fleet and its replacements.

starting ──► stale ──► healthy ──► dead ──► restarting ──► stale ──► healthy
               ▲          │         └─────► retired
               └──────────┘ make_stale

A replica becomes dead from every state but retired, and healthy only after a complete pull of the
fleet's version. A generator that the user spawned goes from starting to healthy or retired.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.one_generator import OneGenerator
from rl_actors.config import RestartPolicy
from rl_actors.types import GeneratorReturn, ReplicaState

if TYPE_CHECKING:
    from rl_actors.clients.fleet import Fleet

HOUR = 3600.0  # seconds
LONGEST_RESTART_PAUSE = 60.0  # seconds
FIRST_RESTARTS = 2  # largest number of restarts of an actor that has never been ready
IF_DEAD = (
    "close this client and spawn another; GeneratorConfig.restarts says how often a dead generator is started again"
)
logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """Counts restarts, and refuses a restart above the limit of the policy."""

    policy: RestartPolicy
    clock: Callable[[], float] = time.monotonic
    # of the error after several deaths
    note: str = (
        "this is the first of {num_deaths} deaths in the last hour, and at most {limit} restarts are allowed in that time; "
        "the last death: {last}"
    )
    total: int = field(default=0, init=False)
    _deaths: deque[tuple[float, Exception]] = field(default_factory=deque, init=False)  # of an hour: (clock, error)

    def pause_after(self, death: Exception, *, was_ready: bool = True) -> float:
        """Count this death. Returns the seconds until the restart; after too many, raises the
        hour's first error. was_ready: whether the actor has ever been ready.
        """
        now = self.clock()
        while self._deaths and self._deaths[0][0] <= now - HOUR:
            self._deaths.popleft()
        self._deaths.append((now, death))
        num_deaths = len(self._deaths)
        limit = self.policy.max_per_hour
        if not was_ready:
            limit = min(limit, FIRST_RESTARTS)
        if num_deaths > limit:
            first = self._deaths[0][1]
            if num_deaths > 1:
                first.add_note(self.note.format(num_deaths=num_deaths, limit=limit, last=death))
            raise first
        self.total += 1
        return 0.0 if num_deaths == 1 else min(self.policy.backoff * 2 ** (num_deaths - 2), LONGEST_RESTART_PAUSE)


class Replica:
    """A generator, which `live` watches and replaces if its GeneratorClient spawned it."""

    def __init__(self, name: str, spawn: Callable[[], OneGenerator], policy: RestartPolicy, fleet: "Fleet") -> None:
        self.name = name
        self.spawn = spawn
        self.policy = policy
        self.fleet = fleet
        self.state: ReplicaState = "starting"
        self.was_ready = False  # whether this replica was ever healthy
        self.cause: Exception | None = None  # the error because of which this replica is retired
        self.restarts = Restarts(policy)
        self.silent_after = policy.silent_after  # seconds without a sign of life after which it counts as dead
        self.client = spawn()
        self._death: asyncio.Future[Exception]  # the death of self.client; `live` sets it before it watches self.client
        # of the first death since the replica was healthy: time.time(), time.monotonic(), error
        self._died: tuple[float, float, Exception] | None = None
        self._is_final = False  # whether no restart follows the last death
        self._is_stale = asyncio.Event()
        self._tasks: list[asyncio.Future[None]] = []  # tasks of `_watch` and `_serve` for self.client

    async def live(self) -> None:
        """Keep a generator running until it is retired. Of a user's generator, await the setup."""
        if not self.client.is_owned:
            try:
                await self.client.ready()
            except Exception as error:
                self._retire(error)
            else:
                self._become_healthy()
            return
        try:
            while self.state != "retired":
                cause = await self._until_death()
                with contextlib.suppress(Exception):
                    await asyncio.shield(self.client.kill())  # goes on if the fleet is closed meanwhile
                await self._restart(cause)
        except Exception as error:  # a bug; without this handler, calls would wait for ever for a healthy replica
            self._retire(error)

    async def _until_death(self) -> Exception:
        self._death = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.ensure_future(self._watch(self.client)), asyncio.ensure_future(self._serve(self.client))]
        try:
            return await self._death
        finally:
            for task in self._tasks:
                task.cancel()
            self._tasks = []

    def expect_signs(self, silent_after: float) -> None:
        """Shorten the seconds without a sign of life after which the generator is dead."""
        if silent_after >= self.silent_after:
            return
        self.silent_after = silent_after
        if self._tasks:
            self._tasks.append(asyncio.ensure_future(self._watch(self.client)))

    async def _restart(self, cause: Exception) -> None:
        """Spawn another generator after a pause. If no restart is allowed, retire the replica."""
        if self._is_final:
            self._retire(cause)
            return
        try:
            pause = self.restarts.pause_after(cause, was_ready=self.was_ready)
        except Exception as first:
            self._retire(first)
            return
        limit = self.policy.max_per_hour
        restart = f"restart {self.restarts.total} (at most {limit} an hour) begins"
        self.fleet.on_change(self, f"{self.name} has died: {cause}; {restart} after {pause:g} s")
        await asyncio.sleep(pause)
        await self.fleet.awake.wait()
        self.state = "restarting"
        self.client = self.spawn()

    def _retire(self, cause: Exception) -> None:
        self.state = "retired"
        self.cause = cause
        if self.was_ready:
            cause.add_note(IF_DEAD)
        self.fleet.on_change(self, f"{self.name} is not started again: {cause}" if self.was_ready else "")

    async def _watch(self, client: OneGenerator) -> None:
        death = await client.death(self.silent_after)
        if death is not None:
            self.lose(client, death)

    async def _serve(self, client: OneGenerator) -> None:
        """Refit the generator after its setup and whenever it is stale. A failure is its death."""
        try:
            await client.ready()
            while True:
                self.state = "stale"
                await self.fleet.refit(self)
                self._become_healthy()
                await self._is_stale.wait()
                self._is_stale.clear()
        except Exception as error:
            cause = error
            if not isinstance(error, ActorDiedError | ActorSilentError):
                # no process has died: if the replica was never healthy, another start would fail, too
                self._is_final = not self.was_ready
                if self.was_ready:
                    cause = ActorDiedError(f"{self.name} did not become healthy again: {error!r}", self.name)
                    cause.__cause__ = error
            self.lose(client, cause)

    def _become_healthy(self) -> None:
        self.state = "healthy"
        self.was_ready = True
        died = self._died
        self._died = None
        if died is None:
            self.fleet.on_change(self, "")
            return
        noticed, began, cause = died
        seconds = time.monotonic() - began
        self.fleet.returns.append(GeneratorReturn(name=self.name, cause=str(cause), noticed=noticed, seconds=seconds))
        self.fleet.on_change(self, f"{self.name} is back after {seconds:.1f} s")

    def make_stale(self, cause: Exception) -> None:
        logger.warning("%s does not have the weights of the last pull: %r", self.name, cause)
        self.state = "stale"
        self._is_stale.set()

    def lose(self, client: OneGenerator, cause: Exception) -> None:
        """Mark a generator as dead, unless it is or was replaced, so that calls go to others."""
        if client is not self.client or self._death.done():
            return
        self._death.set_result(cause)
        self.state = "dead"
        self._died = self._died or (time.time(), time.monotonic(), cause)
        self.fleet.on_change(self, "")
