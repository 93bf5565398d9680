"""A training loop in a file of the user's own: examples/my_loop.py, started in an empty folder outside of the checkout."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import GUARD, wait_until

from controllers.observe.charts import run_charts, trained
from controllers.observe.run_folder import read_jsonl
from controllers.rollouts.groups import RolloutConfig, advantages_of

ROOT = Path(__file__).parents[2]
SHORT = ["--steps", "6", "--checkpoint-every", "2", "--evaluate-every", "3", "--groups", "16"]
SAME = ("step", "phase", "reward/mean", "grad_norm", "learning_rate", "eval/reward", "sample/longest")


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copy(ROOT / "examples/my_loop.py", tmp_path)
    return tmp_path


def loop(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "my_loop.py", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=GUARD)


@pytest.mark.slow
def test_a_loop_of_ones_own_has_the_flags_of_every_loop_and_those_of_its_config(folder):
    finished = loop(folder, "--dry-run", "--half-life", "5", "--trainer.parallelism.tensor-parallel-degree", "2")
    assert finished.returncode == 0, finished.stderr
    shown = json.loads(finished.stdout)
    assert shown["half_life"] == 5.0 and shown["rollouts"]["advantage"] == "__main__:ranks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--config", "tiny"], "my_loop.py: error: --config tiny is neither a config nor a file"),
        (
            ["--advantage", "nope"],
            "it must be one of grpo, dr_grpo, rloo, reinforce_plus_plus, gae, or module:function",
        ),
        (["--advantage", "my_loop:nothing"], "rollouts.advantage='my_loop:nothing' cannot be imported"),
    ],
)
def test_a_wrong_flag_of_a_loop_of_ones_own_is_refused_by_its_name(folder, flags, error):
    finished = loop(folder, *flags, "--dry-run")
    assert finished.returncode == 2 and error in finished.stderr


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_after_kill_9_with_the_numbers_of_an_undisturbed_run(folder):
    whole = loop(folder, *SHORT, "--output-dir", "whole")
    assert whole.returncode == 0, whole.stdout
    with (folder / "log").open("w") as log:
        command = [sys.executable, "my_loop.py", *SHORT, "--output-dir", "killed"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    wait_until(lambda: (folder / "killed/checkpoints/step-4").is_dir())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(GUARD)
    resumed = loop(folder, "--resume", "killed")
    assert resumed.returncode == 0, resumed.stdout
    found = []
    for name in ("whole", "killed"):
        # A step whose checkpoint was not complete is repeated, so the last line of a step counts.
        records = {record["step"]: record for record in read_jsonl(folder / name / "metrics.jsonl")}
        found.append([{key: records[step].get(key) for key in SAME} for step in range(1, 7)])
    assert found[0] == found[1]


RECORDS = [
    {"step": step, "phase": "mine", "reward/mean": 0.5, "mine/a": 1.0, "mine/b": 2.0, "reward/of_mine": 1, "note": "x"}
    | {"time/step": 1.0}
    for step in (1, 2, 3)
]


def test_steps_of_any_phase_are_drawn_and_counted_and_metrics_of_ones_own_have_a_chart():
    assert trained([{"step": 0, "phase": "start"}, *RECORDS]) == RECORDS
    charts = {chart["title"]: [curve["name"] for curve in chart["curves"]] for chart in run_charts(RECORDS)}
    assert charts == {
        "Reward": ["reward"],
        "Time of a step": ["whole step"],
        "mine": ["mine/a", "mine/b"],
        "reward": ["reward/of_mine"],
    }


def half(rewards: torch.Tensor) -> torch.Tensor:
    return rewards / 2


def test_advantages_are_those_of_the_named_function():
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert advantages_of(RolloutConfig(advantage=f"{__name__}:half"), rewards).tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize("name", ["wrong_shape", "not_finite", "no_tensor"])
def test_advantages_of_another_shape_are_refused_by_the_name_of_their_function(name):
    config = RolloutConfig(advantage=f"{__name__}:{name}")
    with pytest.raises(
        ValueError, match=f"{name}' returned .* it must return a tensor of finite numbers of the same shape"
    ):
        advantages_of(config, torch.ones(1, 2))


def wrong_shape(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[:, :1]


def not_finite(rewards: torch.Tensor) -> torch.Tensor:
    return rewards / 0


def no_tensor(rewards: torch.Tensor) -> list:
    return rewards.tolist()
