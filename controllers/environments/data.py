"""Problems from a file or a Hugging Face data set, all read at the start."""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from random import Random
from typing import Any, cast

from controllers.environments.base import Message, Problem, text_of
from controllers.environments.config import EnvironmentConfig
from controllers.environments.entries import Entry, fits, require_answer, text_score, to_problem
from controllers.environments.files import Row, read_dataset, read_file
from controllers.environments.held_out import digest_of, hold_out


class DataEnvironment:
    """A task from a file or a data set. Every epoch has its own order."""

    def __init__(self, config: EnvironmentConfig, rows: Iterable[Row] | None = None, *, trains: bool = True):
        """rows: None reads those of the config. trains=False: all problems may be held out.

        Raises ValueError for a bad row, naming its place, and for too few problems, naming their
        source.
        """
        self.config = config
        self.reward = text_score(config)
        # all may be held out if training has another source, or if nothing is trained; else half
        source = config.of_held_out()
        if trains and config.has_own_held_out:
            rows = read_rows(config) if rows is None else rows
            problems = _read_problems(config, rows)
            held_out = _read_problems(source, read_rows(source))
        else:
            problems = held_out = _read_problems(source, read_rows(source) if rows is None else rows)
        self._held_out = hold_out(
            held_out,
            number=config.num_held_out,
            seed=config.seed_of_held_out,
            share=0.0,
            source=source.source,
            may_be_all=config.has_own_held_out or not trains,
        )[0]
        keys = {problem.key for problem in self._held_out}
        self._training = [problem for problem in problems if problem.key not in keys]
        self.trains = trains
        # rows with the key of a held-out problem, of this run or an earlier one
        self.num_excluded = 0
        if trains:
            self.num_excluded = len(problems) - len(self._training)
            self.num_excluded -= 0 if config.has_own_held_out else len(keys)
            self._require_training()

    def exclude(self, digests: frozenset[str]) -> None:
        """Train on no problem whose digest_of(key) is given. Raises ValueError if none is left."""
        left = [problem for problem in self._training if digest_of(problem.key) not in digests]
        self.num_excluded += len(self._training) - len(left)
        self._training = left
        if self.trains:
            self._require_training()

    def _require_training(self) -> None:
        if not self._training:
            raise ValueError(
                f"no problem of {self.config.source} is left to train on after {len(self._held_out)} problems are held out"
                + (f", and {self.num_excluded} rows have held-out prompts" if self.num_excluded else "")
            )

    def problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._training))
        return self._training[_shuffled(len(self._training), f"{self.config.seed}/{epoch}")[position]]

    @property
    def training_problems(self) -> list[Problem]:
        """In the order of the file."""
        return self._training

    def held_out(self) -> list[Problem]:
        return list(self._held_out)


def _read_problems(config: EnvironmentConfig, rows: Iterable[Row]) -> list[Problem]:
    problems = []
    for entry in read_entries(config, rows):
        problem = to_problem(entry, config)
        if fits(problem, config):
            require_answer(entry, config)
            problems.append(problem)
    return problems


@functools.lru_cache(maxsize=4)
def _shuffled(length: int, seed: str) -> list[int]:
    return Random(seed).sample(range(length), length)


def read_rows(config: EnvironmentConfig) -> Iterator[Row]:
    return read_file(config.task) if config.is_file else read_dataset(config.task, config.split, config.options)


def read_entries(config: EnvironmentConfig, rows: Iterable[Row]) -> Iterator[Entry]:
    """An Entry for each row.

    Raises ValueError, naming the row, for a missing column; a question or an answer that is neither
    text nor a number, or of another type than in earlier rows; a conversation that is not a list of
    messages; equal chosen and rejected answers.
    """
    kinds: dict[str, tuple[type, str]] = {}  # by column: type, and place of the first row
    used = (config.prompt_column, config.answer_column, config.messages_column)
    for where, row in rows:
        messages: list[Message] = []
        tools: list[dict[str, Any]] = []
        if config.prompt_column not in row and config.messages_column in row:
            messages, question, answer = _conversation(config, where, row)
            tools = _tools(config.tools_column, where, row)
        else:
            question = _column(config.prompt_column, where, row)
            answer = _column(config.answer_column, where, row)
        _require_kind(config.prompt_column, question, where, kinds)
        _require_kind(config.answer_column, answer, where, kinds)
        if config.rejected_column:
            _require_pair(config, where, row, kinds)
        metadata = {name: value for name, value in row.items() if name not in used}
        yield Entry(
            question=str(question),
            answer=str(answer),
            metadata=metadata,
            messages=messages,
            tools=tools,
            place=where,
        )


