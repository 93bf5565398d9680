"""An environment that mixes the problems of several environments by weight."""

from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Protocol, runtime_checkable

from controllers import config_file
from controllers.environments.base import Environment, Problem, Reward
from controllers.environments.config import LIMITS_OF_RUN, EnvironmentConfig
from controllers.environments.held_out import digest_of, digests_of

DRAWS_PER_PROBLEM = 1000
"""Problems of a part that are tried for one training problem."""

BLOCK = 100
"""In each block of this many indices, a part has the same number of problems."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the environments of a mixture."""

    name: str
    weight: float  # share of the training problems; all add up to 1
    config: EnvironmentConfig


def read_parts(config: EnvironmentConfig) -> list[Part]:
    """The parts, with unset fields from `config`. Raises ValueError, naming the part.

    num_held_out is divided by weight, at least 1 each.
    """
    if len(config.mixture) > BLOCK:
        raise ValueError(
            f"mixture has {len(config.mixture)} parts, but at most {BLOCK} are allowed: each needs at least one problem in every block "
            f"of {BLOCK} training problems"
        )
    around = asdict(config) | {"mixture": []}
    total = sum(_weight(number, values) for number, values in enumerate(config.mixture))
    parts = []
    for number, values in enumerate(config.mixture):
        own = {name: value for name, value in values.items() if name not in ("weight", "name")}
        if limits := [name for name in LIMITS_OF_RUN if name in own]:
            raise ValueError(
                f"mixture[{number}] sets {limits[0]}, which applies to the whole run; set environment.{limits[0]} instead"
            )
        if own.get("mixture"):
            raise ValueError(f"mixture[{number}] is itself a mixture; list its parts in the outer mixture")
        if "task" not in own:
            raise ValueError(f"mixture[{number}]={values} names no task")
        try:
            made = config_file.from_values(EnvironmentConfig, around | own)
        except ValueError as error:
            raise ValueError(f"mixture[{number}]: {error}") from None
        weight = _weight(number, values) / total
        if "num_held_out" not in own:
            made.num_held_out = max(1, round(config.num_held_out * weight))
        parts.append(Part(name=str(values.get("name", made.task)), weight=weight, config=made))
    repeated = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
    if repeated:
        raise ValueError(f"mixture has several parts with the name {repeated[0]!r}; give each part a different name")
    return parts


def _weight(number: int, values: dict[str, object]) -> float:
    weight = values.get("weight", 1.0) if isinstance(values, dict) else None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ValueError(f"mixture[{number}]={values}; it must be an object whose weight is a number above 0")
    return float(weight)


@runtime_checkable
class Excluding(Protocol):
    """An environment that can leave out training problems."""

    def exclude(self, digests: frozenset[str]) -> None: ...


class MixedEnvironment:
    """Problems of several environments; `source` is the name of a problem's own."""

    def __init__(self, parts: Sequence[Part], environments: Sequence[Environment], seed: int):
        self.names = [part.name for part in parts]
        self.environments = dict(zip(self.names, environments, strict=True))
        self.seed = seed
        self.counts = _counts([part.weight for part in parts])
        self._excluded: frozenset[str] = frozenset()
        # what one part holds out no part trains on
        self.exclude(digests_of(self.held_out()))

    def exclude(self, digests: frozenset[str]) -> None:
        """Give no training problem with one of these digests (digest_of)."""
        self._excluded |= digests
        for environment in self.environments.values():
            if isinstance(environment, Excluding):
                environment.exclude(digests)

    def problem(self, index: int) -> Problem:
        block, position = divmod(index, BLOCK)
        order = [name for name, count in zip(self.names, self.counts, strict=True) for _ in range(count)]
        Random(f"{self.seed}/{block}").shuffle(order)
        name = order[position]
        count = self.counts[self.names.index(name)]
        return self._of(name, self._part_problem(name, block * count + order[:position].count(name)))

    def _part_problem(self, name: str, index: int) -> Problem:
        """Draws another index if the key is excluded, which a user's own part may not do."""
        draws = Random(f"{self.seed}/{name}/{index}")
        tried = index
        for _ in range(DRAWS_PER_PROBLEM):
            problem = self.environments[name].problem(tried)
            if digest_of(problem.key) not in self._excluded:
                return problem
            tried = draws.randrange(2**31)
        raise ValueError(f"mixture, {name}: {DRAWS_PER_PROBLEM} problems drawn for problem {index} are all held out")

    def held_out(self) -> list[Problem]:
        return [self._of(name, problem) for name in self.names for problem in self.environments[name].held_out()]

    def reward(self, problem: Problem, completion: str) -> Reward | Awaitable[Reward]:
        return self.environments[problem.source].reward(problem, completion)

    def _of(self, name: str, problem: Problem) -> Problem:
        return replace(problem, source=name)


def _counts(weights: Sequence[float]) -> list[int]:
    """Problems of each part in a block: weight * BLOCK, rounded, at least 1, BLOCK in all."""
    counts = [max(1, int(weight * BLOCK)) for weight in weights]
    remainders = [weight * BLOCK - count for weight, count in zip(weights, counts, strict=True)]
    while sum(counts) != BLOCK:
        step = 1 if sum(counts) < BLOCK else -1
        chosen = max(range(len(counts)), key=lambda at: step * remainders[at] if counts[at] + step >= 1 else -BLOCK)
        counts[chosen] += step
        remainders[chosen] -= step
    return counts
