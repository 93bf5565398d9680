"""The protocols of tasks: problems, and the rewards of completions or the episodes of several turns."""

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Required, TypedDict, runtime_checkable

Reward = float | Mapping[str, float]
"""A finite number, or components by name. The reward is the component "reward", else their sum."""


class Message(TypedDict, total=False):
    """One message of a conversation. Other fields reach the chat template, too."""

    role: Required[str]  # "system", "user", "assistant", "tool" or another role of the template
    content: Required[str | list[str | dict[str, Any]]]  # "" beside tool_calls
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    weight: float  # of an assistant's message in SFT; 0: not trained; default 1


def text_of(message: Message) -> str:
    """The content of a message, or the joined texts of its parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    prompt: str
    answer: str
    key: str  # no training problem has the key of a held-out problem
    metadata: dict[str, object] = field(default_factory=dict)
    # If given, the chat template makes the prompt's tokens, and `prompt` is only shown in reports.
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)  # for the chat template
    source: str = ""  # name of the part of a mixture
    place: str = field(default="", compare=False)  # file and row, such as "tasks.jsonl:3", or ""


@runtime_checkable
class Environment(Protocol):
    def problem(self, index: int) -> Problem:
        """Training problem `index`, never a held-out one; depends on the seed and `index` alone."""

    def held_out(self) -> list[Problem]:
        """At most `num_held_out` problems with distinct keys."""

    def reward(self, problem: Problem, completion: str) -> Reward | Awaitable[Reward]:
        """The reward of a completion of this problem's prompt; Scorer awaits an awaitable."""


Observation = str | list[Message] | list[int]
"""Text, messages for the chat template, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of an episode to a turn of the policy."""

    observation: Observation = ""  # before the policy's next turn; at the end only for reports
    reward: float = 0.0  # of the turn
    is_over: bool = False


class Episode(Protocol):
    """One conversation. Awaitable answers let a slow tool run beside other episodes."""

    def reset(self) -> Observation | Awaitable[Observation]:
        """The beginning of the conversation."""

    def step(self, completion: str) -> Reply | Awaitable[Reply]:
        """completion: the text of a turn without the stop token."""


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
    def demonstration(self, problem: Problem) -> Sequence[str]:
        """The texts of the policy's turns in an episode of this problem."""


AnyEnvironment = Environment | EpisodeEnvironment


class EpisodeError(ValueError):
    """An episode broke its protocol, or failed too often."""


class RewardError(ValueError):
    """A reward is not a finite number, or the environment gave none."""


def as_reward(value: object) -> float:
    """A number, or a scalar of numpy or torch, as a float. Raises ValueError if not finite."""
    try:
        # item() gives Python's own type; a text or a complex number is none
        plain = value.item() if hasattr(value, "item") else value
        is_text = isinstance(plain, str | bytes | bytearray | complex)
        number = math.nan if is_text else float(plain)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def are_equal(rewards: Sequence[float]) -> bool:
    """True up to the rounding of a few sums, as for 0.1 + 0.2 and 0.3."""
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-12, abs_tol=1e-12)
