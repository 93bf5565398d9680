"""Tests of the controller after a process on a host has died.

The controller either starts a new program that resumes the run, or ends the run.

Here the death is simulated. tests/monarch/test_worker_hosts.py kills real workers.
"""

import json
import os
import socket
import sys
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from test_resumed_run import grpo_config

from configs.tiny import tiny
from controllers.grpo import GRPOConfig
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import launch
from controllers.program.cli import Invocation
from controllers.run import hosts, restart_process
from controllers.run.actors import StartAgainError
from controllers.run.hosts import HostsConfig

LOST = StartAgainError("the worker of tcp://10.0.0.6:4444 has ended", ["tcp://10.0.0.6:4444"])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with two recorded steps."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return RunFolder(tmp_path)


def config(addresses: str = "process://2", *, max_restarts: int = 2, **of_hosts: object) -> GRPOConfig:
    made = replace(grpo_config(), hosts=HostsConfig(addresses=addresses, **of_hosts))
    made.survival.max_restarts_per_hour = max_restarts
    return made


def lost_before(folder: RunFolder, ago: timedelta) -> None:
    """Add a line to restarts.jsonl: a new program was started `ago` before now."""
    time = (datetime.now(UTC) - ago).isoformat()
    with folder.restarts.open("a") as file:
        file.write(json.dumps({"restart": restart_process.PROGRAM, "time": time}) + "\n")


def test_the_restart_is_recorded_and_the_run_does_not_wait_for_workers_that_a_job_starts(folder):
    """The hosts of `config` are process://2. A job starts the workers of such hosts."""
    told = []
    assert restart_process.wait(config(), folder, LOST, told.append)
    [line] = read_jsonl(folder.restarts)
    assert line["restart"] == "program" and line["after_step"] == 2
    assert line["cause"] == "the worker of tcp://10.0.0.6:4444 has ended"
    assert told == [f"{LOST}; the run goes on in a new program (restart 1, at most 2 an hour)"]


def test_only_restarts_of_the_last_hour_count_for_the_limit(folder):
    told = []
    lost_before(folder, timedelta(hours=2))
    lost_before(folder, timedelta(minutes=50))
    assert restart_process.wait(config(), folder, LOST, told.append)
    assert not restart_process.wait(config(), folder, LOST, told.append)
    assert told[-1] == "this is death 3 in the last hour, but survival.max_restarts_per_hour=2"
    assert len(read_jsonl(folder.restarts)) == 3


@pytest.mark.parametrize("ends", [{"return_timeout": 0.0}, {"max_restarts": 0}])
def test_a_config_can_let_the_death_end_the_run(folder, ends):
    assert not restart_process.wait(config(**ends), folder, LOST, [].append)
    assert not folder.restarts.exists()


def test_the_run_waits_until_the_worker_listens(folder, monkeypatch):
    """The worker begins to listen after the second attempt to connect."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            listening.listen()

    monkeypatch.setattr(hosts.time, "sleep", pause)
    told = []
    with listening:
        assert restart_process.wait(
            config(address), folder, StartAgainError(f"the worker of {address} has ended", [address]), told.append
        )
    assert len(pauses) == 2
    assert told[0] == (
        f"the worker of {address} has ended; the run waits up to 600 s for the lost workers. Start them again by: make worker ADDRESS={address}"
    )


def test_a_worker_that_does_not_come_back_in_time_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    told = []
    lost = StartAgainError(f"the worker of {address} has ended", [address])
    assert not restart_process.wait(config(address, return_timeout=0.01), folder, lost, told.append)
    assert told[-1] == f"no worker listens at {address} after hosts.return_timeout=0.01 s"


@pytest.mark.parametrize(
    ("started_by", "begin"),
    [
        (["-X", "dev", "-m", "controllers.grpo", "--steps", "3"], ["-X", "dev", "-m", "controllers.grpo"]),
        (["bin/rl-actors", "grpo", "--steps", "3"], ["bin/rl-actors", "grpo"]),
    ],
)
def test_the_command_that_resumes_the_run_begins_like_the_command_of_this_program(monkeypatch, started_by, begin):
    monkeypatch.setattr(sys, "orig_argv", ["python", *started_by])
    monkeypatch.setattr(sys, "argv", ["program", "--steps", "3"])
    assert restart_process.command(["--resume", "runs/a"]) == [sys.executable, *begin, "--resume", "runs/a"]
    monkeypatch.setattr(sys, "argv", ["program", "--steps", "4"])
    with pytest.raises(ValueError, match="is not the end of"):
        restart_process.command([])


@pytest.mark.parametrize("returns", [True, False])
def test_the_program_either_starts_a_program_that_resumes_the_run_or_fails(folder, monkeypatch, capfd, returns):
    replaced = []

    def lose(*_: object) -> int:
        raise LOST

    def replace_program(_: str, words: list[str]) -> None:
        replaced.append(words)

    given = replace(tiny(), hosts=HostsConfig(addresses="process://2", return_timeout=600.0 if returns else 0.0))
    invocation = Invocation(
        config=given,
        config_name="",
        output_dir=folder.path,
        resume=None,
        eval_only=None,
        dry_run=False,
        plan=False,
        verbose=True,
    )
    monkeypatch.setattr(launch, "_run", lose)
    monkeypatch.setattr(launch.cli, "parse", lambda *_, **__: invocation)
    monkeypatch.setattr(os, "execv", replace_program)
    monkeypatch.setattr(launch, "shutdown_context", Future)  # this test does not start Monarch
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "controllers.grpo"])
    monkeypatch.setattr(sys, "argv", ["controllers/grpo.py"])
    with pytest.raises(SystemExit) as ended:
        launch.start_loop("controllers.grpo")
    # With returns=True the real execv would replace this program. The fake execv only records its arguments, so `main`
    # goes on and exits with status 1, as with returns=False.
    assert ended.value.code == 1
    assert [words[-3:] for words in replaced] == ([["--resume", str(folder.path), "--verbose"]] if returns else [])
    output = capfd.readouterr().out
    assert "The run failed: the worker of tcp://10.0.0.6:4444 has ended.\n" in output
    assert ("the run goes on in a new program" in output) is returns
