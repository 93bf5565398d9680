"""Sends slots over TCP, each in several ranges at once, one connection per range.

Requests are signed, but nothing is encrypted: the network must be private.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from rl_actors.transports import control
from rl_actors.transports.control import Request, left
from rl_actors.transports.received import BUFFERS, ReceivedSlot
from rl_actors.transports.slots import Layout, Slot, SlotAddress

GPU_PART_BYTES = 64 << 20  # a slot on a GPU goes through host memory in such parts
NUM_STREAMS = 4
MIN_STREAM_BYTES = 32 << 20
"""Smaller slots come in fewer streams."""


class Sender:
    """Sends a range of a slot over the connection that asked for it."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.connection = connection

    def send(self, slot: Slot, request: Request) -> None:
        if slot.on_gpu is None:
            _send_file(self.connection, slot.fd, slot.data_offset + request.start, request.num_bytes)
            return
        for part in slot.data[request.start : request.start + request.num_bytes].split(GPU_PART_BYTES):
            self.connection.sendall(memoryview(part.cpu().numpy()))

    def end(self) -> None:
        """Does nothing."""


def _send_file(connection: socket.socket, fd: int, offset: int, num_bytes: int) -> None:
    """Without copying the bytes into this process."""
    with open(os.dup(fd), "rb") as file:
        connection.sendfile(file, offset, num_bytes)


@contextlib.contextmanager
def received(
    addresses: tuple[SlotAddress, ...], key: str, *, secret: bytes, timeout: float
) -> Iterator[list[ReceivedSlot]]:
    """Receive the slots of all ranks at the same time, as point_to_point.received (same errors)."""
    buffers = [BUFFERS.take(address.rank, address.num_bytes) for address in addresses]
    try:
        jobs = []
        with ThreadPoolExecutor(max_workers=NUM_STREAMS * len(addresses)) as pool:
            deadline = time.monotonic() + timeout
            for address, buffer in zip(addresses, buffers, strict=True):
                for start, count in _ranges(address.num_bytes):
                    request = Request(token=address.token.hex(), key=key, start=start, num_bytes=count, path="tcp")
                    part = buffer[start : start + count]
                    jobs.append(pool.submit(_fetch, address, request, part, secret, deadline))
        layouts = [job.result() for job in jobs]
        firsts = [layout for layout, start in layouts if start == 0]
        yield [ReceivedSlot(layout, buffer) for layout, buffer in zip(firsts, buffers, strict=True)]
    finally:
        for address, buffer in zip(addresses, buffers, strict=True):
            BUFFERS.give(address.rank, buffer)


def _ranges(num_bytes: int) -> list[tuple[int, int]]:
    """(start, number of bytes) of each stream."""
    if num_bytes == 0:
        return [(0, 0)]
    num_streams = max(1, min(NUM_STREAMS, num_bytes // MIN_STREAM_BYTES))
    size = -(-num_bytes // num_streams)
    return [(start, min(size, num_bytes - start)) for start in range(0, num_bytes, size)]


def _fetch(address: SlotAddress, request: Request, into: Tensor, secret: bytes, deadline: float) -> tuple[Layout, int]:
    with control.failures(address, request.key, request.path):
        assert address.address is not None
        with socket.create_connection(address.address, timeout=left(deadline)) as connection:
            control.ask(connection, request, secret)
            layout = control.answered(connection)
            view = memoryview(into.numpy())
            while len(view):
                connection.settimeout(left(deadline))
                count = connection.recv_into(view)
                if count == 0:
                    raise ConnectionError("the trainer's process closed the connection")
                view = view[count:]
            control.send_receipt(connection)
    return layout, request.start
