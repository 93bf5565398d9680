"""The client's side of a service. A service is a program that runs actors, such as a trainer and a generator, and lets clients in other
programs call them.

`attach` connects to a service and returns a RemoteMesh. A TrainerClient or GeneratorClient uses a RemoteMesh like an actor mesh of Monarch.
The calls go to the coordinator, an actor of the service, which passes them on to the trainer, the generator or another actor.
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
from rl_actors.processes.spawn import prepare_this_process


class Lease:
    """The connection of a client to a service. When the connection ends, the client knows that the service is gone, and
    the service knows that the client is gone.
    """

    def __init__(self, address: Address, connection: socket.socket, answer: Message) -> None:
        """answer: the service's answer to the first message of the client."""
        self.address, self.answer = address, answer
        self.ended: Future[str] = Future()  # done when the connection ends; the result is the reason
        self._connection = connection
        watching = threading.Thread(
            target=_watch, args=(connection, self.ended, str(address)), name="rl_actors_lease", daemon=True
        )
        watching.start()

    def close(self) -> None:
        """Leave the service. A second call does nothing.

        The service then discards this client's gradients that no optim_step has used, and aborts this client's running generate calls.
        """
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _watch(connection: socket.socket, ended: "Future[str]", address: str) -> None:
    """Read until the connection ends, and set the result of `ended` to a text with the reason. The service's last line has the reason if the
    service ended the connection.
    """
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
    """A stand-in for an actor mesh. Its endpoints call the coordinator of a service. A call has one answer for each
    rank, but `is_alive` has one answer for all ranks.

    number: this client's number at the service. patience: seconds that a call may wait for the end of another client's step.
    """

    def __init__(self, coordinator: Any, lease: Lease, *, number: int, num_ranks: int, patience: float):
        self._coordinator, self.lease = coordinator, lease
        self._number, self._num_ranks, self._patience = number, num_ranks, patience

    def __getattr__(self, name: str) -> "RemoteEndpoint":
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteEndpoint(self, name)

    @property
    def probe(self) -> "LocalEndpoint":
        """An endpoint that answers with a RemoteProbe. The probe's `who` asks the service whether all processes of the actor answer."""
        return LocalEndpoint([RemoteProbe(RemoteEndpoint(self, "is_alive", num_answers=1))])

    async def send(self, endpoint: str, arguments: tuple[object, ...]) -> list[object]:
        """Call an endpoint of the actor, and return the answers of all ranks.

        Raises the call's error if the call fails, and ConnectionError as soon as the service is gone.
        """
        asked = self._coordinator.call.call_one(self._number, endpoint, cloudpickle.dumps(arguments), self._patience)
        answer = asyncio.ensure_future(_awaited(asked))
        ended = asyncio.wrap_future(self.lease.ended)
        await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise ConnectionError(ended.result())
        return opened(answer.result())

    @property
    def num_ranks(self) -> int:
        return self._num_ranks


def opened(answer: bytes) -> list[object]:
    """The answers of all ranks, from the bytes that the coordinator returns. Raises the error of the call."""
    answers, error = pickle.loads(answer)
    if error is not None:
        raise error
    return answers


async def _awaited(future: Awaitable[bytes]) -> bytes:
    return await future


class RemoteEndpoint:
    """One endpoint of a RemoteMesh. A client calls it like an endpoint of Monarch."""

    def __init__(self, mesh: RemoteMesh, name: str, num_answers: int | None = None) -> None:
        self._mesh, self._name = mesh, name
        self._num_answers = mesh.num_ranks if num_answers is None else num_answers

    def stream(self, *arguments: object, order: object = None) -> Iterator[Awaitable[object]]:
        """The answers of the ranks. `order` has the number that the client gave the call (policy_trainer.Order). It is not sent, because the
        service numbers the calls itself.
        """
        answers = asyncio.ensure_future(self._mesh.send(self._name, arguments))
        return (_nth(answers, index) for index in range(self._num_answers))


async def _nth(answers: "asyncio.Future[list[object]]", index: int) -> object:
    return (await answers)[index]


class LocalEndpoint:
    """An endpoint whose answers are known already, so that nothing is sent."""

    def __init__(self, answers: list[object]) -> None:
        self._answers = answers

    def stream(self, *_: object) -> Iterator[Awaitable[object]]:
        return (_just(answer) for answer in self._answers)


async def _just(value: object) -> object:
    return value


class RemoteProbe:
    """A stand-in for the actor Probe of processes/spawn.py, with only the endpoint `who`."""

    def __init__(self, who: RemoteEndpoint) -> None:
        self.who = who


def ask(address: str, wants: Message, *, certificates: str = "", timeout: float = ATTACH_TIMEOUT) -> Message:
    """The answer of a service to a question that needs no actors, such as {"wants": "status"}. Raises the errors of `attach`."""
    target = Address.parse(address)
    connection, answer = _greet(target, wants, certificates, timeout)
    connection.close()
    return answer


def _greet(address: Address, wants: Message, certificates: str, timeout: float) -> tuple[socket.socket, Message]:
    """Connect, send the first message, and return the connection and the service's answer to the message."""
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
    """The error to raise instead of an error of a connection. Its text says what went wrong."""
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
    """Attach to one actor of a service. Returns a RemoteMesh that stands for the actor, and the TrainerInfo or
    GeneratorInfo of the actor's first rank.

    member: the actor's name at the service, such as "trainer", "value_trainer" or "generator".
    step_wait: seconds that a call may wait for the end of another client's step. At most call_timeout / 2 is used.
    Raises ValueError for a wrong address, for a wrong folder of certificates, for versions of packages that differ, and
    for an actor that the service does not have. Raises ConnectionError if no service can be reached at the address, or
    if TLS fails. Raises TimeoutError if the service does not answer within `timeout` seconds.
    """
    target = Address.parse(address)
    name = f"{member}, pid {os.getpid()} on {socket.gethostname()}"
    connection, answer = _greet(target, {"wants": "attach", "member": member, "name": name}, certificates, timeout)
    own_host = connection.getsockname()[0]
    lease = Lease(target, connection, answer)
    try:
        join_monarch(str(answer["transport"]), own_host, certificates)
        coordinator = pickle.loads(base64.b64decode(str(answer["coordinator"])))
        number, num_ranks = int(str(answer["client"])), int(str(answer["num_ranks"]))
        patience = min(step_wait, call_timeout / 2)
        mesh = RemoteMesh(coordinator, lease, number=number, num_ranks=num_ranks, patience=patience)
        asked = coordinator.call.call_one(number, "setup", cloudpickle.dumps(()), patience)
        try:
            info = opened(asked.get(timeout=timeout))[0]
        except TimeoutError:
            raise TimeoutError(
                f"{address} accepted this program, but its {member} did not answer within {timeout:g} s"
            ) from None
    except BaseException:
        lease.close()
        raise
    return mesh, info


def join_monarch(transport: str, own_host: str, certificates: str) -> None:
    """Start Monarch in this process with the service's transport. own_host: the address at which the service reaches this machine."""
    prepare_this_process()
    if transport == "tls":
        tls.use_for_monarch(certificates)
    host = f"[{own_host}]" if ":" in own_host else own_host
    with contextlib.suppress(RuntimeError):  # raised if Monarch is already in use; Monarch then keeps its address
        enable_transport(f"{transport}://{host}:0")
    context()
