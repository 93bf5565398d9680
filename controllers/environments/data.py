"""Problems from a file or a Hugging Face data set, all read at the start."""

import functools
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from random import Random
from typing import Any, cast

from controllers.environments import scores
from controllers.environments.base import Message, Problem, text_of
from controllers.environments.config import EnvironmentConfig
from controllers.environments.files import Row, read_dataset, read_file
from controllers.environments.held_out import digest_of, hold_out

Kinds = dict[str, tuple[type, str]]
"""By column: type, and place of the first row."""


class DataEnvironment:
    """A task from a file or a data set. Every epoch has its own order."""

    def __init__(self, config: EnvironmentConfig, rows: Iterable[Row] | None = None, *, trains: bool = True):
        """rows: default those of the config. trains=False: all problems may be held out."""
        self.config = config
        self.reward = scores.text_score(config)
        source = config.of_held_out()
        if trains and config.has_own_held_out:
            rows = _rows(config) if rows is None else rows
            problems = _read_problems(config, rows)
            held_out = _read_problems(source, _rows(source))
        else:
            problems = held_out = _read_problems(source, _rows(source) if rows is None else rows)
        self._held_out = hold_out(
            held_out,
            number=config.num_held_out,
            seed=config.seed_of_held_out,
            share=0.0,
            source=source.source,
            may_be_all=config.has_own_held_out or not trains,
        )[0]
        keys = {problem.key for problem in self._held_out}
        self.training_problems = [problem for problem in problems if problem.key not in keys]
        self.trains = trains
        # rows with the key of a held-out problem, of this run or an earlier one
        self.num_excluded = 0
        if trains:
            self.num_excluded = len(problems) - len(self.training_problems)
            self.num_excluded -= 0 if config.has_own_held_out else len(keys)
        self.exclude(frozenset())

    def exclude(self, digests: frozenset[str]) -> None:
        """Give no training problem with one of these digests. Raises ValueError if none is left."""
        left = [problem for problem in self.training_problems if digest_of(problem.key) not in digests]
        self.num_excluded += len(self.training_problems) - len(left)
        self.training_problems = left
        if self.trains and not left:
            raise ValueError(
                f"no problem of {self.config.source} is left to train on after {len(self._held_out)} problems are held out"
                + (f", and {self.num_excluded} rows have held-out prompts" if self.num_excluded else "")
            )

    def problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self.training_problems))
        return self.training_problems[_shuffled(len(self.training_problems), f"{self.config.seed}/{epoch}")[position]]

    def held_out(self) -> list[Problem]:
        return list(self._held_out)


@functools.lru_cache(maxsize=4)
def _shuffled(length: int, seed: str) -> list[int]:
    return Random(seed).sample(range(length), length)


def _rows(config: EnvironmentConfig) -> Iterator[Row]:
    return read_file(config.task) if config.is_file else read_dataset(config.task, config.split, config.options)


def _read_problems(config: EnvironmentConfig, rows: Iterable[Row]) -> list[Problem]:
    """The problems that match config.prompt_pattern. Raises ValueError, naming a wrong row."""
    kinds: Kinds = {}
    problems = []
    for place, row in rows:
        problem = _read(config, place, row, kinds)
        if not fits(problem, config):
            continue
        if config.reward == "math_verify" and not scores.gold_values(problem.answer):
            raise ValueError(f"{place}: the answer {problem.answer[:80]!r} has no value that math_verify can compare")
        if config.reward == "python" and not problem.answer.strip():
            raise ValueError(f"{place}: column {config.answer_column!r} is empty; the reward python needs tests there")
        problems.append(problem)
    return problems


