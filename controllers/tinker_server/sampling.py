"""Samples from many versions of the weights with one generator. Contains no HTTP.

A version is whole weights, or an adapter over the base weights. Requests for the held weights and
adapters over them run together; others wait until those have ended, and for a pull.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from rl_actors import GeneratorClient, SamplingParams
from rl_actors.types import Completion

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

PATIENCE = 1.0
"""Seconds after which a request that waits goes before new ones for the held version."""
GATHER_SECONDS = 0.003
"""Requests are gathered into one call until none has come for this long."""
LONGEST_GATHER_SECONDS = 0.06
LOADED_ADAPTERS = 64
"""Most loaded adapters not in use: a restarted generator loads all before its first request."""


@dataclass(slots=True)
class _Waiter:
    """A request for a version."""

    since: float  # time.monotonic()
    admitted: asyncio.Future[None]  # fails if the pull of the version failed
    is_counted: bool = False  # in num_running


@dataclass(slots=True)
class _Adapter:
    name: str  # in the generator
    directory: str
    num_users: int = 0
    loading: asyncio.Future[None] | None = None  # None before the first request, and after a failed load
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request uses it


class VersionedGenerator:
    """A generator, the version that it holds, and the adapters that it has loaded."""

    def __init__(self, generator: GeneratorClient) -> None:
        self.generator = generator
        self.version: int | None = None  # None before the first pull, and after a failed one
        # by version, least recently used first
        self._adapters: OrderedDict[int, _Adapter] = OrderedDict()
        self._names = itertools.count()
        self._unloads: set[asyncio.Future[None]] = set()  # calls of _unload under way
        self.num_running = 0
        self.num_switches = 0
        self._waiting: dict[int, list[_Waiter]] = {}  # by version, in the order of the first waiting request
        self._switching: asyncio.Task[None] | None = None
        # one call has one adapter, and for completions equal SamplingParams
        self.completions: _Gatherer[tuple[str | None, SamplingParams], list[int], list[Completion]] = _Gatherer(
            lambda key, prompts: self.generator.generate_each(prompts, key[1], adapter=key[0])
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
        """Hold the adapter in `directory` over version `base`. Raises RuntimeError if a load fails."""
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
        """Wait for this version's requests, the last ones, and unload its adapter, if loaded."""
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
        """Unload the least recently used idle adapters. A later request loads under another name."""
        idle = [version for version, adapter in self._adapters.items() if not adapter.num_users]
        for version in idle[: max(0, len(self._adapters) - LOADED_ADAPTERS)]:
            unload = asyncio.ensure_future(self._unload(self._adapters.pop(version)))
            self._unloads.add(unload)
            unload.add_done_callback(self._unloads.discard)

    @contextlib.asynccontextmanager
    async def _holding(self, version: int) -> AsyncIterator[None]:
        """Hold the whole weights of this version. Raises RuntimeError if the pull fails."""
        waiter = _Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
        if self._may_start(version):
            self._admit(waiter)
        else:
            self._waiting.setdefault(version, []).append(waiter)
            self._switch_if_idle()
        try:
            await waiter.admitted  # may be cancelled here, also after it was counted
            yield
        finally:
            if waiter.is_counted:
                self.num_running -= 1
            self._switch_if_idle()

    def _admit(self, waiter: _Waiter) -> None:
        waiter.admitted.set_result(None)
        waiter.is_counted = True
        self.num_running += 1

    def _may_start(self, version: int) -> bool:
        if version != self.version or self._switching is not None:
            return False
        others = [waiters[0].since for waiters in self._waiting.values()]
        return not others or time.monotonic() - min(others) < PATIENCE

    def _switch_if_idle(self) -> None:
        if self.num_running == 0 and self._waiting and self._switching is None:
            self._switching = asyncio.create_task(self._switch())

    async def _switch(self) -> None:
        """Pull the version that has been waited for longest, and start or fail its requests."""
        version = next(iter(self._waiting))
        error: Exception | None = None
        try:
            if version != self.version:
                self.version = None
                await self.generator.pull_model_state_dict(version)
                self.version = version
                self.num_switches += 1
        except Exception as failure:
            logger.exception("the pull of version %d failed", version)
            error = failure
        self._switching = None
        for waiter in self._waiting.pop(version, []):
            if waiter.admitted.done():  # cancelled
                continue
            if error is None:
                self._admit(waiter)
            else:
                failed = RuntimeError(f"the weights of version {version} cannot be loaded: {error}")
                waiter.admitted.set_exception(failed)
        self._switch_if_idle()

    async def _score_batch(self, adapter: str | None, sequences: list[list[int]]) -> AsyncIterator[tuple[int, Tensor]]:
        for pair in enumerate(await self.generator.compute_logprobs(sequences, adapter=adapter)):
            yield pair


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that `using` or `using_adapter` hold for a request."""

    versions: VersionedGenerator
    adapter: str | None  # name in the generator; None: whole weights

    async def sample(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        """params.n completions of the prompt."""
        if params.seed is None:  # what a seed draws depends on the prompt's index in the call
            return await self.versions.completions.add((self.adapter, params), prompt)
        async for _, completions in self.versions.generator.generate_each([prompt], params, adapter=self.adapter):
            return completions
        raise RuntimeError("the generator ended the call without completions")

    async def score(self, sequence: list[int]) -> Tensor:
        """[N - 1]: logprobs of all tokens after the first."""
        return await self.versions.logprobs.add(self.adapter, sequence)


class _Gatherer(Generic[Key, Item, Result]):
    """Gathers items of the same key that come at nearly the same time into one call."""

    def __init__(self, call: Callable[[Key, list[Item]], AsyncIterator[tuple[int, Result]]]) -> None:
        """call: (key, items) -> pairs (index of an item, its result) in any order."""
        self._call = call
        self._batches: dict[Key, list[tuple[Item, asyncio.Future[Result]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, key: Key, item: Item) -> Result:
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if key not in self._batches:
            self._batches[key] = []
            task = asyncio.create_task(self._run(key, self._batches[key]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._batches[key].append((item, result))
        return await result

    async def _run(self, key: Key, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        latest = time.monotonic() + LONGEST_GATHER_SECONDS
        num_before = 0
        while num_before < len(batch) and time.monotonic() < latest:
            num_before = len(batch)
            await asyncio.sleep(GATHER_SECONDS)
        del self._batches[key]
        error: BaseException = RuntimeError("the generator ended the call without this result")
        try:
            async for index, answer in self._call(key, [item for item, _ in batch]):
                if not batch[index][1].done():
                    batch[index][1].set_result(answer)
        except BaseException as failure:
            error = failure
            if not isinstance(failure, Exception):
                raise
        finally:
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)
