"""Samples of many versions of the weights from one generator, which holds one version at a time.

Requests for the version that the generator holds run together. Requests for another version wait until those have ended. Then the
generator pulls the other version. Knows no HTTP.
"""

import asyncio
import contextlib
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
"""Seconds that requests for another version wait while new ones for the held version still start."""
GATHER_SECONDS = 0.003
"""Requests are gathered into one call of the generator until none has come for so long."""
LONGEST_GATHER_SECONDS = 0.06
"""Longest time for which requests are gathered into one call."""


class Generator(Protocol):
    """The calls of GeneratorClient that a server makes. tests/fakes.py has one without a model."""

    def ready(self) -> Awaitable[None]: ...
    def generate_each(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> AsyncIterator[tuple[int, list[Completion]]]: ...
    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> Awaitable[list[Tensor]]: ...
    def pull_model_state_dict(self, version: int) -> Awaitable[int]: ...
    def close(self) -> Awaitable[None]: ...


@dataclass(slots=True)
class _Waiter:
    since: float
    admitted: asyncio.Future[None]


class VersionedGenerator:
    """A generator and the version that it holds."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.version: int | None = None  # None before the first pull, and after one that failed
        self.num_running = 0
        self.num_switches = 0
        # Version -> its requests. The versions are in the order in which they were asked for.
        self._waiting: OrderedDict[int, list[_Waiter]] = OrderedDict()
        self._switching: asyncio.Task[None] | None = None
        self._completions: _Gatherer[SamplingParams, list[int], list[Completion]] = _Gatherer(self._generate)
        self._logprobs: _Gatherer[None, list[int], Tensor] = _Gatherer(self._score)

    @property
    def num_waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiting.values())

    @contextlib.asynccontextmanager
    async def holding(self, version: int) -> AsyncIterator[None]:
        """The generator holds this version in the `with` block. Raises the error of the pull if it fails."""
        if self._may_start(version):
            self.num_running += 1
        else:
            waiter = _Waiter(time.monotonic(), asyncio.get_running_loop().create_future())
            self._waiting.setdefault(version, []).append(waiter)
            self._switch_if_idle()
            await waiter.admitted  # `_switch` admits it, and counts it in num_running
        try:
            yield
        finally:
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
        """Pull the version that was asked for first, and admit its requests."""
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

    async def sample(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        """params.n completions of the prompt. Must be called inside `holding`. Calls with equal parameters and no seed share a call of the generator."""
        if params.seed is None:
            return await self._completions.add(params, prompt)
        async for _, completions in self._generate(params, [prompt]):
            return completions
        raise RuntimeError("the generator ended the call without completions")

    async def score(self, sequence: list[int]) -> Tensor:
        """Log probability of every token after the first: [N - 1] for a sequence of N tokens. Must be called inside `holding`."""
        return await self._logprobs.add(None, sequence)

    def _generate(
        self, params: SamplingParams, prompts: list[list[int]]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        return self.generator.generate_each(prompts, params)

    async def _score(self, _: None, sequences: list[list[int]]) -> AsyncIterator[tuple[int, Tensor]]:
        for pair in enumerate(await self.generator.compute_logprobs(sequences)):
            yield pair


@dataclass(slots=True)
class _Batch(Generic[Item, Result]):
    closes: float  # time of the loop at which the batch begins at the latest
    items: list[Item] = field(default_factory=list)
    results: list[asyncio.Future[Result]] = field(default_factory=list)
    beginning: asyncio.TimerHandle | None = None


class _Gatherer(Generic[Key, Item, Result]):
    """Gathers items that come at nearly the same time under one key into one call."""

    def __init__(self, call: Callable[[Key, list[Item]], AsyncIterator[tuple[int, Result]]]) -> None:
        """call: gives (index of an item, its result) in any order."""
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
