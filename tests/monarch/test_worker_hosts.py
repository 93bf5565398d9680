"""Runs with a trainer over two hosts and a generator on one of these hosts.

Two worker processes on this machine play the parts of the two hosts. A worker listens on loopback or in a network
namespace.
"""

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from waiting import GUARD, wait_until

from controllers.run import checkpoints

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent))),
    "OMP_NUM_THREADS": "1",
}


def run(
    addresses: str, folder: Path, certificates: str = "", job: dict | None = None, before: Sequence[str] = ()
) -> dict:
    """Run hosts_program.py and return its output. The entry "above" of the output has a list for each rank of the trainer:
    the process ids of all ancestors of the rank's process, beginning with the parent.

    before: words to put in front of the command, such as `ip netns exec NAME`.
    """
    program = [
        sys.executable,
        str(HERE / "hosts_program.py"),
        addresses,
        str(folder),
        certificates,
        json.dumps(job or {}),
    ]
    finished = subprocess.run(
        [*before, *program], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=GUARD
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(next(line for line in reversed(finished.stdout.splitlines()) if line.startswith("{")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """The output of hosts_program.py without hosts."""
    return run("", tmp_path_factory.mktemp("alone"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Worker:
    """A process that runs `python -m rl_actors.processes.worker`. It listens at `address`, or at a free port of `host` if `address` is empty."""

    def __init__(
        self, *flags: str, scheme: str = "tcp", host: str = "127.0.0.1", address: str = "", before: Sequence[str] = ()
    ) -> None:
        """before: words to put in front of the command, such as `ip netns exec NAME`."""
        self.before = before
        self.address = address or f"{scheme}://{host}:{free_port()}"
        self.process = subprocess.Popen(
            [*before, sys.executable, "-u", "-m", "rl_actors.processes.worker", self.address, *flags],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert "waiting for runs" in self.process.stdout.readline()
        wait_until(self._listens, f"a worker at {self.address}")

    def _listens(self) -> bool:
        assert self.process.poll() is None
        host, _, port = self.address.partition("://")[2].rpartition(":")
        connect = f"import socket; socket.create_connection(({host!r}, {port}), 1.0)"
        return subprocess.run([*self.before, sys.executable, "-c", connect], stderr=subprocess.DEVNULL).returncode == 0

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
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


def test_a_trainer_over_two_hosts_gives_the_same_numbers_as_one_host_in_two_runs_with_the_same_workers(
    alone, two_workers, tmp_path
):
    addresses = ",".join(worker.address for worker in two_workers)
    for index in range(2):
        found = run(addresses, tmp_path / str(index))
        assert_same(found, alone)
        for above, worker in zip(found["above"], two_workers, strict=True):
            assert worker.process.pid in above


def test_workers_of_a_monarch_job_give_the_same_numbers_as_one_host(alone, tmp_path):
    found = run("process://2", tmp_path)
    assert_same(found, alone)
    [first, *_], [second, *_] = found["above"]
    # Each rank has a worker of its own, so the parents of the ranks differ. Both workers are children of the program, so
    # the ranks have other ancestors in common.
    assert first != second


def test_with_certificates_two_hosts_give_the_same_numbers(alone, tmp_path):
    certificates = str(tmp_path / "certificates")
    subprocess.run([sys.executable, str(ROOT / "scripts/certificates.py"), certificates], check=True)
    workers = [Worker("--tls", certificates, scheme="tls") for _ in range(2)]
    try:
        assert_same(run(",".join(worker.address for worker in workers), tmp_path / "logs", certificates), alone)
    finally:
        for worker in workers:
            worker.end()


def program(name: str) -> str:
    """The path of a program. Skips the test, naming the program, if this machine does not have the program."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"this machine has no program {name}")
    return path


@pytest.fixture
def ssh_arguments(tmp_path) -> Iterator[str]:
    """Arguments with which ssh reaches 127.0.0.1 and 127.0.0.2.

    The fixture starts an sshd that listens at both addresses and runs as the current user.
    """
    sshd, keygen, port = program("sshd"), program("ssh-keygen"), free_port()
    program("ssh")
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[127.0.0.{end}]:{port} {host_key}\n" for end in (1, 2)))
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
        f"KbdInteractiveAuthentication no\nAllowUsers {getpass.getuser()}\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # Debian's sshd needs this folder if root starts it
    server = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "config")], stderr=(folder / "log").open("w"))
    words = ["-F", "none", "-p", str(port), "-i", f"{folder}/user", "-o", f"UserKnownHostsFile={folder}/known_hosts"]
    try:
        wait_until(
            lambda: server.poll() is not None or "listening on 127.0.0.1" in (folder / "log").read_text().lower(),
            "sshd",
        )
        assert server.poll() is None, (folder / "log").read_text()
        yield shlex.join(words)
    finally:
        server.terminate()
        server.wait(GUARD)


def workers_at(port: int) -> list[str]:
    """The command lines of Monarch's workers at this port."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "run_worker_loop_forever" in line and f":{port}" in line]


def test_workers_that_a_job_starts_over_ssh_give_the_same_numbers_as_one_host(alone, ssh_arguments, tmp_path):
    port = free_port()
    found = run("ssh://127.0.0.1,ssh://127.0.0.2", tmp_path, job={"arguments": ssh_arguments, "port": port})
    assert_same(found, alone)
    [first, *_], [second, *_] = found["above"]
    assert first != second
    wait_until(lambda: not workers_at(port), "the workers end with the run")


# Prefixes of the metrics that may differ between two runs of the same training: measurements, and numbers of restarts.
MEASURED = ("time/", "busy/", "tokens/s", "memory/", "weights/", "mfu", "ranks/", "restarts")


def start_grpo(folder: Path, *flags: str) -> subprocess.Popen:
    """Start a GRPO run of a few steps with a trainer of two ranks, and return its process."""
    sizes = ["--steps", "3", "--sft-steps", "5", "--rollouts.groups-per-step", "32", "--environment.num-held-out", "64"]
    layout = ["--trainer.parallelism.data-parallel-shard-degree", "2", "--trainer.deterministic"]
    if "--resume" not in flags:
        flags = ("--config", "tiny", "--output-dir", str(folder), "--checkpoint-every", "1", *sizes, *layout, *flags)
    command = [sys.executable, "-m", "controllers.grpo", *flags]
    return subprocess.Popen(
        command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def records(folder: Path) -> list[dict]:
    """The records of a run, without the metrics that MEASURED names. A record has the metrics of one step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


def grpo(folder: Path, *flags: str) -> list[dict]:
    """Run GRPO to its end, and return its records."""
    running = start_grpo(folder, *flags)
    output, _ = running.communicate(timeout=GUARD)
    assert running.returncode == 0, output
    return records(folder)


@pytest.fixture(scope="module")
def grpo_alone(tmp_path_factory) -> list[dict]:
    """Records of a GRPO run without hosts."""
    return grpo(tmp_path_factory.mktemp("alone") / "run")


def assert_same_records(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) > 3
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            assert value == (pytest.approx(other[key], rel=1e-5, abs=1e-7) if isinstance(value, float) else other[key])


def test_grpo_over_two_ssh_hosts_writes_the_same_metrics_as_on_one_host(grpo_alone, ssh_arguments, tmp_path):
    port = free_port()
    hosts = ["--hosts", "ssh://127.0.0.1,ssh://127.0.0.2", "--hosts.trainer", "2"]
    job = [f"--hosts.job.arguments={ssh_arguments}", "--hosts.job.port", str(port)]
    assert_same_records(grpo(tmp_path / "run", *hosts, *job), grpo_alone)
    wait_until(lambda: not workers_at(port), "the workers end with the run")


def kill_after_first_step(running: subprocess.Popen, folder: Path, pid: Callable[[], int]) -> None:
    """Wait until the run's first checkpoint is complete. Then kill the process whose id `pid()` returns: a worker or a rank."""

    def has_checkpoint() -> bool:
        assert running.poll() is None, running.stdout.read()
        return checkpoints.newest(folder / "checkpoints") is not None

    wait_until(has_checkpoint, "the first checkpoint")
    os.kill(pid(), signal.SIGKILL)


def workers_of_job(pid: int) -> list[psutil.Process]:
    """The workers that the Monarch job of a run has started. pid: process id of the run."""
    children = psutil.Process(pid).children()
    return [child for child in children if "run_worker_loop_forever" in " ".join(child.cmdline())]


def test_a_run_goes_on_when_a_worker_of_its_job_is_killed(grpo_alone, tmp_path):
    folder = tmp_path / "run"
    running = start_grpo(folder, "--hosts", "process://2", "--hosts.trainer", "2")
    kill_after_first_step(running, folder, lambda: workers_of_job(running.pid)[1].pid)
    output, _ = running.communicate(timeout=GUARD)
    assert running.returncode == 0, output
    assert "goes on in a new program (restart 1," in output
    assert [json.loads(line)["restart"] for line in (folder / "restarts.jsonl").read_text().splitlines()] == ["program"]
    assert_same_records(records(folder), grpo_alone)


def test_a_run_goes_on_when_a_killed_worker_is_started_again(grpo_alone, two_workers, tmp_path):
    folder = tmp_path / "run"
    addresses = ",".join(worker.address for worker in two_workers)
    running = start_grpo(folder, "--hosts", addresses, "--hosts.trainer", "2")
    killed = two_workers[1]
    kill_after_first_step(running, folder, lambda: killed.process.pid)
    lines = []
    for line in running.stdout:
        lines.append(line)
        if f"Start them again by: make worker ADDRESS={killed.address}" in line:
            killed.end()
            two_workers[1] = Worker(address=killed.address)
    assert running.wait(GUARD) == 0, "".join(lines)
    assert_same_records(records(folder), grpo_alone)


def test_a_run_goes_on_when_a_rank_on_a_host_is_killed(grpo_alone, two_workers, tmp_path):
    folder = tmp_path / "run"
    addresses = ",".join(worker.address for worker in two_workers)
    running = start_grpo(folder, "--hosts", addresses, "--hosts.trainer", "2")

    def second_rank() -> int:
        below = psutil.Process(two_workers[1].process.pid).children(recursive=True)
        return next(each.pid for each in below if each.environ().get("RL_ACTORS_PROCESS") == "trainer-1")

    kill_after_first_step(running, folder, second_rank)
    output, _ = running.communicate(timeout=GUARD)
    assert running.returncode == 0, output
    assert "goes on in a new program (restart 1," in output
    assert_same_records(records(folder), grpo_alone)


class Networks:
    """Three network namespaces with the addresses 10.231.N.1, .2 and .3 for a random N. A bridge connects them to each other and to nothing
    else."""

    def __init__(self) -> None:
        self.ip, self.mark = program("ip"), uuid.uuid4().hex[:6]
        self.bridge = f"rlb{self.mark}"
        self.names = [f"rl{self.mark}{index}" for index in range(3)]
        self.addresses = [f"10.231.{int(self.mark[:2], 16)}.{index + 1}" for index in range(3)]

    def __enter__(self) -> "Networks":
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.remove()
            pytest.skip(f"this machine permits no network namespaces: {error.stderr.strip()}")
        except BaseException:
            self.remove()
            raise
        return self

    def _make(self) -> None:
        # The bridge is in a namespace of its own, so that this machine's network is not connected to the namespaces of the hosts.
        self._call("netns", "add", self.bridge)
        self._call("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        self._call("-n", self.bridge, "link", "set", "br0", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._call("netns", "add", name)
            inside = ["eth0", "netns", name]
            outside = [f"v{index}", "netns", self.bridge]
            self._call("link", "add", *inside, "type", "veth", "peer", "name", *outside)
            self._call("-n", self.bridge, "link", "set", f"v{index}", "master", "br0", "up")
            self._call("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._call("-n", name, "link", "set", device, "up")

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        for name in (*self.names, self.bridge):
            subprocess.run([self.ip, "netns", "delete", name], capture_output=True)

    def _call(self, *arguments: str) -> None:
        subprocess.run([self.ip, *arguments], check=True, capture_output=True, text=True)

    def within(self, index: int) -> list[str]:
        """Words to put in front of a command, which then runs in the namespace with this index."""
        return [self.ip, "netns", "exec", self.names[index]]


def test_workers_in_two_network_namespaces_give_the_same_numbers_as_one_host(alone, tmp_path):
    """The controller runs in a third namespace. gloo, torch's rendezvous and Monarch use the addresses of the namespaces."""
    with Networks() as networks, contextlib.ExitStack() as stack:
        workers = []
        for index in (1, 2):
            worker = Worker("--insecure", host=networks.addresses[index], before=networks.within(index))
            stack.callback(worker.end)
            workers.append(worker)
        addresses = ",".join(worker.address for worker in workers)
        found = run(addresses, tmp_path, before=networks.within(0))
        assert_same(found, alone)
        for above, worker in zip(found["above"], workers, strict=True):
            assert worker.process.pid in above
    assert not set(networks.names) & set(os.listdir("/run/netns"))
