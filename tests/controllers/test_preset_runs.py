"""Tests of a whole run with each preset of --algorithm, in real processes, from the command line to the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD

from controllers.algorithms.presets import ALGORITHMS
from controllers.observe.run_folder import read_jsonl

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_preset_runs_from_the_command_line(algorithm, tmp_path):
    command = [sys.executable, "-m", "controllers.grpo", "--config", "tiny", "--algorithm", algorithm]
    command += ["--steps", "3", "--sft-steps", "5", "--rollouts.groups-per-step", "32", "--no-evaluate-first"]
    command += ["--environment.num-held-out", "64", "--output-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ALGORITHMS[algorithm].paper in done.stderr
    lines = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if line["phase"] == "grpo"]
    assert [line["step"] for line in lines] == [6, 7, 8]
    assert all("nonfinite" not in line for line in lines)
    assert json.loads((tmp_path / "run/outcome.json").read_text())["status"] == "finished"
    assert (tmp_path / "run/report.html").stat().st_size > 10_000
