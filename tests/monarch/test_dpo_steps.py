"""Tests that DPO raises the margin of held-out pairs, and that a resumed run has the reference that the run began with.

The DPO run takes its steps on the trainer that all tests in this folder share. The config of the run is parsed
from flags.
"""

import asyncio
import io
import json
import math
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
from rich.console import Console

from configs.tiny import tiny_dpo
from controllers.algorithms.schedules import ScheduleConfig
from controllers.dpo import DPOConfig, train
from controllers.environments import build_environment
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli
from controllers.rollouts.evaluation import build_sets
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run.checkpoints import Checkpoints
from controllers.run.run import Run, Supervision
from rl_actors import TrainerClient

LETTERS = string.digits + "+-=." + string.ascii_lowercase + "ABCDEF"  # the shared vocabulary adds two special tokens
PAIRS_PER_STEP, NUM_HELD_OUT = 8, 16


def shared() -> DPOConfig:
    config = tiny_dpo()
    return replace(
        config,
        alphabet=LETTERS,
        environment=replace(config.environment, task="", num_held_out=NUM_HELD_OUT),
        trainer=support.trainer_config(),
        generator=support.generator_config(),
        pairs_per_step=PAIRS_PER_STEP,
        samples_per_forward_backward=6,  # calls of 6, 6 and 4 samples in every step
        schedule=ScheduleConfig(learning_rate=1e-3),
        evaluate_every=2,
        checkpoint_every=0,
    )


@pytest.fixture
def take_steps(trainer, ranks, transport, tmp_path):
    """take_steps(steps, state) trains up to step `steps`, and returns the lines of metrics.jsonl.

    state: the controller's state in the checkpoint that the run resumes from; {}: a new run.
    """
    mesh = ranks(1).spawn("dpo_reference", support.TestTrainer, support.trainer_config(optimizer=None), transport)
    build_character_tokenizer(tmp_path / "tokenizer", LETTERS)
    folder = RunFolder(tmp_path / "run")
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}=", "chosen": f"a{n % 3}", "rejected": f"b{n % 3}"} for n in range(80)]
    file.write_text("\n".join(json.dumps(row) for row in rows))

    def take(steps: int, state: dict) -> list[dict]:
        flags = ["--data", str(file), "--steps", str(steps), "--beta", "0.5", "--output-dir", str(tmp_path / "other")]
        config = cli.parse("dpo", {"shared": shared}, flags).config
        environment = build_environment(config.environment)
        supervision = Supervision(
            folder=folder,
            checkpoints=Checkpoints(folder.checkpoints, keep=1, keep_every=0),
            actors=SimpleNamespace(spawn_reference=lambda: TrainerClient(mesh)),
        )
        console = Console(file=io.StringIO())
        with MetricsLogger(folder, trackers=(), steps_done=state.get("step", 0), console=console) as log:
            run = Run(
                config=config,
                environment=environment,
                evaluation_sets=build_sets(environment, {}, seed=0),
                tokenizer=load_tokenizer(tmp_path / "tokenizer"),
                trainer=trainer,
                generator=None,
                log=log,
                supervision=supervision,
                state=state,
            )
            asyncio.run(train(run))
        return read_jsonl(folder.metrics)

    return take


def test_the_margin_of_held_out_pairs_rises_from_zero_and_a_resumed_run_keeps_its_reference(take_steps):
    lines = take_steps(6, {})
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    first, last = lines[0], lines[-1]
    # At the start the policy is the reference. So the loss is then log 2, whatever weights the shared trainer has.
    assert first["eval/dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["eval/dpo/loss"] < first["eval/dpo/loss"]
    # Every chosen answer begins with the letter a. So a few steps also raise the margin of prompts that were not trained on.
    assert last["eval/dpo/margin"] > 0 and last["eval/dpo/accuracy"] > 0.9
    versions = [line["policy_version"] for line in lines[1:]]
    assert [version - versions[0] for version in versions] == [0, 1, 2, 3, 4, 5]
    for line in lines[1:]:
        assert line["grad_norm"] > 0 and line["updates_skipped"] == 0 and "nonfinite" not in line
        assert line["dpo/margin"] == pytest.approx(line["dpo/reward_chosen"] - line["dpo/reward_rejected"], abs=1e-6)
    assert [line["step"] for line in lines if "eval/dpo/accuracy" in line] == [0, 2, 4, 6]

    resumed = take_steps(7, {"step": 6, "cursor": 6 * PAIRS_PER_STEP})
    assert [line["step"] for line in resumed] == [0, 1, 2, 3, 4, 5, 6, 7]
    # If the resumed run took its current policy as the reference, this margin would be 0.
    assert abs(resumed[-1]["dpo/margin"]) > 1e-3

    explained = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = {name for line in resumed for name in line}
    assert sorted(name for name in names if f"`{name}`" not in explained) == []
