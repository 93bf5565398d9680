"""Tests of a service and of programs that attach to it.

A service is a process that owns a trainer and usually a generator.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
import support
from waiting import GUARD, wait_until

from rl_actors import GeneratorClient, OptimParams, Sample, TrainerClient
from rl_actors.clients import remote
from rl_actors.clients.remote import PROTOCOL, encode

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent))),
    "OMP_NUM_THREADS": "1",
}


class Program:
    """A Python program. A test writes lines to its stdin, and reads lines from its stdout."""

    def __init__(self, *arguments: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *arguments], env=ENVIRONMENT, cwd=ROOT, text=True, start_new_session=True, **pipes
        )

    def send(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def read(self) -> object:
        line = self.process.stdout.readline()
        assert line, f"the program has ended with status {self.process.wait(GUARD)}"
        return json.loads(line)

    def ask(self, command: str):
        self.send(command)
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(GUARD)

    def end(self) -> int:
        self.process.stdin.close()
        status = self.process.wait(GUARD)
        self.process.stdout.close()
        return status


class RunningService(Program):
    """Runs `python -m controllers.service` at a free port of the loopback interface."""

    def __init__(self, folder: Path, *flags: str, address: str = "tcp://127.0.0.1:0") -> None:
        fields = ["--trainer.model.vocab-size", str(support.VOCAB_SIZE), "--output-dir", str(folder)]
        super().__init__("-m", "controllers.service", "--config", "tiny", "--address", address, *fields, *flags)
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line
        self.address = line.split(" at ")[1].split(";")[0]
        self.metrics = line.rpartition("; metrics: ")[2].strip()

    def numbers(self) -> dict[str, float]:
        """The numbers that the service gives to Prometheus. A key is a number's name without the prefix
        rl_actors_service_, followed by the labels, for example clients{actor="trainer"}.
        """
        with urllib.request.urlopen(self.metrics, timeout=GUARD) as answer:
            lines = answer.read().decode().splitlines()
        shown = [line.removeprefix("rl_actors_service_").rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in shown}

    def stop(self) -> tuple[int, str]:
        """Send SIGTERM. Returns the exit status and the rest of the output."""
        self.process.send_signal(signal.SIGTERM)
        rest = self.process.stdout.read()
        return self.end(), rest


def client(service: RunningService, *, seed: int, certificates: str = "") -> Program:
    return Program(str(HERE / "service_client.py"), service.address, certificates, str(seed))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service with a trainer and without a generator."""
    running = RunningService(tmp_path_factory.mktemp("service"), "--without-generator")
    yield running
    status, rest = running.stop()
    assert (status, rest) == (128 + signal.SIGTERM, "the service ends: SIGTERM\n")


@pytest.mark.slow
def test_a_step_of_a_client_has_no_gradients_of_other_clients_even_if_one_is_killed_in_its_step(service):
    """Three clients train. One is killed after its forward_backward and before its optim_step.

    With a learning rate of 0 the weights do not change, so all steps of a client must have the same gradient norm.
    """
    programs = [client(service, seed=seed) for seed in range(3)]
    for program in programs:
        assert program.read() == "attached"
    alone = [program.ask("steps 1")[0] for program in programs]
    assert [version for version, _ in alone] == [1, 2, 3]
    killed, *others = programs
    killed.ask("open")
    for program in others:
        program.send("steps 3")
    state = remote.ask(service.address, {"wants": "status"})["status"]
    assert f"pid {killed.process.pid} " in state["members"]["trainer"]["open_step_of"]
    killed.kill()
    steps = [program.read() for program in others]
    versions = [[int(version) for version, _ in each] for each in steps]
    assert sorted(versions[0] + versions[1]) == [4, 5, 6, 7, 8, 9]
    assert all(each == sorted(each) for each in versions)
    for each, (_, norm) in zip(steps, alone[1:], strict=True):
        assert [found for _, found in each] == pytest.approx([norm] * 3, rel=1e-6)

    # All programs use the same weights: after others[1] has taken a step on its samples, this test's process gets
    # higher logprobs of these samples than others[1] got before the step.
    version, before = others[1].ask("forward")
    [[trained, _]] = others[1].ask("steps 1 0.01")
    assert (version, trained) == (9, 10)
    assert [program.end() for program in others] == [0, 0]
    wait_until(lambda: not remote.ask(service.address, {"wants": "status"})["status"]["clients"])
    # This test's own process can attach, too, even if tests of other files have already used Monarch in this process.
    with TrainerClient.attach(service.address) as trainer:
        samples = support.random_samples(seed=2)
        output = trainer.forward(samples).result()
        assert output.policy_version == trained
        assert sum(float(logprobs.sum()) for logprobs in output.logprobs) > before + 1
        assert trainer.is_alive().result()
        trainer.forward_backward(samples, loss="cross_entropy").result()
        result = trainer.optim_step(OptimParams(learning_rate=1e-2, grad_divisor=96)).result()
        assert result.policy_version == trained + 1


