"""The client's side of a service, which is a program that runs actors and lets clients in other
programs call them.

`attach` returns a RemoteMesh, which a client uses like a mesh of Monarch. Its calls go to the
service's coordinator.
"""

import asyncio
import base64
import contextlib
import os
import pickle
import socket
import ssl
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from typing import Any

import cloudpickle
from monarch.actor import context, enable_transport

from rl_actors.clients.base import ATTACH_TIMEOUT, STEP_WAIT
from rl_actors.clients.wire import MAX_LINE_BYTES, PROTOCOL, Message, decode, encode, keep_alive
from rl_actors.clients.wire import versions as own_versions
from rl_actors.processes import tls
from rl_actors.processes.address import Address
from rl_actors.processes.races import unless
from rl_actors.processes.spawn import prepare_this_process


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


class RemoteMesh:
    """Stands for an actor mesh; its endpoints call the coordinator, with one answer a rank."""

    def __init__(self, coordinator: Any, connection: Connection, *, number: int, num_ranks: int, step_wait: float):
        """number: this client's number at the service. step_wait: seconds to wait for the end of
        another client's step.
        """
        self._coordinator = coordinator
        self.connection = connection
        self._number = number
        self.num_ranks = num_ranks
        self._step_wait = step_wait

    def __getattr__(self, name: str) -> "RemoteEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteEndpoint(self, name, self.num_ranks)

    @property
    def probe(self) -> "LocalEndpoint":
        """Its answer is a RemoteProbe, which asks the service whether all processes answer."""
        return LocalEndpoint([RemoteProbe(RemoteEndpoint(self, "is_alive", 1))])

    async def send(self, endpoint: str, arguments: tuple[object, ...]) -> list[object]:
        """The answers of all ranks. Raises ConnectionError as soon as the service is gone."""
        asked = self._coordinator.call.call_one(self._number, endpoint, cloudpickle.dumps(arguments), self._step_wait)
        ended = asyncio.shield(asyncio.wrap_future(self.connection.ended))
        return opened(await unless(ended, ConnectionError, asked))


def opened(answer: bytes) -> list[object]:
    """The answers of all ranks, or the error, from the coordinator's bytes."""
    answers, error = pickle.loads(answer)
    if error is not None:
        raise error
    return answers


class RemoteEndpoint:
    """One endpoint of a RemoteMesh."""

    def __init__(self, mesh: RemoteMesh, name: str, num_answers: int) -> None:
        self._mesh = mesh
        self._name = name
        self._num_answers = num_answers

    def stream(self, *arguments: object, header: object = None) -> Iterator[Awaitable[object]]:
        """The answers. The header is not sent: the service numbers the calls itself."""
        answers = asyncio.ensure_future(self._mesh.send(self._name, arguments))
        return (_nth(answers, index) for index in range(self._num_answers))


async def _nth(answers: "asyncio.Future[list[object]]", index: int) -> object:
    return (await answers)[index]


class LocalEndpoint:
    """An endpoint whose answers are known, so that nothing is sent."""

    def __init__(self, answers: list[object]) -> None:
        self._answers = answers

    def stream(self, *_: object) -> Iterator[Awaitable[object]]:
        return (_just(answer) for answer in self._answers)


async def _just(value: object) -> object:
    return value


class RemoteProbe:
    """Stands for the actor Probe of processes/spawn.py, with only the endpoint `who`."""

    def __init__(self, who: RemoteEndpoint) -> None:
        self.who = who


def ask(address: str, wants: Message, *, certificates: str = "", timeout: float = ATTACH_TIMEOUT) -> Message:
    """A service's answer to a question such as {"wants": "status"}. Errors as `attach`."""
    target = Address.parse(address)
    connection, answer = _greet(target, wants, certificates, timeout)
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
        connection.sendall(encode({"protocol": PROTOCOL, "versions": own_versions(), **wants}))
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
    """Attach to one actor of a service. Returns its RemoteMesh, and the TrainerInfo or
    GeneratorInfo of its first rank.

    member: the actor's name at the service: "trainer", "value_trainer", "reference" or "generator".
    step_wait: as in `ModelClient.attach`, which also lists the errors.
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
        mesh = RemoteMesh(coordinator, held, number=number, num_ranks=num_ranks, step_wait=wait)
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
