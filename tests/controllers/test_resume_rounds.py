"""Rounds of tests/drills/resume.py. A round starts a run with a real trainer and a real vLLM, kills the controller or the
trainer with signal 9, and resumes the run. The resumed run must report the metrics of an uninterrupted run.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.resume import differences

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "victim", "moment"),
    [("tiny", "controller", "between"), ("tiny", "trainer", "writing"), ("tiny_game", "controller", "between")],
)
def test_a_killed_and_resumed_run_reports_the_metrics_of_an_uninterrupted_run(tmp_path, config, victim, moment):
    arguments = ["--config", config, "--rounds", "1", "--victim", victim, "--moment", moment, "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "tests.drills.resume", *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 of 1 rounds gave the metrics of the uninterrupted run, 0 did not" in finished.stdout


def test_differences_between_two_runs_are_named_except_those_of_speed():
    one = [
        {"step": 0, "loss": 0.5, "time/step": 1.0, "busy/trainer": 0.5},
        {"step": 1, "loss": 0.25, "tokens": 12, "nothing": None},
    ]
    near = [
        {"step": 0, "loss": 0.5 + 4e-6, "time/step": 9.0, "busy/trainer": 0.4},
        {"step": 1, "loss": 0.25, "tokens": 12},
    ]
    assert differences(one, near) == []
    far = [near[0], near[1] | {"loss": 0.2501, "tokens": 13}]
    assert differences(one, far) == [
        "step 1: loss=0.2501 instead of 0.25",
        "step 1: tokens=13 instead of 12",
    ]
    assert differences(one, near[:1]) == ["steps [0] instead of [0, 1]"]
