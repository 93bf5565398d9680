"""Proximal policy optimization with a value model: the training loop and its command line.

python -m controllers.ppo --config tiny_ppo
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from controllers.algorithms.critic import AdvantageSamples, Critic, CriticConfig, start_critic
from controllers.algorithms.gae import GAEConfig
from controllers.algorithms.kl_control import mean_divergence, penalised_rewards
from controllers.algorithms.reference import Reference, start_reference
from controllers.grpo import (
    GRPOConfig,
    make_queue,
    step_metrics,
    train_sft_phase,
    train_step,
    with_columns_of_loss,
)
from controllers.program.launch import start_loop
from controllers.rollouts.groups import RolloutBatch, RolloutConfig
from controllers.run.run import Run
from controllers.run.update import chunks, sync
from rl_actors import KL, Sample, TrainerConfig
from rl_actors.losses import Loss

ROLLOUTS = partial(RolloutConfig, groups_per_step=512, group_size=1, advantage="gae", dynamic_sampling_rounds=0)


@dataclass(kw_only=True)
class PPOConfig(GRPOConfig):
    rollouts: RolloutConfig = field(default_factory=ROLLOUTS)
    gae: GAEConfig = field(default_factory=GAEConfig)
    """Advantages and returns from rewards and values."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model and its training."""

    has_critic: ClassVar[bool] = True
    short_flags: ClassVar[dict[str, str]] = GRPOConfig.short_flags | {"--critic-lr": "--critic.schedule.learning-rate"}

    def models(self) -> dict[str, TrainerConfig]:
        critic = replace(self.trainer, head="values", gpu=self.or_trainers(self.critic.gpu))
        return {**super().models(), "critic": critic}

    def validate(self) -> None:
        # before super(), which would report the group size of 1 and not the rule
        if self.rollouts.advantage != "gae":
            raise ValueError(
                f"rollouts.advantage={self.rollouts.advantage!r}; PPO needs 'gae'. A preset of --algorithm sets another "
                "rule; add --advantage gae, which replaces the preset's rule"
            )
        super().validate()
        self.critic.schedule.validate()
        if self.generator.max_model_len > self.trainer.max_sequence_length:
            raise ValueError(
                f"generator.max_model_len={self.generator.max_model_len} exceeds "
                f"trainer.max_sequence_length={self.trainer.max_sequence_length}: the critic reads all tokens of a sequence, "
                "also the last one, which the policy predicts but does not read"
            )
        if self.trainer.lora.rank:
            raise ValueError(f"trainer.lora.rank={self.trainer.lora.rank}; PPO needs 0: a value model has no adapters")


async def train(run: Run[PPOConfig]) -> None:
    """Supervised steps, critic.warmup_steps PPO steps of the critic, config.steps of both."""
    config = run.config
    sft_steps, cursor = await train_sft_phase(run)
    steps_done = max(run.state.get("step", 0), sft_steps)
    num_steps = config.critic.warmup_steps + config.steps
    last_step = sft_steps + num_steps
    run.log.display.total_steps = last_step
    has_begun = steps_done > sft_steps
    reference = None
    if config.reference_kl:
        reference = await start_reference(run, has_begun=has_begun, sft_steps=sft_steps)
    critic = await start_critic(run, config.critic, config.gae, has_begun=has_begun)
    policy_schedule = config.schedule.build(config.steps)
    critic_schedule = config.critic.schedule.build(num_steps)
    kl = config.kl(run.state.get("kl_coefficient"))
    version = await sync(run)
    async with make_queue(run, cursor, None, steps_done=steps_done) as rollouts:
        for step in range(steps_done + 1, last_step + 1):
            ppo_step = step - sft_steps
            is_last = step == last_step
            with run.timer("generate"):
                batch = await rollouts.next_batch(version)
            values = batch.metrics()
            loss = config.make_loss(kl)
            await run.colocation.to_trainer()
            # in processes of their own, so they work at the same time
            states, (samples, rewards, measured) = await asyncio.gather(
                critic.values(batch.samples), with_rewards(run, batch, loss, reference, kl)
            )
            values |= measured
            estimated = critic.estimate_advantages(samples, states, rewards, is_cut_off(batch))
            is_warm_up = ppo_step <= config.critic.warmup_steps
            policy_rate = None if is_warm_up else policy_schedule(ppo_step - config.critic.warmup_steps)
            async with run.training():
                critic_rate = critic_schedule(ppo_step)
                values |= await train_both(run, critic, batch, estimated, loss, critic_rate, policy_rate, step)
            if reference is not None and not is_warm_up:
                values["kl/coefficient"] = kl.coefficient
                kl = config.kl_control.next_kl(kl, values["kl/reference"])
            async with rollouts.update():
                version = await sync(run)
            values |= run.trained_metrics(samples, num_epochs=config.epochs_per_step)
            if is_last or ppo_step % config.evaluate_every == 0:
                values |= await run.evaluate(step)
            await run.log_step(step, values, phase="ppo")
            run.log.rollouts(step, batch.to_record())
            state = {"step": step, **rollouts.state(), "sft_steps": sft_steps, "kl_coefficient": kl.coefficient}
            await run.end_step(state, phase_step=ppo_step, is_last=is_last)


