"""Tests of the daemon for engines that share a GPU, with a fake of NVIDIA's program: it answers while it runs, and ends at `quit`."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from rl_actors.processes import mps

FAKE = """#!/bin/sh
control="$CUDA_MPS_PIPE_DIRECTORY/control"
if [ "$1" = -f ]; then
    echo "$$ sees ${CUDA_VISIBLE_DEVICES-all GPUs}" >> "$STARTS"
    touch "$control"
    while [ -e "$control" ]; do sleep 0.05; done
    exit
fi
read command
[ -e "$control" ] || exit 1
[ "$command" != quit ] || rm "$control"
"""
ENGINE = "import sys; from rl_actors.processes import mps; mps.join(); print('joined', flush=True); sys.stdin.read()"


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """The file in which the fake notes its starts. The machine has no daemon of its user."""
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o700)
    starts = tmp_path / "starts"
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("STARTS", str(starts))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(mps.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mps, "SYSTEMS_OWN", tmp_path / "none")
    monkeypatch.delenv(mps.PIPES, raising=False)
    for name, value in mps.environment().items():
        monkeypatch.setenv(name, value)
    return starts


def start_engine() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def joined(engine: subprocess.Popen) -> bool:
    return engine.stdout.readline() == "joined\n"


def test_one_daemon_serves_all_engines_and_ends_after_the_last_of_them_was_killed(machine, tmp_path):
    engines = [start_engine() for _ in range(3)]
    assert all([joined(engine) for engine in engines])
    [start] = machine.read_text().splitlines()
    pid, _, sees = start.partition(" ")
    assert sees == "sees all GPUs"
    daemon = psutil.Process(int(pid))
    for engine in engines[:2]:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    late = start_engine()
    assert joined(late) and daemon.is_running()
    for engine in (engines[2], late):
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    wait_until(lambda: not (tmp_path / mps.NAME).exists(), "the end of the daemon's folder")
    assert not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE
    assert len(machine.read_text().splitlines()) == 1


def test_engines_after_the_end_of_a_daemon_start_another(machine, tmp_path):
    for number in (1, 2):
        engine = start_engine()
        assert joined(engine)
        engine.communicate("")
        assert len(machine.read_text().splitlines()) == number
        wait_until(lambda: not (tmp_path / mps.NAME).exists(), "the end of the daemon's folder")


def test_an_engine_without_the_program_computes_without_it(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(mps.LOGS, "somewhere")
    mps.join()
    assert mps.PIPES not in mps.os.environ and mps.LOGS not in mps.os.environ
    assert not (tmp_path / mps.NAME).exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [("exit 1", "did not start within 0.2 s"), ("exec sleep 1000", "timed out after 0.2 seconds")],
)
def test_a_daemon_that_does_not_start_or_does_not_answer_costs_only_time(machine, monkeypatch, caplog, command, reason):
    caplog.set_level("INFO")
    (machine.parent / "bin" / mps.PROGRAM).write_text(f"#!/bin/sh\n{command}\n")
    monkeypatch.setattr(mps, "START_TIMEOUT", 0.2)
    mps.join()
    assert mps.PIPES not in mps.os.environ
    assert reason in caplog.text
    mps._held.clear()


def test_a_daemon_of_the_user_is_used_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    assert mps.environment() == {}
    mps.join()  # starts nothing
    assert mps.os.environ[mps.PIPES] == str(tmp_path) and not list(tmp_path.iterdir())
    monkeypatch.delenv(mps.PIPES)
    (tmp_path / "control").touch()
    monkeypatch.setattr(mps, "SYSTEMS_OWN", tmp_path)
    assert mps.environment() == {}


def test_a_part_of_a_gpu_has_no_daemon_and_a_folder_that_cannot_be_made_costs_nothing(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "file" / mps.NAME))
    mps.join()
    assert mps.PIPES not in mps.os.environ and not machine.exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert mps.environment() == {}
