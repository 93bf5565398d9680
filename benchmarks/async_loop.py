"""Compares rollouts that run ahead of the trainer with rollouts that wait for the trainer, in runs with slow rewards.

python -m benchmarks async_loop --staleness 0 2 --steps 60 --seconds 1

The runs are whole runs of controllers.grpo, one after another on the same machine. Each run has the task, model and
seed of the config `tiny`, and one optimizer step in a GRPO step. The runs differ only in rollouts.max_staleness.
The rewards of a group come after a waiting time and need almost no computation, like the rewards of a judge or a
sandbox on another machine. The waiting time is random: exponentially distributed with the mean `--seconds`, but at most
four times the mean. A problem has the same waiting time in every run. Groups do not wait for the rewards of others.
The age of a group is the trainer's policy_version at the beginning of the step that trains on the group, minus the
version that sampled the group's oldest token. The program fails if an age is above max_staleness.
For each run the program prints the rollouts per second, the median times of a step, of generating and of training, the
final held-out accuracy, the largest and the mean age, and the rollouts per second divided by those of the first run.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.harness import results
from benchmarks.learns import run
from configs.tiny import tiny
from controllers import config_file
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig, Problem, build_environment
from controllers.grpo import GRPOConfig
from controllers.observe.run_folder import RunFolder, read_jsonl

SCORED_AT_ONCE = 4096
"""Largest number of groups that wait for their rewards at the same time. It is so large that groups do not wait for
each other."""
LONGEST = 4.0
"""Longest waiting time of the rewards of a group, as a multiple of the mean."""


class SlowAddition:
    """The additions of the config `tiny`. All rewards of a group come together, after the group's waiting time."""

    def __init__(self, environment: Any, seconds: float) -> None:
        self.environment, self.seconds = environment, seconds

    def problem(self, index: int) -> Problem:
        return self.environment.problem(index)

    def held_out(self) -> list[Problem]:
        return self.environment.held_out()

    def reward(self, problem: Problem, completion: str) -> float:
        return self.environment.reward(problem, completion)

    async def rewards(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        draw = Random(problem.prompt).expovariate(1.0)
        await asyncio.sleep(self.seconds * min(draw, LONGEST))
        return [self.environment.reward(problem, completion) for completion in completions]


def slow_addition(*, seed: int, num_held_out: int, seconds: float) -> SlowAddition:
    """The environment of a run. Held-out problems have waiting times, too, so an evaluation takes a few seconds."""
    config = replace(tiny().environment, seed=seed, num_held_out=num_held_out)
    return SlowAddition(build_environment(config), seconds)


def make_config(staleness: int, steps: int, seconds: float) -> GRPOConfig:
    config = tiny()
    environment = EnvironmentConfig(
        task="benchmarks.async_loop:slow_addition",
        options={"seconds": seconds},
        num_held_out=config.environment.num_held_out,
        reward_concurrency=SCORED_AT_ONCE,
    )
    return replace(
        config,
        environment=environment,
        steps=steps,
        updates_per_step=1,
        epochs_per_step=1,
        evaluate_every=steps,
        checkpoint_every=0,
        rollouts=replace(config.rollouts, max_staleness=staleness, groups_per_step=96),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=5e-4, warmup_steps=2, min_ratio=0.1),
    )


def figures(folder: RunFolder, config: GRPOConfig) -> dict[str, Any]:
    """The figures of a finished run. Raises RuntimeError if a step trained on a group of an age above max_staleness."""
    steps = [record for record in read_jsonl(folder.metrics) if record["phase"] == "grpo"]
    ages = [record["age/max"] for record in steps if "age/max" in record]
    bound = config.rollouts.max_staleness
    if max(ages) > bound:
        raise RuntimeError(f"a step trained on a group of age {max(ages)}, but max_staleness={bound}")
    # The first steps do not count, because they fill the queue. The last step does not count, because it evaluates.
    counted = steps[bound + 1 : -1]
    seconds = [record["time/step"] for record in counted]
    groups = config.rollouts.groups_per_step * config.rollouts.group_size
    return {
        "rollouts_per_second": groups * len(seconds) / sum(seconds),
        "step_seconds_median": median(seconds),
        "generate_seconds_median": median(record["time/generate"] for record in counted),
        "train_seconds_median": median(record["time/train"] for record in counted),
        "accuracy": steps[-1]["eval/reward"],
        "age_max": max(ages),
        "age_mean": sum(record.get("age/mean", 0.0) for record in steps) / len(steps),
        "steps": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[0, 2], help="values of max_staleness, one run each"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="mean waiting time of the rewards of a group")
    parser.add_argument("--limit", type=float, default=900.0, help="stop a run after this many seconds")
    options = parser.parse_args()
    if options.steps < max(options.staleness) + 4:
        parser.error(
            f"--steps {options.steps}; it must be at least {max(options.staleness) + 4}, because the first "
            f"{max(options.staleness) + 1} steps and the last step are not counted"
        )
    first: dict[str, Any] | None = None
    for staleness in options.staleness:
        config = make_config(staleness, options.steps, options.seconds)
        with tempfile.TemporaryDirectory() as directory:
            file, folder = Path(directory) / "config.json", RunFolder(Path(directory) / "run")
            file.write_text(config_file.to_json(config))
            run(["--config", str(file), "--output-dir", str(folder.path)], options.limit)
            if not folder.metrics.exists():
                sys.exit(f"the run with max_staleness={staleness} wrote no metrics")
            found = figures(folder, config)
        first = first or found
        found["ratio_to_first"] = found["rollouts_per_second"] / first["rollouts_per_second"]
        text = (
            f"{results.against(found['rollouts_per_second'], first['rollouts_per_second'], 'rollouts/s')}; held-out accuracy "
            f"{found['accuracy']:.3f} against {first['accuracy']:.3f}; largest age {found['age_max']} versions"
        )
        results.add("async_loop", f"staleness {staleness}, rewards of {options.seconds:g} s", found, text)


if __name__ == "__main__":
    main()
