"""Tests of a Listener, the server socket of a service, and of the errors for programs that cannot attach to a service.

A service is a program that runs actors. Other programs attach to it in order to use the actors. The door in these tests
is real, but the service has no actors.
"""

import contextlib
import socket
import threading

import pytest
from waiting import wait_until

from controllers.service import door as door_module
from controllers.service.door import Listener
from controllers.service.service import Service
from rl_actors import GeneratorClient, TrainerClient, ValueTrainerClient
from rl_actors.clients import remote
from rl_actors.clients.call import in_background
from rl_actors.clients.remote import PROTOCOL
from rl_actors.processes.address import Address

TIMEOUT = 600.0
"""A limit in seconds that only a hang reaches. Every refusal comes earlier."""


class NoTrainer:
    num_ranks = 1

    async def leave(self, client) -> None: ...

    async def describe(self) -> dict[str, object]:
        return {"state": "not there"}


@pytest.fixture
def served(tmp_path):
    """A service with an open door, and the address of the door.

    When a program asks the door to end the service, the door adds a reason to `service.stopped`.
    """
    (tmp_path / "trainer-0.log").write_text("one\ntwo\nthree\n")
    stopped: list[str] = []
    service = Service({"trainer": NoTrainer(), "generator": NoTrainer()})
    door = Listener(service, b"not a pickle", logs=tmp_path, stop=stopped.append, transport="tcp")
    address = in_background(door.open(Address("127.0.0.1", 0)), "open").result()
    service.stopped, service.door = stopped, door
    yield service, str(address)
    in_background(door.close("the test is over"), "close").result()


@contextlib.contextmanager
def listener(answer: bytes | None):
    """A server that accepts one connection and sends `answer`; with None it sends nothing.

    Yields the server's address.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    if answer is not None:
                        connection.recv(1)
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("client", [TrainerClient, GeneratorClient])
@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:4400", "tcp://127.0.0.1", "http://127.0.0.1:80", "tcp://:4400", "tcp://h:70000", "tcp://h:1/x", 7],
)
def test_an_invalid_address_is_refused(client, address):
    with pytest.raises(ValueError, match="the address is .*it must be tcp://HOST:PORT"):
        client.attach(address, timeout=TIMEOUT)


@pytest.mark.parametrize("client", [TrainerClient, GeneratorClient])
def test_an_attach_to_a_port_where_nothing_listens_is_refused(client):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"no service listens at tcp://127.0.0.1:{port}"):
        client.attach(f"tcp://127.0.0.1:{port}", timeout=TIMEOUT)


def test_the_error_names_an_unknown_host():
    with pytest.raises(ConnectionError, match="tcp://no-such-host.invalid:4400"):
        TrainerClient.attach("tcp://no-such-host.invalid:4400", timeout=TIMEOUT)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"[]\n", b'{"protocol": "another"}\n', b"\x15\x03\x01\n"]
)
def test_an_attach_to_a_program_that_is_not_a_service_is_refused(answer):
    with listener(answer) as address, pytest.raises(ConnectionError, match=f"{address} is not a service of rl_actors"):
        TrainerClient.attach(address, timeout=TIMEOUT)


def test_an_attach_to_a_program_that_never_answers_ends_at_the_timeout():
    with listener(None) as address, pytest.raises(TimeoutError, match="did not answer within 0.2 s"):
        TrainerClient.attach(address, timeout=0.2)


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_must_be_positive(served, timeout):
    with pytest.raises(ValueError, match="timeout"):
        TrainerClient.attach(served[1], timeout=timeout)


@pytest.mark.parametrize("name", ["rl_actors", "torch", "torchmonarch", "python"])
def test_a_client_with_another_version_is_refused_before_anything_is_unpickled(served, monkeypatch, name):
    service, address = served
    others = door_module.own_versions() | {name: "0.0.1"}
    monkeypatch.setattr(remote, "versions", lambda: others)
    with pytest.raises(ValueError, match=f"the service has {name} .*, the client 0.0.1"):
        TrainerClient.attach(address, timeout=TIMEOUT)
    assert not service.clients


def test_the_error_names_an_actor_that_the_service_lacks(served):
    with pytest.raises(ValueError, match="this service has no value_trainer; it has trainer, generator"):
        ValueTrainerClient.attach(served[1], timeout=TIMEOUT)


def test_a_tls_address_needs_certificates_and_a_tcp_address_refuses_them(served, tmp_path):
    with pytest.raises(ValueError, match="tls://127.0.0.1:1 needs a folder of certificates"):
        TrainerClient.attach("tls://127.0.0.1:1", timeout=TIMEOUT)
    with pytest.raises(ValueError, match="is without TLS, but certificates were given"):
        TrainerClient.attach(served[1], certificates=str(tmp_path), timeout=TIMEOUT)


def test_a_closed_service_tells_its_clients_the_reason(served):
    service, address = served
    target = Address.parse(address)
    wants = {"wants": "attach", "member": "trainer", "name": "a test"}
    connection = remote.Connection(target, *remote._greet(target, wants, "", TIMEOUT))
    assert [client.name for client in service.clients.values()] == ["a test"]
    in_background(service.door.close("it was asked to stop"), "close").result()
    assert connection.ended.result(TIMEOUT) == f"the service at {address} is gone: it was asked to stop"
    with pytest.raises(ConnectionError, match="no service listens"):
        TrainerClient.attach(address, timeout=TIMEOUT)


def test_a_client_leaves_the_service_when_its_connection_ends(served):
    service, address = served
    target = Address.parse(address)
    wants = {"wants": "attach", "member": "trainer", "name": "a test"}
    connection = remote.Connection(target, *remote._greet(target, wants, "", TIMEOUT))
    connection.close()
    wait_until(lambda: not service.clients, "the client leaves")


def test_the_door_answers_requests_for_the_status_for_logs_and_for_a_stop(served):
    service, address = served
    status = remote.ask(address, {"wants": "status"}, timeout=TIMEOUT)["status"]
    assert status["members"]["trainer"] == {"state": "not there"} and status["clients"] == []
    assert remote.ask(address, {"wants": "logs", "lines": 2}, timeout=TIMEOUT)["logs"] == {
        "trainer-0.log": ["two", "three"]
    }
    remote.ask(address, {"wants": "stop"}, timeout=TIMEOUT)
    wait_until(lambda: service.stopped == ["it was asked to stop"], "the service is asked to stop")
    with pytest.raises(ValueError, match="has no answer to 'dance'"):
        remote.ask(address, {"wants": "dance"}, timeout=TIMEOUT)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", b"[" * 5000 + b"\n"], ids=["HTTP", "brackets"])
def test_a_connection_that_sends_something_other_than_a_request_is_closed(served, sent):
    host, port = "127.0.0.1", Address.parse(served[1]).port
    with socket.create_connection((host, port)) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""


def test_a_line_of_thousands_of_brackets_is_not_a_message():
    with pytest.raises(ValueError, match=r"the other program sent b'\[\["):
        remote.decode(b"[" * 100_000)


def test_a_parsed_address_prints_the_text_that_was_parsed():
    for text in ("tcp://127.0.0.1:4400", "tls://example.org:1", "tcp://[::1]:4400"):
        assert str(Address.parse(text)) == text
    assert Address.parse("tcp://127.0.0.1:1").is_loopback() and not Address.parse("tcp://192.0.2.1:1").is_loopback()
    assert PROTOCOL.startswith("rl-actors")
