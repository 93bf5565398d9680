"""A corpus that a model learns in minutes: random chains of tokens. Other benchmarks train on it.

Every token has BRANCHES possible successors, all equally likely. So a model that has learned the corpus has a loss of
log(BRANCHES) = 1.39 nats a token, and its samples are chains, too.
"""

import math

import torch

from rl_actors import Sample

BRANCHES = 4
ENTROPY = math.log(BRANCHES)  # nats a token
FIRST_ID = 2


class Chains:
    """A source of chains. Two sources with the same arguments give the same chains in the same order."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        """The tokens are the ids from FIRST_ID to FIRST_ID + num_tokens - 1."""
        self.draw = torch.Generator().manual_seed(seed)
        self.num_tokens = num_tokens
        # Row i of `successors` has the successors of token i. Each column is a cyclic shift of the same permutation. So a token's successors are
        # distinct, and all tokens are equally frequent.
        order = torch.randperm(num_tokens, generator=self.draw)
        self.successors = torch.stack([order.roll(shift) for shift in range(BRANCHES)], dim=1)

    def ids(self, count: int, length: int) -> torch.Tensor:
        """New chains as ids, in a tensor of shape [count, length]."""
        last = torch.randint(self.num_tokens, (count,), generator=self.draw)
        columns = [last]
        for _ in range(length - 1):
            last = self.successors[last, torch.randint(BRANCHES, (count,), generator=self.draw)]
            columns.append(last)
        return FIRST_ID + torch.stack(columns, dim=1)

    def samples(self, count: int, length: int) -> list[Sample]:
        """New chains as samples of `length` positions. All positions count in the loss."""
        ones = torch.ones(length)
        made = []
        for ids in self.ids(count, length + 1):
            made.append(Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": ones}))
        return made
