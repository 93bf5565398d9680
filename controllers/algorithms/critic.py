"""The critic of a PPO run: a value model, trained on returns. T positions of a sample."""

import asyncio
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from controllers.algorithms.gae import GAEConfig, estimate, whiten
from controllers.algorithms.schedules import ScheduleConfig
from controllers.observe.logger import Timer
from controllers.run import checkpoints
from controllers.run.checkpoints import CRITIC_FOLDER
from controllers.run.config import RunConfig
from controllers.run.run import Run
from controllers.run.update import forward, update
from rl_actors import Sample, TrainerClient, ValueLoss, metrics, num_loss_tokens
from rl_actors.field_types import NaturalInt, PositiveFloat
from rl_actors.losses import explained_variance


@dataclass(kw_only=True)
class CriticConfig:
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(learning_rate=1e-5))
    """Learning rate of the critic, by step after the supervised steps. The default is verl's."""
    gpu: int | None = None
    """First GPU of the critic. None: the trainer's GPUs. No effect on a CPU."""
    clip: PositiveFloat | None = 0.5
    """Largest change of a value within a PPO step that lowers the loss. None: no limit."""
    warmup_steps: NaturalInt = 0
    """First PPO steps that train only the critic (VC-PPO, arXiv 2503.01491)."""

    def loss(self) -> ValueLoss:
        return ValueLoss(clip=self.clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSamples:
    """The samples of a step, with columns from the critic's values."""

    for_policy: list[Sample]  # all given columns, and advantages
    for_critic: list[Sample]  # loss_weights (0 or 1), returns and, if `clip` is set, old_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    trainer: TrainerClient
    config: CriticConfig
    gae: GAEConfig
    run_config: RunConfig
    timer: Timer = field(default_factory=Timer)

    def estimate_advantages(
        self,
        samples: Sequence[Sample],
        values_of_states: Sequence[Tensor],
        rewards: Sequence[Tensor],
        is_cut_off: Sequence[bool],
    ) -> AdvantageSamples:
        """Advantages and returns from rewards and values. Actions have a loss weight other than 0.

        values_of_states: from `values`. rewards: [T] by sample, read at actions only. is_cut_off:
        ended by a limit; with gae.bootstrap its last state has the critic's value, else 0.
        """
        values = [row[:-1] for row in values_of_states]
        is_action = [sample.columns["loss_weights"] != 0 for sample in samples]
        last_values = []
        for row, was_cut_off in zip(values_of_states, is_cut_off, strict=True):
            last_values.append(float(row[-1]) if was_cut_off and self.gae.bootstrap else 0.0)
        advantages, returns = estimate(values, rewards, is_action, last_values, self.gae)
        if self.gae.whiten:
            advantages = whiten(advantages, is_action)
        for_policy = []
        for_critic = []
        for sample, advantage, target, value in zip(samples, advantages, returns, values, strict=True):
            for_policy.append(replace(sample, columns={**sample.columns, "advantages": advantage.float()}))
            columns = {"loss_weights": (sample.columns["loss_weights"] != 0).float(), "returns": target.float()}
            if self.config.clip is not None:
                columns["old_values"] = value
            for_critic.append(replace(sample, columns=columns))
        return AdvantageSamples(for_policy=for_policy, for_critic=for_critic)

    async def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[T + 1] by sample: the value before each target, and after the last."""
        with_last_states = [_with_last_state(sample) for sample in samples]
        with self.timer("values"):
            outputs = await forward(self.trainer, with_last_states, self.run_config.samples_per_forward_backward)
        return [row for output in outputs for row in output.values or ()]

    async def fit(self, parts: Iterable[Sequence[Sample]], learning_rate: float) -> dict[str, float]:
        """One optimizer step on each minibatch. Returns the metrics over all."""
        backward = partial(self.trainer.forward_backward, loss=self.config.loss())
        with self.timer("critic"):
            updates = [
                await update(self.run_config, self.trainer, part, backward, learning_rate, num_loss_tokens(part))
                for part in parts
            ]
        values = metrics.finish(metrics.merge(output.partials for taken in updates for output in taken.outputs))
        return {
            "critic/loss": values["loss:sum"] / values["num_loss_tokens:sum"],
            "critic/explained_variance": explained_variance(values),
            "critic/value_mean": values["value:mean"],
            "critic/return_mean": values["return:mean"],
            "critic/clip_fraction": values["value_clip_fraction:mean"],
            "critic/grad_norm": max(taken.result.grad_norm for taken in updates),
            "critic/learning_rate": learning_rate,
        }


def _with_last_state(sample: Sample) -> Sample:
    """One more position, with the last target as input; its own target is not used."""
    tokens = torch.cat([sample.tokens, sample.targets[-1:]])
    return replace(sample, tokens=tokens, targets=torch.cat([sample.targets, sample.targets[-1:]]), columns={})


async def start_critic(run: Run[Any], config: CriticConfig, gae: GAEConfig, *, has_begun: bool) -> Critic:
    """Begins with the policy's weights and a value head of zeros; has_begun: at the checkpoint."""
    assert run.supervision.actors is not None
    async with run.colocation.borrowed():
        with run.log.setup("starting critic"):
            trainer = run.supervision.actors.spawn_critic()
            if run.config.critic_is_colocated():
                run.colocation.join(trainer)
            await trainer.ready()
            await _load(run, trainer, has_begun=has_begun)
    run.supervision.partners[CRITIC_FOLDER] = trainer
    return Critic(trainer=trainer, config=config, gae=gae, run_config=run.config, timer=run.timer)


async def _load(run: Run[Any], trainer: TrainerClient, *, has_begun: bool) -> None:
    if has_begun:
        newest = checkpoints.newest(run.folder.checkpoints)
        assert newest is not None  # the state in it says has_begun
        await trainer.load_checkpoint(str(newest / CRITIC_FOLDER))
        return
    path = str(run.folder.path / "policy_before_critic")
    saved = await run.trainer.save_checkpoint(path, optimizer=False)
    await saved.wait()
    await trainer.load_checkpoint(path, optimizer=False)
    await asyncio.to_thread(shutil.rmtree, path)  # as large as the model, and not read again
