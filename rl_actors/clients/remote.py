"""The client's side of a service, a program whose actors clients in other programs call. `attach`
returns a RemoteMesh, which a client uses like a mesh of Monarch.

Before either side unpickles anything, they exchange lines of JSON.
"""

import asyncio
import base64
import contextlib
import importlib.metadata
import json
import os
import pickle
import platform
import socket
import ssl
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from monarch.actor import context, enable_transport

import rl_actors
from rl_actors.clients.base import ATTACH_TIMEOUT, STEP_WAIT
from rl_actors.processes import tls
from rl_actors.processes.address import Address
from rl_actors.processes.races import unless
from rl_actors.processes.spawn import prepare_this_process

PROTOCOL = "rl-actors service 1"  # the field `protocol` of every message
MAX_LINE_BYTES = 1 << 20  # of a line of JSON that is read

Message = dict[str, object]


def versions() -> dict[str, str]:
    """Versions that client and service must share, because they exchange pickled objects."""
    major, minor, _ = platform.python_version_tuple()
    return {
        "rl_actors": rl_actors.__version__,
        # Without +cpu or +cu130: all builds of a version can unpickle each other's objects.
        "torch": torch.__version__.partition("+")[0],
        "torchmonarch": importlib.metadata.version("torchmonarch"),
        "python": f"{major}.{minor}",
    }


def mismatch(of_service: dict[str, str], of_client: object) -> str:
    """The first difference, such as "the service has torch 2.13.0, the client 2.12.0", or ""."""
    if not isinstance(of_client, dict):
        return f"the service has {of_service}, the client sent no versions"
    for name, version in of_service.items():
        if of_client.get(name) != version:
            return f"the service has {name} {version}, the client {of_client.get(name, 'sent none')}"
    return ""


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError if the line is not from a service or its client."""
    message: object = None
    with contextlib.suppress(ValueError, RecursionError):  # RecursionError: thousands of brackets
        message = json.loads(line)
    if not isinstance(message, dict) or message.get("protocol") != PROTOCOL:
        raise ValueError(f"the other program sent {line[:60]!r}")
    return message


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone; a quarter of an hour if bytes are
    unacknowledged, because Linux then repeats them and sends no probes (tcp_retries2).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection:
    """The connection of a client to a service. By its end, each side knows that the other is gone."""

    def __init__(self, address: Address, connection: socket.socket, answer: Message) -> None:
        """answer: the service's answer to the first message of the client."""
        self.address = address
        self.answer = answer
        self.ended: Future[str] = Future()  # done when the connection ends; the result is the reason
        self._connection = connection
        watching = threading.Thread(
            target=_watch, args=(connection, self.ended, str(address)), name="rl_actors_connection", daemon=True
        )
        watching.start()

    def close(self) -> None:
        """Leave the service, which discards this client's open step and aborts its generate calls."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _watch(connection: socket.socket, ended: "Future[str]", address: str) -> None:
    """Read until the end, whose reason is in the service's last line, if there is one."""
    received = b""
    with contextlib.suppress(OSError, ValueError):
        while part := connection.recv(4096):
            received = (received + part)[-MAX_LINE_BYTES:]
    reason = "the connection has ended"
    with contextlib.suppress(ValueError):
        reason = str(decode(received).get("end", reason))
    with contextlib.suppress(Exception):
        ended.set_result(f"the service at {address} is gone: {reason}")


@dataclass(kw_only=True)
class RemoteMesh:
    """Stands for an actor mesh; its endpoints call the coordinator, with one answer a rank."""

    coordinator: Any
    connection: Connection
    number: int  # of this client at the service
    num_ranks: int
    step_wait: float  # seconds to wait for the end of another client's step

    def __getattr__(self, name: str) -> "RemoteEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteEndpoint(self, name, self.num_ranks)

    @property
    def probe(self) -> "RemoteProbe":
        """It asks the service whether all processes answer."""
        return RemoteProbe(RemoteEndpoint(self, "is_alive", 1))

    async def send(self, endpoint: str, arguments: tuple[object, ...]) -> list[object]:
        """The answers of all ranks. Raises ConnectionError as soon as the service is gone."""
        asked = self.coordinator.call.call_one(self.number, endpoint, cloudpickle.dumps(arguments), self.step_wait)
        ended = asyncio.shield(asyncio.wrap_future(self.connection.ended))
        return opened(await unless(ended, ConnectionError, asked))


def opened(answer: bytes) -> list[object]:
    """The answers of all ranks, or the error, from the coordinator's bytes."""
    answers, error = pickle.loads(answer)
    if error is not None:
        raise error
    return answers


