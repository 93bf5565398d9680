"""GRPO runs whose trainer has several processes. Each starts from a checkpoint of a run whose trainer is one process, and gets
the rollouts of that run. Both runs must report equal numbers, except for rounding errors."""

import asyncio
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import AnswersEach, ReplayingGenerator

import rl_actors
from configs.tiny import tiny
from controllers.environments import Scorer
from controllers.grpo import GRPOConfig, train
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli, launch
from controllers.run import checkpoints
from controllers.run.interruption import Interruption

NUM_WARMUP_STEPS, NUM_STEPS = 100, 10
# In a name, the number after FSDP, TP or PP is the degree.
LAYOUTS = {
    "FSDP2 x TP2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "PP2": {"pipeline_parallel_degree": 2},
}
COMPARED = ("loss", "grad_norm", "entropy", "ratio/mean", "kl/policy_generator", "logprob_diff/mean")
# Tolerances of the first step, of later steps, and of the gradient norm in later steps. They are relative for values above 1 and absolute for
# smaller values. The runs differ only by rounding errors. Training amplifies these errors. Adam divides a gradient by the root of its second
# moment, so an error in a tiny gradient becomes large. A GRPO step has six optimizer steps, and each of them amplifies the errors again.
FIRST, LATER, LATER_GRAD_NORM = 2e-6, 5e-4, 2e-3


class RecordingGenerator(rl_actors.GeneratorClient):
    """The client of the real generator. It adds the handle of every `generate` call to `recording`."""

    recording: list[Any]

    def generate(self, prompts, params=None):
        call = super().generate(prompts, params)
        self.recording.append(call)
        return call

    generate_each = AnswersEach.generate_each


def config(**degrees: int) -> GRPOConfig:
    made = tiny()
    return replace(
        made,
        trainer=replace(made.trainer, parallelism=replace(made.trainer.parallelism, **degrees)),
        steps=NUM_STEPS,
        sft_steps=NUM_WARMUP_STEPS,
        evaluate_every=100,
        checkpoint_every=100,
        rollouts=replace(made.rollouts, groups_per_step=64, dynamic_sampling_rounds=0),
    )


def run(folder: RunFolder, made: GRPOConfig, *, resume: str | None = None) -> list[dict[str, Any]]:
    made.validate()
    made, task = launch._with_task(made)
    task = replace(task, scorer=Scorer())
    flags = dict.fromkeys(("dry_run", "plan", "verbose"), False)
    invocation = cli.Invocation(
        config=made,
        config_name="tiny",
        output_dir=folder.path,
        resume=resume,
        eval_only=None,
        save_config=None,
        **flags,
    )
    work = launch._train(train, invocation, folder, task, io.StringIO(), Interruption())
    asyncio.run(work)
    return [record for record in read_jsonl(folder.metrics) if record["phase"] == "grpo"]


def resumed(recorded: Path, path: Path, **degrees: int) -> list[dict[str, Any]]:
    """Resume a run from the checkpoint that the recorded run wrote after its supervised phase. Returns the records of the GRPO steps.

    recorded: folder of the recorded run. path: folder of the resumed run.
    """
    shutil.copytree(
        recorded / "checkpoints" / f"step-{NUM_WARMUP_STEPS}", path / f"checkpoints/step-{NUM_WARMUP_STEPS}"
    )
    assert checkpoints.newest(RunFolder(path).checkpoints) is not None
    return run(RunFolder(path), config(**degrees), resume=str(path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_under_another_layout_reports_the_numbers_of_the_run_with_one_process(tmp_path, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(RecordingGenerator, "recording", calls, raising=False)
    monkeypatch.setattr(rl_actors, "GeneratorClient", RecordingGenerator, raising=False)
    expected = run(RunFolder(tmp_path / "one"), config())
    answers = [call.result() for call in calls]
    assert len(expected) == NUM_STEPS and sum(record["updates"] for record in expected) == 6 * NUM_STEPS
    monkeypatch.setattr(rl_actors, "GeneratorClient", ReplayingGenerator, raising=False)
    for name, degrees in {"one again": {}, **LAYOUTS}.items():
        # The first two answers are those of the evaluations before and after the supervised phase. A resumed run starts after both
        # evaluations, so it does not ask for these answers.
        recording = list(answers[2:])
        monkeypatch.setattr(ReplayingGenerator, "recording", recording, raising=False)
        found = resumed(tmp_path / "one", tmp_path / name, **degrees)
        assert recording == []
        worst: dict[str, float] = {}
        for step, (record, known) in enumerate(zip(found, expected, strict=True)):
            assert record["reward/mean"] == known["reward/mean"]
            for key in COMPARED:
                later = LATER_GRAD_NORM if key == "grad_norm" else LATER
                tolerance = (FIRST if step == 0 else later) if degrees else 0.0
                error = abs(record[key] - known[key]) / max(1.0, abs(known[key]))
                worst[key] = max(worst.get(key, 0.0), error)
                assert error <= tolerance, f"{name}: {key} of step {step} is {record[key]}, not {known[key]}"
        print(name, {key: f"{error:.1e}" for key, error in worst.items()})
