"""The protocol between a reader and a trainer rank's server: a signed request, and the answer.

The reader signs the server's random bytes and its request with the transport's secret. Nothing is
encrypted: the network must be private.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rl_actors.transports.slots import SlotAddress, SlotLayout, VersionGoneError, actor_name

NONCE_BYTES = 16
SIGNATURE_BYTES = 32
LENGTH = struct.Struct("<Q")
MAX_REQUEST_BYTES = 4096
SERVED = b"\0"
GONE = b"\1"
"""Begins an answer. SERVED: the slot's layout follows, then its bytes. GONE: the error's text."""
RECEIPT = b"\2"
ACCEPTED = b"\3"
"""The reader sends RECEIPT when all bytes have arrived; the server unlocks the slot and answers
ACCEPTED. A reader without this answer drops the bytes: sendfile returns before all bytes have left,
so after the server's timeout the next push may have rewritten them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a range of a slot's bytes, served only while the slot holds the version `key`."""

    token: str  # SlotAddress.token, hexadecimal
    key: str
    start: int = 0  # in the bytes of the slot's tensors
    num_bytes: int
    path: str  # "tcp" or "point_to_point"
    # For point_to_point. Both sides must use the same piece size, because gloo ends the process
    # otherwise.
    backend: str = ""
    piece_bytes: int = 0


def ask(connection: socket.socket, request: Request, secret: bytes) -> None:
    nonce = receive(connection, NONCE_BYTES)
    text = json.dumps(asdict(request)).encode()
    send_block(connection, text)
    connection.sendall(_signature(secret, nonce, text))


def answered(connection: socket.socket) -> SlotLayout:
    """The slot's layout. Raises VersionGoneError with the server's reason."""
    status = receive(connection, 1)
    answer = receive_block(connection, None)
    if status != SERVED:
        raise VersionGoneError(answer.decode())
    return SlotLayout.from_json(answer)


def send_receipt(connection: socket.socket) -> None:
    """Raises ConnectionError if the bytes came too late to be used."""
    connection.sendall(RECEIPT)
    if receive(connection, 1) != ACCEPTED:
        raise ConnectionError("the trainer's process did not accept the receipt")


def await_receipt(connection: socket.socket) -> None:
    if receive(connection, 1) != RECEIPT:
        raise ConnectionError("the reader did not send a receipt")
    connection.sendall(ACCEPTED)


def receive_request(connection: socket.socket, secret: bytes) -> Request:
    """Send the random bytes to be signed with the next request, and wait for it.

    Raises ValueError if it is signed with another secret or cannot be read.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    text = receive_block(connection, MAX_REQUEST_BYTES)
    if not hmac.compare_digest(receive(connection, SIGNATURE_BYTES), _signature(secret, nonce, text)):
        raise ValueError("the request is signed with another secret")
    try:
        return Request(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"the request cannot be read: {error}") from None


@contextlib.contextmanager
def failures(address: SlotAddress, key: str, path: str) -> Iterator[None]:
    """Its TimeoutError or ConnectionError names version, processes, path and address."""
    what = f"pull of {key}: {actor_name()}: read of {address} over {path} from {address.address}"
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"{what} was not done in time") from None
    except OSError as error:
        raise ConnectionError(f"{what}: {error}") from error


def left(deadline: float) -> float:
    """Raises TimeoutError after the deadline."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _signature(secret: bytes, nonce: bytes, text: bytes) -> bytes:
    return hmac.new(secret, nonce + text, hashlib.sha256).digest()


def send_block(connection: socket.socket, block: bytes) -> None:
    connection.sendall(LENGTH.pack(len(block)) + block)


def receive_block(connection: socket.socket, limit: int | None) -> bytes:
    """Raises ValueError for a block above the limit."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
    if limit is not None and length > limit:
        raise ValueError(f"the request has {length} bytes; the limit is {limit}")
    return receive(connection, length)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError if the other process closes before num_bytes have come."""
    block = bytearray()
    while len(block) < num_bytes:
        part = connection.recv(num_bytes - len(block))
        if not part:
            raise ConnectionError("the other process closed the connection; it may have another secret")
        block += part
    return bytes(block)
