"""A rank's server for readers that cannot map its slots but know the transport's secret."""

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from rl_actors.transports import control, point_to_point, tcp
from rl_actors.transports.control import Request
from rl_actors.transports.slots import Slot, VersionGoneError, actor_name, shared_lock

KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""The kernel ends the connection of a reader whose host is silent for a minute."""


MAKE_SENDER: dict[str, Callable[[socket.socket, float, ExitStack], Callable[[Slot, Request], None]]] = {
    "tcp": tcp.make_sender,
    "point_to_point": point_to_point.make_sender,
}
"""Request.path -> maker of the function that sends the bytes of a locked slot over a connection."""


@dataclass(slots=True, kw_only=True)
class Served:
    """State of the server's threads, which must not refer to the server, so that it can end."""

    find: Callable[[bytes], Slot | None]
    secret: bytes
    timeout: float
    connections: set[socket.socket] | None = field(default_factory=set)  # None: the server has ended
    # reentrant: a garbage collection in a thread that holds the lock may call `end`
    guard: threading.RLock = field(default_factory=threading.RLock)

    def add(self, connection: socket.socket) -> bool:
        """Keep a connection. False if the server has ended; the caller then closes it."""
        with self.guard:
            if self.connections is None:
                return False
            self.connections.add(connection)
            return True

    def remove(self, connection: socket.socket) -> None:
        with self.guard:
            if self.connections is not None:
                self.connections.remove(connection)

    def end(self) -> None:
        """Shut all connections down, which ends the threads that wait for requests."""
        with self.guard:
            for connection in self.connections or ():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.connections = None


class SlotServer:
    """Serves the slots of this process until it is garbage-collected."""

    def __init__(self, find: Callable[[bytes], Slot | None], *, host: str, secret: bytes, timeout: float) -> None:
        """find: token -> slot. timeout: seconds for a slot's lock, and for the reader's parts."""
        self.socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        served = Served(find=find, secret=secret, timeout=timeout)
        accepting = threading.Thread(target=_accept, args=(self.socket, served), name="weights_server", daemon=True)
        accepting.start()
        weakref.finalize(self, _close, self.socket, served)


def _close(server: socket.socket, served: Served) -> None:
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)  # ends the waiting `accept`
    server.close()
    served.end()


def _accept(server: socket.socket, served: Served) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the server was closed
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        if not served.add(connection):
            connection.close()
            return
        threading.Thread(target=_serve, args=(connection, served), name="weights_stream", daemon=True).start()


def _serve(connection: socket.socket, served: Served) -> None:
    """Its errors, such as a wrong secret, end only this connection."""
    with connection, contextlib.suppress(OSError, ValueError), ExitStack() as stack:
        stack.callback(served.remove, connection)
        connection.settimeout(served.timeout)
        send: Callable[[Slot, Request], None] | None = None
        while True:
            request = control.receive_request(connection, served.secret)
            connection.settimeout(served.timeout)
            if send is None:
                send = MAKE_SENDER[request.path](connection, served.timeout, stack)
            _answer(connection, served, send, request)
            connection.settimeout(None)  # the next request comes only with the next version


def _answer(connection: socket.socket, served: Served, send: Callable[[Slot, Request], None], request: Request) -> None:
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
        send(slot, request)
        control.await_receipt(connection)
