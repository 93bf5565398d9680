"""Memory into which a generator receives weights over a network, reused by later versions of the
same size.
"""

import threading

import torch
from torch import Tensor

from rl_actors.transports.slots import Layout, pin_for


class ReceivedSlot:
    """A received copy of a slot: its layout, and tensors as views of the bytes."""

    def __init__(self, layout: Layout, data: Tensor) -> None:
        self.layout = layout
        self.views = layout.views(data)


class Buffers:
    """Buffers for received slots, one idle at most per rank, pinned if this process uses a GPU.

    `free`: (trainer rank, number of bytes) -> idle buffer.
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
