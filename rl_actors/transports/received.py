"""Memory into which a generator receives weights over a network. Later versions of the weights use the memory again if their size is the same.

A slot is memory in which one rank of the trainer keeps its part of one version of the weights.
"""

import threading

import torch
from torch import Tensor

from rl_actors.transports.slots import Layout, pin_for


class ReceivedSlot:
    """A received copy of a slot: the slot's layout, and its tensors as views of the received bytes."""

    def __init__(self, layout: Layout, data: Tensor) -> None:
        self.layout, self.views = layout, layout.views(data)


class Buffers:
    """Memory for received slots. For the first version a buffer is allocated for each rank of the trainer. A later version uses the rank's
    buffer again if the rank's part still has the same size.

    If this process uses a GPU, the memory is pinned. `free` maps (rank of the trainer, number of bytes) to a buffer that is not in use.
    `free` has at most one buffer for each rank.
    """

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.free: dict[tuple[int, int], Tensor] = {}

    def take(self, rank: int, num_bytes: int) -> Tensor:
        with self.guard:
            buffer = self.free.pop((rank, num_bytes), None)
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if torch.cuda.is_initialized():
                pin_for(buffer, buffer, read_only=False)
        return buffer

    def give(self, rank: int, buffer: Tensor) -> None:
        with self.guard:
            self.free = {key: kept for key, kept in self.free.items() if key[0] != rank}
            self.free[rank, len(buffer)] = buffer


BUFFERS = Buffers()
