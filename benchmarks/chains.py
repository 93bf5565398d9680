"""A corpus that a model learns in minutes: chains of tokens in which every token has BRANCHES equally likely successors. Measures nothing.

A model that has learnt it has a loss of log(BRANCHES) = 1.39 nats a token, and its samples are chains as well.
"""

import math

import torch

from rl_actors import Sample

BRANCHES = 4
ENTROPY = math.log(BRANCHES)  # nats a token
FIRST_ID = 2


class Chains:
    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        """The tokens are the ids from FIRST_ID to FIRST_ID + num_tokens - 1."""
        self.draw = torch.Generator().manual_seed(seed)
        self.num_tokens = num_tokens
        # All successors come from one permutation, so that a token's successors are distinct and all tokens are equally frequent.
        order = torch.randperm(num_tokens, generator=self.draw)
        self.successors = torch.stack([order.roll(shift) for shift in range(BRANCHES)], dim=1)

    def ids(self, count: int, length: int) -> torch.Tensor:
        """New chains, [count, length]."""
        last = torch.randint(self.num_tokens, (count,), generator=self.draw)
        columns = [last]
        for _ in range(length - 1):
            last = self.successors[last, torch.randint(BRANCHES, (count,), generator=self.draw)]
            columns.append(last)
        return FIRST_ID + torch.stack(columns, dim=1)

    def samples(self, count: int, length: int) -> list[Sample]:
        """New chains as samples of `length` positions, each of which counts in the loss."""
        ones = torch.ones(length)
        made = []
        for ids in self.ids(count, length + 1):
            made.append(Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": ones}))
        return made
