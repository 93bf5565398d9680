"""The GRPO command line, run as a user runs it. Trainer, vLLM and torchstore are real."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import GUARD, wait_until

from controllers.observe.logger import KEYS
from controllers.observe.run_folder import read_jsonl
from controllers.program.launch import start_loop

ROOT = Path(__file__).parents[2]
SHORT = [
    "--sft-steps",
    "3",
    "--evaluate-every",
    "2",
    "--checkpoint-every",
    "2",
    "--rollouts.groups-per-step",
    "8",
]
# With parity_reward a model with random weights gets the reward 1 for about half of its completions, and 0 for the others. So the rewards
# of a group usually differ.
PARITY = ["--environment.task", "tests.fakes:parity_reward", "--environment.options", "{}"]
PARITY += ["--updates-per-step", "1", "--epochs-per-step", "1"]


def start(*arguments: object, marker: str = "", **kwargs) -> subprocess.Popen:
    """Run the command line in a process group of its own. All processes that it starts have `marker` in their environment."""
    command = [sys.executable, "-m", "controllers.grpo", *map(str, arguments)]
    environment = {**os.environ, "RL_ACTORS_TEST_MARKER": marker}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes, **kwargs)


def finish(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=GUARD)[0]
    finally:
        process.kill()


def processes_of(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RL_ACTORS_TEST_MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> tuple[Path, str]:
    """The folder and the terminal's text of a run of three supervised steps and four GRPO steps."""
    folder = tmp_path_factory.mktemp("grpo") / "run"
    process = start("--config", "tiny", "--output-dir", folder, "--steps", 4, *SHORT, *PARITY)
    output = finish(process)
    assert process.returncode == 0, output
    return folder, output


def test_a_run_leaves_every_file_and_a_line_for_each_step(finished_run):
    folder, output = finished_run
    records = read_jsonl(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["phase"] for record in records] == ["start"] + ["sft"] * 3 + ["grpo"] * 4
    assert all(key in record for record in records for key in KEYS)
    for name in ("config.json", "rollouts.jsonl", "report.html", "start.json", "tokenizer/tokenizer.json"):
        assert (folder / name).stat().st_size > 0
    command = json.loads((folder / "start.json").read_text())["command"]
    assert command.startswith(f"python -m controllers.grpo --config tiny --output-dir {folder} --steps 4")
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-5", "step-7"}
    assert (folder / "checkpoints/step-7/trainer/tokenizer.json").is_file()
    assert list((folder / "tensorboard").iterdir())
    assert {path.stem for path in (folder / "logs").iterdir()} >= {"controller", "trainer-0", "generator-0"}
    assert json.loads((folder / "outcome.json").read_text())["status"] == "finished"
    assert "torchstore" not in output and "WARNING" not in output  # library logs are in the files


def test_every_name_in_metrics_jsonl_is_explained_in_the_docs(finished_run):
    explained = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for record in read_jsonl(finished_run[0] / "metrics.jsonl") for name in record}
    names = {re.sub(r"^loss/.*", "loss/<metric>", re.sub(r"^age/\d+$", "age/<n>", name)) for name in names}
    assert sorted(name for name in names if f"`{name}`" not in explained) == []


def test_trainer_and_generator_agree_on_every_logprob(finished_run):
    trained = [
        r for r in read_jsonl(finished_run[0] / "metrics.jsonl") if r["phase"] == "grpo" and not r.get("skipped")
    ]
    assert trained and all(record["logprob_diff/mean"] < 1e-5 for record in trained)
    assert all(record["policy_lag"] == 0 and record["updates"] == 1 for record in trained)


def test_a_new_run_can_start_from_the_config_of_a_run(finished_run, dry_run, tmp_path):
    assert dry_run("--config", finished_run[0] / "config.json", "--output-dir", "again")["steps"] == 4
    assert not (tmp_path / "again").exists()


