"""Tests of the gate of a run. A gate is a step and a reward.

The first evaluation at or after the step must reach the reward. Otherwise the run ends with status 3.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD

from configs.tiny import tiny, tiny_dpo
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.run.gate import METRIC, Gate, GateMissedError

ROOT = Path(__file__).parents[2]


def test_the_first_evaluation_at_or_after_the_step_decides():
    gate = Gate.parse("40:0.9")
    gate.check(39, {METRIC: 0.1})
    gate.check(40, {"loss": 0.1})
    with pytest.raises(GateMissedError, match="eval/reward is 0.8900 after step 41; the gate needs at least 0.9"):
        gate.check(41, {METRIC: 0.89})
    with pytest.raises(GateMissedError, match="is nan"):
        gate.check(41, {METRIC: math.nan})
    gate.check(42, {METRIC: 0.9})
    gate.check(50, {METRIC: 0.1})
    gate.end()


@pytest.mark.parametrize("accuracies, is_passed", [((0.9, 0.1), True), ((0.89, 0.5), False), ((0.89, 0.95), True)])
def test_a_resumed_run_recalls_whether_it_has_passed_its_gate(accuracies, is_passed):
    """In the third case the run missed its gate, was resumed, and passed."""
    records = [{"step": 39, METRIC: 1.0}, {"step": 40}]
    records += [{"step": 41 + index, METRIC: accuracy} for index, accuracy in enumerate(accuracies)]
    gate = Gate.parse("40:0.9")
    gate.recall(records)
    assert gate.is_passed == is_passed


def test_a_run_that_ends_before_the_evaluation_of_its_gate_misses_the_gate():
    gate = Gate.parse("40:0.9")
    gate.check(39, {METRIC: 1.0})
    with pytest.raises(GateMissedError, match="without an evaluation at or after step 40"):
        gate.end()


@pytest.mark.parametrize("text", ["40", "40:", ":0.9", "x:0.9", "40:high", "-1:0.9", "40:inf", "40:0.9:1"])
def test_a_gate_that_is_not_a_step_and_a_reward_is_refused(text):
    config = tiny()
    config.gate = text
    with pytest.raises(ValueError, match=f"gate='{text}'; it must be STEP:REWARD, .* such as 40:0.9"):
        config.validate()


def test_a_gate_is_refused_for_a_run_that_samples_nothing():
    config = tiny_dpo()
    config.gate = "1:0.5"
    with pytest.raises(ValueError, match="gate='1:0.5', but this run samples nothing"):
        config.validate()


@pytest.mark.slow
def test_a_run_ends_with_status_3_at_the_step_at_which_it_misses_its_gate(tmp_path):
    flags = ["--config", "tiny", "--sft-steps", "2", "--steps", "3", "--evaluate-every", "1", "--gate", "3:0.99"]
    command = [sys.executable, "-m", "controllers.grpo", *flags, "--output-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "after step 3; the gate needs at least 0.99" in done.stdout and "Traceback" not in done.stdout
    assert read_jsonl(RunFolder(tmp_path / "run").metrics)[-1]["step"] == 3


@pytest.mark.slow
def test_a_finished_run_that_has_passed_its_gate_ends_with_status_0_when_it_is_resumed(tmp_path):
    flags = ["--config", "tiny", "--sft-steps", "2", "--steps", "1", "--evaluate-every", "1", "--gate", "3:0"]
    program = [sys.executable, "-m", "controllers.grpo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in ([*flags, "--output-dir", str(tmp_path / "run")], ["--resume", str(tmp_path / "run")]):
        done = subprocess.run(
            [*program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=GUARD
        )
        assert done.returncode == 0, done.stdout + done.stderr
