"""The protocol of a task: problems, and the reward of a completion. Knows no data and no model."""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, runtime_checkable


class Message(TypedDict):
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    prompt: str
    answer: str
    key: str  # identity of the problem: training uses no problem with the key of a held-out problem
    metadata: dict[str, object] = field(default_factory=dict)
    # The conversation that the completion continues. If there is one, the model's chat template makes the prompt's tokens from it, and the
    # text `prompt` is only shown.
    messages: list[Message] = field(default_factory=list)
    source: str = ""  # in a mixture: name of the environment that the problem comes from


@runtime_checkable
class Environment(Protocol):
    def problem(self, index: int) -> Problem:
        """Training problem number `index`. It depends on (seed, index) only, and it is never a held-out problem."""

    def held_out(self) -> list[Problem]:
        """`num_held_out` problems with distinct keys."""

    def reward(self, problem: Problem, completion: str) -> "float | Awaitable[float]":
        """The reward of a completion of this problem's prompt: a finite number, or a mapping from names of components to numbers.

        The method may return an awaitable of the reward. See Scorer.
        """


class RewardError(ValueError):
    """A reward is not a finite number, or no reward came."""
