"""Chooses the held-out problems: those whose keys have the lowest hashes."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path

from controllers.environments.base import Problem
from rl_actors.json_files import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a run held out, also for later runs from its weights."""

    seed: int
    digests: frozenset[str]  # digest_of of every key

    @classmethod
    def read(cls, file: Path) -> "HeldOut | None":
        """None without such a file. Raises ValueError, naming the file, if it is damaged."""
        if not file.is_file():
            return None
        values = read_object(file)
        if not isinstance(values.get("seed"), int) or not isinstance(values.get("keys"), list):
            raise ValueError(f"{file} has no seed or no keys")
        return cls(seed=values["seed"], digests=frozenset(map(str, values["keys"])))

    def to_json(self) -> str:
        return json.dumps({"seed": self.seed, "keys": sorted(self.digests)}, indent=1)


def fraction(key: str, seed: int) -> float:
    """A hash in [0, 1), the same in every process."""
    return int.from_bytes(blake2b(f"{seed}/{key}".encode(), digest_size=6).digest(), "big") / 2**48


def digest_of(key: str) -> str:
    return blake2b(key.encode(), digest_size=8).hexdigest()


def operands_or_key(problem: Problem) -> str:
    """The sorted operands of plain arithmetic, else the key: "34 + 12" goes with "12 + 34"."""
    expression = str(problem.metadata.get("expression", ""))
    if not re.fullmatch(r"[\d\s.+\-*/()]+", expression):
        return problem.key
    return " ".join(sorted(re.findall(r"\d+(?:\.\d+)?", expression)))


def digests_of(problems: Iterable[Problem]) -> frozenset[str]:
    """Digests of keys and operands, for `exclude`."""
    return frozenset(digest_of(name) for problem in problems for name in (problem.key, operands_or_key(problem)))


def hold_out(
    problems: Iterable[Problem],
    *,
    number: int,
    seed: int,
    share: float,
    source: str,
    may_be_all: bool = False,
    key_of: Callable[[Problem], str] = attrgetter("key"),
) -> tuple[list[Problem], float]:
    """The held-out problems, and the highest hash of their keys.

    Reads until `number` keys have hashes below `share` (0: all), and takes the `number` lowest; of
    one key the first problem. Raises ValueError, naming the source, if `number` is more than half
    of the keys read; with may_be_all only if there is no problem.
    """
    found: dict[str, tuple[float, Problem]] = {}
    num_low = 0
    for problem in problems:
        key = key_of(problem)
        if key in found:
            continue
        hashed = fraction(key, seed)
        found[key] = (hashed, problem)
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
