"""Sends slots over NCCL or gloo (communicator.py) into the reader's host memory.

The first request of a reader to a rank makes the communicator, later pulls reuse it, and a failed
call or a death gives it up until the next pull.

The transport's secret guards only the control connection. torch's rendezvous, NCCL and gloo open
ports without a secret, and nothing is encrypted: the network must be private.
"""

import atexit
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import torch
from torch import Tensor

from rl_actors.transports import communicator, control
from rl_actors.transports.communicator import READER, TRAINER, Pair, is_closed
from rl_actors.transports.control import Request, left
from rl_actors.transports.received import BUFFERS, ReceivedSlot
from rl_actors.transports.slots import Layout, Slot, SlotAddress, VersionGoneError

logger = logging.getLogger(__name__)


class Sender:
    """Sends slots of this rank to the reader of one control connection."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.connection = connection
        self.timeout = timeout
        self.reader = connection.getpeername()
        self.pair: Pair | None = None

    def send(self, slot: Slot, request: Request) -> None:
        deadline = time.monotonic() + self.timeout
        try:
            if request.num_bytes != len(slot.data) or request.piece_bytes <= 0:
                raise ValueError(
                    f"the request is for {request.num_bytes} bytes in pieces of {request.piece_bytes} bytes, but the slot has "
                    f"{len(slot.data)} bytes, and a piece must have at least 1 byte"
                )
            if self.pair is None:
                self.pair = Pair(
                    self.connection,
                    member=TRAINER,
                    backend=request.backend,
                    piece_bytes=request.piece_bytes,
                    device=slot.device,
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


class Pairs:
    """The reader's idle pairs, at most one per rank. A pull takes pairs and gives them back."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.free: dict[int, tuple[object, Pair]] = {}
        atexit.register(self.end)

    def take(self, address: SlotAddress, request: Request) -> Pair | None:
        """The idle pair of a rank. None, ending the pair, if it does not fit the request or its
        connection is closed.
        """
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


@contextlib.contextmanager
def received(
    addresses: tuple[SlotAddress, ...], key: str, *, secret: bytes, timeout: float
) -> Iterator[list[ReceivedSlot]]:
    """Receive the slots of all ranks at the same time. The bytes are valid only inside the context.

    Raises VersionGoneError if a slot holds another version, ConnectionError or TimeoutError naming
    the rank and its address if a transfer fails.
    """
    backend = backend_for(addresses)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    buffers = [BUFFERS.take(address.rank, address.num_bytes) for address in addresses]
    deadline = time.monotonic() + timeout
    jobs = []
    with futures.ThreadPoolExecutor(max_workers=len(addresses)) as pool:
        for address, buffer in zip(addresses, buffers, strict=True):
            size = address.num_bytes
            request = Request(
                token=address.token.hex(),
                key=key,
                num_bytes=size,
                path="point_to_point",
                backend=backend,
                piece_bytes=communicator.PIECE_BYTES,
            )
            jobs.append(pool.submit(_fetch, address, request, buffer, secret, deadline, device))
    # after an error the buffers are not given back: an aborted call may still write to them
    layouts = [job.result() for job in jobs]
    try:
        yield [ReceivedSlot(layout, buffer) for layout, buffer in zip(layouts, buffers, strict=True)]
    finally:
        for address, buffer in zip(addresses, buffers, strict=True):
            BUFFERS.give(address.rank, buffer)


def _fetch(
    address: SlotAddress, request: Request, into: Tensor, secret: bytes, deadline: float, device: torch.device
) -> Layout:
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


def _received(pair: Pair, request: Request, into: Tensor, secret: bytes, deadline: float) -> Layout:
    pair.connection.settimeout(left(deadline))
    control.ask(pair.connection, request, secret)
    layout = control.answered(pair.connection)
    if pair.group is None:
        pair.run(deadline, pair.join)
    pair.run(deadline, pair.receive, into)
    control.send_receipt(pair.connection)
    return layout
