"""The task of the comparison with other trainers: prompts of random words, and a reward that is the parity of a completion's words.

A word is a token, "w17" the token 17, so that every trainer sees the same tokens. The policy need not learn anything.
"""

import random
import re
from typing import Any

from controllers.environments import Problem

FIRST_TOKEN = 2
PAD = "<pad>"
END = "<end>"
NUM_HELD_OUT = 8


def prompt(index: int, num_words: int, vocab_size: int) -> str:
    draw = random.Random(index)
    return " ".join(f"w{draw.randrange(FIRST_TOKEN, vocab_size)}" for _ in range(num_words))


def parity(completion: str) -> float:
    return float(sum(int(word) for word in re.findall(r"\d+", completion)) % 2)


class Parity:
    """The task for `--task benchmarks.peers.timing_task:Parity`."""

    def __init__(self, *, num_words: int, vocab_size: int, seed: int = 0, num_held_out: int = 0, **_: Any) -> None:
        self.num_words = num_words
        self.vocab_size = vocab_size

    def problem(self, index: int) -> Problem:
        text = prompt(index, self.num_words, self.vocab_size)
        return Problem(prompt=text, answer="", key=text)

    def held_out(self) -> list[Problem]:
        return [self.problem(-1 - index) for index in range(NUM_HELD_OUT)]

    def reward(self, problem: Problem, completion: str) -> float:
        return parity(completion)
