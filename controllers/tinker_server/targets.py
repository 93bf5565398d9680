"""target_prompt_logprobs of a sampling request: row i lists tokens to score at prompt position i + 1.

N tokens of the prompt, a matrix [N - 1, K], C given cells: all if dense, else those listed.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from controllers.tinker_server import messages, tinker_pb2
from controllers.tinker_server.codec import rows_of_csr, shaped
from controllers.tinker_server.sampling import Weights

NOTHING = -1
"""A cell that asks for no token."""
MAX_SCORED = 1024
"""Most distinct (row, token) of a request besides the prompt's own; each costs a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The tokens to score; in row i as the next token after the prompt's tokens 0 to i."""

    rows: np.ndarray  # [C]
    tokens: np.ndarray  # [C]; NOTHING: no token
    foreign: list[tuple[int, int]]  # the distinct pairs (row, token) whose token is not the prompt's own
    shape: tuple[int, ...]  # (N - 1, K)
    # CSR row pointers and column indices; None: dense
    sparse: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def read(cls, tensor: messages.TensorData, prompt: list[int], vocab_size: int) -> Self:
        """Raises ValueError naming what is wrong with the tensor."""
        name = "target_prompt_logprobs"
        shape = tuple(tensor.shape or ())
        if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != len(prompt) - 1:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tensor.shape}; it must be int64 [{len(prompt) - 1}, K], a row for each "
                "token of the prompt after the first"
            )
        tokens = np.asarray(tensor.data, np.int64)
        crow = tensor.sparse_crow_indices
        col = tensor.sparse_col_indices
        sparse = None
        if crow is not None and col is not None:
            sparse = np.asarray(crow, np.int64), np.asarray(col, np.int64)
            rows = rows_of_csr(len(tokens), *sparse, shape, name)
        elif crow is None and col is None:
            shaped(tokens, shape, name)
            rows = np.repeat(np.arange(shape[0]), shape[1])
        else:
            missing = "sparse_crow_indices" if crow is None else "sparse_col_indices"
            raise ValueError(f"{name} lacks {missing}; a sparse tensor has sparse_crow_indices and sparse_col_indices")
        if len(tokens) and not (tokens.min() >= NOTHING and tokens.max() < vocab_size):
            raise ValueError(
                f"{name} has tokens {tokens.min()} to {tokens.max()}; they must be 0 to {vocab_size - 1}, or {NOTHING} for no token"
            )
        is_foreign = (tokens != NOTHING) & (tokens != np.asarray(prompt[1:], np.int64)[rows])
        foreign = sorted(set(zip(rows[is_foreign].tolist(), tokens[is_foreign].tolist(), strict=True)))
        if len(foreign) > MAX_SCORED:
            raise ValueError(
                f"{name} asks for {len(foreign)} tokens that are not the prompt's token at their position; at most {MAX_SCORED} are allowed"
            )
        return cls(rows=rows, tokens=tokens, foreign=foreign, shape=shape, sparse=sparse)

    async def scores(self, weights: Weights, prompt: list[int]) -> Any:
        """A Tensor with the logprob of each cell's token at temperature 1; 0 for NOTHING."""
        known: dict[tuple[int, int], float] = {}
        if (self.tokens != NOTHING).any():
            sequences = [prompt, *([*prompt[: row + 1], token] for row, token in self.foreign)]
            own, *others = await asyncio.gather(*(weights.score(sequence) for sequence in sequences))
            known.update(zip(enumerate(prompt[1:]), own.tolist(), strict=True))
            known.update(zip(self.foreign, (float(scores[-1]) for scores in others), strict=True))
        cells = zip(self.rows.tolist(), self.tokens.tolist(), strict=True)
        values = np.asarray([known.get(cell, 0.0) for cell in cells], "<f4").tobytes()
        message = tinker_pb2.Tensor(dtype=1, shape=self.shape)
        if self.sparse is None:
            message.dense = values
        else:
            crow, col = (each.astype("<i8").tobytes() for each in self.sparse)
            message.sparse_csr.CopyFrom(tinker_pb2.SparseCsr(values=values, crow_indices=crow, col_indices=col))
        return message
