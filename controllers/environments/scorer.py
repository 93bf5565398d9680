"""Calls reward functions to score completions.

A reward function scores one completion, or all completions of a problem. Its answer is a reward, or a list of rewards.
The function returns the answer, or an awaitable of the answer. A reward is a number, or a mapping from names of
components to numbers.
"""

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from controllers.environments.base import Environment, Problem, RewardError, as_reward
from controllers.environments.config import EnvironmentConfig
from controllers.environments.episode import AnyEnvironment, EpisodeEnvironment
from controllers.environments.mixture import MixedEnvironment
from controllers.environments.own_code import described
from controllers.environments.pool import RewardPool, name_of, reward_function
from controllers.environments.together import together

TOTAL = "reward"
"""Name of the component that is taken as the reward. If no component has this name, the reward is the sum of all components."""

LONGEST_PAUSE = 30.0
"""Longest pause, in seconds, before an `async` reward function is called again. The first pause is one second, and each later pause is
twice as long as the pause before it. A reward server that restarts or is overloaded can recover in these pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of the completions of one problem."""

    totals: list[float]
    # By name; None where the completion's reward lacks the component. Empty if the rewards are plain numbers.
    components: dict[str, list[float | None]]
    num_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Calls the reward functions of environments.

    An awaited answer has a time limit. If the await fails or takes too long, the scorer calls the function again.
    """

    timeout: float = 60.0  # seconds
    max_retries: int = 2
    # This semaphore limits the number of answers that are awaited at the same time. It does not count answers of the pool.
    slots: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 64))
    pool: RewardPool | None = None  # processes that call reward functions; `start` and `close` start and end them

    @staticmethod
    def of(config: EnvironmentConfig, environments: Mapping[str, AnyEnvironment] | None = None) -> "Scorer":
        """A scorer with the limits of a config. If reward_workers is above 0, a pool calls the reward functions that are not `async`.

        environments: the environments by name. Error texts show these names. If reward_workers is above 0, raises ValueError for a
        reward function that cannot be sent to a process, and for an environment with episodes.
        """
        with_reward: dict[str, Environment] = {}
        for name, environment in (environments or {}).items():
            if not isinstance(environment, EpisodeEnvironment):
                with_reward[name] = environment
            elif config.reward_workers:
                raise ValueError(
                    f"reward_workers={config.reward_workers}, but {name} has episodes, which the controller plays itself"
                )
        single = _without_mixtures(with_reward)
        return Scorer(
            timeout=config.reward_timeout,
            max_retries=config.reward_retries,
            slots=asyncio.Semaphore(config.reward_concurrency),
            pool=RewardPool(single, num_workers=config.reward_workers) if config.reward_workers else None,
        )

    def start(self) -> None:
        """Start the processes of the pool. Raises ValueError, naming the functions, if a process cannot import them."""
        if self.pool is not None:
            self.pool.start()

    def close(self) -> None:
        """End the processes of the pool."""
        if self.pool is not None:
            self.pool.close()

    @property
    def num_replaced(self) -> int:
        """Number of the pool's processes that were replaced because they ended or did not answer in time."""
        return 0 if self.pool is None else self.pool.num_replaced

    async def score(self, environment: Environment, problem: Problem, texts: Sequence[str]) -> Rewards:
        """The rewards of the completions of a problem.

        If an environment has a method `rewards(problem, completions)`, it is called once for all completions. Otherwise `reward` is called
        for each completion. Both methods may be `async`. A reward is a number or a mapping from names of components to numbers.
        Raises RewardError, naming prompt and completion, for a reward that is not a finite number, and for a reward whose last retry failed.
        Also raises RewardError if `rewards` does not give one reward for each completion.
        """
        owner = _owner(environment, problem)
        if getattr(owner, "rewards", None) is not None:
            answers, num_retries = await self._ask(owner, problem, list(texts))
            if hasattr(answers, "tolist"):  # an array of numpy or a tensor
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
        """Score the answer of a problem. Returns a line with the reward. Raises ValueError, naming the reward function, if it fails."""
        name = name_of(reward_function(_owner(environment, problem)))
        tried = f"the reward {name} of the answer {problem.answer!r} of the held-out problem {problem.prompt!r}"
        try:
            [total] = (await self.score(environment, problem, [problem.answer])).totals
        except RewardError as error:
            raise ValueError(f"{tried} failed: {error}") from error
        except Exception as error:  # the user's function may raise any exception
            raise ValueError(f"{tried} failed: {described(error)}") from error
        return f"{tried} is {total:g}"

    async def _ask(self, environment: Environment, problem: Problem, completion: str | list[str]) -> tuple[object, int]:
        """The answer, and the number of retries. Only awaited answers are retried, so a plain function in this process is called once."""
        limits: Callable[[], contextlib.AbstractAsyncContextManager[None]] = self.limits
        ask: Callable[[], object] = partial(reward_function(environment), problem, completion)
        pauses = True
        if self.pool is not None and self.pool.calls(environment):
            ask = partial(self.pool.ask, environment, problem, completion, timeout=self.timeout)
            limits = contextlib.nullcontext  # the pool measures the time itself, from the moment when a process is free
            # A retry needs no pause, because the pool has replaced a process that ended or did not answer.
            pauses = False
        for attempt in range(self.max_retries + 1):
            if attempt and pauses:
                await asyncio.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE))
            try:
                answer = ask()
            except Exception as error:
                # Only a function that is not `async` can raise here. The scorer takes the error for a bug, so it does
                # not retry.
                error.add_note(
                    f"The reward function raised this for completion {completion!r} of prompt {problem.prompt!r}."
                )
                raise
            if not inspect.isawaitable(answer):
                return answer, 0
            try:
                async with limits():
                    return await answer, attempt
            except Exception as error:
                failure = f"no answer within {self.timeout:g} s" if isinstance(error, TimeoutError) else repr(error)
        where = f"completion {completion!r} of prompt {problem.prompt!r}"
        raise RewardError(f"the reward of {where} failed {self.max_retries + 1} times, the last time with {failure}")

    @contextlib.asynccontextmanager
    async def limits(self) -> AsyncIterator[None]:
        """Context manager in which an answer is awaited. Waits for a free slot. After `timeout` more seconds it cancels its body and raises TimeoutError."""
        async with self.slots, asyncio.timeout(self.timeout):
            yield