@dataclass
class RemoteEndpoint:
    mesh: RemoteMesh
    name: str
    num_answers: int

    def stream(self, *arguments: object, header: object = None) -> Iterator[Awaitable[object]]:
        """The answers. The header is not sent: the service numbers the calls itself."""
        answers = asyncio.ensure_future(self.mesh.send(self.name, arguments))
        return (_nth(answers, index) for index in range(self.num_answers))


async def _nth(answers: "asyncio.Future[list[object]]", index: int) -> object:
    return (await answers)[index]


@dataclass
class RemoteProbe:
    """Stands for the endpoint `probe` and for its answer, a Probe of processes/spawn.py."""

    who: RemoteEndpoint

    def stream(self) -> Iterator[Awaitable["RemoteProbe"]]:
        return iter([asyncio.sleep(0, self)])


def ask(address: str, wants: Message, *, certificates: str = "", timeout: float = ATTACH_TIMEOUT) -> Message:
    """A service's answer to a question such as {"wants": "status"}. Errors as `attach`."""
    connection, answer = _greet(Address.parse(address), wants, certificates, timeout)
    connection.close()
    return answer


def _greet(address: Address, wants: Message, certificates: str, timeout: float) -> tuple[socket.socket, Message]:
    """Connect, send the first message, and return the connection and the answer."""
    if timeout <= 0:
        raise ValueError(f"timeout={timeout}; it must be positive")
    protection = tls.client_context(address, certificates)
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((address.host, address.port), timeout)
        if protection is not None:
            connection = protection.wrap_socket(connection, server_hostname=address.host)
        keep_alive(connection)
        connection.sendall(encode({"protocol": PROTOCOL, "versions": versions(), **wants}))
        answer = decode(_read_line(connection))
    except Exception as error:
        if connection is not None:
            connection.close()
        raise _plain(error, address, timeout) from error
    if "error" in answer:
        connection.close()
        raise ValueError(f"the service at {address} refuses: {answer['error']}")
    connection.settimeout(None)
    return connection, answer


def _plain(error: Exception, address: Address, timeout: float) -> Exception:
    """The error to raise instead of an error of a connection."""
    match error:
        case ssl.SSLError():
            return ConnectionError(f"{address}: TLS failed between this program and the service: {error}")
        case TimeoutError():
            return TimeoutError(f"{address} did not answer within {timeout:g} s")
        case ConnectionRefusedError():
            return ConnectionError(f"no service listens at {address}")
        case socket.gaierror():
            return ConnectionError(f"{address}: the host is unknown: {error}")
        case OSError():
            return ConnectionError(f"{address} cannot be reached: {error}")
        case ValueError():
            return ConnectionError(f"{address} is not a service of rl_actors, or only one side uses TLS: {error}")
    return error


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part or len(line) > MAX_LINE_BYTES:
            break
        line += part
    return line


def attach(
    address: str,
    member: str,
    *,
    certificates: str = "",
    timeout: float = ATTACH_TIMEOUT,
    step_wait: float = STEP_WAIT,
    call_timeout: float,
) -> tuple[RemoteMesh, Any]:
    """Attach to one actor of a service. Returns its RemoteMesh, and the info of its first rank.

    member: its name: "trainer", "value_trainer", "reference" or "generator". Others, errors: see
    `ModelClient.attach`.
    """
    target = Address.parse(address)
    name = f"{member}, pid {os.getpid()} on {socket.gethostname()}"
    connection, answer = _greet(target, {"wants": "attach", "member": member, "name": name}, certificates, timeout)
    own_host = connection.getsockname()[0]
    held = Connection(target, connection, answer)
    try:
        join_monarch(str(answer["transport"]), own_host, certificates)
        coordinator = pickle.loads(base64.b64decode(str(answer["coordinator"])))
        number = int(str(answer["client"]))
        num_ranks = int(str(answer["num_ranks"]))
        wait = min(step_wait, call_timeout / 2)
        mesh = RemoteMesh(coordinator=coordinator, connection=held, number=number, num_ranks=num_ranks, step_wait=wait)
        asked = coordinator.call.call_one(number, "setup", cloudpickle.dumps(()), wait)
        try:
            info = opened(asked.get(timeout=timeout))[0]
        except TimeoutError:
            raise TimeoutError(
                f"{address} accepted this program, but its {member} did not answer within {timeout:g} s"
            ) from None
    except BaseException:
        held.close()
        raise
    return mesh, info


def join_monarch(transport: str, own_host: str, certificates: str) -> None:
    """Start Monarch with the service's transport. own_host: our address as the service sees it."""
    prepare_this_process()
    if transport == "tls":
        tls.use_for_monarch(certificates)
    host = f"[{own_host}]" if ":" in own_host else own_host
    with contextlib.suppress(RuntimeError):  # raised if Monarch is already in use; Monarch then keeps its address
        enable_transport(f"{transport}://{host}:0")
    context()
