"""The default configs of GRPO, SFT and DPO.

A Qwen3 of a million parameters learns two-digit addition from random weights, on two cores.
"""

from typing import TypedDict

from controllers.algorithms.schedules import ScheduleConfig
from controllers.dpo import DPOConfig
from controllers.environments import EnvironmentConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.groups import RolloutConfig
from controllers.sft import SFTConfig, SFTPhaseConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig


class Task(TypedDict):
    """Fields of a run that say what it learns."""

    alphabet: str
    max_tokens: int
    environment: EnvironmentConfig


class _Parts(Task):
    trainer: TrainerConfig
    generator: GeneratorConfig


def tiny() -> GRPOConfig:
    """Supervised steps until about a fifth of the sampled answers are right, and then GRPO."""
    return GRPOConfig(
        **_parts(),
        steps=72,
        updates_per_step=3,
        epochs_per_step=2,
        # The temperature is above 1, so that a problem whose likeliest answer is wrong gets a right answer now and then.
        rollouts=RolloutConfig(groups_per_step=192, group_size=4, dynamic_sampling_rounds=1, temperature=1.3),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=4e-4, warmup_steps=2, min_ratio=0.1),
        sft=sft_phase(stop_at=0.2),
        sft_steps=600,
    )


def tiny_sft() -> SFTConfig:
    """Supervised training only. The run never stops before its last step."""
    return SFTConfig(**_parts(), steps=400, sft=sft_phase(stop_at=1.0))


def tiny_dpo() -> DPOConfig:
    """DPO from random weights, on pairs of the right and a wrong sum of two terms. No answer is sampled."""
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
    """Fields that the tiny configs share. The 14 characters of the alphabet and two special tokens make a vocabulary of 16."""
    # rope_theta, the base of the rotary embedding, is small. If it were 10,000, most angles of the embedding would hardly change over a text
    # of nine tokens.
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
        tie_word_embeddings=False,  # if the head is tied, the digits 0 and 9 are learned long after the others
    )


def addition(digits: int) -> Task:
    """The fields of a run that learns to add two terms of `digits` digits each."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits, "operators": ["+"]}
    options |= {"allow_parentheses": False, "allow_negation": False}
    term = r"\d" * digits
    return {
        "alphabet": "0123456789+-=.",
        # A sum has at most digits + 1 digits. Sampling stops after a sum of this length. After a shorter sum the model has to sample the
        # token that ends the text.
        "max_tokens": digits + 1,
        "environment": EnvironmentConfig(
            task="basic_arithmetic",
            options=options,
            prompt="{expression}=",
            remove_whitespace=True,
            # basic_arithmetic draws terms from 0 to 10**digits, so some terms have fewer or more digits. prompt_pattern
            # leaves out the problems with such terms.
            prompt_pattern=rf"{term}\+{term}=",
        ),
    }