def _owner(environment: Environment, problem: Problem) -> Environment:
    """The environment itself, or the part of a mixture that the problem comes from."""
    return environment.environments[problem.source] if isinstance(environment, MixedEnvironment) else environment


def _without_mixtures(environments: Mapping[str, Environment]) -> dict[str, Environment]:
    """The environments, with each mixture replaced by the environments that it mixes. The keys are the names that error texts show."""
    single: dict[str, Environment] = {}
    for name, environment in environments.items():
        parts = environment.environments if isinstance(environment, MixedEnvironment) else {}
        single |= {f"{name}, {part}": each for part, each in parts.items()} or {name: environment}
    return single


def _parts(answer: Any, problem: Problem, text: str) -> dict[str, float]:
    """The components of a reward, and their total under the name TOTAL.

    Raises RewardError for a reward that is not a finite number, because it would spoil the advantages of its group.
    """
    found = dict(answer) if isinstance(answer, Mapping) else {TOTAL: answer}
    try:
        parts = {str(name): as_reward(value) for name, value in found.items()}
        if not parts:
            raise ValueError("no component")
        if TOTAL not in parts:
            parts[TOTAL] = as_reward(math.fsum(parts.values()))  # fsum: 0.7 + 0.2 + 0.1 is 1.0
    except (ValueError, OverflowError):
        where = f"completion {text!r} of prompt {problem.prompt!r}"
        raise RewardError(f"the reward of {where} is {answer!r}; it must be a finite number") from None
    return parts
