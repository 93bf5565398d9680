"""Calls reward functions: one completion or all of a problem, plain or `async`."""

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from controllers.environments.base import (
    AnyEnvironment,
    Environment,
    EpisodeEnvironment,
    Problem,
    RewardError,
    as_reward,
)
from controllers.environments.config import EnvironmentConfig
from controllers.environments.mixture import MixedEnvironment
from controllers.environments.own_code import described
from controllers.environments.pool import RewardPool, name_of, reward_function

T = TypeVar("T")
TOTAL = "reward"  # the component that is the reward; without it, the sum of all
LONGEST_PAUSE = 30.0  # seconds, of 1, 2, 4, … before retries of an `async` function


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of the completions of one problem."""

    totals: list[float]
    num_retries: int
    # By name; None where a completion lacks the component. Empty for plain numbers.
    components: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Calls reward functions; an awaited answer has a time limit and retries."""

    timeout: float = 60.0  # seconds
    max_retries: int = 2
    # concurrent awaited answers, without those of the pool
    slots: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 64))
    pool: RewardPool = field(default_factory=RewardPool)

    @staticmethod
    def of(config: EnvironmentConfig, environments: Mapping[str, AnyEnvironment] | None = None) -> "Scorer":
        """environments: by name, for error texts. With reward_workers, raises ValueError for a reward
        function that cannot be sent to a process, and for episodes."""
        single: dict[str, Environment] = {}
        for name, environment in (environments or {}).items():
            if isinstance(environment, MixedEnvironment):
                single |= {f"{name}, {part}": each for part, each in environment.environments.items()}
            elif not isinstance(environment, EpisodeEnvironment):
                single[name] = environment
            elif config.reward_workers:
                raise ValueError(
                    f"reward_workers={config.reward_workers}, but {name} has episodes, which the controller plays itself"
                )
        return Scorer(
            timeout=config.reward_timeout,
            max_retries=config.reward_retries,
            slots=asyncio.Semaphore(config.reward_concurrency),
            pool=RewardPool(single if config.reward_workers else {}, num_workers=config.reward_workers),
        )

    def start(self) -> None:
        """Raises ValueError, naming functions that a process of the pool cannot import."""
        self.pool.start()

    def close(self) -> None:
        self.pool.close()

    @property
    def num_replaced(self) -> int:
        return self.pool.num_replaced

    async def score(self, environment: Environment, problem: Problem, texts: Sequence[str]) -> Rewards:
        """By one call of `rewards`, or by `reward` one by one. Raises RewardError, naming prompt and
        completion, for one that is missing or not finite, or after the last retry."""
        owner = _owner(environment, problem)
        if getattr(owner, "rewards", None) is not None:
            answers, num_retries = await self._ask(owner, problem, list(texts))
            if hasattr(answers, "tolist"):  # numpy or torch
                answers = answers.tolist()
            if not isinstance(answers, Sequence) or isinstance(answers, str | bytes) or len(answers) != len(texts):
                raise RewardError(
                    f"the method rewards gave {answers!r} for {len(texts)} completions of prompt {problem.prompt!r}; it must give one reward for each"
                )
        else:
            pairs = await together(self._ask(owner, problem, text) for text in texts)
            answers = [answer for answer, _ in pairs]
            num_retries = sum(retries for _, retries in pairs)
        parts = [_parts(answer, problem, text) for answer, text in zip(answers, texts, strict=True)]
        names = sorted({name for each in parts for name in each} - {TOTAL})
        return Rewards(
            totals=[each[TOTAL] for each in parts],
            components={name: [each.get(name) for each in parts] for name in names},
            num_retries=num_retries,
        )

    async def try_on_answer(self, environment: Environment, problem: Problem) -> str:
        """A line with the reward of the problem's answer. Raises ValueError, naming the function."""
        name = name_of(reward_function(_owner(environment, problem)))
        tried = f"the reward {name} of the answer {problem.answer!r} of the held-out problem {problem.prompt!r}"
        try:
            [total] = (await self.score(environment, problem, [problem.answer])).totals
        except RewardError as error:
            raise ValueError(f"{tried} failed: {error}") from error
        except Exception as error:  # the user's function may raise anything
            raise ValueError(f"{tried} failed: {described(error)}") from error
        return f"{tried} is {total:g}"

    async def _ask(self, environment: Environment, problem: Problem, completion: str | list[str]) -> tuple[object, int]:
        """The answer and the number of retries. Only awaited answers are retried."""
        ask: Callable[[], object] = partial(reward_function(environment), problem, completion)
        is_pooled = self.pool.calls(environment)
        if is_pooled:
            ask = partial(self.pool.ask, environment, problem, completion, timeout=self.timeout)
        for attempt in range(self.max_retries + 1):
            if attempt and not is_pooled:
                await asyncio.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE))
            try:
                answer = ask()
            except Exception as error:
                error.add_note(f"The reward function raised this for {_where(problem, completion)}.")
                raise  # by a plain function: a bug, so no retry
            if not inspect.isawaitable(answer):
                return answer, 0
            try:
                # the pool counts from when a process is free
                async with contextlib.nullcontext() if is_pooled else self.limits():
                    return await answer, attempt
            except Exception as error:
                failure = f"no answer within {self.timeout:g} s" if isinstance(error, TimeoutError) else repr(error)
        where = _where(problem, completion)
        raise RewardError(f"the reward of {where} failed {self.max_retries + 1} times, the last time with {failure}")

    @contextlib.asynccontextmanager
    async def limits(self) -> AsyncIterator[None]:
        """Awaits a slot; after `timeout` seconds more raises TimeoutError."""
        async with self.slots, asyncio.timeout(self.timeout):
            yield


async def together(work: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """The results in order. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _where(problem: Problem, completion: str | list[str]) -> str:
    return f"completion {completion!r} of prompt {problem.prompt!r}"


def _owner(environment: Environment, problem: Problem) -> Environment:
    """The part of a mixture that the problem comes from, or the environment itself."""
    return environment.environments[problem.source] if isinstance(environment, MixedEnvironment) else environment


def _parts(answer: Any, problem: Problem, text: str) -> dict[str, float]:
    """The components and their TOTAL. Raises RewardError for a reward that is not finite."""
    found = dict(answer) if isinstance(answer, Mapping) else {TOTAL: answer}
    try:
        parts = {str(name): as_reward(value) for name, value in found.items()}
        if not parts:
            raise ValueError("no component")
        if TOTAL not in parts:
            parts[TOTAL] = as_reward(math.fsum(parts.values()))  # fsum: 0.7 + 0.2 + 0.1 is 1.0
    except (ValueError, OverflowError):
        where = _where(problem, text)
        raise RewardError(f"the reward of {where} is {answer!r}; it must be a finite number") from None
    return parts
