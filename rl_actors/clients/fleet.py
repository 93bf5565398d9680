"""`Fleet`, the generators of a GeneratorClient.

It divides calls among them, sends the open prompts of a dead generator to the others, and gives all
the same weights.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from rl_actors.clients.base import ActorDiedError
from rl_actors.clients.call import Call
from rl_actors.clients.completions import GenerateCall
from rl_actors.clients.one_generator import OneGenerator
from rl_actors.clients.replicas import Replica, Watcher
from rl_actors.clients.routing import Router
from rl_actors.config import RestartPolicy
from rl_actors.types import DeviceMemory, GeneratorInfo, GeneratorReturn, SamplingParams, Transfer

FIRST_PULL_TIMEOUT = 60.0  # seconds that a generator's first pull waits for the version to be published
REFIT_TIMEOUT = 5.0  # seconds that a later pull of `_refit` waits; a generator has mostly pulled the version before
REFIT_PAUSE = 0.5  # seconds between two tries of `_refit`

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Fleet:
    """Generators with the same weights. All completions of a prompt come from one of them.

    A call waits while no generator is healthy. When all are retired, every call raises the error
    that ended the first.
    """

    def __init__(
        self,
        spawns: dict[str, Callable[[], OneGenerator]],
        policy: RestartPolicy,
        *,
        first_version: Call[int] | None = None,
        setup_timeout: float,
        on_event: Callable[[str], None],
    ) -> None:
        """spawns: the name of each generator, and the function that spawns it.

        first_version: the trainer's call that pushes the version to pull first. on_event: gets a
        line of text when a generator has died, is healthy again, or is not started again.
        """
        self.setup_timeout = setup_timeout
        self.on_event = on_event
        # The version that every generator has or must pull. `pull` sets it back if the pull fails
        # everywhere.
        self.target_version: int | None = None
        # The slowest transfer of the last `pull`; before the first, the first transfer into a
        # generator.
        self.last_pull: Transfer | None = None
        self.returns: list[GeneratorReturn] = []
        self._first_version = first_version
        self._router = Router(len(spawns))
        self._num_changes = 0  # number of calls of `pull` and `load_adapter` that have begun
        self._adapters: dict[str, str] = {}  # name -> directory
        self._uses: Counter[str] = Counter()  # name of an adapter -> number of calls that run with it
        self._change = asyncio.Event()  # `_notify` sets it at each change of a state, and replaces it
        self._awake = asyncio.Event()  # not set while the generators sleep; then no dead generator is restarted
        self._awake.set()
        self._lives: list[asyncio.Task[None]] = []  # for each replica the task that runs Replica.live
        self._closed = False
        watcher = Watcher(
            changed=self._on_change, returned=self.returns.append, refit=self._refit, may_restart=self._awake.wait
        )
        self.replicas = [Replica(name, spawn, policy, watcher) for name, spawn in spawns.items()]

    @property
    def num_restarts(self) -> int:
        return sum(replica.restarts.total for replica in self.replicas)

    async def start(self) -> GeneratorInfo:
        """Wait until all have been healthy once. Returns the first's info, or raises an error."""
        self._lives = [asyncio.ensure_future(replica.live()) for replica in self.replicas]
        await self._until(lambda: all(replica.was_ready or replica.cause for replica in self.replicas))
        for replica in self.replicas:
            if not replica.was_ready and replica.cause is not None:
                raise replica.cause
        # `known` is None if the first generator has died meanwhile.
        known = self.replicas[0].client.known or await self.info()
        return known if self.target_version is None else replace(known, policy_version=self.target_version)

    def expect_signs(self, silent_after: float) -> None:
        """See Replica.expect_signs."""
        for replica in self.replicas:
            replica.expect_signs(silent_after)

    async def end(self) -> Exception:
        """Wait until all generators are retired. Returns the error that ended the first."""
        await self._until(lambda: self._end_cause() is not None)
        cause = self._end_cause()
        assert cause is not None
        return cause

    async def close(self) -> None:
        await self._stop_lives()
        await asyncio.gather(*(replica.client.close() for replica in self.replicas))

    async def kill(self) -> None:
        """Kill the processes of all generators."""
        await self._stop_lives()
        await asyncio.gather(*(replica.client.kill() for replica in self.replicas))

    async def _stop_lives(self) -> None:
        self._closed = True
        self._notify()
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    async def answers_within(self, timeout: float) -> bool:
        """True if all generators are healthy and answer in time."""
        if self._closed or any(replica.state != "healthy" for replica in self.replicas):
            return False
        return all(await asyncio.gather(*(replica.client.answers_within(timeout) for replica in self.replicas)))

    async def info(self) -> GeneratorInfo:
        """The info of the healthy generator with the oldest weights; of several, `replicas` has all."""
        await self._ask_all(lambda client: client.info())
        infos = {}
        for index, replica in enumerate(self.replicas):
            if replica.client.known is not None:
                infos[index] = replace(replica.client.known, state=replica.state, restarts=replica.restarts.total)
        healthy = [infos[index] for index in self._healthy()]
        oldest = min(healthy, key=lambda info: info.policy_version)
        several = tuple(infos.values()) if len(self.replicas) > 1 else ()
        return replace(oldest, replicas=several, restarts=self.num_restarts)

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seed_indices: Sequence[int] | None,
        adapter: str | None = None,
    ) -> GenerateCall:
        """Start a call. seed_indices: for each prompt, p of SamplingParams.seed; None: its index."""
        indices = list(range(len(prompts)))
        seeds = indices if seed_indices is None else list(seed_indices)
        call = GenerateCall(prompts, params, seeds, adapter, on_end=lambda: self._end_use(adapter))
        self._begin_use(adapter)
        try:
            await self._send(call, indices)
        except BaseException:
            await call.abort()
            raise
        return call

    def _begin_use(self, adapter: str | None) -> None:
        if adapter is not None:
            self._uses[adapter] += 1

    def _end_use(self, adapter: str | None) -> None:
        if adapter is not None:
            self._uses[adapter] -= 1
            self._notify()

    async def _send(self, call: GenerateCall, indices: list[int]) -> None:
        """Send the prompts with these indices to healthy generators, as soon as there is one."""
        while indices:
            parts = await self._divide([call.prompts[index] for index in indices], call.params.n)
            starts = []
            for replica_index, members in parts.items():
                starts.append(self._start_part(call, replica_index, [indices[member] for member in members]))
            lost = await gather_all(starts)
            indices = sorted(itertools.chain.from_iterable(lost))

    async def _start_part(self, call: GenerateCall, replica_index: int, indices: list[int]) -> list[int]:
        """Send these prompts to one generator. Returns them if it has died, otherwise []."""
        replica = self.replicas[replica_index]
        client = replica.client
        prompts = [call.prompts[index] for index in indices]
        seed_indices = [call.seed_indices[index] for index in indices]
        try:
            number = await client.start_generate(prompts, call.params, seed_indices, call.adapter)
        except BaseException as error:
            self._router.finish(replica_index, call.params.n * len(indices))
            self._lose_or_raise(replica, client, error)
            return indices
        part = asyncio.ensure_future(self._collect(call, replica_index, client, number, indices))
        call.parts.add(part)
        part.add_done_callback(call.parts.discard)
        return []

    async def _collect(
        self, call: GenerateCall, replica_index: int, client: OneGenerator, number: int, indices: list[int]
    ) -> None:
        """Take the finished prompts from one generator. If it dies, send the open ones to others."""
        n = call.params.n
        try:
            try:
                while not call.open.isdisjoint(indices):
                    groups = await client.finished_groups(number, 1)
                    self._router.finish(replica_index, n * len(groups))
                    call.deliver([(indices[member], completions) for member, completions in groups])
            except BaseException as error:
                left = sorted(call.open.intersection(indices))
                self._router.finish(replica_index, n * len(left))
                self._lose_or_raise(self.replicas[replica_index], client, error)
                logger.info("%s has died; its %s open prompts are sent again", client.name, len(left))
                await self._send(call, left)
        except Exception as error:
            call.fail(error)

    async def compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        self._begin_use(adapter)
        try:
            return await self._compute_logprobs(sequences, adapter)
        finally:
            self._end_use(adapter)

    async def _compute_logprobs(self, sequences: list[list[int]], adapter: str | None) -> list[Tensor]:
        logprobs: dict[int, Tensor] = {}
        left = list(range(len(sequences)))
        while left:
            parts = await self._divide([sequences[index] for index in left], 1)
            asked = []
            for replica_index, members in parts.items():
                indices = [left[member] for member in members]
                asked.append(self._logprobs_of_part(replica_index, sequences, indices, adapter))
            for found in await gather_all(asked):
                logprobs |= found
            left = [index for index in left if index not in logprobs]
        return [logprobs[index] for index in range(len(sequences))]

    async def _logprobs_of_part(
        self, replica_index: int, sequences: list[list[int]], indices: list[int], adapter: str | None
    ) -> dict[int, Tensor]:
        """Index -> the logprobs of this sequence. Empty if the generator has died."""
        replica = self.replicas[replica_index]
        client = replica.client
        try:
            found = await client.compute_logprobs([sequences[index] for index in indices], adapter)
        except Exception as error:
            self._lose_or_raise(replica, client, error)
            return {}
        finally:
            self._router.finish(replica_index, len(indices))
        return dict(zip(indices, found, strict=True))

    async def _divide(self, prompts: Sequence[Sequence[int]], n: int) -> dict[int, list[int]]:
        """Index of a generator -> the positions of its prompts. Waits until a generator is healthy."""
        healthy = await self._until_healthy()
        parts: dict[int, list[int]] = {}
        for member, prompt in enumerate(prompts):
            parts.setdefault(self._router.assign(prompt, n, healthy), []).append(member)
        return parts

    async def pull(self, version: int, timeout: float, in_flight: bool) -> None:
        """Let all healthy generators pull the version; a starting one pulls it before it becomes
        healthy.

        Generators on which only some pulls fail are stale until theirs succeeds. If all pulls fail,
        raises the first error and keeps the former version. Deaths do not count; if all die, waits
        until one is healthy again.
        """
        self._num_changes += 1
        former = self.target_version
        self.target_version = version
        replicas = [self.replicas[index] for index in self._healthy()]
        clients = [replica.client for replica in replicas]
        results = await asyncio.gather(
            *(client.pull(version, timeout, in_flight) for client in clients), return_exceptions=True
        )
        self._router.forget()
        pulled = [result for result in results if isinstance(result, Transfer)]
        failed: list[tuple[Replica, Exception]] = []
        for replica, client, result in zip(replicas, clients, results, strict=True):
            if isinstance(result, Exception) and is_death(client, result):
                replica.lose(client, result)
            elif isinstance(result, Exception):
                failed.append((replica, result))
        if pulled:
            self.last_pull = max(pulled, key=lambda pull: pull.seconds)
            for replica, error in failed:
                replica.make_stale(error)
        elif failed:
            if self.target_version == version:
                self.target_version = former
            raise failed[0][1]
        else:  # all generators have died; each pulls the version when it is started again
            [first, *_] = await self._until_healthy()
            self.last_pull = self.replicas[first].client.last_pull

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load an adapter into all healthy generators, or into none. A starting one loads it before
        it becomes healthy.

        Raises ValueError if an adapter of this name is loaded already.
        """
        if name in self._adapters:
            raise ValueError(f"an adapter of the name {name!r} is loaded already, from {self._adapters[name]}")
        self._adapters[name] = directory
        self._num_changes += 1
        try:
            await self._ask_all(lambda client: client.load_adapter(name, directory))
        except BaseException:
            del self._adapters[name]
            if self._healthy():
                await self._ask_all(lambda client: client.unload_adapter(name))
            raise

    async def unload_adapter(self, name: str) -> None:
        """When the calls that use the adapter have ended, unload it from all healthy generators."""
        await self._until(lambda: not self._uses[name])
        if self._adapters.pop(name, None) is not None:
            await self._ask_all(lambda client: client.unload_adapter(name))

    async def _refit(self, replica: Replica) -> None:
        """Pull the target version into a generator, and load the adapters. Raises the error of the
        last try.

        A generator that has been healthy before tries for setup_timeout seconds, another one once.
        """
        is_first = self.target_version is None and self._first_version is not None
        if is_first:
            assert self._first_version is not None
            version = await self._first_version
            self.target_version = version if self.target_version is None else self.target_version
        deadline = time.monotonic() + self.setup_timeout
        while self.target_version is not None or self._adapters:
            number = self._num_changes
            try:
                if self.target_version is not None:
                    transfer = await replica.client.pull(
                        self.target_version, FIRST_PULL_TIMEOUT if is_first else REFIT_TIMEOUT
                    )
                    self.last_pull = self.last_pull or transfer
                await self._load_adapters(replica)
            except Exception as error:
                if not replica.was_ready or isinstance(error, ActorDiedError) or time.monotonic() > deadline:
                    raise
                # If the trainer has died, too, the version is lost, and the fleet soon pulls
                # another one.
                what = (
                    "its adapters" if self.target_version is None else f"version {self.target_version} and its adapters"
                )
                logger.info("%s could not load %s, and tries again: %r", replica.name, what, error)
                await asyncio.sleep(REFIT_PAUSE)
                continue
            if number == self._num_changes:  # otherwise a pull or the load of an adapter has begun meanwhile, so repeat
                return

    async def _load_adapters(self, replica: Replica) -> None:
        for name, directory in list(self._adapters.items()):
            try:
                await replica.client.load_adapter(name, directory)
            except ValueError as error:
                # On this generator, requests with this adapter fail. It serves all other requests.
                logger.warning("%s cannot load the adapter %r again: %s", replica.name, name, error)

    async def sleep(self, level: int) -> DeviceMemory:
        """Put the healthy generators to sleep, when no other is starting. A dead one is started
        again only after `wake`, because a start needs memory of the device."""
        await self._until(lambda: all(replica.state in ("healthy", "dead", "retired") for replica in self.replicas))
        self._awake.clear()
        try:
            return _of_all(await self._ask_all(lambda client: client.sleep(level)))
        except BaseException:
            self._awake.set()
            raise

    async def wake(self) -> DeviceMemory:
        self._awake.set()
        return _of_all(await self._ask_all(lambda client: client.wake()))

    async def _ask_all(self, ask: Callable[[OneGenerator], Awaitable[T]]) -> list[T]:
        """The answers of the healthy generators that did not die. Repeats until there is one."""
        while True:
            healthy = await self._until_healthy()
            clients = [self.replicas[index].client for index in healthy]
            results = await asyncio.gather(*(ask(client) for client in clients), return_exceptions=True)
            answers: list[T] = []
            for index, client, result in zip(healthy, clients, results, strict=True):
                if isinstance(result, BaseException):
                    self._lose_or_raise(self.replicas[index], client, result)
                else:
                    answers.append(result)
            if answers:
                return answers

    def _lose_or_raise(self, replica: Replica, client: OneGenerator, error: BaseException) -> None:
        """Mark the generator as dead if the error is its death. Otherwise raises the error."""
        if self._closed or not is_death(client, error):
            raise error
        assert isinstance(error, ActorDiedError)
        replica.lose(client, error)

    def _healthy(self) -> list[int]:
        return [index for index, replica in enumerate(self.replicas) if replica.state == "healthy"]

    async def _until_healthy(self) -> list[int]:
        """The indices of the healthy generators, of at least one. Raises `_end_cause`."""
        await self._until(lambda: bool(self._healthy()) or self._end_cause() is not None)
        if not self._healthy() and (cause := self._end_cause()) is not None:
            raise cause
        return self._healthy()

    def _end_cause(self) -> Exception | None:
        """The error that ended the first generator, if all are retired."""
        causes = [replica.cause for replica in self.replicas]
        return causes[0] if all(causes) else None

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._closed:
                raise RuntimeError("the generator was closed")
            await self._change.wait()

    def _on_change(self, replica: Replica, line: str) -> None:
        if replica.state == "dead":
            self._router.forget()
        if line:
            logger.warning("%s", line)
            self.on_event(line)
        self._notify()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def is_death(client: OneGenerator, error: BaseException) -> bool:
    """True if the error says that a generator has died that the fleet spawned and so can replace."""
    return client.is_owned and isinstance(error, ActorDiedError)


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results, in order. If some fail, waits for all and raises the first error."""
    # A single awaitable gets a task, too: awaited directly, it could overtake an earlier call whose
    # task has not started.
    results = await asyncio.gather(*work, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def _of_all(answers: Sequence[DeviceMemory]) -> DeviceMemory:
    """The bytes of all generators together, and the seconds of the slowest generator."""
    return DeviceMemory(
        num_bytes=sum(answer.num_bytes for answer in answers), seconds=max(answer.seconds for answer in answers)
    )