@pytest.fixture(scope="module")
def resumed_run(finished_run) -> tuple[list[dict], list[dict], str]:
    """Resume the finished run for two more steps, with --verbose. Returns its records before, its records after, and the terminal's text."""
    folder = finished_run[0]
    before = read_jsonl(folder / "metrics.jsonl")
    process = start("--resume", folder, "--steps", 6, "--verbose")
    output = finish(process)
    assert process.returncode == 0, output
    return before, read_jsonl(folder / "metrics.jsonl"), output


@pytest.mark.slow
def test_a_resumed_run_goes_on_after_the_step_of_its_newest_checkpoint(resumed_run):
    before, after, _ = resumed_run
    assert [record["step"] for record in after] == list(range(10))
    assert after[:8] == before
    assert after[8]["policy_version"] == before[-1]["policy_version"] + 1


@pytest.mark.slow
def test_verbose_shows_the_logs_of_the_actors_with_name_and_rank(finished_run, resumed_run):
    shown, mesh = resumed_run[2], "Building device mesh with parallelism"  # torchtitan logs this text in every trainer
    assert [line for line in shown.splitlines() if line.startswith("[trainer 0] ") and mesh in line], shown
    assert [line for line in shown.splitlines() if line.startswith("[generator 0] ")], shown
    assert mesh in (finished_run[0] / "logs/trainer-0.log").read_text()
    assert mesh not in finished_run[1]


@pytest.mark.slow
def test_eval_only_gives_a_checkpoint_the_accuracy_that_the_run_measured(finished_run):
    folder = finished_run[0]
    process = start("--eval-only", folder / "checkpoints" / "step-7")
    output = finish(process)
    assert process.returncode == 0, output
    scored = next(r["eval/reward"] for r in read_jsonl(folder / "metrics.jsonl") if r["step"] == 7)
    assert f"eval/reward {scored:.4f}" in output


@pytest.mark.slow
def test_a_grpo_step_whose_rewards_are_all_equal_takes_no_optimizer_step_and_is_recorded_as_skipped(tmp_path):
    task = ["--environment.task", "tests.fakes:constant_reward", "--environment.options", '{"reward": 1.0}']
    process = start(
        "--output-dir", tmp_path / "run", "--steps", 2, *SHORT, "--rollouts.dynamic-sampling-rounds", 1, *task
    )
    output = finish(process)
    assert process.returncode == 0, output
    grpo = [record for record in read_jsonl(tmp_path / "run/metrics.jsonl") if record["phase"] == "grpo"]
    assert [record["skipped"] for record in grpo] == [True, True]
    assert [record["groups/filtered"] for record in grpo] == [16, 16]
    assert [record["groups/refills"] for record in grpo] == [1, 1]
    assert all(record["policy_version"] is None for record in grpo)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "reward"])
def test_the_kl_from_the_reference_starts_at_0_and_a_resumed_run_has_the_same_reference(tmp_path, kind):
    folder = tmp_path / "run"
    kl = ["--reference-kl", 0.1, "--reference-kl-in", kind, "--schedule.learning-rate", 4e-3]
    process = start("--config", "tiny", "--output-dir", folder, "--steps", 4, *SHORT, *PARITY, *kl)
    output = finish(process)
    assert process.returncode == 0, output
    whole = read_jsonl(folder / "metrics.jsonl")
    found = [record["kl/reference"] for record in whole if record["phase"] == "grpo"]
    # At first the policy's logprobs differ from the reference's only by rounding. The limit is higher for the KL in the reward, for two
    # reasons. First, k1, the estimator in the reward, is the difference itself. k3, the estimator in the loss, is about half the square of
    # the difference. Second, the KL in the reward takes the policy's logprobs from the generator. The KL in the loss takes them from the
    # trainer, which rounds like the reference.
    assert abs(found[0]) < {"loss": 1e-9, "reward": 1e-5}[kind] and all(abs(value) > 1e-4 for value in found[1:]), found
    assert [("reward/kl_penalty" in record) for record in whole if record["phase"] == "grpo"] == [kind == "reward"] * 4
    shutil.rmtree(folder / "checkpoints" / "step-7")
    process = start("--resume", folder)
    output = finish(process)
    assert process.returncode == 0, output
    again = read_jsonl(folder / "metrics.jsonl")
    assert [record["step"] for record in again] == list(range(8))
    for key in ("kl/reference", "loss", "grad_norm"):
        repeated, expected = ([record[key] for record in records[6:]] for records in (again, whole))
        assert repeated == pytest.approx(expected, rel=1e-5), key
    assert (folder / "logs/reference-0.log").exists()


