"""Receives slots over a network into memory that later versions reuse."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rl_actors.transports.control import Request
from rl_actors.transports.slots import SlotAddress, SlotLayout, pin_for

Fetch = Callable[[SlotAddress, Request, Tensor, float], SlotLayout]
"""Receives the requested bytes into the tensor until a deadline, and returns the slot's layout."""


class ReceivedSlot:
    """A received copy of a slot: its layout, and tensors as views of the bytes."""

    def __init__(self, layout: SlotLayout, data: Tensor) -> None:
        self.layout = layout
        self.views = layout.views(data)


class Buffers:
    """At most one idle buffer per rank, pinned if this process uses a GPU."""

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


@contextlib.contextmanager
def receive_slots(
    requests: Sequence[tuple[SlotAddress, list[Request]]], fetch: Fetch, timeout: float
) -> Iterator[list[ReceivedSlot]]:
    """Receive all slots at the same time. The bytes are valid only inside the context.

    Raises VersionGoneError if a slot holds another version, ConnectionError or TimeoutError naming
    rank and address if a transfer fails.
    """
    deadline = time.monotonic() + timeout
    buffers = [BUFFERS.take(address.rank, address.num_bytes) for address, _ in requests]
    with ThreadPoolExecutor(max_workers=sum(len(of_slot) for _, of_slot in requests)) as pool:
        jobs = []
        for (address, of_slot), buffer in zip(requests, buffers, strict=True):
            jobs_of_slot = []
            for request in of_slot:
                part = buffer[request.start : request.start + request.num_bytes]
                jobs_of_slot.append(pool.submit(fetch, address, request, part, deadline))
            jobs.append(jobs_of_slot)
    # after an error the buffers are not given back: an aborted call may still write to them
    layouts = [[job.result() for job in jobs_of_slot][0] for jobs_of_slot in jobs]
    try:
        yield [ReceivedSlot(layout, buffer) for layout, buffer in zip(layouts, buffers, strict=True)]
    finally:
        for (address, _), buffer in zip(requests, buffers, strict=True):
            BUFFERS.give(address.rank, buffer)
