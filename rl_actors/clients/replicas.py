"""A GeneratorClient may have several generators. A `Replica` is the entry for one generator in the client's list.

The client's Fleet (fleet.py) has this list. Either the client spawns the generators, or the user has spawned one. When
a generator that the client spawned dies, its replica spawns another generator with the same config.

The states of a replica whose generator the client spawns, and the transitions between them:

starting ──► stale ──► healthy ──► dead ──► restarting ──► stale ──► healthy
               ▲          │         └─────► retired
               └──────────┘ make_stale

A replica also becomes dead from the states starting, stale and restarting. The cause of each death is that a process
of the generator has ended or is silent, or that the generator could not be set up or could not get the weights.

The fleet's version is the version of the weights that all generators should have. The replica becomes healthy only
after a complete pull of the fleet's version, if there is such a version yet. So its generator never samples with
weights of which only a part has arrived.

If the user spawned the generator, the replica goes from starting to healthy or to retired. Later the state of this
replica does not change.
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

    changed: Callable[["Replica", str], None]
    """Called with a replica whose state has changed, and with a line of text for the user. The line may be empty."""
    returned: Callable[[GeneratorReturn], None]
    """Called with the record of a replica that is healthy again after a death."""
    refit: Callable[["Replica"], Awaitable[None]]
    """Pulls the fleet's version of the weights into a replica, and loads the fleet's adapters. If this fails, `refit`
    may try again. Raises the error of the last try."""
    may_restart: Callable[[], Awaitable[object]]
    """Waits until the fleet allows the start of a generator. The fleet allows no start while its generators sleep; see
    Fleet.sleep."""


class Replica:
    """A generator and its replacements.

    If the GeneratorClient spawned the generator, `live` watches the generator and replaces it after a death. `live`
    does neither for a generator that the user spawned.
    """

    def __init__(self, name: str, spawn: Callable[[], OneGenerator], policy: RestartPolicy, watcher: Watcher) -> None:
        self.name, self.spawn, self.policy, self.watcher = name, spawn, policy, watcher
        self.state: ReplicaState = "starting"
        self.was_ready = False  # whether this replica was ever healthy
        self.cause: Exception | None = None  # the error because of which this replica is retired
        self.restarts = Restarts(policy)
        # Seconds without a sign of life after which the generator counts as dead.
        self.silent_after = policy.silent_after
        self.client = spawn()
        self._death: asyncio.Future[Exception]  # the death of self.client; `live` sets it before it watches self.client
        # First death since the replica was last healthy: time.time(), time.monotonic() and the error. None: no death.
        self._died: tuple[float, float, Exception] | None = None
        self._is_final = False  # whether no restart follows the last death
        self._is_stale = asyncio.Event()
        self._tasks: list[asyncio.Future[None]] = []  # tasks of `_watch` and `_serve` for self.client

    async def live(self) -> None:
        """Keep a generator running until the replica is retired.

        If the user spawned the generator, only wait until it is set up.
        """
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
        """Wait until a generator that the user spawned is set up."""
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
        """From now on, the generator counts as dead after this many seconds without a sign of life.

        If a shorter time was set before, that time still applies.
        """
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
        self.state, self.cause = "retired", cause
        self.watcher.changed(self, f"{self.name} is not started again: {cause}" if self.was_ready else "")

    async def _watch(self, client: OneGenerator) -> None:
        """Wait until a process of the generator has ended or has been silent for too long."""
        death = await client.death(self.silent_after)
        if death is not None:
            self.lose(client, death)

    async def _serve(self, client: OneGenerator) -> None:
        """Wait until the generator is set up, and call `refit`. Call `refit` again whenever the replica becomes stale.

        If the setup or `refit` fails, mark the generator as dead.
        """
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
                # The setup or the pull has failed although no process has died. If the replica has never been healthy,
                # another start would fail, too, so no restart follows.
                self._is_final = not self.was_ready
                if self.was_ready:
                    cause = ActorDiedError(f"{self.name} did not become healthy again: {error!r}", self.name)
                    cause.__cause__ = error
            self.lose(client, cause)

    def _become_healthy(self) -> None:
        self.state, self.was_ready = "healthy", True
        died, self._died = self._died, None
        if died is None:
            self.watcher.changed(self, "")
            return
        noticed, began, cause = died
        seconds = time.monotonic() - began
        self.watcher.returned(GeneratorReturn(name=self.name, cause=str(cause), noticed=noticed, seconds=seconds))
        self.watcher.changed(self, f"{self.name} is back after {seconds:.1f} s")

    def make_stale(self, cause: Exception) -> None:
        """Mark a healthy replica as stale, because a pull failed on its generator and succeeded on another one.

        The replica stays stale until the pull has succeeded on its generator, too.
        """
        logger.warning("%s does not have the weights of the last pull: %r", self.name, cause)
        self.state = "stale"
        self._is_stale.set()

    def lose(self, client: OneGenerator, cause: Exception) -> None:
        """Mark a generator as dead, so that calls go to other generators.

        Does nothing if the generator is marked as dead already or has been replaced.
        """
        if client is not self.client or self._death.done():
            return
        self._death.set_result(cause)
        self.state = "dead"
        self._died = self._died or (time.time(), time.monotonic(), cause)
        self.watcher.changed(self, "")
