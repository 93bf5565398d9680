"""Problems drawn at random from a task of reasoning-gym."""

import difflib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from controllers.environments.base import Problem
from controllers.environments.config import EnvironmentConfig
from controllers.environments.data import fits, to_problem
from controllers.environments.held_out import digest_of, fraction, hold_out, operands_or_key
from controllers.environments.scores import Score, text_score

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

HELD_OUT_SHARE = 1 / 8
"""Share of the keys, those with the lowest hashes, of which problems are held out; with fewer than
`num_held_out` higher hashes count, too."""
DRAWS_PER_PROBLEM = 1000


class GeneratedEnvironment:
    def __init__(self, config: EnvironmentConfig, dataset: "ProceduralDataset"):
        self.config = config
        self.dataset = dataset
        self.reward: Score = TaskScore(dataset) if config.reward == "task" else text_score(config)
        probes = map(self._read, range(min(len(dataset), 32 * config.num_held_out)))
        self._held_out, self._highest_held_out = hold_out(
            (problem for problem in probes if fits(problem, config)),
            number=config.num_held_out,
            seed=config.seed_of_held_out,
            share=HELD_OUT_SHARE,
            source=config.source,
            key_of=operands_or_key,
        )
        self._excluded: frozenset[str] = frozenset()

    def exclude(self, digests: frozenset[str]) -> None:
        """Give no training problem with one of these digests."""
        self._excluded |= digests

    def _read(self, position: int) -> Problem:
        drawn = self.dataset[position]
        return to_problem(self.config, drawn["question"], str(drawn["answer"]), drawn["metadata"])

    def problem(self, index: int) -> Problem:
        # drawn, because entry i of seed s is entry i + 1 of seed s - 1
        draws = Random(f"{self.config.seed}/{index}")
        for _ in range(DRAWS_PER_PROBLEM):
            problem = self._read(draws.randrange(len(self.dataset)))
            operands = operands_or_key(problem)
            is_held_out = fraction(operands, self.config.seed_of_held_out) <= self._highest_held_out
            is_excluded = not self._excluded.isdisjoint((digest_of(problem.key), digest_of(operands)))
            if fits(problem, self.config) and not is_held_out and not is_excluded:
                return problem
        pattern = self.config.prompt_pattern
        unfit = f" or did not match prompt_pattern={pattern!r}" if pattern else ""
        raise ValueError(
            f"training problem {index}: each of {DRAWS_PER_PROBLEM} draws of task={self.config.task!r} was held out{unfit}"
        )

    def held_out(self) -> list[Problem]:
        return list(self._held_out)


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The score of the reasoning-gym task."""

    dataset: "ProceduralDataset"

    def __call__(self, problem: Problem, completion: str) -> float:
        entry = {"question": problem.metadata["question"], "answer": problem.answer, "metadata": problem.metadata}
        return float(self.dataset.score_answer(answer=completion.strip(), entry=entry))


def reasoning_gym(config: EnvironmentConfig) -> GeneratedEnvironment:
    """Raises ValueError for an unknown task, wrong options, or a num_held_out that is too large."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if config.task not in DATASETS:
        near = " or ".join(difflib.get_close_matches(config.task, DATASETS)) or "a file or module:function"
        raise ValueError(f"task={config.task!r} is not a reasoning-gym task; did you mean {near}?")
    options = {"seed": int(fraction("dataset", config.seed) * 2**31), "size": 1_000_000, **config.options}
    try:
        dataset = create_dataset(config.task, **options)
    except (TypeError, ValueError, AssertionError) as error:
        known = ", ".join(DATASETS[config.task][1].__dataclass_fields__)
        raise ValueError(f"task={config.task!r} with options={options}: {error} (known options: {known})") from error
    return GeneratedEnvironment(config, dataset)