@pytest.mark.slow  # the quick test of Ctrl-C is in test_signals.py
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_and_all_its_processes(tmp_path, number, status):
    marker = f"{tmp_path}-{number}"
    process = start("--output-dir", tmp_path / "run", "--steps", 1000, marker=marker)
    wait_until(lambda: read_jsonl(tmp_path / "run/metrics.jsonl"), "the first step")
    process.send_signal(number)
    output = finish(process)
    assert process.returncode == status, output
    wait_until(lambda: not processes_of(marker), "the end of the run's processes")
    assert json.loads((tmp_path / "run/outcome.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_run_that_may_not_restart_ends_when_its_trainer_is_killed_and_names_the_trainer(tmp_path):
    marker = str(tmp_path)
    process = start(
        "--output-dir", tmp_path / "run", "--steps", 1000, "--survival.max-restarts-per-hour", 0, marker=marker
    )
    wait_until(lambda: read_jsonl(tmp_path / "run/metrics.jsonl"), "the first step")
    trainer = next(p for p in processes_of(marker) if p.environ().get("RL_ACTORS_PROCESS") == "trainer-0")
    trainer.kill()
    output = finish(process)
    assert process.returncode == 1, output
    assert "trainer" in output
    wait_until(lambda: not processes_of(marker), "the end of the run's processes")


@pytest.mark.slow
def test_kill_9_of_the_controller_leaves_no_process_behind(tmp_path):
    marker = str(tmp_path)
    process = start("--output-dir", tmp_path / "run", "--steps", 1000, marker=marker)
    wait_until(lambda: read_jsonl(tmp_path / "run/metrics.jsonl"), "the first step")
    process.kill()
    wait_until(lambda: not processes_of(marker), "the end of the run's processes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.parallelism.tensor-parallel-degree", "3"], "num_attention_heads=8 is not divisible by"),
        (["--optimizer.beta1", "1.5"], "beta1=1.5; it must be"),
        (["--schedule.learning-rate", "-1"], "learning_rate=-1.0"),
        (["--rollouts.group-size", "1"], "rollouts.group_size=1; it must be at least 2"),
        (["--updates-per-step", "0"], "updates_per_step=0; it must be at least 1"),
        (["--reference-kl", "-0.1"], "reference_kl=-0.1; it must be finite and at least 0"),
        (["--epochs-per-step", "0"], "epochs_per_step=0; it must be at least 1"),
        (["--rollouts.top-p", "2"], "rollouts.top_p=2.0; it must be in (0, 1]"),
        (["--alphabet", "0123"], "are not in the tokenizer's alphabet"),
        (["--steps", "0"], "steps=0; it must be at least 1"),
        (["--trainer.max-sequence-length", "999"], "max_sequence_length=999 exceeds model.max_position_embeddings=128"),
        (["--max-tokens", "64"], "max_tokens=64 leaves no room for a prompt in generator.max_model_len=64"),
        (["--environment.task", "no_such_task"], "no_such_task"),
        (["--eval-only", "tests"], "is not a complete checkpoint"),
    ],
)
def test_a_config_that_cannot_run_is_refused(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["grpo", "--config", "tiny", "--output-dir", str(tmp_path / "run"), *arguments])
    with pytest.raises(SystemExit) as ended:
        start_loop("controllers.grpo")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_refused_command_line_ends_with_status_2_and_leaves_nothing(tmp_path):
    process = start("--config", "tiny", "--output-dir", tmp_path / "run", "--steps", 0)
    output = finish(process)
    assert process.returncode == 2, output
    assert "steps=0; it must be at least 1" in output
    assert not (tmp_path / "run").exists()
