"""A trainer over two hosts and a generator on one of them: two workers on loopback stand in for two machines."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent))),
    "OMP_NUM_THREADS": "1",
}


def run(addresses: str, folder: Path, certificates: str = "") -> dict:
    command = [sys.executable, str(HERE / "hosts_program.py"), addresses, str(folder), certificates]
    finished = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """Output of the program without hosts."""
    return run("", tmp_path_factory.mktemp("alone"))


class Worker:
    """`python -m rl_actors.processes.worker` at a free port of loopback."""

    def __init__(self, *flags: str, scheme: str = "tcp") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"{scheme}://127.0.0.1:{free.getsockname()[1]}"
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "rl_actors.processes.worker", self.address, *flags],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert "waiting for runs" in self.process.stdout.readline()
        while not self._listens():
            assert self.process.poll() is None

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])), 1.0).close()
        except OSError:
            return False
        return True

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(GUARD)
        self.process.stdout.close()


@pytest.fixture
def two_workers():
    workers = [Worker(), Worker()]
    yield workers
    for worker in workers:
        worker.end()


def assert_same(found: dict, alone: dict) -> None:
    for step, expected in zip(found["steps"], alone["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-6)
    assert found["tokens"] == alone["tokens"]


def test_a_trainer_over_two_hosts_gives_the_numbers_of_one_host_and_the_workers_take_the_next_run(
    alone, two_workers, tmp_path
):
    addresses = ",".join(worker.address for worker in two_workers)
    for index in range(2):
        found = run(addresses, tmp_path / str(index))
        assert_same(found, alone)
        for above, worker in zip(found["above"], two_workers, strict=True):
            assert worker.process.pid in above


def test_workers_of_a_monarch_job_give_the_numbers_of_one_host(alone, tmp_path):
    found = run("process://2", tmp_path)
    assert_same(found, alone)
    [first, *_], [second, *_] = found["above"]
    assert first != second  # each rank has a worker of its own, and both workers are children of the program


def test_with_certificates_two_hosts_give_the_same_numbers(alone, tmp_path):
    certificates = str(tmp_path / "certificates")
    subprocess.run([sys.executable, str(ROOT / "scripts/certificates.py"), certificates], check=True)
    workers = [Worker("--tls", certificates, scheme="tls") for _ in range(2)]
    try:
        assert_same(run(",".join(worker.address for worker in workers), tmp_path / "logs", certificates), alone)
    finally:
        for worker in workers:
            worker.end()
