"""Configs without a task. The user names a task with --task.

A Qwen3 of a million parameters learns the task from random weights, on two cores.
"""

from configs.tiny import sft_phase, tiny_model
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.groups import RolloutConfig
from controllers.sft import SFTConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig

NUM_SFT_STEPS = 300


def blank() -> GRPOConfig:
    """Supervised steps on the answers, and then GRPO.

    The supervised steps end when the mean probability of a right answer is above 0.5, or after NUM_SFT_STEPS steps.
    """
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
    """Supervised training only. The run never stops before its last step."""
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
    # A run replaces vocab_size by the number of characters in the run's alphabet plus the number of special tokens.
    # rope_theta, the base of the rotary embedding, is small because the texts have only some tens of tokens. With a
    # base of 10,000 most angles of the embedding would hardly change over so few tokens.
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
