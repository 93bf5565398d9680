"""Preference pairs that need no file: a right and a wrong sum."""

import itertools
from collections.abc import Iterator
from random import Random

from controllers.environments.config import EnvironmentConfig
from controllers.environments.data import DataEnvironment, Row

TERMS = range(10, 100)


def additions(*, seed: int, num_held_out: int) -> DataEnvironment:
    """All sums of two-digit terms. The rejected answer is the sum of two random terms."""
    config = EnvironmentConfig(
        task="additions", answer_column="chosen", rejected_column="rejected", seed=seed, num_held_out=num_held_out
    )
    return DataEnvironment(config, _rows(Random(seed)))


def _rows(draw: Random) -> Iterator[Row]:
    for a, b in itertools.product(TERMS, TERMS):
        wrong = a + b
        while wrong == a + b:
            wrong = draw.randint(10, 99) + draw.randint(10, 99)
        yield f"{a}+{b}", {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
