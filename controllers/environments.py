"""Tasks: sources of problems, and the reward of a completion. Knows nothing of tokens, groups or actors."""

import difflib
import functools
import importlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypedDict, runtime_checkable

from tyro.constructors import PrimitiveConstructorSpec

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

HELD_OUT_SHARE = 1 / 8
"""Share of the keys that training does not use. If a task has few keys, `num_held_out` can need a larger share."""

DRAWS_PER_PROBLEM = 1000
"""Entries tried for one training problem before the task is given up."""


class Entry(TypedDict):
    """An entry of a dataset."""

    question: str
    answer: str
    metadata: dict[str, object]


class Message(TypedDict):
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    prompt: str
    answer: str
    key: str  # training uses no problem that has the key of a held-out one
    metadata: dict[str, object] = field(default_factory=dict)
    # The conversation that the completion continues. If it is not empty, the model's chat template makes the prompt from it, and `prompt`
    # is only shown.
    messages: list[Message] = field(default_factory=list)


@runtime_checkable
class Environment(Protocol):
    def problem(self, index: int) -> Problem:
        """Training problem number `index`. It depends on (seed, index) only, and it is never a held-out problem."""

    def held_out(self) -> list[Problem]:
        """`num_held_out` problems with distinct keys."""

    def reward(self, problem: Problem, completion: str) -> float:
        """The reward of a completion of this problem's prompt: a finite number."""


class RewardError(ValueError):
    """A reward that is not a finite number."""


def score(environment: Environment, problem: Problem, completion: str) -> float:
    """The reward of a completion. Raises RewardError for one that is not a finite number: it would spoil the whole group's advantages."""
    reward = environment.reward(problem, completion)
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        where = f"completion {completion!r} of prompt {problem.prompt!r}"
        raise RewardError(f"the reward of {where} is {reward!r}; it must be a finite number")
    return value


