"""Whole runs of PPO as a user starts them, with real actors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GUARD

from controllers.observe.run_folder import read_jsonl
from tests.drills.resume import differences

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FLAGS = (
    "--steps 3 --sft-steps 2 --critic.warmup-steps 1 --checkpoint-every 1 --keep-checkpoints 9 --evaluate-every 2 "
    # With random weights about half of the completions earn this reward.
    "--environment.task tests.fakes:parity_reward --environment.options {}"
)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "controllers.ppo", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ppo") / "run"
    run("--config", "tiny_ppo", *FLAGS.split(), "--output-dir", str(folder))
    return folder


def test_a_run_trains_critic_and_policy_and_reports_both(folder):
    records = read_jsonl(folder / "metrics.jsonl")
    assert [record["phase"] for record in records] == ["start", "sft", "sft", *["ppo"] * 4]
    warm_up, first, *_, last = records[3:]  # the warm-up step trains only the critic
    assert warm_up["grad_norm"] is None and warm_up["critic/grad_norm"] > 0
    # 2 supervised steps and 6 updates: a PPO step has 2 epochs of 3 updates.
    assert warm_up["policy_version"] is None and first["policy_version"] == 2 + 6
    assert last["critic/explained_variance"] is not None and last["eval/reward"] is not None
    page = (folder / "report.html").read_text()
    assert "Variance of the returns that the critic explains" in page and "Values and returns" in page


def test_a_resumed_run_restores_policy_critic_and_data_and_ends_with_the_same_metrics(folder, tmp_path):
    resumed = tmp_path / "resumed"
    shutil.copytree(folder, resumed)
    for step in (5, 6):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step}")
    assert {path.name for path in (resumed / "checkpoints" / "step-4").iterdir()} == {
        "critic",
        "trainer",
        "state.json",
        "checksums.json",
    }
    run("--resume", str(resumed))
    assert differences(read_jsonl(folder / "metrics.jsonl"), read_jsonl(resumed / "metrics.jsonl")) == []
    assert json.loads((resumed / "checkpoints" / "step-6" / "state.json").read_text())["step"] == 6


def test_a_run_with_stale_rollouts_and_the_reference_kl_in_the_reward_finishes(tmp_path):
    ahead = ["--rollouts.max-staleness", "6", "--reference-kl", "0.05", "--reference-kl-in", "reward"]
    run("--config", "tiny_ppo", *FLAGS.split(), *ahead, "--output-dir", str(tmp_path / "run"))
    records = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if record["phase"] == "ppo"]
    assert len(records) == 4 and max(record["age/max"] for record in records) > 0


def test_a_run_whose_trainer_and_generator_take_turns_in_memory_has_the_usual_metrics(folder, tmp_path):
    run("--config", "tiny_ppo", *FLAGS.split(), "--colocate", "--output-dir", str(tmp_path / "run"))
    usual, turns = read_jsonl(folder / "metrics.jsonl"), read_jsonl(tmp_path / "run" / "metrics.jsonl")
    moves = ("offload/", "onload/", "sleep/", "wake/", "weights/")
    for records in (usual, turns):
        for record in records:
            for key in [key for key in record if key.startswith(moves)]:
                del record[key]
    assert differences(usual, turns) == []