def test_an_attached_client_raises_the_same_errors_as_other_clients(service):
    sample = Sample.from_tokens([3], [4], advantages=1.0)
    with TrainerClient.attach(service.address) as trainer:
        with pytest.raises(ValueError, match="vocab"):  # raised by the call, before .result()
            trainer.forward(support.random_samples()[:1] + [Sample.from_tokens([10**6], [4])])
        with pytest.raises(RuntimeError, match="no gradients are accumulated") as caught:
            trainer.optim_step(OptimParams(learning_rate=0.0)).result()
        assert any("optim_step" in note for note in caught.value.__notes__)
        with pytest.raises(ValueError, match="call GeneratorClient.attach"):
            trainer.spawn_generator()
        with pytest.raises(ValueError, match="this service has no generator; it has trainer"):
            GeneratorClient.attach(service.address)
        output = trainer.forward_backward_custom([sample], lambda samples, logprobs: (-logprobs[0].sum(), {}))
        assert output.result().metrics["loss:sum"] > 0
        trainer.discard_gradients().result()
    with pytest.raises(RuntimeError, match="not possible after close"):
        trainer.info()


def test_the_numbers_of_a_service_count_its_clients_and_their_calls(service):
    before = service.numbers()
    with TrainerClient.attach(service.address) as trainer:
        trainer.forward(support.random_samples()).result()
        with pytest.raises(RuntimeError, match="no gradients are accumulated"):
            trainer.optim_step(OptimParams(learning_rate=0.0)).result()
        trainer.forward_backward(support.random_samples(), loss="cross_entropy").result()
        numbers = service.numbers()
        trainer.discard_gradients().result()

    def added(call: str, outcome: str) -> float:
        name = f'calls_total{{actor="trainer",call="{call}",outcome="{outcome}"}}'
        return numbers.get(name, 0) - before.get(name, 0)

    assert numbers['clients{actor="trainer"}'] >= 1 and numbers['step_open_seconds{actor="trainer"}'] > 0
    assert (added("forward", "answered"), added("forward_backward", "answered")) == (1, 1)
    assert (added("optim_step", "failed"), added("optim_step", "answered")) == (1, 0)
    # The service and the client have seen the same newest version.
    assert numbers['policy_version{actor="trainer"}'] == trainer.policy_version
    assert numbers['silent_seconds{actor="trainer",process="trainer-0"}'] < GUARD
    assert numbers["up_seconds"] > before["up_seconds"]


def test_a_checkpoint_of_an_attached_client_is_written_by_the_service(service, tmp_path):
    with TrainerClient.attach(service.address) as trainer:
        saved = trainer.save_checkpoint(str(tmp_path / "saved")).result()
        saved.wait().result()
        assert (tmp_path / "saved").is_dir()
        assert trainer.load_checkpoint(str(tmp_path / "saved")).result() == saved.policy_version
        (tmp_path / "saved" / ".metadata").chmod(0o666)  # DCP unpickles this file, so only its owner may write it
        with pytest.raises(ValueError, match="metadata can be written by others .mode 666."):
            trainer.load_checkpoint(str(tmp_path / "saved")).result()


