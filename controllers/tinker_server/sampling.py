"""Samples from many versions of the weights with one generator. Contains no HTTP.

A version is whole weights, or an adapter over the base weights. Requests for the held weights and
adapters over them run at the same time; others wait until those have ended and the generator has
pulled.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from rl_actors import SamplingParams
from rl_actors.types import Completion

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

PATIENCE = 1.0
"""Seconds that a request for another version waits before new requests for the held version wait
behind it.
"""
GATHER_SECONDS = 0.003
"""Requests are gathered into one call until none has come for this long."""
LONGEST_GATHER_SECONDS = 0.06
"""Longest gathering of one call."""
LOADED_ADAPTERS = 64
"""Most loaded adapters not in use, because a restarted generator loads all of them before its first
request.
"""


class Generator(Protocol):
    """The calls of GeneratorClient that a server makes. tests/fakes.py has a fake."""

    def ready(self) -> Awaitable[None]: ...
    def generate_each(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, adapter: str | None = None
    ) -> AsyncIterator[tuple[int, list[Completion]]]: ...
    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> Awaitable[list[Tensor]]: ...
    def pull_model_state_dict(self, version: int) -> Awaitable[int]: ...
    def load_adapter(self, name: str, directory: str) -> Awaitable[None]: ...
    def unload_adapter(self, name: str) -> Awaitable[None]: ...
    def close(self) -> Awaitable[None]: ...


@dataclass(slots=True)
class _Waiter:
    """A request that waits for its version."""

    since: float  # time.monotonic()
    # set by `_switch`, which counts the request in num_running, or fails it if the pull failed
    admitted: asyncio.Future[None]

    @property
    def is_counted(self) -> bool:
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None


@dataclass(slots=True)
class _Adapter:
    name: str  # in the generator
    directory: str
    num_users: int = 0
    loading: asyncio.Future[None] | None = None  # None before the first request, and after a failed load
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request uses it


class VersionedGenerator:
    """A generator, the version that it holds, and the adapters that it has loaded."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.version: int | None = None  # None before the first pull, and after a failed one
        # by version, least recently used first
        self._adapters: OrderedDict[int, _Adapter] = OrderedDict()
        self._names = itertools.count()
        self._unloads: set[asyncio.Future[None]] = set()  # calls of _unload under way
        self.num_running = 0
        self.num_switches = 0
        # by version, in the order of the first waiting request
        self._waiting: OrderedDict[int, list[_Waiter]] = OrderedDict()
        self._switching: asyncio.Task[None] | None = None
        # one call has one adapter, and for completions equal SamplingParams
        self.completions: _Gatherer[tuple[str | None, SamplingParams], list[int], list[Completion]] = _Gatherer(
            self._generate_batch
        )
        self.logprobs: _Gatherer[str | None, list[int], Tensor] = _Gatherer(self._score_batch)

    @property
    def num_waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiting.values())

    @property
    def num_adapters(self) -> int:
        """Loaded or being loaded."""
        return sum(adapter.loading is not None for adapter in self._adapters.values())

    @contextlib.asynccontextmanager
    async def using(self, version: int) -> "AsyncIterator[Weights]":
        """Hold the whole weights of a version. Raises RuntimeError if they cannot be pulled."""
        async with self._holding(version):
            yield Weights(self, None)

    @contextlib.asynccontextmanager
    async def using_adapter(self, version: int, directory: str, *, base: int) -> "AsyncIterator[Weights]":
        """Hold the adapter of `version` (files in `directory`) over the whole weights of version
        `base`.

        Raises RuntimeError if adapter or weights cannot be loaded.
        """
        if version not in self._adapters:
            self._adapters[version] = _Adapter(f"version {version}, {next(self._names)}", directory)
        adapter = self._adapters[version]
        self._adapters.move_to_end(version)
        adapter.num_users += 1
        adapter.unused.clear()
        try:
            async with self._holding(base):
                await self._load(version, adapter)
                yield Weights(self, adapter.name)
        finally:
            adapter.num_users -= 1
            if not adapter.num_users:
                adapter.unused.set()
            self._unload_oldest()

    async def _load(self, version: int, adapter: _Adapter) -> None:
        if adapter.loading is None:
            adapter.loading = asyncio.ensure_future(self._load_now(version, adapter))
        await asyncio.shield(adapter.loading)  # others may wait for the same load

    async def _load_now(self, version: int, adapter: _Adapter) -> None:
        try:
            await self.generator.load_adapter(adapter.name, adapter.directory)
        except Exception as error:
            adapter.loading = None
            raise RuntimeError(f"the adapter of version {version} cannot be loaded: {error}") from error

    async def unload(self, version: int) -> None:
        """Wait for this version's requests, and unload its adapter, if loaded. No new request for
        it may come.
        """
        adapter = self._adapters.pop(version, None)
        if adapter is not None:
            await self._unload(adapter)

    async def _unload(self, adapter: _Adapter) -> None:
        while adapter.num_users:
            await adapter.unused.wait()
        if adapter.loading is None:
            return
        try:
            await self.generator.unload_adapter(adapter.name)
        except Exception:
            logger.exception("the adapter %r was not unloaded", adapter.name)

    def _unload_oldest(self) -> None:
        """Unload the least recently used idle adapters above LOADED_ADAPTERS. A later request loads
        again, under another name.
        """
        idle = [version for version, adapter in self._adapters.items() if not adapter.num_users]
        for version in idle[: max(0, len(self._adapters) - LOADED_ADAPTERS)]:
            unload = asyncio.ensure_future(self._unload(self._adapters.pop(version)))
            self._unloads.add(unload)
            unload.add_done_callback(self._unloads.discard)

    @contextlib.asynccontextmanager
    async def _holding(self, version: int) -> AsyncIterator[None]:
        """Hold the whole weights of this version. Raises RuntimeError if the pull fails."""
        waiter = None
        if self._may_start(version):
            self.num_running += 1
        else:
            waiter = _Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
            self._waiting.setdefault(version, []).append(waiter)
            self._switch_if_idle()
        try:
            if waiter is not None:
                await waiter.admitted  # may be cancelled here, also after it was counted
            yield
        finally:
            if waiter is None or waiter.is_counted:
                self.num_running -= 1
            self._switch_if_idle()

    def _may_start(self, version: int) -> bool:
        if version != self.version or self._switching is not None:
            return False
        others = [waiters[0].since for waiters in self._waiting.values()]
        return not others or time.monotonic() - min(others) < PATIENCE

    def _switch_if_idle(self) -> None:
        if self.num_running == 0 and self._waiting and self._switching is None:
            self._switching = asyncio.create_task(self._switch())

    async def _switch(self) -> None:
        """Pull the version that has been waited for longest, unless held, and start its requests,
        or fail them.
        """
        version = next(iter(self._waiting))
        error: Exception | None = None
        try:
            if version != self.version:
                self.version = None
                await self.generator.pull_model_state_dict(version)
                self.version = version
                self.num_switches = self.num_switches + 1
        except Exception as failure:
            logger.exception("the pull of version %d failed", version)
            error = failure
        self._switching = None
        for waiter in self._waiting.pop(version, []):
            if waiter.admitted.done():  # cancelled
                continue
            if error is None:
                self.num_running += 1
                waiter.admitted.set_result(None)
            else:
                waiter.admitted.set_exception(
                    RuntimeError(f"the weights of version {version} cannot be loaded: {error}")
                )
        self._switch_if_idle()

    async def _generate_batch(
        self, key: tuple[str | None, SamplingParams], prompts: list[list[int]]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        adapter, params = key
        async for pair in self.generator.generate_each(prompts, params, adapter=adapter):
            yield pair

    async def _score_batch(self, adapter: str | None, sequences: list[list[int]]) -> AsyncIterator[tuple[int, Tensor]]:
        for pair in enumerate(await self.generator.compute_logprobs(sequences, adapter=adapter)):
            yield pair


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that `using` or `using_adapter` hold for a request."""

    versions: VersionedGenerator
    adapter: str | None  # name in the generator; None: whole weights

    async def sample(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        """params.n completions of the prompt.

        Requests without seed and with equal weights and `params` share a call. A seed needs a call
        of its own, because seeds depend on the prompt's index.
        """
        if params.seed is None:
            return await self.versions.completions.add((self.adapter, params), prompt)
        async for _, completions in self.versions.generator.generate_each([prompt], params, adapter=self.adapter):
            return completions
        raise RuntimeError("the generator ended the call without completions")

    async def score(self, sequence: list[int]) -> Tensor:
        """[N - 1]: logprobs of all tokens after the first."""
        return await self.versions.logprobs.add(self.adapter, sequence)


@dataclass(slots=True)
class _Batch(Generic[Item, Result]):
    closes: float  # latest begin of the call, on the loop's clock
    items: list[Item] = field(default_factory=list)
    results: list[asyncio.Future[Result]] = field(default_factory=list)
    beginning: asyncio.TimerHandle | None = None


class _Gatherer(Generic[Key, Item, Result]):
    """Gathers items of the same key that come at nearly the same time into one call."""

    def __init__(self, call: Callable[[Key, list[Item]], AsyncIterator[tuple[int, Result]]]) -> None:
        """call: (key, items) -> pairs (index of an item, its result) in any order."""
        self._call = call
        self._batches: dict[Key, _Batch[Item, Result]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, key: Key, item: Item) -> Result:
        loop = asyncio.get_running_loop()
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(closes=loop.time() + LONGEST_GATHER_SECONDS)
        if batch.beginning is not None:
            batch.beginning.cancel()
        batch.beginning = loop.call_at(min(loop.time() + GATHER_SECONDS, batch.closes), self._begin, key)
        result: asyncio.Future[Result] = loop.create_future()
        batch.items.append(item)
        batch.results.append(result)
        return await result

    def _begin(self, key: Key) -> None:
        task = asyncio.create_task(self._run(key, self._batches.pop(key)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: Key, batch: _Batch[Item, Result]) -> None:
        error: BaseException = RuntimeError("the generator ended the call without this result")
        try:
            async for index, answer in self._call(key, batch.items):
                if not batch.results[index].done():
                    batch.results[index].set_result(answer)
        except BaseException as failure:
            error = failure
            if not isinstance(failure, Exception):
                raise
        finally:
            for result in batch.results:
                if not result.done():
                    result.set_exception(error)
