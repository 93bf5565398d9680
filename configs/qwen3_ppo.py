"""Configs of PPO for models of Qwen3's shapes, on two H200 GPUs (139 GiB each).

GPU 0 has policy and reference, GPU 1 critic and generator, which samples the next step's
completions while both train. Weights and task as in qwen3.py, learning rates as in verl.
qwen3_0_6b_ppo ran six steps with random weights on two H100 GPUs; qwen3_4b_ppo has not been run on
a GPU, and neither config with pretrained weights.
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
    """`--plan` estimates 58 GiB for policy and reference, and 35 GiB for the critic; vLLM takes
    half of GPU 1.

    No activations are recomputed.
    """
    base = qwen3.qwen3_0_6b()
    base.trainer.tokens_per_row = 16_384
    return _ppo(base, generator_share=0.5)


def qwen3_4b_ppo() -> PPOConfig:
    """`--plan`: 107 GiB for policy and reference, 78 GiB for the critic; 0.3 of GPU 1 for vLLM."""
    base = qwen3.qwen3_4b()
    base.trainer.tokens_per_row = 8192
    base.trainer.logprob_chunk_tokens = 4096
    return _ppo(base, generator_share=0.3)


def _ppo(base: GRPOConfig, *, generator_share: float) -> PPOConfig:
    """As many completions a step as `base`, one for each problem. Ten steps warm the critic up."""
    given = {each.name: getattr(base, each.name) for each in fields(base)}
    given["rollouts"] = RolloutConfig(
        groups_per_step=base.rollouts.groups_per_step * base.rollouts.group_size,
        group_size=1,
        dynamic_sampling_rounds=0,
        advantage="gae",
        max_staleness=UPDATES_PER_STEP,  # one step ahead, in updates
    )
    given["generator"] = replace(base.generator, gpu=1, gpu_memory_utilization=generator_share)
    given["updates_per_step"] = UPDATES_PER_STEP
    given["reference_kl"] = 1e-3
    given["reference"] = ReferenceConfig(gpu=0)
    given["schedule"] = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-6, warmup_steps=5)
    schedule = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-5, warmup_steps=5)
    return PPOConfig(**given, critic=CriticConfig(schedule=schedule, warmup_steps=10, gpu=1))
