"""`Replica`, a generator of a Fleet and its replacements after deaths.

starting ──► stale ──► healthy ──► dead ──► restarting ──► stale ──► healthy
               ▲          │         └─────► retired
               └──────────┘ make_stale

A replica becomes dead from every state but retired. It becomes healthy only after a complete pull
of the fleet's version, so that its generator never samples with half of the weights. A generator
that the user spawned only goes from starting to healthy or retired.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.one_generator import OneGenerator
from rl_actors.clients.restarts import Restarts
from rl_actors.config import RestartPolicy
from rl_actors.types import GeneratorReturn, ReplicaState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Watcher:
    """Functions of the fleet that a replica calls."""

    changed: Callable[["Replica", str], None]  # after a change of state, with a line for the user, or ""
    returned: Callable[[GeneratorReturn], None]  # when the replica is healthy again after a death
    refit: Callable[["Replica"], Awaitable[None]]  # brings weights and adapters; raises the error of its last try
    may_restart: Callable[[], Awaitable[object]]  # waits while the generators sleep


class Replica:
    """A generator, which `live` watches and replaces if its GeneratorClient spawned it."""

    def __init__(self, name: str, spawn: Callable[[], OneGenerator], policy: RestartPolicy, watcher: Watcher) -> None:
        self.name = name
        self.spawn = spawn
        self.policy = policy
        self.watcher = watcher
        self.state: ReplicaState = "starting"
        self.was_ready = False  # whether this replica was ever healthy
        self.cause: Exception | None = None  # the error because of which this replica is retired
        self.restarts = Restarts(policy)
        self.silent_after = policy.silent_after  # seconds without a sign of life after which it counts as dead
        self.client = spawn()
        self._death: asyncio.Future[Exception]  # the death of self.client; `live` sets it before it watches self.client
        # First death since the replica was last healthy: time.time(), time.monotonic() and the
        # error. None: no death.
        self._died: tuple[float, float, Exception] | None = None
        self._is_final = False  # whether no restart follows the last death
        self._is_stale = asyncio.Event()
        self._tasks: list[asyncio.Future[None]] = []  # tasks of `_watch` and `_serve` for self.client

    async def live(self) -> None:
        """Keep a generator running until it is retired. Of a user's generator, await the setup."""
        if not self.client.is_owned:
            await self._begin()
            return
        try:
            while self.state != "retired":
                cause = await self._until_death()
                with contextlib.suppress(Exception):
                    await self.client.kill()
                await self._restart(cause)
        except Exception as error:  # a bug; without this handler, calls would wait for ever for a healthy replica
            self._retire(error)

    async def _begin(self) -> None:
        try:
            await self.client.ready()
        except Exception as error:
            self._retire(error)
        else:
            self._become_healthy()

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
        """The generator is dead after so many seconds without a sign of life, if fewer than before."""
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
        self.watcher.changed(self, f"{self.name} has died: {cause}; {restart} after {pause:g} s")
        await asyncio.sleep(pause)
        await self.watcher.may_restart()
        self.state = "restarting"
        self.client = self.spawn()

    def _retire(self, cause: Exception) -> None:
        self.state = "retired"
        self.cause = cause
        self.watcher.changed(self, f"{self.name} is not started again: {cause}" if self.was_ready else "")

    async def _watch(self, client: OneGenerator) -> None:
        """Wait until a process of the generator has ended or has been silent for too long."""
        death = await client.death(self.silent_after)
        if death is not None:
            self.lose(client, death)

    async def _serve(self, client: OneGenerator) -> None:
        """Refit the generator after its setup and whenever it is stale. A failure is its death."""
        try:
            await client.ready()
            while True:
                self.state = "stale"
                await self.watcher.refit(self)
                self._become_healthy()
                await self._is_stale.wait()
                self._is_stale.clear()
        except Exception as error:
            cause = error
            if not isinstance(error, ActorDiedError | ActorSilentError):
                # No process has died. If the replica was never healthy, another start would fail,
                # too.
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
            self.watcher.changed(self, "")
            return
        noticed, began, cause = died
        seconds = time.monotonic() - began
        self.watcher.returned(GeneratorReturn(name=self.name, cause=str(cause), noticed=noticed, seconds=seconds))
        self.watcher.changed(self, f"{self.name} is back after {seconds:.1f} s")

    def make_stale(self, cause: Exception) -> None:
        """Mark the replica as stale until a pull that succeeded elsewhere has succeeded here, too."""
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
        self.watcher.changed(self, "")
