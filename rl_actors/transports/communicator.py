"""A communicator sends weights from one rank of a trainer to one reader. It uses NCCL if both processes use GPUs,
otherwise gloo.

A reader is a process that loads the trainer's weights, for example a worker of vLLM. A slot is the memory in which a rank keeps its part of
one version of the weights (slots.py). point_to_point.py sends slots to readers through communicators.

A communicator is a torch process group of the rank and the reader. It has a TCPStore of its own and does not belong to
torch's default group. So if one of the two processes ends, only this process group breaks.

A call of NCCL may wait for ever. So all calls of a communicator run on a thread of their own. The class Pair holds a
communicator, its thread, and the control connection, over which the reader asks for slots. `Pair.run` hands a call to
the thread and waits for the result. `run` raises an error if the deadline passes, or if the other process closes the
control connection. The caller of `run` then calls `Pair.end`, which aborts the communicator.

A slot is sent in pieces of PIECE_BYTES. The reader sends READY over the control connection when it is ready for a piece, and the rank sends
the piece only then. So a GPU does not begin to send to a reader that has died. At most WINDOW pieces are on their way at the same time.
NCCL sends and receives only in the memory of a GPU. So if the bytes are in the host's memory, they go through WINDOW buffers on the GPU.

When a rank writes its next version into a slot, the rank waits for all work of its GPU, including a piece that NCCL is
sending. So a reader that hangs in the middle of a piece can delay this write until the deadline of `Pair.send`.

The tests of NCCL are in tests/gpu/test_weights.py and need two GPUs. They passed on one host with two GPUs: in
some cases NCCL could use all of its paths, in the other cases only the loopback network. NCCL has not run between two hosts.
"""

import contextlib
import os
import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rl_actors.transports import control
from rl_actors.transports.control import left

PIECE_BYTES = 64 << 20
WINDOW = 2
TRAINER, READER = 0, 1
"""The ranks of the two processes in the communicator's process group."""
READY = b"\4"
"""The byte that the reader sends when it is ready for the next piece."""
PORT = struct.Struct("<H")
"""Format of the message in which the rank tells the reader the port of its store."""
WATCH_SECONDS = 0.1
"""Seconds between two checks of the control connection while a call runs."""
ABORT_SECONDS = 5.0
"""Seconds that `Pair.end` waits for the abort of a communicator."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
CLOSED = "the other process closed the connection"

Value = TypeVar("Value")


class Work(Protocol):
    """A send or a receive that has begun."""

    def wait(self, timeout: timedelta) -> object: ...


class Group(Protocol):
    """A process group of torch."""

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...
    def abort(self) -> None: ...


class Pieces(Protocol):
    """Gives the memory from which a backend sends a piece, and the memory into which the backend receives a piece.

    The argument `number` is the index of the piece in its slot.
    """

    def active(self) -> AbstractContextManager[object]:
        """A context manager. Pieces are sent and received inside its `with` block."""

    def outgoing(self, piece: Tensor, number: int) -> Tensor:
        """The piece, in memory from which the backend can send."""

    def incoming(self, piece: Tensor, number: int) -> Tensor:
        """Memory into which the backend can receive the piece."""

    def arrived(self, came: Tensor, piece: Tensor) -> None:
        """Begin to copy a received piece to `piece`. came: the memory that `incoming` returned for this piece."""

    def finish(self) -> None:
        """Wait until all copies that `arrived` has begun are done."""


class HostPieces:
    """Pieces for gloo, which reads and writes the host's memory."""

    def active(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def outgoing(self, piece: Tensor, number: int) -> Tensor:
        return piece.cpu()

    def incoming(self, piece: Tensor, number: int) -> Tensor:
        return piece

    def arrived(self, came: Tensor, piece: Tensor) -> None:
        """Does nothing, because gloo has received the bytes directly into `piece`."""

    def finish(self) -> None:
        """Does nothing, because `arrived` begins no copy."""


class GPUPieces:
    """Pieces for NCCL, which reads and writes the memory of a GPU.

    The copies run on a CUDA stream that the training does not use, so that they do not wait for the training.
    """

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.buffers = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(WINDOW)]

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def outgoing(self, piece: Tensor, number: int) -> Tensor:
        return piece if piece.is_cuda else self.incoming(piece, number).copy_(piece, non_blocking=True)

    def incoming(self, piece: Tensor, number: int) -> Tensor:
        # It is safe to overwrite the buffer. A sender waits until the buffer's former piece has been sent. In a reader, the stream runs the copy
        # out of the buffer before the next receive.
        return self.buffers[number % WINDOW][: len(piece)]

    def arrived(self, came: Tensor, piece: Tensor) -> None:
        piece.copy_(came, non_blocking=True)

    def finish(self) -> None:
        self.stream.synchronize()


def _gloo(store: object, member: int, host: str, timeout: timedelta) -> Group:
    """A process group of gloo. member: TRAINER or READER. host: an address at which the other process can reach this
    process.
    """
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    # By default torch uses the address to which this host's name resolves. Another host may not reach that address.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, member, 2, options)


