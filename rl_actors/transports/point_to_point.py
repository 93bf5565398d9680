"""Sends slots over NCCL or gloo (communicator.py) into the reader's host memory.

The first request of a reader to a rank makes the communicator; a failed call or a death ends it.
The transport's secret guards only the control connection: torch's rendezvous, NCCL and gloo open
ports without a secret, and nothing is encrypted, so the network must be private.
"""

import atexit
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor

from rl_actors.transports import communicator, control
from rl_actors.transports.communicator import READER, TRAINER, Pair, is_closed
from rl_actors.transports.control import Request, left
from rl_actors.transports.received import ReceivedSlot, receive_slots
from rl_actors.transports.slots import Slot, SlotAddress, SlotLayout, VersionGoneError

logger = logging.getLogger(__name__)


class Sender:
    """Sends slots of this rank to the reader of one control connection."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.connection = connection
        self.timeout = timeout
        self.reader = connection.getpeername()
        self.pair: Pair | None = None

    def __call__(self, slot: Slot, request: Request) -> None:
        deadline = time.monotonic() + self.timeout
        size = len(slot.data)
        pieces = request.piece_bytes
        try:
            if request.num_bytes != size or pieces <= 0:
                raise ValueError(
                    f"the request is for {request.num_bytes} bytes in pieces of {pieces} bytes, but the slot has "
                    f"{size} bytes, and a piece must have at least 1 byte"
                )
            if self.pair is None:
                self.pair = Pair(
                    self.connection, member=TRAINER, backend=request.backend, piece_bytes=pieces, device=slot.device
                )
                self.pair.run(deadline, self.pair.listen)
            self.pair.run(deadline, self.pair.send, slot.data)
        except Exception as error:
            logger.warning("pull of %s: gave up the communicator with %s: %r", request.key, self.reader, error)
            self.end()  # before the caller unlocks the slot: NCCL may still read it
            raise

    def end(self) -> None:
        if self.pair is not None:
            self.pair.end()
            self.pair = None


def make_sender(connection: socket.socket, timeout: float, stack: ExitStack) -> Callable[[Slot, Request], None]:
    """Sends slots over the communicator of a connection. stack: ends it with the connection."""
    sender = Sender(connection, timeout)
    stack.callback(sender.end)
    return sender


class Pairs:
    """The reader's idle pairs, at most one per rank. A pull takes pairs and gives them back."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.free: dict[int, tuple[object, Pair]] = {}
        atexit.register(self.end)

    def take(self, address: SlotAddress, request: Request) -> Pair | None:
        """The idle pair of a rank, if it fits the request and its connection is open."""
        with self.guard:
            if address.rank not in self.free:
                return None
            key, pair = self.free.pop(address.rank)
        if key == _kind(address, request) and not is_closed(pair.connection):
            return pair
        pair.end()
        return None

    def give(self, address: SlotAddress, request: Request, pair: Pair) -> None:
        with self.guard:
            _, former = self.free.get(address.rank, (None, None))
            self.free[address.rank] = _kind(address, request), pair
        if former is not None:
            former.end()

    def end(self) -> None:
        with self.guard:
            kept = list(self.free.values())
            self.free = {}
        for _, pair in kept:
            pair.end()


def _kind(address: SlotAddress, request: Request) -> tuple[object, ...]:
    return address.address, request.backend, request.piece_bytes


PAIRS = Pairs()


def backend_for(addresses: tuple[SlotAddress, ...]) -> str:
    """nccl if both sides use GPUs and torch has NCCL, else gloo."""
    on_gpus = torch.cuda.is_initialized() and all(address.weights_on_gpu for address in addresses)
    return "nccl" if on_gpus and torch.distributed.is_nccl_available() else "gloo"


def received(
    addresses: tuple[SlotAddress, ...], key: str, *, secret: bytes, timeout: float
) -> AbstractContextManager[list[ReceivedSlot]]:
    """As receive_slots."""
    backend = backend_for(addresses)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    requests = []
    for address in addresses:
        request = Request(
            token=address.token.hex(),
            key=key,
            num_bytes=address.num_bytes,
            path="point_to_point",
            backend=backend,
            piece_bytes=communicator.PIECE_BYTES,
        )
        requests.append((address, [request]))
    return receive_slots(requests, functools.partial(_fetch, secret, device), timeout)


def _fetch(
    secret: bytes, device: torch.device, address: SlotAddress, request: Request, into: Tensor, deadline: float
) -> SlotLayout:
    with control.failures(address, request.key, request.path):
        pair = PAIRS.take(address, request) or _connected(address, request, deadline, device)
        try:
            layout = _received(pair, request, into, secret, deadline)
        except VersionGoneError:  # the rank sends nothing more: reuse the pair
            PAIRS.give(address, request, pair)
            raise
        except BaseException:
            pair.end()
            raise
        PAIRS.give(address, request, pair)
    return layout


def _connected(address: SlotAddress, request: Request, deadline: float, device: torch.device) -> Pair:
    assert address.address is not None
    connection = socket.create_connection(address.address, timeout=left(deadline))
    return Pair(connection, member=READER, backend=request.backend, piece_bytes=request.piece_bytes, device=device)


def _received(pair: Pair, request: Request, into: Tensor, secret: bytes, deadline: float) -> SlotLayout:
    pair.connection.settimeout(left(deadline))
    control.ask(pair.connection, request, secret)
    layout = control.answered(pair.connection)
    if pair.group is None:
        pair.run(deadline, pair.join)
    pair.run(deadline, pair.receive, into)
    control.send_receipt(pair.connection)
    return layout
