"""The protocol `Environment`: a task that gives problems, and computes the rewards of completions."""

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Required, TypedDict, runtime_checkable

Reward = float | Mapping[str, float]
"""A finite number, or the components of a reward: a mapping from names to finite numbers. A component of the name "reward" is
the reward. If there is none, the reward is the sum of the components."""


class Message(TypedDict, total=False):
    """One message of a conversation. Fields that are not listed here reach the chat template, too."""

    role: Required[str]  # "system", "user", "assistant", "tool" or another role that the template knows
    content: Required[str | list[str | dict[str, Any]]]  # "" beside tool_calls; a list if the template takes one
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    weight: float  # of an assistant's message in supervised training: 0 is not trained; default 1


def text_of(message: Message) -> str:
    """The text of a message: its content, or the texts of the content's parts, joined."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    prompt: str
    answer: str
    key: str  # identifies the problem; training uses no problem that has the key of a held-out problem
    metadata: dict[str, object] = field(default_factory=dict)
    # The conversation that the completion continues. If the list is not empty, the model's chat template makes the prompt's
    # tokens from it, and the text `prompt` is only shown in reports.
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)  # descriptions of tools, for the chat template
    source: str = ""  # name of the environment that the problem comes from, if the task is a mixture
    place: str = field(default="", compare=False)  # file and row, such as "tasks.jsonl:3"; "" if it has none


@runtime_checkable
class Environment(Protocol):
    def problem(self, index: int) -> Problem:
        """Training problem number `index`. It depends only on the environment's seed and on `index`, and is never a held-out problem."""

    def held_out(self) -> list[Problem]:
        """The held-out problems, with distinct keys. The user asks for `num_held_out` of them, but there may be fewer."""

    def reward(self, problem: Problem, completion: str) -> Reward | Awaitable[Reward]:
        """The reward of a completion of this problem's prompt: a finite number, or a mapping from names of components to numbers.

        The method may also return an awaitable, whose result is the reward. The class Scorer awaits it.
        """


class RewardError(ValueError):
    """A reward is not a finite number, or the environment gave no reward."""


def as_reward(value: object) -> float:
    """A number, or a scalar of numpy or torch, as a float. Raises ValueError for anything else, and if it is not finite."""
    try:
        # item() of an array or a tensor is Python's own type: a text or a complex number is none.
        plain = value.item() if hasattr(value, "item") else value
        is_text = isinstance(plain, str | bytes | bytearray | complex)
        number = math.nan if is_text else float(plain)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def are_equal(rewards: Sequence[float]) -> bool:
    """True if the rewards differ by no more than the rounding of a few sums, as 0.1 + 0.2 and 0.3 do."""
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-12, abs_tol=1e-12)
