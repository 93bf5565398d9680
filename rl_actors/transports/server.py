"""The server of one rank of a trainer. It sends published weights to readers that do not open the rank's slots themselves.

A slot is the memory in which the rank keeps its part of one version of the weights. A reader is a process that loads the weights. A reader
must know the secret of the transport.
"""

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from rl_actors.transports import control, point_to_point, tcp
from rl_actors.transports.control import Request
from rl_actors.transports.slots import Slot, VersionGoneError, actor_name, shared_lock

KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""TCP options. If a reader's host does not answer for a minute, the kernel ends the connection, and the server ends the connection's Sender."""


class Sender(Protocol):
    """Protocol of tcp.Sender and point_to_point.Sender, which send bytes to the reader of one connection."""

    def send(self, slot: Slot, request: Request) -> None:
        """Send the bytes that a request asks for. The caller has locked the slot, and has sent the slot's layout."""

    def end(self) -> None:
        """Free what this sender has made for its connection."""


SENDERS: dict[str, Callable[[socket.socket, float], Sender]] = {
    "tcp": tcp.Sender,
    "point_to_point": point_to_point.Sender,
}
"""For each value of Request.path: the function that makes a sender. Its arguments are the connection, and the timeout of SlotServer."""


class Connections:
    """The open connections of a server. Any thread may call these methods."""

    def __init__(self) -> None:
        # A garbage collection can end the server. The collection may run in a thread that holds the lock, and `end` then takes the lock
        # again. So the lock must be reentrant.
        self.guard = threading.RLock()
        self.open: set[socket.socket] | None = set()  # None: the server has ended

    def add(self, connection: socket.socket) -> bool:
        """Keep a new connection. Returns False if the server has ended; the caller must then close the connection."""
        with self.guard:
            if self.open is None:
                return False
            self.open.add(connection)
            return True

    def remove(self, connection: socket.socket) -> None:
        with self.guard:
            if self.open is not None:
                self.open.remove(connection)

    def end(self) -> None:
        """Shut all connections down. This ends the threads that wait for requests."""
        with self.guard:
            for connection in self.open or ():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.open = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """State that the threads of a server share. The threads do not refer to the server itself, so Python can garbage-collect the server."""

    find: Callable[[bytes], Slot | None]
    secret: bytes
    timeout: float
    connections: Connections = field(default_factory=Connections)


class SlotServer:
    """Serves the slots of this process to readers that know the secret. It ends when it is garbage-collected, or with the process."""

    def __init__(self, find: Callable[[bytes], Slot | None], *, host: str, secret: bytes, timeout: float) -> None:
        """find: function of a token (the bytes that identify a slot). It returns the slot, or None if there is no such slot.
        host: address to bind to. timeout: the longest wait in seconds for the lock of a slot, and for the reader during a request.
        """
        self.socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        served = Served(find=find, secret=secret, timeout=timeout)
        accepting = threading.Thread(target=_accept, args=(self.socket, served), name="weights_server", daemon=True)
        accepting.start()
        weakref.finalize(self, _close, self.socket, served)


def _close(server: socket.socket, served: Served) -> None:
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)  # ends the call of `accept` that waits in another thread
    server.close()
    served.connections.end()


def _accept(server: socket.socket, served: Served) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the server was closed
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        if not served.connections.add(connection):
            connection.close()
            return
        threading.Thread(target=_serve, args=(connection, served), name="weights_stream", daemon=True).start()


def _serve(connection: socket.socket, served: Served) -> None:
    """Answer the requests of one reader until the reader ends the connection.

    An error of the reader, such as a wrong secret, ends only this connection.
    """
    with connection, contextlib.suppress(OSError, ValueError), ExitStack() as stack:
        stack.callback(served.connections.remove, connection)
        connection.settimeout(served.timeout)
        sender: Sender | None = None
        while True:
            request = control.receive_request(connection, served.secret, control.send_nonce(connection))
            connection.settimeout(served.timeout)
            if sender is None:
                sender = SENDERS[request.path](connection, served.timeout)
                stack.callback(sender.end)
            _answer(connection, served, sender, request)
            connection.settimeout(None)  # no time limit, because the next request comes only with the next version


def _answer(connection: socket.socket, served: Served, sender: Sender, request: Request) -> None:
    """Send the bytes that a request asks for, or the reason why the slot cannot be read."""
    with ExitStack() as stack:
        try:
            slot = served.find(bytes.fromhex(request.token))
            if slot is None:
                raise VersionGoneError(f"{request.key} is gone: the trainer has dropped its slot")
            what = f"pull of {request.key}: {actor_name()}: lock of slot {slot.number}"
            stack.enter_context(shared_lock(slot.fd, served.timeout, what))
            slot.require(request.key)
        except (TimeoutError, VersionGoneError) as error:
            connection.sendall(control.GONE)
            control.send_block(connection, str(error).encode())
            return
        connection.sendall(control.SERVED)
        control.send_block(connection, slot.layout.to_json())
        sender.send(slot, request)
        control.await_receipt(connection)
