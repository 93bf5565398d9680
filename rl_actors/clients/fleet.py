"""`Fleet`, the generators of a GeneratorClient.

The fleet divides calls among the generators. It sends the unfinished prompts of a dead generator to the other
generators. It gives all generators the same version of the weights.

In this file `place` is the index of a generator in the fleet's list of generators. A `part` is those prompts of
a call that go to one generator. A `Replica` has a generator and restarts it; replicas.py explains its states, such as
healthy, stale and retired.
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
from rl_actors.clients.one_generator import Groups, OneGenerator
from rl_actors.clients.replicas import Replica, Watcher
from rl_actors.clients.routing import Router
from rl_actors.config import RestartPolicy
from rl_actors.types import DeviceMemory, GeneratorInfo, GeneratorReturn, SamplingParams, Transfer

FIRST_PULL_TIMEOUT = 60.0
"""`Fleet._refit` pulls the weights into a generator before the generator becomes healthy. This is the largest number of
seconds for which its first pull waits until the version is published. Usually the version is published already, because
the first pull begins after the push of the version has returned."""
REFIT_TIMEOUT = 5.0
"""Largest number of seconds for which a later pull of `Fleet._refit` waits until the version is published. Usually the
version is published already, because a generator has pulled it before."""
REFIT_PAUSE = 0.5
"""Seconds between a failed try of `Fleet._refit` and the next try."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RoutedCall:
    """A generate call: its prompts, and the completions of the prompts that have finished."""

    def __init__(
        self, prompts: list[list[int]], params: SamplingParams, numbers: list[int], adapter: str | None
    ) -> None:
        """numbers: for each prompt, the number p from which its seeds are computed; see SamplingParams.seed. adapter: name of a loaded adapter."""
        self.prompts, self.params, self.numbers, self.adapter = prompts, params, numbers, adapter
        self.num_left = len(prompts)  # number of prompts whose completions `take` has not returned
        self.parts: set[asyncio.Task[None]] = set()  # one task for each part with unfinished prompts
        self._finished: Groups = []  # finished prompts that `take` has not returned
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def deliver(self, groups: Groups) -> None:
        self._finished += groups
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Make the call raise an error. Does nothing if the call has failed already."""
        self._failure = self._failure or error
        self._changed.set()

    async def take(self, at_least: int) -> Groups:
        """The finished prompts that `take` has not returned before. Waits for at_least prompts, or for all that are left.

        Raises the error of the call.
        """
        while len(self._finished) < min(at_least, self.num_left):
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        taken, self._finished = self._finished, []
        self.num_left -= len(taken)
        return taken


class Fleet:
    """Generators with the same weights. All completions of a prompt come from one of the generators.

    A seed gives the same completions on every generator. A call waits while no generator is healthy. Every phase of a
    restart has a time limit, and the number of restarts is limited. A generator that cannot be restarted is retired.
    When all generators are retired, every call raises the error that ended the first generator of the list.
    """

    def __init__(
        self,
        spawns: dict[str, Callable[[], OneGenerator]],
        policy: RestartPolicy,
        *,
        first_version: Call[int] | None = None,
        setup_timeout: float,
        tell: Callable[[str], None],
    ) -> None:
        """spawns: for each generator its name and the function that spawns it. first_version: the trainer's
        call that pushes its weights. The result of this call is the version that the generators pull first.

        tell: the fleet calls this function with a line of text when a generator has died, is healthy again, or is not
        started again.
        """
        self.setup_timeout, self.tell = setup_timeout, tell
        # The fleet's version of the weights, which every generator has or must pull. `pull` sets it at the beginning, and
        # sets it back if the pull fails on all generators. None before the first pull.
        self.told: int | None = None
        # The slowest transfer of the last call of `pull`. Before the first such call: the first transfer into a generator.
        self.last_pull: Transfer | None = None
        self.returns: list[GeneratorReturn] = []  # one record each time that a generator is healthy again after a death
        self._first_version = first_version
        self._router = Router(len(spawns))
        self._routed: dict[int, RoutedCall] = {}
        self._numbers = itertools.count()
        self._num_changes = 0  # number of calls of `pull` and `load_adapter` that have begun
        self._adapters: dict[str, str] = {}  # name -> directory
        self._uses: Counter[str] = Counter()  # name of an adapter -> number of calls that run with it
        # `_notify` sets this event at each change of a state, and replaces it by a new event.
        self._change = asyncio.Event()
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
        """Wait until every generator has been healthy once.

        Returns the info of the first generator. If a generator does not start, raises its error.
        """
        self._lives = [asyncio.ensure_future(replica.live()) for replica in self.replicas]
        await self._until(lambda: all(replica.was_ready or replica.cause for replica in self.replicas))
        for replica in self.replicas:
            if not replica.was_ready and replica.cause is not None:
                raise replica.cause
        # `known` is None if the first generator has died meanwhile and its replacement is not set up yet.
        known = self.replicas[0].client.known or await self.info()
        return known if self.told is None else replace(known, policy_version=self.told)

    def expect_signs(self, silent_after: float) -> None:
        """From now on, a generator counts as dead if it gives no sign of life for silent_after seconds.

        If a shorter time was set before, that time still applies.
        """
        for replica in self.replicas:
            replica.expect_signs(silent_after)

    async def end(self) -> Exception:
        """Wait until all generators are retired. Returns the error that ended the first generator of the list."""
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
        """The info of the healthy generator with the oldest weights.

        If the fleet has several generators, the field `replicas` has the last info of each generator. A generator that
        has not been set up since its last start is left out.
        """
        await self._ask_all(lambda client: client.info())
        infos = {}
        for place, replica in enumerate(self.replicas):
            if replica.client.known is not None:
                infos[place] = replace(replica.client.known, state=replica.state, restarts=replica.restarts.total)
        healthy = [infos[place] for place in self._healthy()]
        oldest = min(healthy, key=lambda info: info.policy_version)
        several = tuple(infos.values()) if len(self.replicas) > 1 else ()
        return replace(oldest, replicas=several, restarts=self.num_restarts)

    async def start_generate(
        self, prompts: list[list[int]], params: SamplingParams, numbers: list[int] | None, adapter: str | None = None
    ) -> int:
        """Start a generate call, and return its number.

        numbers: for each prompt, the number p from which its seeds are computed; see SamplingParams.seed. None: p is
        the prompt's index in the list.
        adapter: name of a loaded adapter; None: no adapter.
        """
        call = RoutedCall(prompts, params, list(range(len(prompts))) if numbers is None else numbers, adapter)
        number = next(self._numbers)
        self._routed[number] = call
        self._begin_use(adapter)
        try:
            await self._send(call, list(range(len(prompts))))
        except BaseException:
            await self.abort_generate(number)
            raise
        return number

    async def finished_groups(self, number: int, at_least: int) -> Groups:
        call = self._routed[number]
        try:
            finished = await call.take(at_least)
        except BaseException:
            await self.abort_generate(number)
            raise
        if call.num_left == 0 and self._routed.pop(number, None) is not None:
            self._end_use(call.adapter)
        return finished

    async def abort_generate(self, number: int) -> None:
        call = self._routed.pop(number, None)
        if call is not None:
            for part in call.parts:
                part.cancel()
            await asyncio.gather(*call.parts, return_exceptions=True)
            self._end_use(call.adapter)

    def _begin_use(self, adapter: str | None) -> None:
        if adapter is not None:
            self._uses[adapter] += 1

    def _end_use(self, adapter: str | None) -> None:
        if adapter is not None:
            self._uses[adapter] -= 1
            self._notify()

    async def _send(self, call: RoutedCall, indices: list[int]) -> None:
        """Send the prompts with these indices to healthy generators. Waits until a generator is healthy."""
        while indices:
            parts = await self._divide([call.prompts[index] for index in indices], call.params.n)
            starts = []
            for place, members in parts.items():
                starts.append(self._start_part(call, place, [indices[member] for member in members]))
            lost = await gather_all(starts)
            indices = sorted(itertools.chain.from_iterable(lost))

    async def _start_part(self, call: RoutedCall, place: int, indices: list[int]) -> list[int]:
        """Send the prompts with these indices to one generator.

        Returns the indices if the generator has died, otherwise an empty list.
        """
        replica, client = self.replicas[place], self.replicas[place].client
        prompts, numbers = [call.prompts[index] for index in indices], [call.numbers[index] for index in indices]
        try:
            number = await client.start_generate(prompts, call.params, numbers, call.adapter)
        except BaseException as error:
            self._router.finish(place, call.params.n * len(indices))
            self._lose_or_raise(replica, client, error)
            return indices
        part = asyncio.ensure_future(self._collect(call, place, client, number, indices))
        call.parts.add(part)
        part.add_done_callback(call.parts.discard)
        return []

    async def _collect(
        self, call: RoutedCall, place: int, client: OneGenerator, number: int, indices: list[int]
    ) -> None:
        """Take the finished prompts from one generator.

        If the generator dies, send the unfinished prompts to healthy generators.
        """
        left, n = set(range(len(indices))), call.params.n  # left: positions in `indices` of the unfinished prompts
        try:
            try:
                while left:
                    groups = await client.finished_groups(number, 1)
                    left -= {member for member, _ in groups}
                    self._router.finish(place, n * len(groups))
                    call.deliver([(indices[member], completions) for member, completions in groups])
            except BaseException as error:
                self._router.finish(place, n * len(left))
                self._lose_or_raise(self.replicas[place], client, error)
                logger.info("%s has died; its %s unfinished prompts are sent again", client.name, len(left))
                await self._send(call, [indices[member] for member in sorted(left)])
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
            for place, members in parts.items():
                indices = [left[member] for member in members]
                asked.append(self._logprobs_of_part(place, sequences, indices, adapter))
            for found in await gather_all(asked):
                logprobs |= found
            left = [index for index in left if index not in logprobs]
        return [logprobs[index] for index in range(len(sequences))]

    async def _logprobs_of_part(
        self, place: int, sequences: list[list[int]], indices: list[int], adapter: str | None
    ) -> dict[int, Tensor]:
        """The logprobs of the sequences with these indices. Key: the index. Empty if the generator has died."""
        replica, client = self.replicas[place], self.replicas[place].client
        try:
            found = await client.compute_logprobs([sequences[index] for index in indices], adapter)
        except Exception as error:
            self._lose_or_raise(replica, client, error)
            return {}
        finally:
            self._router.finish(place, len(indices))
        return dict(zip(indices, found, strict=True))

    async def _divide(self, prompts: Sequence[Sequence[int]], n: int) -> dict[int, list[int]]:
        """The indices of the prompts that each generator gets.

        Key: place of the generator. Waits until a generator is healthy.
        """
        healthy = await self._until_healthy()
        parts: dict[int, list[int]] = {}
        for member, prompt in enumerate(prompts):
            parts.setdefault(self._router.assign(prompt, n, healthy), []).append(member)
        return parts

    async def pull(self, version: int, timeout: float, in_flight: bool) -> None:
        """Let all healthy generators pull the version. A generator that is starting pulls the version before it becomes
        healthy.

        If the pull fails on some generators, these generators are stale until they have pulled the version. If the pull
        fails on all generators, raises the first error, and the fleet keeps its former version. Generators that die
        during the pull do not count here. If all die, waits until one has been started again and is healthy.
        timeout, in_flight: see GeneratorClient.pull_model_state_dict.
        """
        self._num_changes += 1
        former, self.told = self.told, version
        clients = [self.replicas[place].client for place in self._healthy()]
        replicas = [self.replicas[place] for place in self._healthy()]
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
            if self.told == version:
                self.told = former
            raise failed[0][1]
        else:  # all generators have died; each pulls the version when it is started again
            [place, *_] = await self._until_healthy()
            self.last_pull = self.replicas[place].client.last_pull

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load an adapter into all healthy generators. A generator that is starting loads the adapter before it becomes healthy.

        If a generator refuses the adapter, the other generators unload it. Raises ValueError if an adapter of this name
        is loaded already.
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
        """Wait until the calls that use the adapter have ended, and unload it from all healthy generators."""
        await self._until(lambda: not self._uses[name])
        if self._adapters.pop(name, None) is not None:
            await self._ask_all(lambda client: client.unload_adapter(name))

    async def _refit(self, replica: Replica) -> None:
        """Pull the fleet's version of the weights into a generator, and load the fleet's adapters. Raises the error of
        the last try.

        A generator that has been healthy before tries again for setup_timeout seconds. A generator that has never been healthy tries once.
        """
        is_first = self.told is None and self._first_version is not None
        if is_first:
            assert self._first_version is not None
            version = await self._first_version
            self.told = version if self.told is None else self.told
        deadline = time.monotonic() + self.setup_timeout
        while self.told is not None or self._adapters:
            number = self._num_changes
            try:
                if self.told is not None:
                    transfer = await replica.client.pull(self.told, FIRST_PULL_TIMEOUT if is_first else REFIT_TIMEOUT)
                    self.last_pull = self.last_pull or transfer
                await self._load_adapters(replica)
            except Exception as error:
                if not replica.was_ready or isinstance(error, ActorDiedError) or time.monotonic() > deadline:
                    raise
                # The trainer may have died, too, so that this version is lost. Then the fleet soon pulls another
                # version.
                what = "its adapters" if self.told is None else f"version {self.told} and its adapters"
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
        """Wait until every generator is healthy, dead or retired, and then put the healthy generators to sleep.

        level: see GeneratorClient.sleep.
        If a generator dies while the fleet sleeps, it is not started again before `wake`, because a start needs memory
        of the device.
        """
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
        """Send a request to all healthy generators, and return the answers of those that did not die.

        Repeats until at least one generator has answered.
        """
        while True:
            healthy = await self._until_healthy()
            clients = [self.replicas[place].client for place in healthy]
            results = await asyncio.gather(*(ask(client) for client in clients), return_exceptions=True)
            answers: list[T] = []
            for place, client, result in zip(healthy, clients, results, strict=True):
                if isinstance(result, BaseException):
                    self._lose_or_raise(self.replicas[place], client, result)
                else:
                    answers.append(result)
            if answers:
                return answers

    def _lose_or_raise(self, replica: Replica, client: OneGenerator, error: BaseException) -> None:
        """Mark the generator as dead if the error says that the generator has died. Otherwise raises the error."""
        if self._closed or not is_death(client, error):
            raise error
        assert isinstance(error, ActorDiedError)
        replica.lose(client, error)

    def _healthy(self) -> list[int]:
        return [place for place, replica in enumerate(self.replicas) if replica.state == "healthy"]

    async def _until_healthy(self) -> list[int]:
        """The places of the healthy generators.

        Waits until a generator is healthy. If all are retired, raises the error of `_end_cause`.
        """
        await self._until(lambda: bool(self._healthy()) or self._end_cause() is not None)
        if not self._healthy() and (cause := self._end_cause()) is not None:
            raise cause
        return self._healthy()

    def _end_cause(self) -> Exception | None:
        """If all generators are retired, the error that ended the first generator of the list, otherwise None."""
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
            self.tell(line)
        self._notify()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def is_death(client: OneGenerator, error: BaseException) -> bool:
    """True if the error says that the generator has died, and if the fleet spawned this generator and so can replace
    it.
    """
    return client.is_owned and isinstance(error, ActorDiedError)


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all awaitables, in the order of `work`.

    If some fail, waits until all have ended and raises the first error.
    """
    # `gather` starts a task for every awaitable. A single awaitable goes through `gather`, too. If it were awaited
    # directly, it could overtake an earlier call whose task has not started. So calls reach the generators in the order
    # in which they were made.
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
