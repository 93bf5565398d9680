"""A corpus that is learnt in minutes: chains in which every token has BRANCHES successors, equally likely. Measures nothing.

A model that has learnt it is at log(BRANCHES) = 1.39 nats a token, and samples from it more chains.
"""

import math

import torch

from rl_actors import Sample

BRANCHES = 4
ENTROPY = math.log(BRANCHES)  # nats a token
FIRST_ID = 2


class Chains:
    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        """Of the ids FIRST_ID to FIRST_ID + num_tokens - 1."""
        self.draw = torch.Generator().manual_seed(seed)
        self.num_tokens = num_tokens
        # Of one permutation, so that every token has distinct successors and is as frequent as any other.
        order = torch.randperm(num_tokens, generator=self.draw)
        self.successors = torch.stack([order.roll(shift) for shift in range(BRANCHES)], dim=1)

    def ids(self, count: int, length: int) -> torch.Tensor:
        """[count, length] fresh ones."""
        last = torch.randint(self.num_tokens, (count,), generator=self.draw)
        columns = [last]
        for _ in range(length - 1):
            last = self.successors[last, torch.randint(BRANCHES, (count,), generator=self.draw)]
            columns.append(last)
        return FIRST_ID + torch.stack(columns, dim=1)

    def samples(self, count: int, length: int) -> list[Sample]:
        """Of `length` positions, all of which are learnt."""
        ones = torch.ones(length)
        return [
            Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": ones})
            for ids in self.ids(count, length + 1)
        ]
