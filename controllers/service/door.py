"""The two ways into a service: the Listener's port, at which programs attach, and the Coordinator,
which gets their calls.

Both sides of a connection send lines of JSON. It begins with a request to attach, or for state,
logs or the end of the service. Attaching needs the same versions of Python and some packages (see
wire.py) and lasts as long as the connection, whose end tells each side that the other is gone.
"""

import asyncio
import base64
import contextlib
import logging
import pickle
import ssl
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
from monarch.actor import Actor, concurrent_endpoint, this_proc

from controllers.service.service import Service
from rl_actors.clients.call import in_background
from rl_actors.clients.remote import MAX_LINE_BYTES, PROTOCOL, Message, decode, encode, keep_alive, mismatch
from rl_actors.clients.remote import versions as own_versions
from rl_actors.processes.address import Address
from rl_actors.processes.errors import sendable

if TYPE_CHECKING:
    from monarch.actor import UndeliverableMessageEnvelope

logger = logging.getLogger(__name__)

GREETING_TIMEOUT = 10.0
"""For the greeting, the line with a program's request."""
_services: dict[str, Service] = {}
"""By key, because a Service cannot be pickled as an argument of the actor."""


class Listener:
    """Listens at one address until `close`. Runs on the background event loop (clients/call.py)."""

    def __init__(
        self, service: Service, coordinator: bytes, *, logs: Path, stop: Callable[[str], None], transport: str
    ) -> None:
        """coordinator: pickled reference. logs: folder. stop: ends the service for a reason.
        transport: of Monarch's connections, "tcp" or "tls".
        """
        self.service = service
        self.coordinator = coordinator
        self.logs = logs
        self.stop = stop
        self.transport = transport
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen, and return the address with its port. Raises OSError naming the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve, address.host, address.port, ssl=tls, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise OSError(error.errno, f"the service cannot listen at {address}: {error.strerror or error}") from None
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(address.host, port, address.tls)

    async def close(self, reason: str) -> None:
        """Stop listening, tell every program the reason, and end the connections."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._open):
            with contextlib.suppress(OSError):
                writer.write(encode({"protocol": PROTOCOL, "end": reason}))
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            keep_alive(writer.get_extra_info("socket"))
            greeting = decode(await asyncio.wait_for(reader.readline(), GREETING_TIMEOUT))
            await self._answer(greeting, reader, writer)
        except (OSError, ValueError, TimeoutError) as error:
            logger.info("the connection from %s ended with an error: %r", writer.get_extra_info("peername"), error)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, greeting: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match greeting.get("wants"):
            case "attach":
                await self._attach(greeting, reader, writer)
            case "status":
                await _send(writer, {"status": await self.service.describe() | {"versions": own_versions()}})
            case "logs":
                lines = greeting.get("lines")
                await _send(writer, {"logs": tails(self.logs, lines if isinstance(lines, int) else 20)})
            case "stop":
                await _send(writer, {"stopping": True})
                self.stop("it was asked to stop")
            case other:
                await _send(writer, {"error": f"the service has no answer to {other!r}"})

    async def _attach(self, greeting: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        different = mismatch(own_versions(), greeting.get("versions"))
        if different:
            await _send(writer, {"error": f"the versions differ: {different}"})
            return
        try:
            client = self.service.attach(str(greeting.get("name")), str(greeting.get("member")))
        except ValueError as error:
            await _send(writer, {"error": str(error)})
            return
        try:
            await _send(
                writer,
                {
                    "client": client.number,
                    "num_ranks": self.service.members[client.member].num_ranks,
                    "transport": self.transport,
                    "coordinator": base64.b64encode(self.coordinator).decode(),
                },
            )
            with contextlib.suppress(OSError):
                await reader.read()  # a client sends nothing after its greeting, so this waits for the end
        finally:
            self.service.leave(client)


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(encode({"protocol": PROTOCOL, **message}))
    await writer.drain()


def tails(folder: Path, num_lines: int) -> dict[str, list[str]]:
    """File name -> its last lines, from 200 bytes per wanted line, so fewer of longer lines."""
    last = {}
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * num_lines))
            last[path.name] = file.read().decode(errors="replace").splitlines()[-num_lines:]
    return last


class Coordinator(Actor):
    """Passes the calls of clients, which run at the same time, to the Service, which decides which
    wait.
    """

    def __init__(self, key: str) -> None:
        self.service = _services[key]

    @concurrent_endpoint
    async def call(self, number: int, endpoint: str, arguments: bytes, step_wait: float) -> bytes:
        """The pickled answers of all ranks, or error, for remote.opened. The rest as in Service.call."""
        try:
            # a failure to unpickle fails only the call; in Monarch it would end this actor
            unpickled = pickle.loads(arguments)
            answers = await in_background(self.service.call(number, endpoint, unpickled, step_wait), endpoint)
            return cloudpickle.dumps((answers, None))
        except Exception as error:
            return cloudpickle.dumps((None, sendable(error)))

    def _handle_undeliverable_message(self, message: "UndeliverableMessageEnvelope") -> bool:
        """Drop an answer to a client that has ended. True keeps the actor running."""
        return True


def spawn_coordinator(service: Service) -> bytes:
    """Start the service's coordinator here, and return a pickled reference to it."""
    key = uuid.uuid4().hex[:12]
    _services[key] = service
    coordinator = this_proc().spawn(f"coordinator_{key}", Coordinator, key)
    coordinator.initialized.get()
    return cloudpickle.dumps(coordinator)
