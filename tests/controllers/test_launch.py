"""Tests that a command line is refused before the run starts if the machine has too little memory, a folder is not writable, a bound of the loss
is impossible, or config.json holds no JSON object.
"""

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs import CONFIGS
from configs.tiny import tiny
from controllers.observe.run_folder import RunFolder
from controllers.program import cli, launch

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the test needs a machine without GPUs")


@on_cpu
def test_a_config_larger_than_the_memory_is_refused_with_the_sizes_and_advice(command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("the run began"))
    for flag in ("--dry-run", "--output-dir"):  # with only --output-dir, the command would start a run
        value = ["run"] if flag == "--output-dir" else []
        status, out, err = command_line("--config", "qwen3_4b", flag, *value)
        assert (status, out) == (2, ""), err
        assert "error: this machine has " in err and "trainer-0 102.5 GiB + generator-0 " in err
        assert ", but its processes need 1" in err and "--trainer.tokens-per-row" in err
        assert not (tmp_path / "run").exists()


@on_cpu
def test_the_plan_of_a_config_larger_than_the_memory_is_printed_and_refused(command_line):
    status, out, err = command_line("--config", "qwen3_4b", "--plan")
    assert status == 2
    assert "  total        102.5 GiB\n" in out and "trainer-0 102.5 GiB + generator-0 " in out
    assert "error: this machine has " in err and ", but its processes need 1" in err


def test_the_tiny_config_fits_into_the_memory_and_a_dry_run_writes_no_file(command_line, tmp_path):
    assert command_line("--config", "tiny", "--plan")[0] == 0
    status, out, err = command_line("--config", "tiny", "--dry-run")
    assert status == 0 and json.loads(out)["steps"] == 72
    assert "exact_match of the answer '" in err and err.endswith(" is 1\n") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


OWN_REWARDS = """
class Task:
    def __init__(self, seed, num_held_out):
        from controllers.environments import Problem
        self.problems = [Problem(prompt=f"{n}+1=", answer=str(n + 1), key=str(n)) for n in range(100)]
    def held_out(self):
        return self.problems[:num]
    def problem(self, index):
        return self.problems[10 + index % 90]

class Fails(Task):
    def reward(self, problem, completion):
        return int(problem.metadata["solution"] == completion)

class IsNone(Task):
    def reward(self, problem, completion):
        pass

class Waits(Task):
    async def reward(self, problem, completion):
        raise ConnectionError("no server")

class Groups(Fails):
    def rewards(self, problem, completions):
        return [0.5 for _ in completions]
""".replace("num]", "10]")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "name, message",
    [
        ("Fails", "own_rewards:Fails of the answer '1' of the held-out problem '0+1=' failed: "),
        ("IsNone", "own_rewards:IsNone of the answer '1' of the held-out problem '0+1=' failed: "),
        ("Waits", "own_rewards:Waits of the answer '1' of the held-out problem '0+1=' failed: "),
    ],
)
def test_a_dry_run_refuses_a_reward_that_fails_on_a_held_out_answer(
    command_line, tmp_path, monkeypatch, name, message, workers
):
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--config", "blank", "--task", f"own_rewards:{name}", "--environment.num-held-out", 10]
    retries = ["--environment.reward-retries", 0, "--environment.reward-workers", workers]
    status, out, err = command_line(*flags, *retries, "--dry-run")
    assert (status, out) == (2, "") and f"error: the reward {message}" in err
    if name == "Fails":
        assert "KeyError" in err and "own_rewards.py:13)" in err