_JSON = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda args: json.loads(args[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


@dataclass(kw_only=True)
class EnvironmentConfig:
    task: str = "basic_arithmetic"
    """A reasoning-gym task, a .jsonl file with "prompt" and "answer" on each line, or a function as module:function."""
    options: Annotated[dict[str, object], _JSON] = field(default_factory=dict)
    """Arguments of the reasoning-gym task or of the user's function: one JSON object, which replaces the default as a whole."""
    prompt: str = "{question}"
    """Template of the prompt. It may use `question` and the keys of the problem's metadata, e.g. "{expression}="."""
    remove_whitespace: bool = False
    """Remove all whitespace from the prompt ("12 + 34=" becomes "12+34="). A character tokenizer then needs fewer tokens."""
    prompt_pattern: str = ""
    """Regular expression that the whole prompt must match, e.g. "\\d\\d\\+\\d\\d=". Problems with another prompt are left out."""
    reward: Literal["exact_match", "math_verify", "task"] = "exact_match"
    """exact_match compares stripped text, math_verify compares mathematical values, task asks the reasoning-gym task."""
    num_held_out: int = 512
    """Distinct problems that are used for validation and never for training."""
    seed: int = 0
    """Seed of the problems, of their order and of the split between training and held-out."""

    def validate(self) -> None:
        """Raise ValueError for a wrong value that can be found without the dataset. `build_environment` finds the others."""
        if self.num_held_out < 1:
            raise ValueError(f"num_held_out={self.num_held_out}; it must be at least 1")
        if not isinstance(self.options, dict):
            raise ValueError(f"options={self.options!r} is not a JSON object")
        try:
            re.compile(self.prompt_pattern)
        except re.error as error:
            raise ValueError(f"prompt_pattern={self.prompt_pattern!r} is not a regular expression: {error}") from None
        if self.reward == "task" and (self.task.endswith(".jsonl") or ":" in self.task):
            raise ValueError(f"reward='task' needs a reasoning-gym task, but task={self.task!r}")
        if self.task.endswith(".jsonl") and not Path(self.task).is_file():
            raise ValueError(f"task={self.task!r} is not a file")


def build_environment(config: EnvironmentConfig) -> Environment:
    """The environment of a task. Raises ValueError for an unknown task or option, a bad line of a file, or too few problems."""
    config.validate()
    if config.task.endswith(".jsonl"):
        return JsonlEnvironment(config, _read_jsonl(config.task))
    if ":" in config.task:
        return _user_environment(config)
    return GeneratedEnvironment(config, _reasoning_gym(config))


def exact_match(answer: str, completion: str) -> float:
    return float(completion.strip() == answer.strip())


def math_verify(answer: str, completion: str) -> float:
    """1.0 when both texts have the same mathematical value, such as "0.5" and "$\\frac{1}{2}$"; else 0.0."""
    from math_verify import parse, verify

    # The package implements its timeout with SIGALRM, which only the main thread may set.
    timeout = 5 if threading.current_thread() is threading.main_thread() else None
    gold, target = (parse(text, parsing_timeout=timeout) for text in (answer, completion))
    return float(verify(gold, target, timeout_seconds=timeout))


SCORES: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "math_verify": math_verify}


def operands_or_text(entry: Entry) -> str:
    """Key of an entry: the sorted operands of plain arithmetic ("12 + 34" and "34 + 12" give "12 34"), else the question."""
    expression = str(entry["metadata"].get("expression", ""))
    if not re.fullmatch(r"[\d\s.+\-*/()]+", expression):
        return entry["question"]
    return " ".join(sorted(re.findall(r"\d+(?:\.\d+)?", expression)))


def _fraction(key: str, seed: int) -> float:
    """A hash of key and seed in [0, 1). It is the same on every machine and in every process."""
    return int.from_bytes(blake2b(f"{seed}/{key}".encode(), digest_size=6).digest(), "big") / 2**48


def _hold_out(problems: Iterable[Problem], config: EnvironmentConfig, share: float) -> tuple[list[Problem], float]:
    """Held-out problems, and the highest hash of their keys.

    The `num_held_out` keys with the lowest hashes are held out, each with its first problem. Reading stops when `num_held_out` keys
    with hashes below `share` are found. Raises ValueError when `num_held_out` is more than half of all keys.
    """
    found: dict[str, tuple[float, Problem]] = {}
    num_low = 0
    for problem in problems:
        if problem.key in found:
            continue
        fraction = _fraction(problem.key, config.seed)
        found[problem.key] = (fraction, problem)
        num_low += fraction < share
        if num_low == config.num_held_out:
            break
    if 2 * config.num_held_out > len(found):
        source = f"task={config.task!r} with options={config.options}"
        if config.prompt_pattern:
            source += f" and prompt_pattern={config.prompt_pattern!r}"
        limit = f"half of the {len(found)} distinct problems found in {source}"
        raise ValueError(f"num_held_out={config.num_held_out} is more than {limit}")
    lowest = sorted(found.values(), key=lambda item: item[0])[: config.num_held_out]
    return [problem for _, problem in lowest], lowest[-1][0]


class GeneratedEnvironment:
    """Random draws from a reasoning-gym task."""

    def __init__(self, config: EnvironmentConfig, dataset: "ProceduralDataset"):
        self.config, self.dataset = config, dataset
        probes = map(self._read, range(min(len(dataset), 32 * config.num_held_out)))
        self._held_out, self._highest_held_out = _hold_out(filter(self._fits, probes), config, HELD_OUT_SHARE)

    def _read(self, position: int) -> Problem:
        entry, template = self.dataset[position], self.config.prompt
        fields = {**entry["metadata"], "question": entry["question"]}
        try:
            prompt = template.format(**fields)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"prompt={template!r} uses the unknown field {error}; known are {', '.join(fields)}"
            ) from None
        prompt = "".join(prompt.split()) if self.config.remove_whitespace else prompt
        return Problem(prompt=prompt, answer=str(entry["answer"]), key=operands_or_text(entry), metadata=fields)

    def _fits(self, problem: Problem) -> bool:
        pattern = self.config.prompt_pattern
        return not pattern or re.fullmatch(pattern, problem.prompt) is not None

    def problem(self, index: int) -> Problem:
        # Entries are drawn at random, not taken in order: entry i of reasoning-gym's seed s is entry i + 1 of seed s - 1.
        draws = Random(f"{self.config.seed}/{index}")
        for _ in range(DRAWS_PER_PROBLEM):
            problem = self._read(draws.randrange(len(self.dataset)))
            if self._fits(problem) and _fraction(problem.key, self.config.seed) > self._highest_held_out:
                return problem
        draw = f"training problem {index}: each of {DRAWS_PER_PROBLEM} draws of task={self.config.task!r} was held out"
        if self.config.prompt_pattern:
            draw += f" or did not match prompt_pattern={self.config.prompt_pattern!r}"
        raise ValueError(draw)

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def reward(self, problem: Problem, completion: str) -> float:
        if self.config.reward != "task":
            return SCORES[self.config.reward](problem.answer, completion)
        entry = {"question": problem.metadata["question"], "answer": problem.answer, "metadata": problem.metadata}
        return float(self.dataset.score_answer(answer=completion.strip(), entry=entry))