def _nccl(store: object, member: int, host: str, timeout: timedelta) -> Group:
    """A process group of NCCL. `host` is not used, because NCCL finds the host's addresses itself."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options.config.blocking = 0  # so that another thread can abort a call that waits
    # torch reads TORCH_NCCL_BLOCKING_WAIT when it makes a group. With the value 1, `Work.wait` waits for the GPU until
    # the timeout, and the group has no watchdog thread. A watchdog would end the trainer's process when a reader has died.
    # The other groups of the trainer keep their watchdogs, because this function restores the variable.
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        return ProcessGroupNCCL(store, member, 2, options)
    finally:
        del os.environ[BLOCKING_WAIT]
        if before is not None:
            os.environ[BLOCKING_WAIT] = before


GROUPS: dict[str, Callable[[object, int, str, timedelta], Group]] = {"gloo": _gloo, "nccl": _nccl}


class Pair:
    """A control connection and the communicator of its two processes. A pair transfers one version after another until a call fails."""

    def __init__(
        self, connection: socket.socket, *, member: int, backend: str, piece_bytes: int, device: torch.device
    ) -> None:
        """member: TRAINER or READER, the rank of this process. device: the device of this process's weights.

        Raises ValueError if the backend is nccl and the device is not a GPU.
        """
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"NCCL connects GPUs, but the weights are on {device}")
        self.connection, self.member, self.make, self.piece_bytes = connection, member, GROUPS[backend], piece_bytes
        self.pieces: Pieces = GPUPieces(device, piece_bytes) if backend == "nccl" else HostPieces()
        self.group: Group | None = None
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self.calls,), name="weights_pair", daemon=True).start()

    def listen(self, deadline: float) -> None:
        """Make the trainer's end of the communicator: serve a store, tell the reader the store's port, and wait for the reader."""
        from torch.distributed import TCPStore

        host = self.connection.getsockname()[0]  # the address at which the reader has reached this process
        listener = socket.create_server((host, 0))
        port, timeout = listener.getsockname()[1], timedelta(seconds=left(deadline))
        store = TCPStore(
            host, port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        self.connection.sendall(PORT.pack(port))
        self.group = self.make(store, self.member, host, timeout)

    def join(self, deadline: float) -> None:
        """Make the reader's end of the communicator: receive the port of the trainer's store, and connect to it."""
        from torch.distributed import TCPStore

        (port,) = PORT.unpack(control.receive(self.connection, PORT.size))
        timeout = timedelta(seconds=left(deadline))
        store = TCPStore(self.connection.getpeername()[0], port, 2, False, timeout)
        self.group = self.make(store, self.member, self.connection.getsockname()[0], timeout)

    def send(self, data: Tensor, deadline: float) -> None:
        """Send the bytes of a slot. Each piece is sent when the reader is ready for it."""
        assert self.group is not None
        under_way: deque[Work] = deque()
        with self.pieces.active():
            for number, piece in enumerate(self._split(data)):
                control.receive(self.connection, len(READY))
                under_way.append(self.group.send([self.pieces.outgoing(piece, number)], READER, 0))
                if len(under_way) == WINDOW:
                    _wait(under_way.popleft(), deadline)
            for work in under_way:
                _wait(work, deadline)

    def receive(self, into: Tensor, deadline: float) -> None:
        """Receive the bytes of a slot into a tensor of the same size."""
        assert self.group is not None
        under_way: deque[tuple[Work, Tensor, Tensor]] = deque()
        with self.pieces.active():
            for number, piece in enumerate(self._split(into)):
                self.connection.sendall(READY)
                coming = self.pieces.incoming(piece, number)
                under_way.append((self.group.recv([coming], TRAINER, 0), coming, piece))
                if len(under_way) == WINDOW:
                    self._end_of(*under_way.popleft(), deadline)
            for work, coming, piece in under_way:
                self._end_of(work, coming, piece, deadline)
            self.pieces.finish()

    def _split(self, data: Tensor) -> tuple[Tensor, ...]:
        return data.split(self.piece_bytes) if len(data) else ()

    def _end_of(self, work: Work, coming: Tensor, piece: Tensor, deadline: float) -> None:
        _wait(work, deadline)
        self.pieces.arrived(coming, piece)

    def run(self, deadline: float, call: Callable[..., Value], *arguments: object) -> Value:
        """Run call(*arguments, deadline) on the communicator's thread, and return its result.

        Raises TimeoutError after the deadline, and ConnectionError if the call fails or the other process closes the control connection.
        After such an error the caller must call `end`.
        """
        done: futures.Future[Value] = futures.Future()

        def answer() -> None:
            try:
                done.set_result(call(*arguments, deadline))
            except BaseException as error:
                # The traceback would keep the communicator and its connections alive until the next garbage collection.
                done.set_exception(error.with_traceback(None))

        self.calls.put(answer)
        while futures.wait([done], timeout=min(WATCH_SECONDS, max(0.0, deadline - time.monotonic()))).not_done:
            if time.monotonic() >= deadline:
                raise TimeoutError
            if is_closed(self.connection):
                raise ConnectionError(CLOSED)
        try:
            return done.result()
        except TimeoutError:
            raise
        except (RuntimeError, OSError) as error:  # from torch, or from the control connection
            left(deadline)  # raises TimeoutError if the deadline has passed
            # If the other process has ended, the call may fail before the loop above notices the closed connection. The
            # call's own error would not name this cause.
            reason = CLOSED if is_closed(self.connection) else str(error)
            raise ConnectionError(reason) from error

    def end(self) -> None:
        """Close the connection and abort the communicator. If a call still waits on the communicator's thread, the abort ends the call."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.calls.put(None)
        group, self.group = self.group, None
        if group is not None:
            aborting = threading.Thread(target=group.abort, name="weights_abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_SECONDS)


def _run(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # otherwise this thread would keep the pair alive while it waits for the next call


def _wait(work: Work, deadline: float) -> None:
    work.wait(timedelta(seconds=left(deadline)))


def is_closed(connection: socket.socket) -> bool:
    """True if this process or the other process has closed the connection. Received bytes that are still unread make no
    difference.
    """
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
