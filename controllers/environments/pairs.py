"""Preference pairs that need no file: a right and a wrong sum."""

from collections.abc import Iterator
from random import Random

from controllers.environments.config import EnvironmentConfig
from controllers.environments.data import DataEnvironment, Row

# smallest and largest term
FIRST = 10
LAST = 99


def additions(*, seed: int, num_held_out: int) -> DataEnvironment:
    """All sums of two-digit terms. The rejected answer is the sum of two random terms."""
    config = EnvironmentConfig(
        task="additions", answer_column="chosen", rejected_column="rejected", seed=seed, num_held_out=num_held_out
    )
    return DataEnvironment(config, _rows(Random(seed)))


def _rows(draw: Random) -> Iterator[Row]:
    for a in range(FIRST, LAST + 1):
        for b in range(FIRST, LAST + 1):
            wrong = a + b
            while wrong == a + b:
                wrong = draw.randint(FIRST, LAST) + draw.randint(FIRST, LAST)
            yield f"{a}+{b}", {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
