"""`Fleet`, the generators of a GeneratorClient: it divides calls among them, sends the open prompts
of a dead one to the others, and gives all the same weights.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.call import Call
from rl_actors.clients.completions import GenerateCall
from rl_actors.clients.one_generator import OneGenerator
from rl_actors.clients.replicas import IF_DEAD, Replica
from rl_actors.config import RestartPolicy
from rl_actors.types import DeviceMemory, GeneratorInfo, GeneratorReturn, SamplingParams, Transfer

FIRST_PULL_TIMEOUT = 60.0  # seconds that a generator's first pull waits for the version to be published
REFIT_TIMEOUT = 5.0  # seconds that a later pull of `refit` waits; a generator has mostly pulled the version before
REFIT_PAUSE = 0.5  # seconds between two tries of `refit`

MAX_KNOWN = 16_384  # prompts whose replica the router remembers
FULL = 64  # requests that an engine of a GPU gets before the GPU's next: fewer run faster in one engine
SLACK = 4  # the replica with the prefix may have SLACK * n requests more than the least loaded; n: completions
# constants of a rolling hash
MULTIPLIER = 6_364_136_223_846_793_005
MASK = (1 << 64) - 1

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Router:
    """Chooses the replica for a prompt: the one with its prefix in the KV cache, or the least loaded."""

    def __init__(self, num_replicas: int, engines_per_gpu: int = 1) -> None:
        self.loads = [0] * num_replicas  # n for a prompt with n completions
        self._per_gpu = engines_per_gpu
        self._known: OrderedDict[int, int] = OrderedDict()  # hash of a prompt -> the replica that got it

    def assign(self, prompt: Sequence[int], n: int, among: Sequence[int]) -> int:
        """Choose the replica for a prompt, and add n to its load. among: the healthy replicas."""
        if len(self.loads) == 1:
            self.loads[0] += n
            return 0
        hashed, known = self._find(prompt)
        replica = self._next(n, among)
        if known is not None and known in among and self.loads[known] - self.loads[replica] <= SLACK * n:
            replica = known
        self._known[hashed] = replica
        self._known.move_to_end(hashed)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        self.loads[replica] += n
        return replica

    def _next(self, n: int, among: Sequence[int]) -> int:
        """On the least loaded GPU: the fullest engine with room for n up to FULL, else the least loaded one."""
        size = self._per_gpu
        gpus = {index // size for index in among}
        gpu = min(gpus, key=lambda gpu: sum(self.loads[gpu * size : (gpu + 1) * size]))
        engines = [index for index in among if index // size == gpu]
        with_room = [index for index in engines if self.loads[index] + n <= FULL]
        return max(with_room, key=self.loads.__getitem__) if with_room else min(engines, key=self.loads.__getitem__)

    def finish(self, replica: int, num_requests: int) -> None:
        self.loads[replica] -= num_requests

    def forget(self) -> None:
        """Forget all prompts: after a pull the caches are useless, after a death one is lost."""
        self._known.clear()

    def _find(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        """The hash of a prompt, and the replica of its longest prefix that was a prompt itself."""
        hashed = 0
        replica = None
        for token in prompt:
            hashed = (hashed * MULTIPLIER + token + 1) & MASK
            replica = self._known.get(hashed, replica)
        return hashed, replica


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
        name: str = "generator",
        engines_per_gpu: int = 1,
        first_version: Call[int] | None = None,
        setup_timeout: float,
        on_event: Callable[[str], None],
    ) -> None:
        """spawns: the name of each generator, and the function that spawns it.
        first_version, on_event: see GeneratorClient.spawn and on_news.
        """
        self.name = name
        self.setup_timeout = setup_timeout
        self.on_event = on_event
        # the version that every generator has or must pull; set back if a pull fails everywhere
        self.target_version: int | None = None
        self.last_pull: Transfer | None = None
        self.returns: list[GeneratorReturn] = []
        self._first_version = first_version
        self._router = Router(len(spawns), engines_per_gpu)
        self._num_changes = 0  # number of calls of `pull` and `load_adapter` that have begun
        self._adapters: dict[str, str] = {}  # name -> directory
        self._uses: Counter[str | None] = Counter()  # name of an adapter -> number of calls that run with it
        self._change = asyncio.Event()  # `_notify` sets it at each change of a state, and replaces it
        self.awake = asyncio.Event()  # not set while the generators sleep; then no dead generator is restarted
        self.awake.set()
        self._lives: list[asyncio.Task[None]] = []  # for each replica the task that runs Replica.live
        self.is_closed = False
        self.replicas = [Replica(name, spawn, policy, self) for name, spawn in spawns.items()]

    @property
    def num_restarts(self) -> int:
        return sum(replica.restarts.total for replica in self.replicas)

    async def start(self) -> GeneratorInfo:
        """Wait until all have been healthy once. Returns the first's info, or raises an error."""
        self._lives = [asyncio.ensure_future(replica.live()) for replica in self.replicas]
        if (failure := await self._start_failure()) is not None:
            raise failure
        # `known` is None if the first generator has died meanwhile.
        known = self.replicas[0].client.known or await self.info()
        return known if self.target_version is None else replace(known, policy_version=self.target_version)

    async def _start_failure(self) -> Exception | None:
        """Wait until all have been healthy once, or have failed. Returns the first's error."""
        await self._until(lambda: all(replica.was_ready or replica.cause for replica in self.replicas))
        return next((replica.cause for replica in self.replicas if not replica.was_ready), None)

    def state(self) -> str:
        if (cause := self._end_cause()) is not None:
            return f"dead, {cause}; {IF_DEAD}"
        unhealthy = [f"{replica.name} is {replica.state}" for replica in self.replicas if replica.state != "healthy"]
        return ", ".join(unhealthy) or "ready"

    def require_open(self, what: str) -> None:
        if self.is_closed:
            raise RuntimeError(f"{self.name}: {what} is not possible after close")

    def seconds_silent(self) -> dict[str, float]:
        silences = [replica.client.seconds_silent() for replica in self.replicas]
        return {name: seconds for silence in silences for name, seconds in silence.items()}

    async def is_alive(self, timeout: float) -> bool:
        if self.is_closed or any(replica.state != "healthy" for replica in self.replicas):
            return False
        return all(await asyncio.gather(*(replica.client.is_alive(timeout) for replica in self.replicas)))

    async def death(self, silent_after: float) -> ActorDiedError | ActorSilentError | None:
        """Wait until all generators are retired. Returns the error that ended the first.

        None if the start has failed, if the fleet was closed, or for an error of another type.
        """
        self.expect_signs(silent_after)
        try:
            if await self._start_failure() is not None:
                return None
            await self._until(lambda: self._end_cause() is not None)
        except RuntimeError:  # the fleet was closed
            return None
        cause = self._end_cause()
        return cause if isinstance(cause, ActorDiedError | ActorSilentError) else None

    def expect_signs(self, silent_after: float) -> None:
        for replica in self.replicas:
            replica.expect_signs(silent_after)

    async def close(self) -> None:
        await self._stop_lives()
        await asyncio.gather(*(replica.client.close() for replica in self.replicas))

    async def kill(self) -> None:
        await self._stop_lives()
        await asyncio.gather(*(replica.client.kill() for replica in self.replicas))

    async def _stop_lives(self) -> None:
        self.is_closed = True
        self._notify()
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    async def info(self) -> GeneratorInfo:
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
        self._uses[adapter] += 1
        try:
            await self._divide(prompts, indices, params.n, partial(self._start_part, call))
        except BaseException:
            await call.abort()
            raise
        return call

    def _end_use(self, adapter: str | None) -> None:
        self._uses[adapter] -= 1
        self._notify()

    async def _start_part(self, call: GenerateCall, replica_index: int, indices: list[int]) -> list[int]:
        """`send` of `_divide`."""
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
                await self._divide(call.prompts, left, n, partial(self._start_part, call))
        except Exception as error:
            call.fail(error)

    async def compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        logprobs: dict[int, Tensor] = {}

        async def compute(replica_index: int, indices: list[int]) -> list[int]:
            replica = self.replicas[replica_index]
            client = replica.client
            try:
                answers = await client.compute_logprobs([sequences[index] for index in indices], adapter)
            except Exception as error:
                self._lose_or_raise(replica, client, error)
                return indices
            finally:
                self._router.finish(replica_index, len(indices))
            logprobs.update(zip(indices, answers, strict=True))
            return []

        self._uses[adapter] += 1
        try:
            await self._divide(sequences, list(range(len(sequences))), 1, compute)
        finally:
            self._end_use(adapter)
        return [logprobs[index] for index in range(len(sequences))]

    async def _divide(
        self,
        prompts: Sequence[Sequence[int]],
        indices: list[int],
        n: int,
        send: Callable[[int, list[int]], Awaitable[list[int]]],
    ) -> None:
        """Divide the prompts with these indices among the healthy generators.

        send: given the index of a generator and the indices of its prompts; returns them if the
        generator has died, so that others get them, otherwise [].
        """
        while indices:
            healthy = await self._until_healthy()
            parts: dict[int, list[int]] = {}
            for index in indices:
                parts.setdefault(self._router.assign(prompts[index], n, healthy), []).append(index)
            sending = [send(replica_index, part) for replica_index, part in parts.items()]
            indices = []
            # all end before the first error is raised; a single one gets a task, too: else it could
            # overtake an earlier call whose task has not started
            for lost in await asyncio.gather(*sending, return_exceptions=True):
                if isinstance(lost, BaseException):
                    raise lost
                indices += lost
            indices.sort()

    async def pull(self, version: int, timeout: float, in_flight: bool) -> None:
        """Let all healthy generators pull the version; others pull it before they become healthy.

        If some pulls fail, their generators are stale until theirs succeeds. If all fail, raises
        the first error and keeps the former version. Deaths do not count; if all die, waits until
        one is healthy again.
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
        """Load an adapter into all healthy generators, or none; others load it before they are healthy."""
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

    async def refit(self, replica: Replica) -> None:
        """Pull the target version into a generator, and load the adapters: once, or if it has been
        healthy for up to setup_timeout seconds. Raises the error of the last try.
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
                # if the trainer has died, too, the version is lost, and the fleet soon pulls another
                wanted = f"version {self.target_version} and its adapters"
                logger.info("%s could not load %s, and tries again: %r", replica.name, wanted, error)
                await asyncio.sleep(REFIT_PAUSE)
                continue
            if number == self._num_changes:  # otherwise a pull or the load of an adapter has begun meanwhile, so repeat
                return

    async def _load_adapters(self, replica: Replica) -> None:
        for name, directory in list(self._adapters.items()):
            try:
                await replica.client.load_adapter(name, directory)
            except ValueError as error:
                # only requests with this adapter fail here
                logger.warning("%s cannot load the adapter %r again: %s", replica.name, name, error)

    async def sleep(self, level: int) -> DeviceMemory:
        """Put the healthy generators to sleep, when none is starting. Dead ones are started again
        after `wake`, because a start needs memory of the device."""
        await self._until(lambda: all(replica.state in ("healthy", "dead", "retired") for replica in self.replicas))
        self.awake.clear()
        try:
            return _of_all(await self._ask_all(lambda client: client.sleep(level)))
        except BaseException:
            self.awake.set()
            raise

    async def wake(self) -> DeviceMemory:
        self.awake.set()
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
        if self.is_closed or not is_death(client, error):
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
            if self.is_closed:
                raise RuntimeError("the generator was closed")
            await self._change.wait()

    def on_change(self, replica: Replica, line: str) -> None:
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


def _of_all(answers: Sequence[DeviceMemory]) -> DeviceMemory:
    """The bytes of all generators together, and the seconds of the slowest generator."""
    return DeviceMemory(
        num_bytes=sum(answer.num_bytes for answer in answers), seconds=max(answer.seconds for answer in answers)
    )
