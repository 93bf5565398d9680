"""`ReplicatedGenerator`, the client of several generators with the same weights. A caller uses it as the client of one."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rl_actors.clients.generator import GeneratorClient
from rl_actors.clients.routing import Router
from rl_actors.config import GeneratorConfig
from rl_actors.types import Completion, DeviceMemory, GeneratorInfo, SamplingParams

Groups = list[tuple[int, list[Completion]]]


@dataclass(slots=True, kw_only=True)
class Part:
    """The prompts of a call that one replica has."""

    replica: int
    call: int  # the number of the replica's call
    indices: list[int]  # of the prompts, in the whole call
    num_left: int  # prompts that have not finished
    fetching: "asyncio.Task[Groups] | None" = None


@dataclass(slots=True, kw_only=True)
class RoutedCall:
    n: int  # completions of each prompt
    parts: list[Part]
    finished: Groups = field(default_factory=list)  # not yet fetched

    def num_left(self) -> int:
        return sum(part.num_left for part in self.parts)


class ReplicatedGenerator(GeneratorClient):
    """Spawns a process for each replica. All completions of a prompt come from one replica. A seed gives the same completions from each.

    A pull goes to all replicas at the same time.
    """

    def _start(self) -> None:
        self.replicas = self._spawn_replicas()
        self._router = Router(len(self.replicas))
        self._routed: dict[int, RoutedCall] = {}
        self._numbers = itertools.count()
        super()._start()

    def _spawn_replicas(self) -> list[GeneratorClient]:
        assert self.config is not None
        replicas = []
        for index in range(self.config.replicas):
            replica = GeneratorClient(
                None,
                name=f"{self.name}-{index}",
                call_timeout=self.call_timeout,
                setup_timeout=self.setup_timeout,
                config=config_of_replica(self.config, index),
                transport=self._transport,
                first_version=self._first_version,
                logs=self._logs,
            )
            replicas.append(replica)
        return replicas

    async def _set_up(self) -> None:
        infos = await asyncio.gather(*(replica.info() for replica in self.replicas))
        versions = {info.policy_version for info in infos if info.policy_version >= 0}
        self._version = versions.pop() if len(versions) == 1 else None

    async def _is_alive(self, timeout: float) -> bool:
        return not self._closed and all(await asyncio.gather(*(one.is_alive(timeout) for one in self.replicas)))

    async def _close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _info(self) -> GeneratorInfo:
        """The info of the replica with the oldest weights. Its `replicas` has the infos of all."""
        infos = await asyncio.gather(*(replica.info() for replica in self.replicas))
        oldest = min(infos, key=lambda info: info.policy_version)
        return replace(oldest, replicas=tuple(infos))

    async def start_generate(
        self, prompts: list[list[int]], params: SamplingParams, indices: list[int] | None = None
    ) -> int:
        by_replica: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_replica.setdefault(self._router.assign(prompt, params.n), []).append(index)
        numbers = list(range(len(prompts))) if indices is None else indices
        starts = [self._start_part(replica, prompts, params, part, numbers) for replica, part in by_replica.items()]
        results = await asyncio.gather(*starts, return_exceptions=True)
        routed = RoutedCall(n=params.n, parts=[part for part in results if isinstance(part, Part)])
        number = next(self._numbers)
        self._routed[number] = routed
        for error in results:
            if isinstance(error, BaseException):
                await self.abort_generate(number)
                raise error
        return number

    async def _start_part(
        self, replica: int, prompts: list[list[int]], params: SamplingParams, indices: list[int], numbers: list[int]
    ) -> Part:
        """numbers: for each prompt of the whole call, its index in the seeds."""
        try:
            part = [prompts[index] for index in indices]
            of_part = [numbers[index] for index in indices]
            call = await self.replicas[replica].start_generate(part, params, of_part)
        except BaseException:
            self._router.finish(replica, params.n * len(indices))
            raise
        return Part(replica=replica, call=call, indices=indices, num_left=len(indices))

    async def finished_groups(self, call: int, at_least: int = 1) -> Groups:
        routed = self._routed[call]
        at_least = min(at_least, routed.num_left() + len(routed.finished))
        try:
            while len(routed.finished) < at_least:
                await self._fetch(routed, wants_all=at_least == routed.num_left() + len(routed.finished))
        except BaseException:
            await self.abort_generate(call)
            raise
        finished, routed.finished = routed.finished, []
        if routed.num_left() == 0:
            self._routed.pop(call, None)
        return finished

    async def _fetch(self, routed: RoutedCall, *, wants_all: bool) -> None:
        """Wait until one of the replicas has finished prompts. With wants_all each replica answers when it has finished all of its own."""
        for part in routed.parts:
            if part.fetching is None and part.num_left:
                fetch = self.replicas[part.replica].finished_groups(part.call, part.num_left if wants_all else 1)
                part.fetching = asyncio.ensure_future(fetch)
        fetching = [part.fetching for part in routed.parts if part.fetching is not None]
        await asyncio.wait(fetching, return_when=asyncio.FIRST_COMPLETED)
        for part in routed.parts:
            if part.fetching is not None and part.fetching.done():
                groups, part.fetching = part.fetching.result(), None
                part.num_left -= len(groups)
                self._router.finish(part.replica, routed.n * len(groups))
                routed.finished += [(part.indices[index], completions) for index, completions in groups]

    async def abort_generate(self, call: int) -> None:
        routed = self._routed.pop(call, None)
        if routed is None:
            return
        for part in routed.parts:
            self._router.finish(part.replica, routed.n * part.num_left)
            if part.fetching is not None:
                part.fetching.cancel()
        await asyncio.gather(*(self.replicas[part.replica].abort_generate(part.call) for part in routed.parts))

    async def _compute_logprobs(self, sequences: list[list[int]]) -> list[Tensor]:
        by_replica: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_replica.setdefault(self._router.assign(sequence, 1), []).append(index)
        try:
            calls = []
            for replica, indices in by_replica.items():
                calls.append(self.replicas[replica].compute_logprobs([sequences[index] for index in indices]))
            answers = await asyncio.gather(*calls)
        finally:
            for replica, indices in by_replica.items():
                self._router.finish(replica, len(indices))
        logprobs: dict[int, Tensor] = {}
        for indices, answer in zip(by_replica.values(), answers, strict=True):
            logprobs |= dict(zip(indices, answer, strict=True))
        return [logprobs[index] for index in range(len(sequences))]

    async def _sleep(self, level: int) -> DeviceMemory:
        return _of_all(await asyncio.gather(*(replica.sleep(level) for replica in self.replicas)))  # type: ignore[arg-type]

    async def _wake(self) -> DeviceMemory:
        return _of_all(await asyncio.gather(*(replica.wake() for replica in self.replicas)))

    async def _pull(self, version: int, timeout: float, in_flight: bool = True) -> int:
        """Raises the first error, with a note that says which replicas have the version and which have not."""
        pulls = [replica.pull_model_state_dict(version, timeout, in_flight=in_flight) for replica in self.replicas]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        self._router.forget()
        self._version = version if all(result == version for result in results) else None
        pulled = [replica.last_pull for replica in self.replicas if replica.last_pull is not None]
        self.last_pull = max(pulled, key=lambda pull: pull.seconds, default=None)  # the slowest
        failed = {one.name: error for one, error in zip(self.replicas, results, strict=True) if error != version}
        for error in failed.values():
            assert isinstance(error, BaseException)
            done = [one.name for one in self.replicas if one.name not in failed]
            where = f"version {version} is not in {', '.join(failed)}; it is in {', '.join(done) or 'none'}"
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{error}; {where}")  # asyncio passes timeouts on without their notes
            error.add_note(where)
            raise error
        return version


def _of_all(answers: Sequence[DeviceMemory]) -> DeviceMemory:
    return DeviceMemory(
        num_bytes=sum(answer.num_bytes for answer in answers), seconds=max(answer.seconds for answer in answers)
    )


def config_of_replica(config: GeneratorConfig, index: int) -> GeneratorConfig:
    """The config of one replica. Its GPUs follow those of the replica before it. Requests without a seed draw from a seed of the replica."""
    gpu = config.gpu
    if torch.cuda.is_available():
        gpu = (config.gpu or 0) + index * config.tensor_parallel
    return replace(config, replicas=1, gpu=gpu, seed=config.seed + index)
