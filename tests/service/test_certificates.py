"""Tests of services with TLS. Such a service admits a program only if the service's certificate authority has signed the
program's certificate.
"""

import contextlib
import os
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from controllers.service.door import Listener
from controllers.service.service import Service
from rl_actors import TrainerClient
from rl_actors.clients import remote
from rl_actors.clients.call import in_background
from rl_actors.clients.remote import PROTOCOL, encode
from rl_actors.processes import tls
from rl_actors.processes.address import Address

ROOT = Path(__file__).parents[2]
TIMEOUT = 600.0


def make(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts/certificates.py"), str(folder), *arguments]
    made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert made.returncode == 0, made.stderr
    return str(folder)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> str:
    return make(tmp_path_factory.mktemp("own") / "certificates", "--host", "gpu-1.invalid", "--host", "192.0.2.7")


class NoTrainer:
    num_ranks = 1

    async def leave(self, client) -> None: ...

    async def describe(self) -> dict[str, object]:
        return {}


@pytest.fixture
def served(certificates, tmp_path):
    """The address of a service with TLS. A Listener is the server socket of a service."""
    service = Service({"trainer": NoTrainer()})
    door = Listener(service, b"", logs=tmp_path, stop=lambda reason: None, transport="tls")
    opening = door.open(Address("127.0.0.1", 0, tls=True), tls.server_context(certificates))
    yield str(in_background(opening, "open").result())
    in_background(door.close("the test is over"), "close").result()


def test_a_program_with_a_certificate_of_the_authority_is_admitted(served, certificates):
    assert remote.ask(served, {"wants": "status"}, certificates=certificates, timeout=TIMEOUT)["status"]
    target = Address.parse(served)
    wants = {"wants": "attach", "member": "trainer", "name": "a test"}
    connection = remote.Connection(target, *remote._greet(target, wants, certificates, TIMEOUT))
    assert connection.answer["client"] == 1
    connection.close()
    wait_until(connection.ended.done, "the end of the connection")


def test_a_program_without_a_certificate_is_refused(served, certificates):
    trusting = ssl.create_default_context(cafile=str(Path(certificates) / tls.AUTHORITY))
    answer = b""
    address = (Address.parse(served).host, Address.parse(served).port)
    with contextlib.suppress(ssl.SSLError, ConnectionError), socket.create_connection(address, TIMEOUT) as plain:
        connection = trusting.wrap_socket(plain, server_hostname=address[0])
        connection.sendall(encode({"protocol": PROTOCOL, "wants": "status"}))
        answer = connection.recv(100)
    assert answer == b""


def test_a_program_with_a_certificate_of_another_authority_is_refused(served, tmp_path):
    other = make(tmp_path / "other")
    with pytest.raises(ConnectionError, match="TLS failed between this program and the service"):
        TrainerClient.attach(served, certificates=other, timeout=TIMEOUT)


def test_a_program_without_tls_gets_no_answer(served):
    with pytest.raises(
        ConnectionError, match="is not a service of rl_actors, or only one side uses TLS|cannot be reached"
    ):
        TrainerClient.attach(served.replace("tls:", "tcp:"), timeout=TIMEOUT)


def test_a_client_does_not_trust_a_service_whose_certificate_lacks_the_service_address(tmp_path, certificates):
    """Every certificate lists 127.0.0.1, but this service listens at 127.0.0.2, which is also an address of this machine."""
    service = Service({"trainer": NoTrainer()})
    door = Listener(service, b"", logs=tmp_path, stop=lambda reason: None, transport="tls")
    opening = door.open(Address("127.0.0.2", 0, tls=True), tls.server_context(certificates))
    address = str(in_background(opening, "open").result())
    with pytest.raises(ConnectionError, match="TLS failed .*127.0.0.2"):
        TrainerClient.attach(address, certificates=certificates, timeout=TIMEOUT)
    in_background(door.close("the test is over"), "close").result()


@pytest.mark.parametrize("name", [tls.AUTHORITY, tls.CERTIFICATE, tls.KEY])
def test_attach_names_a_missing_file_and_does_not_connect(tmp_path, name):
    folder = make(tmp_path / "certificates")
    os.unlink(Path(folder) / name)
    with pytest.raises(ValueError, match=f"{name} does not exist; `make certificates`"):
        TrainerClient.attach("tls://127.0.0.1:1", certificates=folder, timeout=TIMEOUT)


def test_a_key_that_others_can_read_is_refused(tmp_path):
    folder = Path(make(tmp_path / "certificates"))
    assert stat.S_IMODE((folder / tls.KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "authority").stat().st_mode) == 0o700
    (folder / tls.KEY).chmod(0o640)
    with pytest.raises(ValueError, match="key.pem can be read by others .mode 640."):
        TrainerClient.attach("tls://127.0.0.1:1", certificates=str(folder), timeout=TIMEOUT)


def test_files_that_are_no_certificates_are_refused(tmp_path):
    folder = Path(make(tmp_path / "certificates"))
    (folder / tls.CERTIFICATE).write_text("not a certificate")
    with pytest.raises(ValueError, match="has no usable certificates"):
        TrainerClient.attach("tls://127.0.0.1:1", certificates=str(folder), timeout=TIMEOUT)


def test_a_second_run_of_the_script_keeps_the_authority_and_makes_a_new_certificate(tmp_path):
    folder = Path(make(tmp_path / "certificates"))
    before = [(folder / name).read_bytes() for name in (tls.AUTHORITY, tls.CERTIFICATE)]
    make(folder, "--host", "another.invalid")
    after = [(folder / name).read_bytes() for name in (tls.AUTHORITY, tls.CERTIFICATE)]
    assert before[0] == after[0] and before[1] != after[1]
