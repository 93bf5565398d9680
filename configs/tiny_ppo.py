"""PPO with the tiny model and a value model of its shape, on addition and tiny_game.py's tasks."""

import dataclasses
from dataclasses import replace

from configs.tiny import sft_phase, tiny
from configs.tiny_game import tiny_game, tiny_tool
from controllers.algorithms.critic import CriticConfig
from controllers.algorithms.gae import GAEConfig
from controllers.algorithms.schedules import ScheduleConfig
from controllers.grpo import GRPOConfig
from controllers.ppo import PPOConfig
from controllers.rollouts.groups import RolloutConfig


def tiny_ppo_game() -> PPOConfig:
    """PPO on the guessing game, from random weights; a turn is one token, so it has one value."""
    return _with_critic(tiny_game())


def tiny_ppo_tool() -> PPOConfig:
    """PPO on tiny_tool's products, with a calculator."""
    return _with_critic(tiny_tool())


def _with_critic(config: GRPOConfig) -> PPOConfig:
    """PPO in place of GRPO, with as many episodes a step, in groups of one."""
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(GRPOConfig)}
    count = config.rollouts.groups_per_step * config.rollouts.group_size
    fields["rollouts"] = replace(
        config.rollouts, groups_per_step=count, group_size=1, dynamic_sampling_rounds=0, advantage="gae"
    )
    critic = CriticConfig(schedule=ScheduleConfig(learning_rate=1e-3, warmup_steps=2), warmup_steps=2)
    return PPOConfig(**fields, critic=critic, gae=GAEConfig(bootstrap=False))


def tiny_ppo() -> PPOConfig:
    """Supervised steps until a fifth of the sampled answers are right, then PPO."""
    base = tiny()
    return PPOConfig(
        alphabet=base.alphabet,
        max_tokens=base.max_tokens + 1,  # room for a stop token after the longest answer
        environment=base.environment,
        trainer=base.trainer,
        generator=base.generator,
        steps=70,
        updates_per_step=3,
        epochs_per_step=2,
        rollouts=RolloutConfig(
            groups_per_step=768, group_size=1, dynamic_sampling_rounds=0, advantage="gae", temperature=1.3
        ),
        gae=GAEConfig(bootstrap=False),  # an answer that is cut off is wrong
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=4e-4, warmup_steps=2, min_ratio=0.1),
        critic=CriticConfig(schedule=ScheduleConfig(learning_rate=1e-3, warmup_steps=2), warmup_steps=2),
        sft=sft_phase(stop_at=0.2),
        sft_steps=600,
    )
