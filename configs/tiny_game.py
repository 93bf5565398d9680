"""Configs of tasks of several turns for the tiny model: a guessing game, and a calculator."""

from dataclasses import replace

from configs.tiny import sft_phase, tiny
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.episodes import EpisodeConfig
from controllers.rollouts.groups import RolloutConfig


def tiny_game() -> GRPOConfig:
    """A random model learns to find a secret digit in four guesses of one token each."""
    return replace(
        tiny(),
        alphabet="0123456789?+-=",
        max_tokens=1,
        episodes=EpisodeConfig(max_turns=4),
        environment=EnvironmentConfig(task="controllers.environments.guessing:GuessingGame", num_held_out=10),
        steps=50,
        updates_per_step=2,
        epochs_per_step=1,
        rollouts=RolloutConfig(groups_per_step=60, group_size=8, dynamic_sampling_rounds=0),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-3, warmup_steps=2, min_ratio=0.1),
        sft_steps=0,
        checkpoint_every=25,
    )


def tiny_tool() -> GRPOConfig:
    """Supervised steps teach the format of a turn, then GRPO to ask a calculator for products."""
    return replace(
        tiny(),
        alphabet="0123456789*c=?",
        max_tokens=7,
        episodes=EpisodeConfig(max_turns=3),
        environment=EnvironmentConfig(task="controllers.environments.calculator:Products", num_held_out=256),
        steps=50,
        updates_per_step=2,
        epochs_per_step=1,
        rollouts=RolloutConfig(groups_per_step=64, group_size=8, dynamic_sampling_rounds=0),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=4e-4, warmup_steps=2, min_ratio=0.1),
        sft=sft_phase(stop_at=1.0),
        sft_steps=60,
        checkpoint_every=20,
    )
