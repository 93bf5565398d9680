"""The protocol of a task in which the policy takes several turns, such as a conversation. The task makes one Episode object for every episode."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from controllers.environments.base import Environment, Message, Problem

Observation = str | list[Message] | list[int]
"""Text, messages for the model's chat template, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of an episode to a turn of the policy."""

    observation: Observation = ""  # the policy reads it before its next turn; after the last turn, only reports show it
    reward: float = 0.0  # reward of the turn
    is_over: bool = False  # True: the episode ends with this reply


class Episode(Protocol):
    """One conversation with the policy. `reset` and `step` may return an awaitable, so that a slow tool does not hold up other episodes."""

    def reset(self) -> Observation | Awaitable[Observation]:
        """The beginning of the conversation. Called once, before the first turn."""

    def step(self, completion: str) -> Reply | Awaitable[Reply]:
        """The reply to a turn. completion: the text of the turn, without the token that ends the turn."""


@runtime_checkable
class EpisodeEnvironment(Protocol):
    """If an environment has keeps_special_tokens = True, `Episode.step` gets special tokens, such as [TOOL_CALLS], as text."""

    def problem(self, index: int) -> Problem:
        """Training problem number `index`, as in Environment. The problem's prompt should be the text that `reset` returns.

        Reports show the prompt, and the controller checks the prompt's length before a run.
        """

    def held_out(self) -> list[Problem]:
        """The held-out problems, with distinct keys. The user asks for `num_held_out` of them, but there may be fewer."""

    def episode(self, problem: Problem) -> Episode:
        """A new episode of this problem. Every completion of a group has an episode of its own."""


@runtime_checkable
class Demonstrating(Protocol):
    """An environment with demonstrations, on which a supervised phase trains the policy."""

    def demonstration(self, problem: Problem) -> Sequence[str]:
        """The texts of the policy's turns in an episode of this problem."""


AnyEnvironment = Environment | EpisodeEnvironment


class EpisodeError(ValueError):
    """An episode returned something that its protocol does not allow, or failed too often."""
