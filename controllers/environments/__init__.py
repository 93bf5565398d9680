"""Tasks: sources of problems, and the reward of a completion. Knows nothing of tokens, groups or actors."""

from controllers.environments.base import Environment, Message, Problem, RewardError, score
from controllers.environments.build import build_environment
from controllers.environments.config import EnvironmentConfig
from controllers.environments.scores import math_verify

__all__ = [
    "Environment",
    "EnvironmentConfig",
    "Message",
    "Problem",
    "RewardError",
    "build_environment",
    "math_verify",
    "score",
]
