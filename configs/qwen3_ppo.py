"""Configs of PPO with models of Qwen3's shapes, for two H200 GPUs, which have 139 GiB of memory each.

The policy and the reference run on the first GPU, and the critic and the generator run on the second. Policy and
critic train at the same time. Meanwhile the generator samples the completions of the next step. Weights and task are
the same as in qwen3.py. The learning rates are verl's. qwen3_0_6b_ppo ran for six steps with random weights on two
H100 GPUs. qwen3_4b_ppo has not been run on a GPU. Neither config has been run with pretrained weights.
"""

from dataclasses import fields, replace

from configs import qwen3
from controllers.algorithms.critic import CriticConfig
from controllers.algorithms.schedules import ScheduleConfig
from controllers.grpo import GRPOConfig
from controllers.ppo import PPOConfig
from controllers.rollouts.groups import RolloutConfig
from controllers.run.config import ReferenceConfig

UPDATES_PER_STEP = 4


def qwen3_0_6b_ppo() -> PPOConfig:
    """PPO at 0.6B. `--plan` estimates 58 GiB for policy and reference on the first GPU, and 35 GiB for the critic on the
    second. On the second GPU vLLM also takes half of the GPU's memory. No activations are recomputed.
    """
    base = qwen3.qwen3_0_6b()
    base.trainer.tokens_per_row = 16_384
    return _ppo(base, generator_share=0.5)


def qwen3_4b_ppo() -> PPOConfig:
    """PPO at 4B. `--plan` estimates 107 GiB for policy and reference on the first GPU, and 78 GiB for the critic on the
    second. On the second GPU vLLM also takes 0.3 of the GPU's memory.
    """
    base = qwen3.qwen3_4b()
    base.trainer.tokens_per_row = 8192
    base.trainer.logprob_chunk_tokens = 4096
    return _ppo(base, generator_share=0.3)


def _ppo(base: GRPOConfig, *, generator_share: float) -> PPOConfig:
    """PPO with as many completions a step as `base`, but only one completion of each problem. The first ten steps train only the critic."""
    given = {each.name: getattr(base, each.name) for each in fields(base)}
    given["rollouts"] = RolloutConfig(
        groups_per_step=base.rollouts.groups_per_step * base.rollouts.group_size,
        group_size=1,
        dynamic_sampling_rounds=0,
        advantage="gae",
        max_staleness=UPDATES_PER_STEP,  # in updates: rollouts may be generated one step ahead of training
    )
    given["generator"] = replace(base.generator, gpu=1, gpu_memory_utilization=generator_share)
    given["updates_per_step"] = UPDATES_PER_STEP
    given["reference_kl"] = 1e-3
    given["reference"] = ReferenceConfig(gpu=0)
    given["schedule"] = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-6, warmup_steps=5)
    schedule = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-5, warmup_steps=5)
    return PPOConfig(**given, critic=CriticConfig(schedule=schedule, warmup_steps=10, gpu=1))
