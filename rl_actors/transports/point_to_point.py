"""Send slots to readers over NCCL or gloo. A slot is the memory in which a rank of the trainer keeps its part of one version of the
weights. A reader is a process that pulls the weights. A communicator is a torch process group of one rank and one reader (communicator.py).

The reader's first request to a rank makes the communicator, and later pulls use it again. If a call of the communicator fails or hangs, or
if one of the two processes ends, the communicator is given up, and the next pull makes a new one. The bytes arrive in the reader's host
memory. The rank sends them in pieces. A piece is a range of the slot's bytes that may begin and end in the middle of a tensor, so a tensor of
any size can be sent.

A reader asks for slots over a control connection. The secret of the transport guards only this connection. torch's rendezvous, NCCL and gloo
open ports that ask for no secret, and nothing is encrypted. So the network must be private.
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
    """Sends slots of this rank to one reader, which asks for them over a control connection. The first request makes the communicator."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.connection, self.timeout = connection, timeout
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
            self.end()  # before the caller unlocks the slot, because the trainer may free an unlocked slot while NCCL still reads it
            raise

    def end(self) -> None:
        if self.pair is not None:
            self.pair.end()
            self.pair = None


class Pairs:
    """The pairs of this reader that no pull is using. A pair is a control connection to a rank, and the communicator with that rank.

    At most one pair is kept for each rank. A pull takes the pairs that it needs, and gives them back.
    """

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.free: dict[int, tuple[object, Pair]] = {}
        atexit.register(self.end)

    def take(self, address: SlotAddress, request: Request) -> Pair | None:
        """Take the free pair of a rank. Returns None if there is none, if it does not fit the address and the request, or if its connection is
        closed. In the last two cases the pair is ended.
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
            kept, self.free = list(self.free.values()), {}
        for _, pair in kept:
            pair.end()


def _kind(address: SlotAddress, request: Request) -> tuple[object, ...]:
    return address.address, request.backend, request.piece_bytes


PAIRS = Pairs()


def backend_for(addresses: tuple[SlotAddress, ...]) -> str:
    """nccl if these ranks have their weights on GPUs, this process uses a GPU, and torch has NCCL. Otherwise gloo."""
    on_gpus = torch.cuda.is_initialized() and all(address.weights_on_gpu for address in addresses)
    return "nccl" if on_gpus and torch.distributed.is_nccl_available() else "gloo"


@contextlib.contextmanager
def received(
    addresses: tuple[SlotAddress, ...], key: str, *, secret: bytes, timeout: float
) -> Iterator[list[ReceivedSlot]]:
    """Context manager that receives the slots of all ranks at the same time. The received bytes are valid only inside the context.

    key: the version's key. Raises VersionGoneError if a slot holds another version. If a transfer fails or takes too long, raises ConnectionError
    or TimeoutError naming the rank and its address.
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
    # If a job has failed, this line raises its error. The buffers are then not given back, because an aborted call of the communicator may
    # still write to them.
    layouts = [job.result() for job in jobs]
    try:
        yield [ReceivedSlot(layout, buffer) for layout, buffer in zip(layouts, buffers, strict=True)]
    finally:
        for address, buffer in zip(addresses, buffers, strict=True):
            BUFFERS.give(address.rank, buffer)


def _fetch(
    address: SlotAddress, request: Request, into: Tensor, secret: bytes, deadline: float, device: torch.device
) -> Layout:
    """Receive a slot's bytes into the tensor `into`. Returns the slot's layout."""
    with control.failures(address, request.key, request.path):
        pair = PAIRS.take(address, request) or _connected(address, request, deadline, device)
        try:
            layout = _received(pair, request, into, secret, deadline)
        except VersionGoneError:  # the rank has answered and sends nothing more, so the pair can be used again
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
