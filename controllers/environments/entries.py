"""Makes problems from entries of data, and chooses the function that scores completions."""

import inspect
import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from controllers.environments import scores
from controllers.environments.base import Message, Problem, Reward, text_of
from controllers.environments.config import EnvironmentConfig
from controllers.environments.judge import Judge
from controllers.environments.own_code import imported, require_takes
from controllers.environments.sandbox import Sandbox

Score = Callable[[Problem, str], Reward | Awaitable[Reward]]
"""(problem, completion) -> reward, or an awaitable of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the data of a task."""

    question: str
    answer: str
    metadata: Mapping[str, object]
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    place: str = ""  # file and row


def require_answer(entry: Entry, config: EnvironmentConfig) -> None:
    """Raises ValueError, naming the place, if no completion can earn the reward."""
    if config.reward == "math_verify" and not scores.gold_values(entry.answer):
        raise ValueError(
            f"{entry.place}: the answer {entry.answer[:80]!r} has no value that the reward math_verify can compare"
        )
    if config.reward == "python" and not entry.answer.strip():
        raise ValueError(
            f"{entry.place}: column {config.answer_column!r} is empty; the reward python needs tests there"
        )


def to_problem(entry: Entry, config: EnvironmentConfig) -> Problem:
    """Raises ValueError if config.prompt is no template, or uses a field that the entry lacks."""
    fields = {**entry.metadata, "question": entry.question}
    try:
        prompt = config.prompt.format(**fields)
    except KeyError as error:
        known = f"the problems of task={config.task!r} have these fields: {', '.join(fields)}"
        raise ValueError(f"prompt={config.prompt!r} uses the unknown field {error}; {known}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"prompt={config.prompt!r} is not a template: {error}") from None
    prompt = "".join(prompt.split()) if config.remove_whitespace else prompt
    key = key_of(prompt, entry.messages, entry.tools)
    return Problem(
        prompt=prompt,
        answer=entry.answer,
        key=key,
        metadata=fields,
        messages=entry.messages,
        tools=entry.tools,
        place=entry.place,
    )


def fits(problem: Problem, config: EnvironmentConfig) -> bool:
    """True if the whole prompt matches config.prompt_pattern, or without a pattern."""
    return not config.prompt_pattern or re.fullmatch(config.prompt_pattern, problem.prompt) is not None


def key_of(prompt: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Identifies a problem: the prompt, or the conversation without its answer.

    key_of("12 +  3 = ", []) -> "12 + 3 ="
    """
    asked = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if len(asked) == 1 and not tools:
        prompt = text_of(asked[0])
    elif asked:
        lines = [f"{message['role']}: {text_of(message)} {message.get('tool_calls', '')}" for message in asked]
        prompt = "\n".join([*map(str, tools), *lines])
    return " ".join(unicodedata.normalize("NFC", prompt).split())


def text_score(config: EnvironmentConfig) -> Score:
    """The function for config.reward, other than "task" (generated.py).

    Raises ValueError if the user's function cannot be imported, or does not take (answer,
    completion).
    """
    if config.reward == "judge":
        return Judge(config=config.judge)
    if config.reward == "python":
        return Sandbox(config=config.sandbox)
    compares: dict[str, Callable[[str, str], Reward]] = {
        "exact_match": scores.exact_match,
        "math_verify": scores.math_verify,
        "regex": partial(scores.last_match, config.reward_pattern),
    }
    if config.reward in compares:
        return TextScore(compares[config.reward])
    compare = imported("reward", config.reward)
    require_takes(f"reward={config.reward!r}", compare, "answer", "completion")
    return LaterTextScore(compare) if inspect.iscoroutinefunction(compare) else TextScore(compare)


@dataclass(frozen=True, slots=True)
class TextScore:
    """Scores with a function of (answer, completion)."""

    compare: Callable[[str, str], Reward]

    def __call__(self, problem: Problem, completion: str) -> Reward:
        return self.compare(problem.answer, completion)


@dataclass(frozen=True, slots=True)
class LaterTextScore:
    """Scores with an `async` function of (answer, completion)."""

    compare: Callable[[str, str], Awaitable[Reward]]

    async def __call__(self, problem: Problem, completion: str) -> Reward:
        return await self.compare(problem.answer, completion)
