"""PPO with a model of Qwen3 0.6B's shape, for Hopper GPUs of 140 GB. The critic shares the trainer's GPU; the generator has another one.

Weights and task are those of qwen3.py. The learning rates are verl's. No run of this config was made on a GPU yet.
"""

from dataclasses import fields

from configs import qwen3
from controllers.critic import CriticConfig
from controllers.ppo import PPOConfig
from controllers.rollouts import RolloutConfig
from controllers.schedules import ScheduleConfig


def qwen3_0_6b_ppo() -> PPOConfig:
    """PPO with as many completions a step as qwen3_0_6b has, one for each problem. In the first ten steps only the critic is trained."""
    base = qwen3.qwen3_0_6b()
    # Half of GRPO's, because the activations of the critic need room, too.
    base.trainer.tokens_per_row //= 2
    given = {each.name: getattr(base, each.name) for each in fields(base)}
    completions = base.rollouts.groups_per_step * base.rollouts.group_size
    given["rollouts"] = RolloutConfig(groups_per_step=completions, group_size=1, max_refills=0, advantage="gae")
    given["updates_per_step"] = 4
    given["schedule"] = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-6, warmup_steps=5)
    critic = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-5, warmup_steps=5)
    return PPOConfig(**given, critic=CriticConfig(schedule=critic, warmup_steps=10))
