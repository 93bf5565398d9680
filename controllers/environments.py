"""Tasks: where problems come from and what a completion earns. Knows nothing of tokens, groups or actors."""

import difflib
import functools
import importlib
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from tyro.constructors import PrimitiveConstructorSpec

HELD_OUT_SHARE = 1 / 8
"""Share of the keys that is kept from training, unless `num_held_out` needs more of a small space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    prompt: str
    answer: str
    key: str  # problems of one key are one problem to the split between training and held-out
    metadata: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    def problem(self, index: int) -> Problem:
        """Training problem number `index`: the same for the same (seed, index), and never a held-out one."""

    def held_out(self) -> list[Problem]:
        """`num_held_out` problems with distinct keys."""

    def reward(self, problem: Problem, completion: str) -> float: ...


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
    options: Annotated[dict[str, Any], _JSON] = field(default_factory=dict)
    """Arguments of the reasoning-gym task or of the user's function: one JSON object, which replaces the default."""
    prompt: str = "{question}"
    """Template of a prompt over `question` and the problem's metadata, e.g. "{expression}="."""
    remove_whitespace: bool = False
    """Take all whitespace out of the prompt, which spares a character tokenizer tokens: "12 + 34=" to "12+34="."""
    prompt_pattern: str = ""
    """Regular expression that the whole prompt must match, e.g. "\\d\\d\\+\\d\\d="; problems whose prompt does not are left out."""
    reward: Literal["exact_match", "math_verify", "task"] = "exact_match"
    """exact_match compares stripped text, math_verify compares as mathematics, task asks the reasoning-gym task."""
    num_held_out: int = 512
    """Distinct problems kept from training for validation."""
    seed: int = 0
    """Of the problems, their order and the split."""

    def validate(self) -> None:
        """Raises ValueError for values that no environment can be built from; `build_environment` finds the rest."""
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
    """Raises ValueError for an unknown task or option, a bad line of a file, or too few problems for `num_held_out`."""
    config.validate()
    if config.task.endswith(".jsonl"):
        return JsonlEnvironment(config, _read_jsonl(config.task))
    return _user_environment(config) if ":" in config.task else GeneratedEnvironment(config, _reasoning_gym(config))


def exact_match(answer: str, completion: str) -> float:
    return float(completion.strip() == answer.strip())


def math_verify(answer: str, completion: str) -> float:
    """1.0 when the two are equal as mathematics: "0.5" and "$\\frac{1}{2}$"."""
    from math_verify import parse, verify

    # The package times out by SIGALRM, which only the main thread may set.
    timeout = 5 if threading.current_thread() is threading.main_thread() else None
    gold, target = (parse(text, parsing_timeout=timeout) for text in (answer, completion))
    return float(verify(gold, target, timeout_seconds=timeout))


def operands_or_text(entry: dict[str, Any]) -> str:
    """The sorted operands of plain arithmetic, else the question: "12 + 34" and "34 + 12" both give "12 34"."""
    expression = str(entry["metadata"].get("expression", ""))
    plain = re.fullmatch(r"[\d\s.+\-*/()]+", expression)
    return " ".join(sorted(re.findall(r"\d+(?:\.\d+)?", expression))) if plain else entry["question"]


def _fraction(key: str, seed: int) -> float:
    """A stable hash in [0, 1)."""
    return int.from_bytes(blake2b(f"{seed}/{key}".encode(), digest_size=6).digest(), "big") / 2**48


def _hold_out(problems: Iterable[Problem], config: EnvironmentConfig, share: float) -> tuple[list[Problem], float]:
    """The first problem of each of the `num_held_out` keys with the lowest hashes, and the highest of these hashes.

    Stops reading as soon as hashes below `share` are enough. Raises ValueError when half of all keys is not enough.
    """
    found: dict[str, tuple[float, Problem]] = {}
    num_low = 0
    for problem in problems:
        if problem.key not in found:
            found[problem.key] = (_fraction(problem.key, config.seed), problem)
            num_low += found[problem.key][0] < share
            if num_low == config.num_held_out:
                break
    if 2 * config.num_held_out > len(found):
        source = f"task={config.task!r} with options={config.options}"
        source += f" and prompt_pattern={config.prompt_pattern!r}" if config.prompt_pattern else ""
        limit = f"half of the {len(found)} distinct problems found in {source}"
        raise ValueError(f"num_held_out={config.num_held_out} is more than {limit}")
    lowest = sorted(found.values(), key=lambda item: item[0])[: config.num_held_out]
    return [problem for _, problem in lowest], lowest[-1][0]


class GeneratedEnvironment:
    """Random draws from a sequence of {"question", "answer", "metadata"}, such as a reasoning-gym task."""

    def __init__(self, config: EnvironmentConfig, dataset: Any):
        self.config, self.dataset = config, dataset
        probes = map(self._read, range(min(len(dataset), 32 * config.num_held_out)))
        self._held_out, self._highest_held_out = _hold_out(filter(self._fits, probes), config, HELD_OUT_SHARE)

    def _read(self, position: int) -> Problem:
        entry, template = self.dataset[position], self.config.prompt
        fields = {**entry["metadata"], "question": entry["question"]}
        try:
            prompt = template.format(**fields)
        except (KeyError, IndexError) as error:
            raise ValueError(f"prompt={template!r} asks for {error}; there are {', '.join(fields)}") from None
        prompt = "".join(prompt.split()) if self.config.remove_whitespace else prompt
        return Problem(prompt=prompt, answer=str(entry["answer"]), key=operands_or_text(entry), metadata=fields)

    def _fits(self, problem: Problem) -> bool:
        pattern = self.config.prompt_pattern
        return not pattern or re.fullmatch(pattern, problem.prompt) is not None

    def problem(self, index: int) -> Problem:
        # Drawn, not counted: item i of reasoning-gym's seed s is item i + 1 of seed s - 1.
        draws = Random(f"{self.config.seed}/{index}")
        for _ in range(1000):
            problem = self._read(draws.randrange(len(self.dataset)))
            if self._fits(problem) and _fraction(problem.key, self.config.seed) > self._highest_held_out:
                return problem
        pattern = (
            f" or did not match prompt_pattern={self.config.prompt_pattern!r}" if self.config.prompt_pattern else ""
        )
        raise ValueError(
            f"training problem {index}: 1000 draws of task={self.config.task!r} were all held out{pattern}"
        )

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def reward(self, problem: Problem, completion: str) -> float:
        if self.config.reward != "task":
            score = {"exact_match": exact_match, "math_verify": math_verify}[self.config.reward]
            return score(problem.answer, completion)
        entry = {"question": problem.metadata["question"], "answer": problem.answer, "metadata": problem.metadata}
        return float(self.dataset.score_answer(answer=completion.strip(), entry=entry))


class JsonlEnvironment(GeneratedEnvironment):
    """All of a file but the held-out problems, in a new order each time round."""

    def __init__(self, config: EnvironmentConfig, dataset: list[dict[str, Any]]):
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


def _read_jsonl(path: str) -> list[dict[str, Any]]:
    entries = []
    # split, not splitlines: a JSON string may hold U+2028 and its like.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").rstrip().split("\n"), 1):
        try:
            metadata = json.loads(line)
            entries.append({"question": metadata.pop("prompt"), "answer": metadata.pop("answer"), "metadata": metadata})
        except (KeyError, AttributeError, TypeError, json.JSONDecodeError):
            raise ValueError(f'{path}:{number} is not a JSON object with "prompt" and "answer": {line[:80]}') from None
    return entries


def _reasoning_gym(config: EnvironmentConfig):
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
