"""Tests that a run whose generator is killed has the same metrics as a run without a kill. Neither run generates rollouts ahead of training."""

import asyncio
import functools
import io
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from configs.tiny import tiny
from controllers.environments import Scorer
from controllers.grpo import GRPOConfig, train
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli, launch
from controllers.run.interruption import Interruption

NUM_STEPS, NUM_SFT_STEPS = 8, 40
# Prefixes of the metrics that the test does not compare: measured times and sizes, values that are computed from
# measured times or sizes, and the number of restarts.
MEASURED = ("time/", "busy/", "tokens/s", "memory/", "weights/", "mfu", "restarts")


def config() -> GRPOConfig:
    made = tiny()
    made.trainer.deterministic = True
    return replace(
        made,
        steps=NUM_STEPS,
        sft_steps=NUM_SFT_STEPS,
        evaluate_every=4,
        checkpoint_every=0,
        rollouts=replace(made.rollouts, groups_per_step=64),
    )


def run(folder: RunFolder) -> tuple[list[dict[str, Any]], str]:
    """Run the config. Returns the records of its steps without the MEASURED keys, and the terminal output."""
    made = config()
    made.validate()
    made, task = launch._with_task(made)
    task = replace(task, scorer=Scorer())
    invocation = cli.Invocation(
        config=made,
        config_name="tiny",
        output_dir=folder.path,
        resume=None,
        eval_only=None,
        save_config=None,
        **dict.fromkeys(("dry_run", "plan", "verbose"), False),
    )
    terminal = io.StringIO()
    assert asyncio.run(launch._train(train, invocation, folder, task, terminal, Interruption())) == 0
    records = []
    for record in read_jsonl(folder.metrics):
        records.append({key: value for key, value in record.items() if not key.startswith(MEASURED)})
    return records, terminal.getvalue()


def kill_generator(folder: RunFolder, step: int, delay: float) -> None:
    """Kill the generator's process `delay` seconds after the record of `step` is written."""
    wait_until(lambda: folder.metrics.exists() and len(read_jsonl(folder.metrics)) > step)
    time.sleep(delay)
    for process in psutil.Process().children(recursive=True):
        try:
            if process.environ().get("RL_ACTORS_PROCESS") == "generator-0":
                os.kill(process.pid, signal.SIGKILL)
        except psutil.Error:
            continue


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_whose_generator_is_killed_has_the_metrics_of_an_undisturbed_run(tmp_path: Path):
    expected, _ = run(RunFolder(tmp_path / "undisturbed"))
    folder = RunFolder(tmp_path / "disturbed")
    step, delay = NUM_SFT_STEPS + random.randrange(NUM_STEPS - 2), random.random()
    print(f"the generator is killed {delay:.2f} s after step {step}")
    killing = threading.Thread(target=functools.partial(kill_generator, folder, step, delay))
    killing.start()
    found, output = run(folder)
    killing.join()
    assert found == expected
    assert "generator has died: generator: the process of rank 0" in output and "generator is back after" in output
    assert read_jsonl(folder.metrics)[-1]["restarts/generator"] == 1
