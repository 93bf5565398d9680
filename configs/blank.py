"""Configs without a task, which --task names, for a Qwen3 of a million parameters on two cores."""

from configs.tiny import sft_phase, tiny_model
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.groups import RolloutConfig
from controllers.sft import SFTConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig

NUM_SFT_STEPS = 300


def blank() -> GRPOConfig:
    """At most NUM_SFT_STEPS supervised steps, until answers have probability 0.5, then GRPO."""
    return GRPOConfig(
        environment=_no_task(),
        trainer=_trainer(),
        generator=_generator(),
        alphabet="auto",
        max_tokens=16,
        steps=40,
        updates_per_step=2,
        rollouts=RolloutConfig(groups_per_step=64, group_size=8),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=3e-4, warmup_steps=2, min_ratio=0.1),
        sft=sft_phase(stop_at=0.5),
        sft_steps=NUM_SFT_STEPS,
    )


def blank_sft() -> SFTConfig:
    """Supervised training, without an early stop."""
    return SFTConfig(
        environment=_no_task(),
        trainer=_trainer(),
        generator=_generator(),
        alphabet="auto",
        max_tokens=16,
        steps=NUM_SFT_STEPS,
        sft=sft_phase(stop_at=1.0),
    )


def _no_task() -> EnvironmentConfig:
    return EnvironmentConfig(task="", num_held_out=128)


def _model() -> ModelConfig:
    # A run sets vocab_size from its alphabet. rope_theta is small, because over some tens of tokens
    # most angles would hardly change with 10,000.
    return tiny_model(vocab_size=128, max_position_embeddings=256, rope_theta=100.0)


def _trainer() -> TrainerConfig:
    return TrainerConfig(
        model=_model(),
        max_sequence_length=256,
        tokens_per_row=256,
        rows_per_microbatch=32,
        logprob_chunk_tokens=1 << 13,
    )


def _generator() -> GeneratorConfig:
    return GeneratorConfig(
        model=_model(), max_model_len=256, max_num_seqs=512, gpu_memory_utilization=0.3, enforce_eager=True
    )
