"""The protocol of a task of several turns, which makes one Episode for every episode."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from controllers.environments.base import Environment, Message, Problem

Observation = str | list[Message] | list[int]
"""Text, messages for the chat template, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of an episode to a turn of the policy."""

    observation: Observation = ""  # before the policy's next turn; at the end only for reports
    reward: float = 0.0  # of the turn
    is_over: bool = False


class Episode(Protocol):
    """One conversation. Awaitable `reset` and `step` let a slow tool run beside other episodes."""

    def reset(self) -> Observation | Awaitable[Observation]:
        """The beginning of the conversation. Called once, before the first turn."""

    def step(self, completion: str) -> Reply | Awaitable[Reply]:
        """The reply to a turn. completion: its text without the stop token."""


@runtime_checkable
class EpisodeEnvironment(Protocol):
    """With keeps_special_tokens = True, `Episode.step` gets them, such as [TOOL_CALLS], as text."""

    def problem(self, index: int) -> Problem:
        """As in Environment. The prompt should be the text of `reset`, for a check of lengths."""

    def held_out(self) -> list[Problem]:
        """As in Environment."""

    def episode(self, problem: Problem) -> Episode:
        """A new episode; every completion of a group has its own."""


@runtime_checkable
class Demonstrating(Protocol):
    """An environment with demonstrations for supervised training."""

    def demonstration(self, problem: Problem) -> Sequence[str]:
        """The texts of the policy's turns in an episode of this problem."""


AnyEnvironment = Environment | EpisodeEnvironment


class EpisodeError(ValueError):
    """An episode broke its protocol, or failed too often."""
