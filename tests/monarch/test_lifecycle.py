"""Programs that spawn actors leave no process, open port or shared memory behind. A client still works after an interrupt."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import support
from waiting import GUARD

from rl_actors.processes import spawn

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPAWN = """
import support
from rl_actors import *
trainer = TrainerClient.spawn(support.trainer_config())
generator = trainer.spawn_generator(support.generator_config())
"""


class Program:
    """A Python program in a process group of its own. Its processes are found by a mark in their environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark, self.segments = uuid.uuid4().hex, support.shared_memory()
        env = {
            **os.environ,
            "RL_ACTORS_TEST_MARK": self.mark,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent))),
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *arguments], env=env, cwd=ROOT, text=True, start_new_session=True, **pipes
        )
        self.output = ""

    def read_until(self, word: str) -> None:
        for line in self.process.stdout:
            self.output += line
            if word in line:
                return
        raise AssertionError(f"the program ended before it printed {word!r}:\n{self.output}")

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RL_ACTORS_TEST_MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.is_running()]

    def ports(self) -> set[int]:
        """The TCP ports on which processes of the program listen."""
        ports = set()
        for process in self.processes():
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.add(connection.laddr.port)
        return ports

    def assert_nothing_is_left(self, ports: set[int]) -> None:
        support.wait_until(lambda: not self.processes() and not any(map(is_open, ports)))
        assert not support.left_in_shared_memory(self.segments)

    def end(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait(GUARD)
        self.process.stdin.close()
        self.process.stdout.close()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def start():
    programs = []

    def start(*arguments: str) -> Program:
        programs.append(Program(*arguments))
        return programs[-1]

    yield start
    for program in programs:
        program.end()


def test_a_repl_that_ends_without_close_leaves_nothing_behind(start):
    repl = start("-i", "-q")
    print(
        SPAWN,
        'generator.generate([[1, 2]]).result(); print("generated")',
        sep="\n",
        file=repl.process.stdin,
        flush=True,
    )
    repl.read_until("generated")
    ports = repl.ports()
    assert len(repl.processes()) >= 4 and ports
    repl.process.stdin.close()  # Ctrl-D
    assert repl.process.wait(GUARD) == 0
    repl.assert_nothing_is_left(ports)


def test_a_program_that_kill_9_ends_leaves_nothing_behind(start):
    program = start("-c", SPAWN + 'generator.generate([[1, 2]]).result(); print("generated"); input()')
    program.read_until("generated")
    ports = program.ports()
    assert len(program.processes()) >= 4 and ports
    program.process.kill()
    program.process.wait(GUARD)
    program.assert_nothing_is_left(ports)


WAIT = """
import pathlib, sys
import support
from rl_actors import *
trainer = TrainerClient.spawn(support.trainer_config())
trainer.ready().result()
gate = support.Gate(folder=pathlib.Path(sys.argv[1]))
call = trainer.forward_backward(support.random_samples(), loss=gate)
gate.wait_begun()
"""
CTRL_C = """
try:
    print("waiting")
    call.result()
except KeyboardInterrupt:
    print("interrupted")
gate.open()
call.result()
print("version", trainer.optim_step(OptimParams(learning_rate=0.1)).result().policy_version)
"""


def test_ctrl_c_ends_the_wait_for_a_call_and_the_client_still_works(start, tmp_path):
    program = start("-c", WAIT + CTRL_C, str(tmp_path))
    program.read_until("waiting")
    os.killpg(program.process.pid, signal.SIGINT)  # to all processes of the program, as a terminal does
    program.read_until("interrupted")
    program.read_until("version 1")
    assert program.process.wait(GUARD) == 0
    program.assert_nothing_is_left(set())


@pytest.mark.parametrize(
    ("send", "number"), [(os.kill, signal.SIGINT), (os.kill, signal.SIGTERM), (os.killpg, signal.SIGTERM)]
)
def test_a_program_that_a_signal_ends_during_a_call_leaves_nothing_behind(start, tmp_path, send, number):
    program = start("-c", WAIT + 'print("waiting"); call.result()', str(tmp_path))
    program.read_until("waiting")
    ports = program.ports()
    send(program.process.pid, number)
    assert program.process.wait(GUARD) == -number
    program.assert_nothing_is_left(ports)


def test_actors_work_in_a_monarch_program_that_opens_its_own_torchstore(start):
    program = start(str(HERE / "embedding_own_store.py"))
    output, _ = program.process.communicate(timeout=GUARD)
    assert program.process.returncode == 0, output
    assert re.search(r"logprob_diff/max \S+e-0[67]; a key of mine: 7", output), output
    assert "frozen in a process of mine: 0\n" in output
    program.assert_nothing_is_left(set())


def test_processes_that_start_too_late_are_ended(monkeypatch):
    monkeypatch.setattr(spawn, "START_TIMEOUT", 0.05)
    with pytest.raises(TimeoutError, match=r"late: not all of 2 processes started within 0.05 s"):
        asyncio.run(spawn.spawn_processes("late", 2))
    names = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            names.append(process.environ().get("RL_ACTORS_PROCESS", ""))
    assert not [name for name in names if name.startswith("late")]
