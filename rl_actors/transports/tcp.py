"""Slots over TCP, for a reader that cannot open the memory of a trainer's rank: a server in the rank's process, and its client.

A request is one range of the bytes of one slot. It proves with the secret of the transport that it may read: the server sends random bytes,
and the client signs them together with its request. The bytes themselves are not encrypted, so the network must be private.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rl_actors.transports.slots import Layout, Slot, SlotAddress, VersionGoneError, actor_name, shared_lock

NONCE_BYTES, SIGNATURE_BYTES = 16, 32
LENGTH = struct.Struct("<Q")
MAX_REQUEST_BYTES = 4096
GPU_PART_BYTES = 64 << 20  # of a slot on a GPU; a part at a time goes through the host's memory
NUM_STREAMS = 4
MIN_STREAM_BYTES = 32 << 20
"""A slot with fewer bytes than NUM_STREAMS times this comes in fewer streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A range of the tensors' bytes of a slot. It is served only while the slot holds the version `key`."""

    token: str  # of the slot, in hexadecimal digits
    key: str
    start: int
    num_bytes: int


class SlotServer:
    """Serves the slots of this process to readers that know the secret.

    It ends with the process, or when nobody holds it any more. Then its threads and connections end, too.
    """

    def __init__(self, find: Callable[[bytes], Slot | None], *, host: str, secret: bytes, timeout: float) -> None:
        """find: token -> the slot. host: address to bind to."""
        self.socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        connections = Connections()
        arguments = (self.socket, connections, find, secret, timeout)
        threading.Thread(target=_accept, args=arguments, name="weights_server", daemon=True).start()
        weakref.finalize(self, _close, self.socket, connections)


class Connections:
    """The open connections of a server."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def of(self, connection: socket.socket) -> Iterator[None]:
        """Context manager of a connection, which is closed at the end. It has ended already if the server has."""
        with connection:
            with self._guard:
                self._open.add(connection)
                if self._is_closed:
                    _shut_down(connection)
            try:
                yield
            finally:
                with self._guard:
                    self._open.discard(connection)

    def close(self) -> None:
        """End all connections: whoever waits for one gets an OSError."""
        with self._guard:
            self._is_closed = True
            for connection in self._open:
                _shut_down(connection)


def _close(server: socket.socket, connections: Connections) -> None:
    _shut_down(server)  # ends the accept that waits in another thread
    server.close()
    connections.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _accept(
    server: socket.socket,
    connections: Connections,
    find: Callable[[bytes], Slot | None],
    secret: bytes,
    timeout: float,
) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # it was closed
            return
        arguments = (connection, connections, find, secret, timeout)
        threading.Thread(target=_serve, args=arguments, name="weights_stream", daemon=True).start()


def _serve(
    connection: socket.socket,
    connections: Connections,
    find: Callable[[bytes], Slot | None],
    secret: bytes,
    timeout: float,
) -> None:
    """Answer one request. A reader that goes away, or that has a wrong secret, ends only its own connection."""
    with contextlib.suppress(OSError, ValueError), connections.of(connection):
        connection.settimeout(timeout)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        text = _receive_block(connection, MAX_REQUEST_BYTES)
        if not hmac.compare_digest(_receive(connection, SIGNATURE_BYTES), _signature(secret, nonce, text)):
            return
        request = Request(**json.loads(text))
        try:
            slot = find(bytes.fromhex(request.token))
            if slot is None:
                raise VersionGoneError(f"{request.key} is gone: the trainer has dropped its slot")
            with shared_lock(slot.fd, timeout, f"pull of {request.key}: {actor_name()}: lock of slot {slot.number}"):
                slot.require(request.key)
                connection.sendall(b"\0")
                _send_block(connection, slot.layout.to_json())
                if slot.on_gpu is None:
                    _send_file(connection, slot.fd, slot.data_offset + request.start, request.num_bytes)
                else:
                    for part in slot.data[request.start : request.start + request.num_bytes].split(GPU_PART_BYTES):
                        connection.sendall(memoryview(part.cpu().numpy()))
        except (TimeoutError, VersionGoneError) as error:
            connection.sendall(b"\1")
            _send_block(connection, str(error).encode())


def _send_file(connection: socket.socket, fd: int, offset: int, num_bytes: int) -> None:
    """Send a range of a file without copying it into this process."""
    with open(os.dup(fd), "rb") as file:
        connection.sendfile(file, offset, num_bytes)


class ReceivedSlot:
    """The bytes of a slot in this process."""

    def __init__(self, layout: Layout, data: Tensor) -> None:
        self.layout, self.views = layout, layout.views(data)


class Buffers:
    """Memory for received slots, by rank and size. It is made at the first version and used again by the next ones."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.free: dict[tuple[int, int], Tensor] = {}

    def take(self, rank: int, num_bytes: int) -> Tensor:
        with self.guard:
            buffer = self.free.pop((rank, num_bytes), None)
        return torch.empty(num_bytes, dtype=torch.uint8) if buffer is None else buffer

    def give(self, rank: int, buffer: Tensor) -> None:
        with self.guard:
            self.free = {key: kept for key, kept in self.free.items() if key[0] != rank}
            self.free[rank, len(buffer)] = buffer