def to_problem(
    config: EnvironmentConfig,
    question: str,
    answer: str,
    metadata: Mapping[str, object],
    *,
    messages: Sequence[Message] = (),
    tools: Sequence[dict[str, Any]] = (),
    place: str = "",
) -> Problem:
    """Raises ValueError if config.prompt is no template, or uses a field that metadata lacks."""
    fields = {**metadata, "question": question}
    try:
        prompt = config.prompt.format(**fields)
    except KeyError as error:
        known = f"the problems of task={config.task!r} have these fields: {', '.join(fields)}"
        raise ValueError(f"prompt={config.prompt!r} uses the unknown field {error}; {known}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"prompt={config.prompt!r} is not a template: {error}") from None
    prompt = "".join(prompt.split()) if config.remove_whitespace else prompt
    return Problem(
        prompt=prompt,
        answer=answer,
        key=_key_of(prompt, messages, tools),
        metadata=fields,
        messages=list(messages),
        tools=list(tools),
        place=place,
    )


def fits(problem: Problem, config: EnvironmentConfig) -> bool:
    return not config.prompt_pattern or re.fullmatch(config.prompt_pattern, problem.prompt) is not None


def _key_of(prompt: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """The prompt, or the conversation without its answer: ("12 +  3 = ", [], []) -> "12 + 3 =" """
    asked = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if len(asked) == 1 and not tools:
        prompt = text_of(asked[0])
    elif asked:
        lines = [f"{message['role']}: {text_of(message)} {message.get('tool_calls', '')}" for message in asked]
        prompt = "\n".join([*map(str, tools), *lines])
    return " ".join(unicodedata.normalize("NFC", prompt).split())


def _read(config: EnvironmentConfig, place: str, row: Mapping[str, object], kinds: Kinds) -> Problem:
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    question: object
    answer: object
    if config.prompt_column not in row and config.messages_column in row:
        messages = _messages(config.messages_column, place, row)
        tools = _tools(config.tools_column, place, row)
        asked = [message for message in messages if message["role"] != "assistant"]
        if not asked:
            raise ValueError(f"{place}: column {config.messages_column!r} has only messages of the assistant")
        question = text_of(asked[-1])
        is_answered = config.answer_column not in row and messages[-1]["role"] == "assistant"
        answer = text_of(messages[-1]) if is_answered else _column(config.answer_column, place, row)
    else:
        question = _column(config.prompt_column, place, row)
        answer = _column(config.answer_column, place, row)
    _require_kind(config.prompt_column, question, place, kinds)
    _require_kind(config.answer_column, answer, place, kinds)
    if config.rejected_column:
        _column(config.prompt_column, place, row)  # the prompt of a pair cannot be a conversation
        rejected = _column(config.rejected_column, place, row)
        _require_kind(config.rejected_column, rejected, place, kinds)
        if str(rejected) == str(answer):
            raise ValueError(
                f"{place}: columns {config.answer_column!r} and {config.rejected_column!r} both hold {str(rejected)[:80]!r}; "
                "a pair needs two answers"
            )
    used = (config.prompt_column, config.answer_column, config.messages_column)
    metadata = {name: value for name, value in row.items() if name not in used}
    return to_problem(config, str(question), str(answer), metadata, messages=messages, tools=tools, place=place)


def _column(name: str, place: str, row: Mapping[str, object]) -> object:
    if name not in row:
        raise ValueError(f"{place} has no column {name!r}; it has {', '.join(row) or 'none'}")
    return row[name]


def _require_kind(column: str, value: object, place: str, kinds: Kinds) -> None:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, str | int | float | bool | Decimal) or not is_finite:
        raise ValueError(f"{place}: column {column!r} holds {str(value)[:80]!r}, which is neither text nor a number")
    kind, first = kinds.setdefault(column, (type(value), place))
    if type(value) is not kind:
        raise ValueError(
            f"{place}: column {column!r} holds {type(value).__name__} {value!r}, but it holds {kind.__name__} at {first}"
        )


def _messages(column: str, place: str, row: Mapping[str, object]) -> list[Message]:
    """The conversation with all its fields but those that are null."""
    given = _column(column, place, row)
    if not isinstance(given, list) or not given:
        raise ValueError(f"{place}: column {column!r} holds {str(given)[:80]!r}, not a list of messages")
    messages = []
    for each in given:
        message = _without_null(each)
        if isinstance(message, dict) and ("tool_calls" in message or "reasoning_content" in message):
            message.setdefault("content", "")
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = [_without_null(part) for part in message["content"]]
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str | list)
            or not all(isinstance(part, str | dict) for part in message["content"])
        ):
            raise ValueError(f'{place}: column {column!r} holds {str(each)[:80]!r}, not {{"role": …, "content": …}}')
        _require_calls(place, message.get("tool_calls", []))
        weight = message.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{place}: a message has the weight {weight!r}; it must be a finite number of at least 0")
        messages.append(cast(Message, message))
    return messages


def _without_null(value: object) -> object:
    """An object without its null fields; other values as they are."""
    return {name: field for name, field in value.items() if field is not None} if isinstance(value, dict) else value


def _require_calls(place: str, calls: object) -> None:
    """Raises ValueError unless these are OpenAI's tool calls, the level "function" optional."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{place}: a message has the tool calls {str(calls)[:80]!r}, not "
                '[{"function": {"name": …, "arguments": …}}, …]'
            )


def _tools(column: str, place: str, row: Mapping[str, object]) -> list[dict[str, Any]]:
    given = row.get(column)
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: column {column!r} holds a text that is not JSON: {error}") from None
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{place}: column {column!r} holds {str(given)[:80]!r}, not a list of tools")
    return tools
