"""One process group per (trainer rank, reader): NCCL between GPUs, else gloo.

It is not in torch's default group, so a death breaks only this pair. Calls run on a thread of their
own because NCCL may block for ever; `Pair.end` aborts them.

A slot is sent in pieces of PIECE_BYTES, at most WINDOW in flight, each only after the reader's
READY, so that a GPU does not begin to send to a dead reader. A reader that hangs within a piece can
delay the rank's next write, which waits for all work of the GPU, until the deadline of `Pair.send`.
NCCL has run between two GPUs of one host (tests/gpu/test_weights.py), not between two hosts.
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
TRAINER = 0
READER = 1
READY = b"\4"
PORT = struct.Struct("<H")
"""The rank tells the reader the port of its store."""
WATCH_SECONDS = 0.1
"""Between checks of the control connection during a call."""
ABORT_SECONDS = 5.0
"""For the abort in `Pair.end`."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
CLOSED = "the other process closed the connection"

Value = TypeVar("Value")


class Work(Protocol):
    """A send or receive under way."""

    def wait(self, timeout: timedelta) -> object: ...


class Group(Protocol):
    """A process group of torch, for two ranks."""

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...
    def abort(self) -> None: ...


class HostPieces:
    """Host memory from which gloo sends pieces, and into which it receives them."""

    def active(self) -> AbstractContextManager[object]:
        """The context in which pieces are sent and received."""
        return contextlib.nullcontext()

    def outgoing(self, piece: Tensor, number: int) -> Tensor:
        """The piece, in memory from which the backend can send. number: index of the piece."""
        return piece.cpu()

    def incoming(self, piece: Tensor, number: int) -> Tensor:
        """Memory into which the backend can receive the piece."""
        return piece

    def arrived(self, came: Tensor, piece: Tensor) -> None:
        """Begin to copy a received piece from `came`, the result of `incoming`, to `piece`."""

    def finish(self) -> None:
        """Wait for the copies that `arrived` has begun."""


class GPUPieces(HostPieces):
    """GPU memory for the pieces of NCCL, copied on a stream that does not wait for the training."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.buffers = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(WINDOW)]

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def outgoing(self, piece: Tensor, number: int) -> Tensor:
        return piece if piece.is_cuda else self.incoming(piece, number).copy_(piece, non_blocking=True)

    def incoming(self, piece: Tensor, number: int) -> Tensor:
        # safe to overwrite: a sender has waited for the former piece, a reader's stream copies it
        # out before the next receive
        return self.buffers[number % WINDOW][: len(piece)]

    def arrived(self, came: Tensor, piece: Tensor) -> None:
        piece.copy_(came, non_blocking=True)

    def finish(self) -> None:
        self.stream.synchronize()


def _gloo(store: object, member: int, host: str, timeout: timedelta) -> Group:
    """host: where the other process reaches this one."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    # by default torch takes the address of this host's name, which another host may not reach
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, member, 2, options)


def _nccl(store: object, member: int, host: str, timeout: timedelta) -> Group:
    """NCCL finds the addresses itself."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options.config.blocking = 0  # so that another thread can abort a waiting call
    # With TORCH_NCCL_BLOCKING_WAIT=1 `Work.wait` has a timeout and the group no watchdog, which
    # would end the trainer when a reader dies. Restored below, so that the trainer's other groups
    # keep theirs.
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
    """A control connection and its communicator, for one version after another until a call fails."""

    def __init__(
        self, connection: socket.socket, *, member: int, backend: str, piece_bytes: int, device: torch.device
    ) -> None:
        """member: TRAINER or READER. device: of this process's weights."""
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"NCCL connects GPUs, but the weights are on {device}")
        self.connection = connection
        self.member = member
        self.make = GROUPS[backend]
        self.piece_bytes = piece_bytes
        self.pieces = GPUPieces(device, piece_bytes) if backend == "nccl" else HostPieces()
        self.group: Group | None = None
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self.calls,), name="weights_pair", daemon=True).start()

    def listen(self, deadline: float) -> None:
        """Make the trainer's end: serve a store, tell the reader its port, and wait for the reader."""
        from torch.distributed import TCPStore

        host = self.connection.getsockname()[0]  # the address at which the reader has reached this process
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=left(deadline))
        store = TCPStore(
            host, port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        self.connection.sendall(PORT.pack(port))
        self.group = self.make(store, self.member, host, timeout)

    def join(self, deadline: float) -> None:
        """Make the reader's end: receive the port of the trainer's store, and connect."""
        from torch.distributed import TCPStore

        (port,) = PORT.unpack(control.receive(self.connection, PORT.size))
        timeout = timedelta(seconds=left(deadline))
        store = TCPStore(self.connection.getpeername()[0], port, 2, False, timeout)
        self.group = self.make(store, self.member, self.connection.getsockname()[0], timeout)

    def send(self, data: Tensor, deadline: float) -> None:
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
        """Run call(*arguments, deadline) on the communicator's thread; after an error call `end`.

        Raises TimeoutError after the deadline, ConnectionError if the call fails or the other
        process closes the control connection.
        """
        done: futures.Future[Value] = futures.Future()

        def answer() -> None:
            try:
                done.set_result(call(*arguments, deadline))
            except BaseException as error:
                # a traceback would keep the connections alive until the next garbage collection
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
        except (RuntimeError, OSError) as error:  # of torch or the control connection
            left(deadline)
            # the call may fail before the loop above sees the closed connection, with an error that
            # does not name this cause
            reason = CLOSED if is_closed(self.connection) else str(error)
            raise ConnectionError(reason) from error

    def end(self) -> None:
        """Close the connection, and abort the communicator with any waiting call."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.calls.put(None)
        group = self.group
        self.group = None
        if group is not None:
            aborting = threading.Thread(target=group.abort, name="weights_abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_SECONDS)


def _run(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # otherwise this thread keeps the pair alive while it waits


def _wait(work: Work, deadline: float) -> None:
    work.wait(timedelta(seconds=left(deadline)))


def is_closed(connection: socket.socket) -> bool:
    """True if either process has closed the connection, whatever is still unread."""
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
