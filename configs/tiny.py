"""The default configs of GRPO, SFT and DPO: a Qwen3 of a million parameters adds on two cores."""

from typing import TypedDict

from controllers.algorithms.schedules import ScheduleConfig
from controllers.dpo import DPOConfig
from controllers.environments import EnvironmentConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.groups import RolloutConfig
from controllers.sft import SFTConfig, SFTPhaseConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig


class Task(TypedDict):
    """What a run learns."""

    alphabet: str
    max_tokens: int
    environment: EnvironmentConfig


class _Parts(Task):
    trainer: TrainerConfig
    generator: GeneratorConfig


def tiny() -> GRPOConfig:
    """Supervised steps until a fifth of the sampled answers are right, then GRPO."""
    return GRPOConfig(
        **_parts(),
        steps=72,
        updates_per_step=3,
        epochs_per_step=2,
        # above 1, so that a problem with a likely wrong answer gets a right one now and then
        rollouts=RolloutConfig(groups_per_step=192, group_size=4, dynamic_sampling_rounds=1, temperature=1.3),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=4e-4, warmup_steps=2, min_ratio=0.1),
        sft=sft_phase(stop_at=0.2),
        sft_steps=600,
    )


def tiny_sft() -> SFTConfig:
    """Supervised training, without an early stop."""
    return SFTConfig(**_parts(), steps=400, sft=sft_phase(stop_at=1.0))


def tiny_dpo() -> DPOConfig:
    """DPO from random weights, on pairs of a right and a wrong sum."""
    pairs = EnvironmentConfig(
        task="controllers.environments.pairs:additions",
        answer_column="chosen",
        rejected_column="rejected",
        num_held_out=256,
    )
    return DPOConfig(
        **(_parts() | {"alphabet": "auto", "environment": pairs}),
        steps=150,
        pairs_per_step=128,
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-3, warmup_steps=10, min_ratio=0.1),
    )


def sft_phase(stop_at: float, learning_rate: float = 1e-3, batch_size: int = 128) -> SFTPhaseConfig:
    schedule = ScheduleConfig(learning_rate=learning_rate, warmup_steps=20)
    return SFTPhaseConfig(batch_size=batch_size, schedule=schedule, stop_at_answer_probability=stop_at)


def _parts() -> _Parts:
    """Shared fields. 14 characters and two special tokens make a vocabulary of 16."""
    # rope_theta is small, because over nine tokens most angles would hardly change with 10,000
    model = tiny_model(vocab_size=16, max_position_embeddings=128, rope_theta=10.0)
    return {
        **addition(digits=2),
        "trainer": TrainerConfig(
            model=model,
            max_sequence_length=64,
            tokens_per_row=64,
            rows_per_microbatch=128,
            logprob_chunk_tokens=1 << 13,
        ),
        "generator": GeneratorConfig(
            model=model,
            max_model_len=64,
            max_num_seqs=1024,
            gpu_memory_utilization=0.3,
            enforce_eager=True,
        ),
    }


def tiny_model(*, vocab_size: int, max_position_embeddings: int, rope_theta: float) -> ModelConfig:
    """A Qwen3 of a million parameters."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
        rope_theta=rope_theta,
        tie_word_embeddings=False,  # tied, it learns 0 and 9 long after the others
    )


def addition(digits: int) -> Task:
    """A run that learns to add two terms of `digits` digits."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits, "operators": ["+"]}
    options |= {"allow_parentheses": False, "allow_negation": False}
    term = r"\d" * digits
    return {
        "alphabet": "0123456789+-=.",
        # the longest sum; after a shorter one the model has to sample the stop token
        "max_tokens": digits + 1,
        "environment": EnvironmentConfig(
            task="basic_arithmetic",
            options=options,
            prompt="{expression}=",
            remove_whitespace=True,
            # basic_arithmetic also draws terms of fewer or more digits, from 0 to 10**digits
            prompt_pattern=rf"{term}\+{term}=",
        ),
    }