@pytest.mark.slow
def test_all_clients_generate_with_the_weights_that_one_client_trained(tmp_path):
    running = RunningService(tmp_path)
    one, other = client(running, seed=0), client(running, seed=1)
    assert (one.read(), other.read()) == ("attached", "attached")
    one.ask("steps 2 0.01")
    answers = [program.ask("generate") for program in (one, other)]
    assert answers[0] == answers[1] and answers[0][1] == [2] * len(answers[0][0])
    assert (one.end(), other.end()) == (0, 0)
    assert running.stop()[0] == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_with_tls_the_ports_of_the_service_and_of_monarch_refuse_a_client_without_a_certificate(tmp_path, host):
    made = subprocess.run([sys.executable, str(ROOT / "scripts/certificates.py"), str(tmp_path / "certificates")])
    assert made.returncode == 0
    flags = ("--without-generator", "--tls", str(tmp_path / "certificates"))
    running = RunningService(tmp_path / "service", *flags, address=f"tls://{host}:0")
    program = client(running, seed=0, certificates=str(tmp_path / "certificates"))
    assert program.read() == "attached"
    assert [version for version, _ in program.ask("steps 2 0.01")] == [1, 2]
    # The port for clients and Monarch's port must refuse a client without a certificate. The service's
    # process also listens on ports without TLS, such as the port of its page /metrics, so not every port refuses.
    trusting = ssl.create_default_context(cafile=str(tmp_path / "certificates" / "authority.pem"))
    refused = 0
    for port in listening_ports(running.process.pid):
        with contextlib.suppress(ConnectionError, TimeoutError):
            refused += refuses_strangers(trusting, port)
    assert refused >= 2  # the port for clients and Monarch's port
    assert program.end() == 0
    assert running.stop()[0] == 128 + signal.SIGTERM


def listening_ports(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def refuses_strangers(trusting: ssl.SSLContext, port: int) -> bool:
    """True if the port uses TLS, and ends a connection of a client without a certificate."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as plain:
        try:
            connection = trusting.wrap_socket(plain, server_hostname="127.0.0.1")
            connection.sendall(encode({"protocol": PROTOCOL, "wants": "status"}))
            return connection.recv(100) == b""
        except ssl.SSLError as error:
            return "certificate required" in str(error).lower().replace("_", " ")


@pytest.mark.slow
def test_a_service_ends_after_its_idle_timeout_or_when_it_is_asked_to(tmp_path):
    idle = RunningService(tmp_path / "idle", "--without-generator", "--idle-timeout", "0.5")
    assert (idle.process.stdout.read(), idle.end()) == ("the service ends: no client for 0.5 s\n", 0)
    asked = RunningService(tmp_path / "asked", "--without-generator")
    attached = TrainerClient.attach(asked.address)
    command = [sys.executable, "-m", "controllers.service"]
    for words in (["status"], ["logs", "--lines", "3"], ["stop"]):
        answer = subprocess.run(
            [*command, *words, asked.address], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=GUARD
        )
        assert answer.returncode == 0, answer.stderr
        assert {"status": '"trainer"', "logs": "==> trainer-0.log", "stop": "ends"}[words[0]] in answer.stdout
    assert (asked.process.stdout.read(), asked.end()) == ("the service ends: it was asked to stop\n", 0)
    with pytest.raises(ConnectionError, match="is gone: it was asked to stop"):
        attached.info().result()
    attached.close().result()
    status = subprocess.run([*command, "status", asked.address], env=ENVIRONMENT, cwd=ROOT, capture_output=True)
    assert status.returncode == 1 and b"no service listens" in status.stderr
