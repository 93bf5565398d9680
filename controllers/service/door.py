"""`Listener`, the port at which a service listens. Both sides send lines of JSON; calls to actors do
not go through it.

A program connects to attach, or to ask for state, logs or the end of the service. Attaching needs
the same versions of Python and some packages (see wire.py), gives the reference to the coordinator,
and lasts as long as the connection, whose end tells each side that the other is gone.
"""

import asyncio
import base64
import contextlib
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from controllers.service.open_step import AttachedClient
from controllers.service.service import Service
from rl_actors.clients.remote import MAX_LINE_BYTES, PROTOCOL, Message, decode, encode, keep_alive, mismatch
from rl_actors.clients.remote import versions as own_versions
from rl_actors.processes.address import Address

logger = logging.getLogger(__name__)

GREETING_TIMEOUT = 10.0
"""For the greeting, the line with a program's request."""


class Listener:
    """Listens at one address until `close`. Runs on the background event loop (clients/call.py)."""

    def __init__(
        self, service: Service, coordinator: bytes, *, logs: Path, stop: Callable[[str], None], transport: str
    ) -> None:
        """coordinator: pickled reference. logs: folder of the actors' logs. stop: ends the service
        for a reason.

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
                lines = greeting.get("lines", 20)
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
        member = str(greeting.get("member"))
        try:
            client = self.service.attach(str(greeting.get("name")), member)
        except ValueError as error:
            await _send(writer, {"error": str(error)})
            return
        try:
            await _send(
                writer,
                {
                    "client": client.number,
                    "num_ranks": self.service.members[member].num_ranks,
                    "transport": self.transport,
                    "coordinator": base64.b64encode(self.coordinator).decode(),
                },
            )
            await self._until_it_leaves(client, reader)
        finally:
            self.service.leave(client)

    async def _until_it_leaves(self, client: AttachedClient, reader: asyncio.StreamReader) -> None:
        """A client sends nothing after its greeting, so a read waits for the end."""
        with contextlib.suppress(OSError):
            await reader.read()


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(encode({"protocol": PROTOCOL, **message}))
    await writer.drain()


def tails(folder: Path, num_lines: int) -> dict[str, list[str]]:
    """File name -> last lines of every log, read from the last 200 bytes per wanted line: of longer
    lines there are fewer, the first perhaps cut.
    """
    last = {}
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * num_lines))
            last[path.name] = file.read().decode(errors="replace").splitlines()[-num_lines:]
    return last
