"""Sends slots over TCP, signed but not encrypted: the network must be private."""

import functools
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from torch import Tensor

from rl_actors.transports import control
from rl_actors.transports.control import Request, left
from rl_actors.transports.received import ReceivedSlot, receive_slots
from rl_actors.transports.slots import Slot, SlotAddress, SlotLayout

GPU_PART_BYTES = 64 << 20  # a slot on a GPU goes through host memory in such parts
NUM_STREAMS = 4
MIN_STREAM_BYTES = 32 << 20
"""Smaller slots come in fewer streams."""


def make_sender(connection: socket.socket, timeout: float, stack: ExitStack) -> Callable[[Slot, Request], None]:
    """Sends ranges of slots over the connection that asks for them."""

    def send(slot: Slot, request: Request) -> None:
        if slot.on_gpu is None:
            _send_file(connection, slot.fd, slot.data_offset + request.start, request.num_bytes)
            return
        for part in slot.data[request.start : request.start + request.num_bytes].split(GPU_PART_BYTES):
            connection.sendall(memoryview(part.cpu().numpy()))

    return send


def _send_file(connection: socket.socket, fd: int, offset: int, num_bytes: int) -> None:
    """Without copying the bytes into this process."""
    with open(os.dup(fd), "rb") as file:
        connection.sendfile(file, offset, num_bytes)


def received(
    addresses: tuple[SlotAddress, ...], key: str, *, secret: bytes, timeout: float
) -> AbstractContextManager[list[ReceivedSlot]]:
    """As receive_slots."""
    requests = [(address, _requests(address, key)) for address in addresses]
    return receive_slots(requests, functools.partial(_fetch, secret), timeout)


def _requests(address: SlotAddress, key: str) -> list[Request]:
    token = address.token.hex()
    ranges = _ranges(address.num_bytes)
    return [Request(token=token, key=key, start=start, num_bytes=count, path="tcp") for start, count in ranges]


def _ranges(num_bytes: int) -> list[tuple[int, int]]:
    """(start, number of bytes) of each stream."""
    if num_bytes == 0:
        return [(0, 0)]
    num_streams = max(1, min(NUM_STREAMS, num_bytes // MIN_STREAM_BYTES))
    size = -(-num_bytes // num_streams)
    return [(start, min(size, num_bytes - start)) for start in range(0, num_bytes, size)]


def _fetch(secret: bytes, address: SlotAddress, request: Request, into: Tensor, deadline: float) -> SlotLayout:
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
    return layout
