"""The field target_prompt_logprobs of a sampling request: row i of a matrix lists token ids to
score at position i + 1 of the prompt.

N tokens of the prompt, a matrix of N - 1 rows and K columns, C given cells: all (N - 1) K if dense,
else those listed.
"""

import asyncio
from dataclasses import dataclass
from typing import Self

import numpy as np

from controllers.tinker_server import messages
from controllers.tinker_server.codec import Cells, rows_of_csr, shaped
from controllers.tinker_server.sampling import Weights

NOTHING = -1
"""A cell that asks for no token."""
MAX_SCORED = 1024
"""Most additional passes of one request. One pass scores the prompt's own tokens; every other
distinct (row, token) costs one up to its position.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The tokens to score; in row i as the next token after the prompt's tokens 0 to i."""

    rows: np.ndarray  # [C]
    tokens: np.ndarray  # [C]; NOTHING: no token
    shape: tuple[int, int]  # (N - 1, K)
    # CSR row pointers and column indices; None: dense
    sparse: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def read(cls, tensor: messages.TensorData, prompt: list[int], vocab_size: int) -> Self:
        """Raises ValueError naming what is wrong with the tensor."""
        name = "target_prompt_logprobs"
        if (
            tensor.dtype != "int64"
            or tensor.shape is None
            or len(tensor.shape) != 2
            or tensor.shape[0] != len(prompt) - 1
        ):
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tensor.shape}; it must be int64 [{len(prompt) - 1}, K], a row for each "
                "token of the prompt after the first"
            )
        shape = (tensor.shape[0], tensor.shape[1])
        tokens = np.asarray(tensor.data, np.int64)
        sparse = None
        crow = tensor.sparse_crow_indices
        col = tensor.sparse_col_indices
        if (crow is None) != (col is None):
            missing = "sparse_crow_indices" if crow is None else "sparse_col_indices"
            raise ValueError(f"{name} lacks {missing}; a sparse tensor has sparse_crow_indices and sparse_col_indices")
        if crow is not None and col is not None:
            sparse = np.asarray(crow, np.int64), np.asarray(col, np.int64)
            rows = rows_of_csr(len(tokens), *sparse, shape, name)
        else:
            shaped(tokens, shape, name)
            rows = np.repeat(np.arange(shape[0]), shape[1])
        if len(tokens) and not (tokens.min() >= NOTHING and tokens.max() < vocab_size):
            raise ValueError(
                f"{name} has tokens {tokens.min()} to {tokens.max()}; they must be 0 to {vocab_size - 1}, or {NOTHING} for no token"
            )
        made = cls(rows=rows, tokens=tokens, shape=shape, sparse=sparse)
        if (count := len(made.foreign(prompt))) > MAX_SCORED:
            raise ValueError(
                f"{name} asks for {count} tokens that are not the prompt's token at their position; at most {MAX_SCORED} are allowed"
            )
        return made

    def foreign(self, prompt: list[int]) -> list[tuple[int, int]]:
        """The distinct pairs (row, token) whose token is not the prompt's own."""
        own = np.asarray(prompt[1:], np.int64)[self.rows] if len(self.rows) else self.rows
        wanted = (self.tokens != NOTHING) & (self.tokens != own)
        return sorted(set(zip(self.rows[wanted].tolist(), self.tokens[wanted].tolist(), strict=True)))

    async def scores(self, weights: Weights, prompt: list[int]) -> Cells:
        """The logprob of each cell's token at temperature 1; 0 for NOTHING."""
        values = np.zeros(len(self.tokens), np.float32)
        if not (self.tokens != NOTHING).any():
            return Cells(values=values, shape=self.shape, sparse=self.sparse)
        foreign = self.foreign(prompt)
        sequences = [prompt, *([*prompt[: row + 1], token] for row, token in foreign)]
        own, *others = await asyncio.gather(*(weights.score(sequence) for sequence in sequences))
        known = {pair: float(scores[-1]) for pair, scores in zip(foreign, others, strict=True)}
        for index, pair in enumerate(zip(self.rows.tolist(), self.tokens.tolist(), strict=True)):
            if pair[1] != NOTHING:
                values[index] = known[pair] if pair in known else float(own[pair[0]])
        return Cells(values=values, shape=self.shape, sparse=self.sparse)
