"""The task of the comparison with other trainers: prompts of random words, and a reward that is the parity of a completion's words.

A word is a token, "w17" the token 17, so that every trainer sees the same tokens. The policy need not learn anything.
"""

import random
from pathlib import Path
from typing import Any

from benchmarks.harness import random_weights
from controllers.environments import Problem
from rl_actors import ModelConfig

FIRST_TOKEN = 2  # w0 pads, w1 ends a text
NUM_HELD_OUT = 8


def write_model(model: ModelConfig, directory: Path) -> None:
    """Write a Hugging Face directory with random weights and a tokenizer of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    random_weights.write(model, directory)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(model.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    tokenizer.save_pretrained(directory)


def prompt(index: int, num_words: int, vocab_size: int) -> str:
    draw = random.Random(index)
    return " ".join(f"w{draw.randrange(FIRST_TOKEN, vocab_size)}" for _ in range(num_words))


def parity(completion: str) -> float:
    return float(sum(int(word) for word in completion.replace("w", " ").split()) % 2)


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