async def train_both(
    run: Run[PPOConfig],
    critic: Critic,
    batch: RolloutBatch,
    estimated: AdvantageSamples,
    loss: Loss,
    critic_rate: float,
    policy_rate: float | None,
    step: int,
) -> dict[str, float]:
    """Metrics of both. policy_rate=None trains only the critic."""
    fit = critic.fit(minibatches(run.config, estimated.for_critic, step), critic_rate)
    if policy_rate is None:
        return await fit
    parts = minibatches(run.config, estimated.for_policy, step)
    fitted, updates = await run.colocation.run_both(fit, train_step(run, parts, loss, policy_rate))
    return fitted | step_metrics(run.config, batch, updates) | {"learning_rate": policy_rate}


def minibatches(config: PPOConfig, samples: Sequence[Sample], step: int) -> Iterator[Sequence[Sample]]:
    """epochs_per_step shuffled passes over the samples, of at most updates_per_step minibatches.

    The order depends on seed and step alone: the same for policy and critic, and in a resumed run.
    """
    draw = Random(f"{config.seed} {step}")
    part_size = math.ceil(len(samples) / config.updates_per_step)
    for _ in range(config.epochs_per_step):
        yield from chunks(draw.sample(samples, k=len(samples)), part_size)


async def with_rewards(
    run: Run[PPOConfig], batch: RolloutBatch, loss: Loss, reference: Reference | None, kl: KL
) -> tuple[Sequence[Sample], list[Tensor], dict[str, float]]:
    """(samples with the columns that the loss reads, `token_rewards`, metrics)."""
    samples = await with_columns_of_loss(run, batch.samples, loss, reference)
    rewards, measured = await token_rewards(run.config, batch, samples, reference, kl)
    return samples, rewards, measured


async def token_rewards(
    config: PPOConfig, batch: RolloutBatch, samples: Sequence[Sample], reference: Reference | None, kl: KL
) -> tuple[list[Tensor], dict[str, float]]:
    """(rewards, metrics). Rewards are [T] float64 by sample of T positions, 0 in the prompt.

    A turn's reward is at its last token, and the length penalty at the completion's last. With
    reference_kl_in="reward", kl.coefficient * KL is subtracted at every sampled token.
    """
    of_completions = [row for group in batch.groups for row in group.rewards_per_token]
    rows = []
    for sample, rewards in zip(samples, of_completions, strict=True):
        row = torch.zeros(len(sample), dtype=torch.float64)
        row[-len(rewards) :] = torch.tensor(rewards, dtype=torch.float64)
        rows.append(row)
    if reference is None or config.reference_kl_in == "loss":
        return rows, {}
    is_action = [sample.columns["loss_weights"] != 0 for sample in samples]
    logprobs = [sample.columns["old_logprobs"] for sample in samples]
    ref_logprobs = await reference.logprobs(samples)
    measured = {"kl/reference": mean_divergence(logprobs, ref_logprobs, is_action, kl)}
    return penalised_rewards(rows, logprobs, ref_logprobs, is_action, kl), measured


def is_cut_off(batch: RolloutBatch) -> list[bool]:
    """By completion: ended by a limit of tokens or turns."""
    return [is_truncated for group in batch.groups for is_truncated in group.truncated]


if __name__ == "__main__":
    start_loop("controllers.ppo")