BUFFERS = Buffers()


@contextlib.contextmanager
def received(addresses: tuple[SlotAddress, ...], key: str, *, secret: bytes, timeout: float):
    """Receive the slots of all ranks at the same time, and keep their memory for as long as the context lasts.

    Raises VersionGoneError if a slot holds another version, and ConnectionError or TimeoutError naming the rank and its address.
    """
    buffers = [BUFFERS.take(address.rank, address.num_bytes) for address in addresses]
    try:
        jobs = []
        with ThreadPoolExecutor(max_workers=NUM_STREAMS * len(addresses)) as pool:
            deadline = time.monotonic() + timeout
            for address, buffer in zip(addresses, buffers, strict=True):
                for start, count in _ranges(address.num_bytes):
                    request = Request(token=address.token.hex(), key=key, start=start, num_bytes=count)
                    part = buffer[start : start + count]
                    jobs.append(pool.submit(_fetch, address, request, part, secret, deadline))
        layouts = [job.result() for job in jobs]
        firsts = [layout for layout, start in layouts if start == 0]
        yield [ReceivedSlot(layout, buffer) for layout, buffer in zip(firsts, buffers, strict=True)]
    finally:
        for address, buffer in zip(addresses, buffers, strict=True):
            BUFFERS.give(address.rank, buffer)


def _ranges(num_bytes: int) -> list[tuple[int, int]]:
    """(start, number of bytes) of the streams of a slot."""
    if num_bytes == 0:
        return [(0, 0)]
    num_streams = max(1, min(NUM_STREAMS, num_bytes // MIN_STREAM_BYTES))
    size = -(-num_bytes // num_streams)
    return [(start, min(size, num_bytes - start)) for start in range(0, num_bytes, size)]


def _fetch(address: SlotAddress, request: Request, into: Tensor, secret: bytes, deadline: float) -> tuple[Layout, int]:
    """Receive a range. Returns the layout of the slot and the start of the range."""
    what = f"pull of {request.key}: {actor_name()}: read of {address} over tcp from {address.address}"
    assert address.address is not None
    try:
        with socket.create_connection(address.address, timeout=_left(deadline)) as connection:
            nonce = _receive(connection, NONCE_BYTES)
            text = json.dumps(asdict(request)).encode()
            _send_block(connection, text)
            connection.sendall(_signature(secret, nonce, text))
            status, answer = _receive(connection, 1), _receive_block(connection, None)
            if status != b"\0":
                raise VersionGoneError(answer.decode())
            view = memoryview(into.numpy())
            while len(view):
                connection.settimeout(_left(deadline))
                count = connection.recv_into(view)
                if count == 0:
                    raise ConnectionError("the trainer's process closed the connection")
                view = view[count:]
    except TimeoutError:
        raise TimeoutError(f"{what} was not done in time") from None
    except OSError as error:
        raise ConnectionError(f"{what}: {error}") from error
    return Layout.from_json(answer), request.start


def _left(deadline: float) -> float:
    """Seconds until the deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _signature(secret: bytes, nonce: bytes, text: bytes) -> bytes:
    return hmac.new(secret, nonce + text, hashlib.sha256).digest()


def _send_block(connection: socket.socket, block: bytes) -> None:
    connection.sendall(LENGTH.pack(len(block)) + block)


def _receive_block(connection: socket.socket, limit: int | None) -> bytes:
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    if limit is not None and length > limit:
        raise ValueError(f"a request of {length} bytes; at most {limit} are read")
    return _receive(connection, length)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    block = bytearray()
    while len(block) < num_bytes:
        part = connection.recv(num_bytes - len(block))
        if not part:
            raise ConnectionError("the other side closed the connection; it may have another secret")
        block += part
    return bytes(block)
