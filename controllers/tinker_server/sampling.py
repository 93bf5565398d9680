"""Sample from many versions of the weights with one generator. This module contains no HTTP.

A version is either whole weights, or a LoRA adapter over the weights of the base model. The generator holds one version of whole weights at a
time. Requests for the held weights, and requests for adapters over them, run at the same time. Requests for other whole weights wait until the
running requests have ended and the generator has pulled those other weights.
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
"""New requests for the version that the generator holds start at once, until a request for another version has waited this number of
seconds. From then on new requests for the held version wait, too. When all running requests have ended, the generator pulls the other version."""
GATHER_SECONDS = 0.003
"""Requests are gathered into one call of the generator until no further request has come for this number of seconds."""
LONGEST_GATHER_SECONDS = 0.06
"""Largest number of seconds for which requests are gathered into one call."""
LOADED_ADAPTERS = 64
"""Largest number of loaded adapters. If more adapters are in use, all adapters in use stay loaded. There is a limit, because a restarted
generator loads all these adapters before its first request."""


class Generator(Protocol):
    """The calls of GeneratorClient that a server makes. tests/fakes.py has a generator without a model."""

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
    """A request that waits until the generator holds the request's version."""

    since: float  # time.monotonic() when the wait began
    # `_switch` counts the request in num_running and sets the result, or sets an exception if the pull failed.
    admitted: asyncio.Future[None]

    @property
    def is_counted(self) -> bool:
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None


@dataclass(slots=True)
class _Adapter:
    """The adapter of one version, and the number of requests that use the adapter."""

    name: str  # the adapter's name in the generator
    directory: str
    num_users: int = 0
    loading: asyncio.Future[None] | None = None  # None before the first request, and after a load that failed
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # set when no request uses the adapter any more


class VersionedGenerator:
    """A generator, the version that it holds, and the adapters that it has loaded."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.version: int | None = None  # None before the first pull, and after a failed pull
        # Version -> its adapter. The least recently used adapter is the first.
        self._adapters: OrderedDict[int, _Adapter] = OrderedDict()
        self._names = itertools.count()
        self._unloads: set[asyncio.Future[None]] = set()  # the calls of _unload that have not ended
        self.num_running = 0
        self.num_switches = 0
        # Version -> the requests that wait for it. The versions are in the order of their first waiting request.
        self._waiting: OrderedDict[int, list[_Waiter]] = OrderedDict()
        self._switching: asyncio.Task[None] | None = None
        # All requests in one call of the generator have the same adapter, or all have none. In a call for completions all requests also have
        # equal SamplingParams.
        self.completions: _Gatherer[tuple[str | None, SamplingParams], list[int], list[Completion]] = _Gatherer(
            self._generate_batch
        )
        self.logprobs: _Gatherer[str | None, list[int], Tensor] = _Gatherer(self._score_batch)

    @property
    def num_waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiting.values())

    @property
    def num_adapters(self) -> int:
        """Number of adapters that are loaded or being loaded."""
        return sum(adapter.loading is not None for adapter in self._adapters.values())

    @contextlib.asynccontextmanager
    async def using(self, version: int) -> "AsyncIterator[Weights]":
        """The whole weights of a version. The generator holds them in the `with` block. Raises RuntimeError if they cannot be pulled."""
        async with self._holding(version):
            yield Weights(self, None)

    @contextlib.asynccontextmanager
    async def using_adapter(self, version: int, directory: str, *, base: int) -> "AsyncIterator[Weights]":
        """The adapter of `version`, over the whole weights of version `base`. directory: the folder with the adapter's files.

        In the `with` block the generator holds the adapter and the weights. Raises RuntimeError if the adapter cannot be loaded, or if the
        weights cannot be pulled.
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
        await asyncio.shield(adapter.loading)  # shielded, because other requests may wait for the same load

    async def _load_now(self, version: int, adapter: _Adapter) -> None:
        try:
            await self.generator.load_adapter(adapter.name, adapter.directory)
        except Exception as error:
            adapter.loading = None
            raise RuntimeError(f"the adapter of version {version} cannot be loaded: {error}") from error

    async def unload(self, version: int) -> None:
        """Wait until the requests for this version have ended, and unload its adapter. Does nothing if its adapter is not loaded.

        After the call of `unload` no new request for the version may come.
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
        """Unload the least recently used adapters until at most LOADED_ADAPTERS are left. An adapter in use is not unloaded.

        A later request loads an unloaded adapter again, under another name.
        """
        idle = [version for version, adapter in self._adapters.items() if not adapter.num_users]
        for version in idle[: max(0, len(self._adapters) - LOADED_ADAPTERS)]:
            unload = asyncio.ensure_future(self._unload(self._adapters.pop(version)))
            self._unloads.add(unload)
            unload.add_done_callback(self._unloads.discard)

    @contextlib.asynccontextmanager
    async def _holding(self, version: int) -> AsyncIterator[None]:
        """Context manager. In its body the generator holds the whole weights of this version. Raises RuntimeError if the pull fails."""
        waiter = None
        if self._may_start(version):
            self.num_running += 1
        else:
            waiter = _Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
            self._waiting.setdefault(version, []).append(waiter)
            self._switch_if_idle()
        try:
            if waiter is not None:
                await waiter.admitted  # the request may be cancelled here, also after it was counted
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
        """Pull the version of the request that has waited longest, and let the requests for this version start.

        If the generator holds this version already, nothing is pulled. If the pull fails, the requests for this version fail.
        """
        version = next(iter(self._waiting))
        error: Exception | None = None
        try:
            if version != self.version:
                self.version = None
                await self.generator.pull_model_state_dict(version)
                self.version, self.num_switches = version, self.num_switches + 1
        except Exception as failure:
            logger.exception("the pull of version %d failed", version)
            error = failure
        self._switching = None
        for waiter in self._waiting.pop(version, []):
            if waiter.admitted.done():  # its request was cancelled
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
    """The weights that a request uses. The generator holds them while the `with` block of `using` or `using_adapter` runs."""

    versions: VersionedGenerator
    adapter: str | None  # the adapter's name in the generator; None: whole weights

    async def sample(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        """params.n completions of the prompt.

        Requests without a seed share a call of the generator if they come at nearly the same time, and have the same weights and equal `params`.
        A request with a seed gets a call of its own, because the seed of a completion depends on the prompt's index in the call.
        """
        if params.seed is None:
            return await self.versions.completions.add((self.adapter, params), prompt)
        async for _, completions in self.versions.generator.generate_each([prompt], params, adapter=self.adapter):
            return completions
        raise RuntimeError("the generator ended the call without completions")

    async def score(self, sequence: list[int]) -> Tensor:
        """Logprobs of all tokens after the first: [N - 1] for a sequence of N tokens."""
        return await self.versions.logprobs.add(self.adapter, sequence)


@dataclass(slots=True)
class _Batch(Generic[Item, Result]):
    closes: float  # latest time on the loop's clock at which the call for the batch begins
    items: list[Item] = field(default_factory=list)
    results: list[asyncio.Future[Result]] = field(default_factory=list)
    beginning: asyncio.TimerHandle | None = None  # the timer that begins the call


class _Gatherer(Generic[Key, Item, Result]):
    """Gathers items that are added under the same key at nearly the same time, and makes one call for all these items."""

    def __init__(self, call: Callable[[Key, list[Item]], AsyncIterator[tuple[int, Result]]]) -> None:
        """call: takes a key and a list of items, and yields pairs (index of an item, result of this item) in any order."""
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
