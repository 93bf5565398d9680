"""A client may have several generators. A `Replica` is the entry for one generator in the client's list.

When the generator of a replica dies, the replica spawns another generator with the same config. The Fleet of
the client (fleet.py) has the list of its replicas.

The states of a replica whose generator the client spawns, and the transitions between them:

starting ──► stale ──► healthy ──► dead ──► restarting ──► stale ──► healthy
               ▲          │         └─────► retired
               └──────────┘ make_stale

From every state except retired such a replica becomes dead when a process of its generator has ended or is silent. The
replica becomes healthy only after a complete pull of the version that the other replicas have. So it never generates
with weights of which only a part has arrived.

If the user spawned the generator, the replica goes from starting to healthy or to retired. Later its state does not
change.
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
    """Pulls the fleet's version of the weights into a replica, and loads the fleet's adapters. Raises the error of the
    last try."""
    may_restart: Callable[[], Awaitable[object]]
    """Waits until the fleet allows the start of a generator. The fleet allows no start while its generators sleep; see
    Fleet.sleep."""


class Replica:
    """A generator and its replacements.

    `live` restarts a dead generator if the GeneratorClient spawned it. `live` does not watch or restart a generator
    that the user spawned.
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
        self._death: asyncio.Future[Exception]  # the death of self.client; exists once live() watches self.client
        # First death since the replica was healthy: time.time(), time.monotonic() and the error.
        self._died: tuple[float, float, Exception] | None = None
        self._is_final = False  # whether no restart follows the last death
        self._is_stale = asyncio.Event()
        self._tasks: list[asyncio.Future[None]] = []  # tasks that watch and serve `client`

    async def live(self) -> None:
        """Keep a generator running. Ends when the replica is retired."""
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
        """Wait until a generator that the caller spawned is set up. `live` does not watch such a generator later."""
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
        """Wait until the generator is set up. Then, and whenever it becomes stale, give it the weights of the last pull."""
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
                # The start has failed although no process has died. If the replica has never been healthy, another
                # start would fail, too, so no restart follows.
                self._is_final = not self.was_ready
                if self.was_ready:
                    cause = ActorDiedError(f"{self.name} did not start again: {error!r}", self.name)
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
        """Mark a healthy replica as stale until a pull has succeeded.

        Its weights differ from those of the other replicas.
        """
        logger.warning("%s does not have the weights of the last pull: %r", self.name, cause)
        self.state = "stale"
        self._is_stale.set()

    def lose(self, client: OneGenerator, cause: Exception) -> None:
        """Mark a generator as dead, so that calls go to other generators.

        Does nothing if it is dead already or has been replaced.
        """
        if client is not self.client or self._death.done():
            return
        self._death.set_result(cause)
        self.state = "dead"
        self._died = self._died or (time.time(), time.monotonic(), cause)
        self.watcher.changed(self, "")
