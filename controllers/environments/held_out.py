"""Chooses the held-out problems: the problems whose keys have the lowest hashes.

Problems whose keys have higher hashes may be trained on.
"""

from collections.abc import Iterable
from hashlib import blake2b

from controllers.environments.base import Problem


def fraction(key: str, seed: int) -> float:
    """A hash of key and seed, as a number in [0, 1). It is the same on every machine and in every process."""
    return int.from_bytes(blake2b(f"{seed}/{key}".encode(), digest_size=6).digest(), "big") / 2**48


def hold_out(
    problems: Iterable[Problem], *, number: int, seed: int, share: float, source: str, may_be_all: bool = False
) -> tuple[list[Problem], float]:
    """The held-out problems, and the highest hash of their keys.

    Reads problems until `number` keys with hashes below `share` are found, or until all problems are read. With share=0
    all problems are read. Of the keys read, the `number` keys with the lowest hashes are then held out. If several
    problems have the same key, only the first one counts. Raises ValueError, naming the source, if `number` is more than
    half of the keys read.

    If may_be_all is True, `number` has no limit, and ValueError is raised only if the source has no problem. If
    `number` is larger than the number of keys, all keys are held out.
    """
    found: dict[str, tuple[float, Problem]] = {}
    num_low = 0
    for problem in problems:
        if problem.key in found:
            continue
        hashed = fraction(problem.key, seed)
        found[problem.key] = (hashed, problem)
        num_low += hashed < share
        if num_low == number:
            break
    if may_be_all and not found:
        raise ValueError(f"no problem was found in {source}")
    if not may_be_all and 2 * number > len(found):
        raise ValueError(
            f"num_held_out={number} is more than half of the {len(found)} distinct problems found in {source}"
        )
    lowest = sorted(found.values(), key=lambda item: item[0])[:number]
    return [problem for _, problem in lowest], lowest[-1][0]
