"""An environment that mixes the problems of several environments by weight."""

import math
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
BLOCK = 100  # in each block of this many indices, a part has the same number of problems


@dataclass(kw_only=True)
class Part(EnvironmentConfig):
    name: str = ""  # default: the task
    weight: float = 1.0  # read_parts divides them by their sum


def read_parts(config: EnvironmentConfig) -> list[Part]:
    """With unset fields from `config`; num_held_out is divided by weight. Raises ValueError."""
    if len(config.mixture) > BLOCK:
        raise ValueError(
            f"mixture has {len(config.mixture)} parts, but at most {BLOCK} are allowed: each needs at least one problem in every block "
            f"of {BLOCK} training problems"
        )
    parts = [_read_part(config, f"mixture[{number}]", values) for number, values in enumerate(config.mixture)]
    total = sum(part.weight for part in parts)
    for part, values in zip(parts, config.mixture, strict=True):
        part.weight /= total
        if "num_held_out" not in values:
            part.num_held_out = max(1, round(config.num_held_out * part.weight))
    repeated = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
    if repeated:
        raise ValueError(f"mixture has several parts with the name {repeated[0]!r}; give each part a different name")
    return parts


def _read_part(config: EnvironmentConfig, where: str, values: dict[str, object]) -> Part:
    if limits := [name for name in LIMITS_OF_RUN if name in values]:
        raise ValueError(
            f"{where} sets {limits[0]}, which applies to the whole run; set environment.{limits[0]} instead"
        )
    if values.get("mixture"):
        raise ValueError(f"{where} is itself a mixture; list its parts in the outer mixture")
    if "task" not in values:
        raise ValueError(f"{where}={values} names no task")
    try:
        part = config_file.from_values(Part, asdict(config) | {"mixture": []} | values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not 0 < part.weight < math.inf:
        raise ValueError(f"{where}={values}; it must be an object whose weight is a number above 0")
    part.name = part.name or part.task
    return part


@runtime_checkable
class Excluding(Protocol):
    """An environment that can leave out training problems."""

    def exclude(self, digests: frozenset[str]) -> None: ...


class MixedEnvironment:
    """Problems of several environments; `source` is the name of a problem's own."""

    def __init__(self, parts: Sequence[Part], environments: Sequence[Environment], seed: int):
        names = [part.name for part in parts]
        self.environments = dict(zip(names, environments, strict=True))
        self.seed = seed
        self.counts = dict(zip(names, _counts([part.weight for part in parts]), strict=True))
        self._excluded: frozenset[str] = frozenset()
        self.exclude(digests_of(self.held_out()))  # what one part holds out no part trains on

    def exclude(self, digests: frozenset[str]) -> None:
        """Give no training problem with one of these digests."""
        self._excluded |= digests
        for environment in self.environments.values():
            if isinstance(environment, Excluding):
                environment.exclude(digests)

    def problem(self, index: int) -> Problem:
        block, position = divmod(index, BLOCK)
        order = [name for name, count in self.counts.items() for _ in range(count)]
        Random(f"{self.seed}/{block}").shuffle(order)
        name = order[position]
        own_index = block * self.counts[name] + order[:position].count(name)
        return replace(self._part_problem(name, own_index), source=name)

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
        environments = self.environments.items()
        return [replace(problem, source=name) for name, each in environments for problem in each.held_out()]

    def reward(self, problem: Problem, completion: str) -> Reward | Awaitable[Reward]:
        return self.environments[problem.source].reward(problem, completion)


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
