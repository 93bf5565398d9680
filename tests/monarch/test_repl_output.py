"""A REPL session in a process of its own: what the terminal shows after a death, for bad arguments, and at the exit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, time
sys.ps1 = ">>> "
from configs.tiny import tiny
from rl_actors import OptimParams, SamplingParams, TrainerClient

trainer = TrainerClient.spawn(tiny().trainer)
generator = trainer.spawn_generator()
try:
    generator.generate([[3, 4, 5]], SamplingParams(max_tokens=5000))
except ValueError as error:
    print("refused", error)
generator.generate([[3, 4, 5]]).result()
print("logs", trainer.info().result()[0].logs)
[process] = trainer.ranks.watched.processes
os.kill(process.pid, signal.SIGKILL)
while not process.has_ended():
    time.sleep(0.01)
print("repr", trainer)
try:
    trainer.optim_step(OptimParams(learning_rate=1e-3)).result()
except RuntimeError as error:
    print("error", error, *error.__notes__)
time.sleep(3)  # Monarch tells of the death
unread = trainer.push_model_state_dict(), trainer.info(), generator.generate([[3, 4, 5]])
"""


@pytest.mark.slow
def test_a_session_with_a_dead_trainer_says_so_and_shows_nothing_of_other_packages():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", None)
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GUARD)
    assert ended.returncode == 0, ended.stderr
    refused, logs, shown, error = ended.stdout.splitlines()
    assert refused.startswith("refused max_tokens=5000 exceeds max_model_len=")
    assert shown.startswith("repr <TrainerClient trainer: dead, rank 0 (pid ") and "ready" not in shown
    assert "ended during optim_step" in error and "close this client and spawn another; load_checkpoint" in error
    allowed = ("trainer is starting; its output: ", "generator is starting; its output: ")
    lines = [line for line in ended.stderr.splitlines() if "failed and nobody asked for its answer" not in line]
    foreign = [line for line in lines if not any(text in line for text in allowed) and not line.startswith("  ")]
    assert foreign == [], ended.stderr
    log = (Path(logs.removeprefix("logs ")).parent / "client.log").read_text()
    assert "MeshFailure" in log and "Monarch internal logs" in log
