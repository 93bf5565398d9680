"""Tasks: sources of problems, and the reward of a completion. Knows nothing of tokens, groups or actors."""

from controllers.environments.base import Environment, Message, Problem, RewardError
from controllers.environments.build import build_environment
from controllers.environments.config import EnvironmentConfig
from controllers.environments.scorer import Rewards, Scorer
from controllers.environments.scores import math_verify

__all__ = [
    "Environment",
    "EnvironmentConfig",
    "Message",
    "Problem",
    "RewardError",
    "Rewards",
    "Scorer",
    "build_environment",
    "math_verify",
]
