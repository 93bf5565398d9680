"""Trainer and generator share the memory of the same GPUs, one after the other.

While the trainer works, vLLM sleeps without weights and KV cache; while the generator works, the
offloaded parts are in host memory. A critic there works before the policy in the trainer's turn.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

from controllers.observe.logger import Timer
from controllers.observe.run_folder import Record
from rl_actors import GeneratorClient, TrainerClient, TrainerInfo
from rl_actors.parts import PARTS, HostMove, Part, of_all_ranks, require_parts

T = TypeVar("T")
U = TypeVar("U")


@dataclass(kw_only=True)
class ColocationConfig:
    enabled: bool = False
    """Trainer and generator (and a critic) share GPUs in turns. Needs rollouts.max_staleness=0."""
    offload: tuple[Part, ...] = ("optimizer",)
    """Optimizer, weights, gradients: offloaded to pinned host memory while the generator works."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.offload if self.enabled else ()

    def validate(self, *, has_generator: bool, trainer: range, generator: range) -> None:
        """trainer, generator: the indices of their GPUs."""
        require_parts("colocation.offload", self.offload)
        if self.enabled and not has_generator:
            raise ValueError("colocation.enabled=True, but this run has no generator")
        if self.enabled and not overlap(trainer, generator):
            raise ValueError(
                f"colocation.enabled=True, but trainer and generator share no GPU, so both can keep their memory: "
                f"generator.gpu={generator.start} gives the GPUs {[*generator]}, and trainer.gpu={trainer.start} the GPUs {[*trainer]}"
            )


def overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


class Colocation:
    """What a loop calls when the work passes to another actor. Here all may work at the same time."""

    async def to_trainer(self) -> None:
        """Before the trainer works: a colocated generator goes to sleep."""

    async def trained(self) -> None:
        """After the optimizer steps. A push or more training may follow."""

    async def to_generator(self) -> None:
        """Before the generator works. It may have lost its weights, so a pull must follow."""

    def join(self, critic: TrainerClient) -> None:
        """The critic shares these GPUs from now on."""

    async def run_both(
        self, of_critic: Coroutine[object, None, T], of_trainer: Coroutine[object, None, U]
    ) -> tuple[T, U]:
        """Run both calls: at the same time, or the critic's first if it is colocated."""
        first, second = await asyncio.gather(of_critic, of_trainer)
        return first, second

    def borrowed(self) -> AbstractAsyncContextManager[None]:
        """The trainer may work in this context during the generator's turn."""
        return contextlib.nullcontext()

    def metrics(self, infos: Sequence[TrainerInfo]) -> Record:
        """Memory that generator and trainer freed and took back since the last call."""
        return {}


class Colocated(Colocation):
    """One after the other; the generator has the first turn."""

    def __init__(
        self, config: ColocationConfig, trainer: TrainerClient, generator: GeneratorClient, timer: Timer
    ) -> None:
        self.trainer = trainer
        self.generator = generator
        self.timer = timer
        self.parts = config.parts
        # level 2 drops the weights, which the next pull brings, unless it brings an adapter
        assert generator.config is not None
        self.level: Literal[1, 2] = 1 if generator.config.lora.syncs_adapter else 2
        self.critic: TrainerClient | None = None  # the critic that shares the GPUs
        self.is_trainers = False
        self.generator_bytes = {"sleep": 0, "wake": 0}  # since the last record
        # the trainer's totals at the last record
        self.trainer_moves = {"offload": HostMove(), "onload": HostMove()}

    async def to_trainer(self) -> None:
        if not self.is_trainers:
            with self.timer("sleep"):
                memory = await self.generator.sleep(self.level)
            self.generator_bytes["sleep"] += memory.num_bytes
            self.is_trainers = True

    async def trained(self) -> None:
        # at once, because another forward_backward may need the memory; a push needs the weights
        with self.timer("release"):
            await self.trainer.offload([part for part in self.parts if part != "weights"])

    async def to_generator(self) -> None:
        if self.is_trainers:
            with self.timer("wake"):
                await self._release_critic()
                await self.trainer.offload(self.parts)
                memory = await self.generator.wake()
            self.generator_bytes["wake"] += memory.num_bytes
            self.is_trainers = False

    def join(self, critic: TrainerClient) -> None:
        self.critic = critic

    async def run_both(
        self, of_critic: Coroutine[object, None, T], of_trainer: Coroutine[object, None, U]
    ) -> tuple[T, U]:
        if self.critic is None:  # the critic has GPUs of its own, so it takes no turns
            return await super().run_both(of_critic, of_trainer)
        try:
            first = await of_critic
            with self.timer("release"):
                await self._release_critic()
        except BaseException:
            of_trainer.close()
            raise
        return first, await of_trainer

    async def _release_critic(self) -> None:
        if self.critic is not None:
            await self.critic.offload(PARTS)

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        if self.is_trainers:
            yield
            return
        version = (await self.generator.info()).policy_version
        await self.to_trainer()
        yield
        await self.to_generator()
        if version >= 0:  # the version that the generator had, which the trainer still offers
            with self.timer("sync"):
                await self.generator.pull_model_state_dict(version)

    def metrics(self, infos: Sequence[TrainerInfo]) -> Record:
        values: Record = {f"{name}/gigabytes": count / 1e9 for name, count in self.generator_bytes.items()}
        self.generator_bytes = {"sleep": 0, "wake": 0}
        totals = {
            "offload": of_all_ranks(info.offloaded for info in infos),
            "onload": of_all_ranks(info.onloaded for info in infos),
        }
        for name, total in totals.items():
            move = total.since(self.trainer_moves[name])
            values[f"{name}/gigabytes"] = move.num_bytes / 1e9
            values[f"time/{name}"] = move.seconds
        self.trainer_moves = totals
        return values
