"""Tasks: problems, and rewards of completions or episodes. Imports neither tokenizer nor actors."""

from controllers.environments.base import (
    AnyEnvironment,
    Demonstrating,
    Environment,
    Episode,
    EpisodeEnvironment,
    EpisodeError,
    Message,
    Observation,
    Problem,
    Reply,
    RewardError,
)
from controllers.environments.build import build_environment
from controllers.environments.config import EnvironmentConfig
from controllers.environments.scorer import Rewards, Scorer
from controllers.environments.scores import math_verify

__all__ = [
    "AnyEnvironment",
    "Demonstrating",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "EpisodeEnvironment",
    "EpisodeError",
    "Message",
    "Observation",
    "Problem",
    "Reply",
    "RewardError",
    "Rewards",
    "Scorer",
    "build_environment",
    "math_verify",
]