def test_a_dry_run_calls_the_reward_of_every_set_and_says_what_an_answer_gets(command_line, tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--config", "blank", "--task", "own_rewards:Groups", "--environment.num-held-out", 10]
    further = json.dumps({"sums": {"task": "basic_arithmetic", "num_held_out": 4}})
    status, out, err = command_line(*flags, "--evaluation", further, "--max-tokens", 8, "--dry-run")
    assert status == 0 and json.loads(out)["environment"]["task"] == "own_rewards:Groups", err
    first, second = err.splitlines()
    assert first.endswith("own_rewards:Groups of the answer '1' of the held-out problem '0+1=' is 0.5")
    assert "exact_match" in second and second.endswith(" is 1")


@pytest.mark.parametrize("folder", ["file", "file/run", "file/more/run"])
def test_an_output_folder_that_cannot_be_made_is_refused(command_line, tmp_path, folder):
    (tmp_path / "file").write_text("")
    status, out, err = command_line("--config", "tiny", "--dry-run", "--output-dir", folder)
    assert (status, out) == (2, ""), err
    assert f"--output-dir {folder}: file is not a folder" in err


@pytest.fixture
def nobody(command_line, tmp_path):
    """nobody(*arguments) does the same as command_line(*arguments), but without root's right to write everywhere."""
    # The user `nobody` may be unable to read the files of the modules. So this call imports the modules first.
    command_line("--config", "tiny", "--dry-run")

    def run(*arguments: object) -> tuple[int, str, str]:
        user = os.geteuid()
        if user == 0:  # root can write everywhere, so the command runs as the user `nobody`
            tmp_path.chmod(0o755)
            for above in list(tmp_path.parents)[:-2]:
                above.chmod(0o755)
            os.seteuid(65534)
        try:
            return command_line(*arguments)
        finally:
            os.seteuid(user)

    return run


@pytest.mark.parametrize(("folder", "mode"), [("", 0o555), ("run", 0o555), ("run", 0o000)])
def test_an_output_folder_that_is_not_writable_is_refused(nobody, tmp_path, folder, mode):
    parent = tmp_path / "parent"
    parent.mkdir(mode=mode)
    status, out, err = nobody("--config", "tiny", "--dry-run", "--output-dir", parent / folder)
    assert (status, out) == (2, ""), err
    assert f"--output-dir {parent / folder}: {parent} is not writable" in err


def test_plan_and_a_dry_run_without_output_dir_need_no_writable_folder_but_a_run_does(nobody, tmp_path, monkeypatch):
    tmp_path.chmod(0o555)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_run", lambda *_: pytest.fail("the run began"))
        for arguments in (["--plan"], ["--plan", "--output-dir", tmp_path / "run"], ["--dry-run"]):
            status, _, err = nobody("--config", "tiny", *arguments)
            assert status == 0, err
        status, _, err = nobody("--config", "tiny")
        assert status == 2 and f"--output-dir {Path('runs')}" in err and "is not writable" in err


@pytest.mark.slow
def test_an_evaluation_needs_write_access_only_to_the_folder_of_the_checkpoint(nobody, tmp_path, monkeypatch):
    run, checkpoint, began = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-1", []
    checkpoint.mkdir(parents=True)
    (run / "config.json").write_text(nobody("--config", "tiny", "--dry-run")[1])
    monkeypatch.setattr(launch.checkpoints, "find", lambda folder: checkpoint)
    monkeypatch.setattr(launch, "_run", lambda invocation, *_: began.append(invocation.eval_only) or 0)
    checkpoint.chmod(0o777)
    tmp_path.chmod(0o555)
    assert nobody("--eval-only", run)[0] == 0 and began == [checkpoint]
    checkpoint.chmod(0o555)
    status, _, err = nobody("--eval-only", run)
    assert status == 2 and f"--eval-only {checkpoint}: {checkpoint} is not writable" in err
    assert nobody("--eval-only", run, "--dry-run")[0] == 0 and began == [checkpoint]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss.ratio-high", "inf", "ratio_low=0.8, ratio_high=inf; it must hold that 0 <= low <= 1 <= high < inf"),
        ("loss.ratio-high", "nan", "ratio_high=nan"),
        ("loss.ratio-low", "nan", "ratio_low=nan"),
        ("loss.ratio-low", "1.1", "ratio_low=1.1"),
        ("loss.ratio-high", "0.9", "ratio_high=0.9"),
    ],
)
def test_an_impossible_bound_of_the_probability_ratio_is_refused(command_line, name, value, message):
    status, out, err = command_line("--config", "tiny", "--dry-run", f"--{name}", value)
    assert (status, out) == (2, ""), err
    assert message in err


@pytest.mark.parametrize("text", ['{"model_type": "qwen3", "hid', "", "[1]"])
def test_the_error_names_a_config_json_that_holds_no_json_object(command_line, tmp_path, text):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(text)
    status, out, err = command_line("--config", "tiny", "--dry-run", "--trainer.hf-path", "model")
    assert (status, out) == (2, ""), err
    assert f"{Path('model') / 'config.json'} is not " in err


def test_a_resumed_run_keeps_the_command_and_the_time_of_its_start(tmp_path, monkeypatch):
    config = cli.parse("prog", CONFIGS["controllers.grpo"], ["--config", "tiny"]).config
    _, task = launch._with_task(config)
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rl-actors grpo", "--config", "tiny"])
    launch._prepare(folder, config, task.environment, "controllers.grpo")
    start = json.loads(folder.start.read_text())
    assert start["command"] == "rl-actors grpo --config tiny" and datetime.fromisoformat(start["time"])
    monkeypatch.setattr(sys, "argv", ["rl-actors grpo", "--resume", "run"])
    launch._prepare(folder, config, task.environment, "controllers.grpo")
    assert json.loads(folder.start.read_text()) == start


@pytest.mark.parametrize("own, other", [("/there/my_loop.py", "controllers.grpo"), ("controllers.grpo", "my_loop.py")])
def test_a_run_is_continued_only_by_its_own_loop(tmp_path, own, other):
    (tmp_path / "start.json").write_text(json.dumps({"loop": own}))
    invocation = SimpleNamespace(resume=tmp_path, eval_only=None, dry_run=True, config=tiny())
    with pytest.raises(ValueError, match=f"this run's loop is {own}, which must continue it, and not {other}"):
        launch._with_checkpoint(invocation, other)
    assert launch._with_checkpoint(invocation, Path(own).name) is invocation