class JsonlEnvironment(GeneratedEnvironment):
    """All problems of a file except the held-out ones, in another order in every epoch."""

    def __init__(self, config: EnvironmentConfig, dataset: list[Entry]):
        self.config, self.dataset = config, dataset
        problems = list(filter(self._fits, map(self._read, range(len(dataset)))))
        self._held_out, highest = _hold_out(problems, config, 0.0)
        self._training = [problem for problem in problems if _fraction(problem.key, config.seed) > highest]

    def problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._training))
        return self._training[_shuffled(len(self._training), f"{self.config.seed}/{epoch}")[position]]


@functools.lru_cache(maxsize=4)
def _shuffled(length: int, seed: str) -> list[int]:
    return Random(seed).sample(range(length), length)


def _read_jsonl(path: str) -> list[Entry]:
    entries: list[Entry] = []
    # split, not splitlines: a JSON string may hold U+2028, at which splitlines splits, too.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").rstrip().split("\n"), 1):
        try:
            metadata = json.loads(line)
            entries.append({"question": metadata.pop("prompt"), "answer": metadata.pop("answer"), "metadata": metadata})
        except (KeyError, AttributeError, TypeError, json.JSONDecodeError):
            raise ValueError(f'{path}:{number} is not a JSON object with "prompt" and "answer": {line[:80]}') from None
    return entries


def _reasoning_gym(config: EnvironmentConfig) -> "ProceduralDataset":
    from reasoning_gym.factory import DATASETS, create_dataset

    if config.task not in DATASETS:
        near = " or ".join(difflib.get_close_matches(config.task, DATASETS)) or "a .jsonl file or module:function"
        raise ValueError(f"task={config.task!r} is not a reasoning-gym task; did you mean {near}?")
    options = {"seed": int(_fraction("dataset", config.seed) * 2**31), "size": 1_000_000, **config.options}
    try:
        return create_dataset(config.task, **options)
    except (TypeError, ValueError, AssertionError) as error:
        known = ", ".join(DATASETS[config.task][1].__dataclass_fields__)
        raise ValueError(f"task={config.task!r} with options={options}: {error} (known options: {known})") from error


def _user_environment(config: EnvironmentConfig) -> Environment:
    module, _, name = config.task.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task={config.task!r} cannot be imported: {error}") from error
    environment = function(seed=config.seed, num_held_out=config.num_held_out, **config.options)
    if not isinstance(environment, Environment):
        missing = [name for name in ("problem", "held_out", "reward") if not hasattr(environment, name)]
        raise ValueError(f"task={config.task!r} returned {type(environment).__name__} without {', '.join(missing)}")
    return environment
