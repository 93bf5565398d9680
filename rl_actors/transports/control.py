"""The protocol between a reader of weights and the server of a trainer's rank: a signed request, and the answer. This module moves no weights.

A slot is the memory in which a rank keeps its part of one version of the weights (slots.py). A reader is a process that loads the weights.
The server sends random bytes. The reader signs these bytes and its request with the secret of the transport, which trainer and readers
share. The signature proves that the reader may read. Nothing is encrypted, so the network must be private.
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

from rl_actors.transports.slots import Layout, SlotAddress, VersionGoneError, actor_name

NONCE_BYTES, SIGNATURE_BYTES = 16, 32
LENGTH = struct.Struct("<Q")
MAX_REQUEST_BYTES = 4096
SERVED, GONE = b"\0", b"\1"
"""The first byte of an answer. SERVED: the layout of the slot follows (names, shapes and places of the tensors), and then the bytes come by
the path that the request names. GONE: the version cannot be read, and the text of the error follows."""
RECEIPT, ACCEPTED = b"\2", b"\3"
"""When all bytes have arrived, the reader sends RECEIPT. The server keeps the slot locked until it has the RECEIPT, and then answers
ACCEPTED. If the reader does not get this answer, it drops the bytes, because they may be wrong. A server that waits too long for the RECEIPT
releases the lock. The next push may then rewrite the slot before the last bytes of the old version have left the slot, because sendfile returns
before it has sent all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a range of the tensors' bytes in a slot. It is served only while the slot holds the version `key`."""

    token: str  # the bytes that identify the slot, in hexadecimal digits
    key: str
    start: int = 0  # offset of the range in the bytes of the slot's tensors
    num_bytes: int
    path: str  # how the bytes come: "tcp" or "point_to_point"
    # Only for point_to_point: the communicator's backend, "nccl" or "gloo", and the number of bytes of a piece. The reader chooses these
    # two values. The trainer's rank must use the same values, because gloo ends the process if the two processes use pieces of different sizes.
    backend: str = ""
    piece_bytes: int = 0


def ask(connection: socket.socket, request: Request, secret: bytes) -> None:
    """Wait for the server's random bytes, and send a signed request."""
    nonce = receive(connection, NONCE_BYTES)
    text = json.dumps(asdict(request)).encode()
    send_block(connection, text)
    connection.sendall(_signature(secret, nonce, text))


def answered(connection: socket.socket) -> Layout:
    """Wait for the answer to a request. Returns the layout of the slot.

    Raises VersionGoneError with the server's reason if the slot is gone or holds another version, or if its lock did not become free in time.
    """
    status, answer = receive(connection, 1), receive_block(connection, None)
    if status != SERVED:
        raise VersionGoneError(answer.decode())
    return Layout.from_json(answer)


def send_receipt(connection: socket.socket) -> None:
    """Tell the server that all bytes have arrived. Raises ConnectionError if the bytes came too late. The caller
    must then not use them."""
    connection.sendall(RECEIPT)
    if receive(connection, 1) != ACCEPTED:
        raise ConnectionError("the trainer's process did not accept the receipt")


def await_receipt(connection: socket.socket) -> None:
    """Wait for the reader's receipt, and accept it."""
    if receive(connection, 1) != RECEIPT:
        raise ConnectionError("the reader did not send a receipt")
    connection.sendall(ACCEPTED)


def send_nonce(connection: socket.socket) -> bytes:
    """Ask for the next request. Returns the random bytes that the reader must sign together with its request."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    return nonce


def receive_request(connection: socket.socket, secret: bytes, nonce: bytes) -> Request:
    """Wait for a request. Raises ValueError if the sender has another secret, or if the request cannot be read."""
    text = receive_block(connection, MAX_REQUEST_BYTES)
    if not hmac.compare_digest(receive(connection, SIGNATURE_BYTES), _signature(secret, nonce, text)):
        raise ValueError("the request is signed with another secret")
    try:
        return Request(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"the request cannot be read: {error}") from None


@contextlib.contextmanager
def failures(address: SlotAddress, key: str, path: str) -> Iterator[None]:
    """Replace an OSError of the `with` block by an error that names the version, the two processes, the path and the address.

    The new error is a TimeoutError or a ConnectionError. Errors other than an OSError pass unchanged.
    """
    what = f"pull of {key}: {actor_name()}: read of {address} over {path} from {address.address}"
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"{what} was not done in time") from None
    except OSError as error:
        raise ConnectionError(f"{what}: {error}") from error


def left(deadline: float) -> float:
    """Seconds until the deadline. Raises TimeoutError if the deadline has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _signature(secret: bytes, nonce: bytes, text: bytes) -> bytes:
    return hmac.new(secret, nonce + text, hashlib.sha256).digest()


def send_block(connection: socket.socket, block: bytes) -> None:
    """Send the number of bytes of the block, and then the block."""
    connection.sendall(LENGTH.pack(len(block)) + block)


def receive_block(connection: socket.socket, limit: int | None) -> bytes:
    """A block that the other process sent with `send_block`. Raises ValueError if the block has more bytes than the limit."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
    if limit is not None and length > limit:
        raise ValueError(f"the request has {length} bytes; the limit is {limit}")
    return receive(connection, length)


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly num_bytes bytes. Raises ConnectionError if the other process closes the connection before they have arrived."""
    block = bytearray()
    while len(block) < num_bytes:
        part = connection.recv(num_bytes - len(block))
        if not part:
            raise ConnectionError("the other process closed the connection; it may have another secret")
        block += part
    return bytes(block)