def _require_pair(
    config: EnvironmentConfig, where: str, row: Mapping[str, object], kinds: dict[str, tuple[type, str]]
) -> None:
    # the prompt of a pair cannot be a conversation
    _column(config.prompt_column, where, row)
    chosen = config.answer_column
    rejected = config.rejected_column
    value = _column(rejected, where, row)
    _require_kind(rejected, value, where, kinds)
    if str(value) == str(_column(chosen, where, row)):
        raise ValueError(
            f"{where}: columns {chosen!r} and {rejected!r} both hold {str(value)[:80]!r}; a pair needs two answers"
        )


def _conversation(
    config: EnvironmentConfig, where: str, row: Mapping[str, object]
) -> tuple[list[Message], object, object]:
    """Messages, question (the last message that is not the assistant's) and answer.

    The answer is the answer column, or without it the last message, which must be the assistant's.
    """
    messages = _messages(config.messages_column, where, row)
    asked = [message for message in messages if message["role"] != "assistant"]
    if not asked:
        raise ValueError(f"{where}: column {config.messages_column!r} has only messages of the assistant")
    question: object = text_of(asked[-1])
    if config.answer_column not in row and messages[-1]["role"] == "assistant":
        return messages, question, text_of(messages[-1])
    return messages, question, _column(config.answer_column, where, row)


def _column(name: str, where: str, row: Mapping[str, object]) -> object:
    if name not in row:
        raise ValueError(f"{where} has no column {name!r}; it has {', '.join(row) or 'none'}")
    return row[name]


def _require_kind(column: str, value: object, where: str, kinds: dict[str, tuple[type, str]]) -> None:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, str | int | float | bool | Decimal) or not is_finite:
        raise ValueError(f"{where}: column {column!r} holds {str(value)[:80]!r}, which is neither text nor a number")
    kind, first = kinds.setdefault(column, (type(value), where))
    if type(value) is not kind:
        raise ValueError(
            f"{where}: column {column!r} holds {type(value).__name__} {value!r}, but it holds {kind.__name__} at {first}"
        )


def _messages(column: str, where: str, row: Mapping[str, object]) -> list[Message]:
    """The conversation with all its fields but those that are null."""
    given = _column(column, where, row)
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where}: column {column!r} holds {str(given)[:80]!r}, not a list of messages")
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
            raise ValueError(f'{where}: column {column!r} holds {str(each)[:80]!r}, not {{"role": …, "content": …}}')
        _require_calls(where, message.get("tool_calls", []))
        weight = message.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{where}: a message has the weight {weight!r}; it must be a finite number of at least 0")
        messages.append(cast(Message, message))
    return messages


def _without_null(value: object) -> object:
    """An object without its null fields; other values as they are."""
    return {name: field for name, field in value.items() if field is not None} if isinstance(value, dict) else value


def _require_calls(where: str, calls: object) -> None:
    """Raises ValueError unless these are OpenAI's tool calls, the level "function" optional."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}: a message has the tool calls {str(calls)[:80]!r}, not "
                '[{"function": {"name": …, "arguments": …}}, …]'
            )


def _tools(column: str, where: str, row: Mapping[str, object]) -> list[dict[str, Any]]:
    given = row.get(column)
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: column {column!r} holds a text that is not JSON: {error}") from None
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: column {column!r} holds {str(given)[:80]!r}, not a list of tools")
    return tools
