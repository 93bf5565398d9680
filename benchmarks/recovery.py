"""Measures how many seconds a run takes to its next step after the death of a trainer rank, and after the death of a generator process.

The run is `controllers.grpo --config CONFIG`, which takes supervised steps and then GRPO steps, and replaces dead processes by itself. After
the second GRPO step this program kills a rank of the trainer with signal 9. The run recovers and takes a first step. Two steps later this
program kills a process of the generator. The run must end with exit status 0 and have recorded all its steps. This program passes unknown flags
on to the controller.
"""

import argparse
import random
from datetime import datetime
from pathlib import Path

from benchmarks.harness import results
from configs import CONFIGS
from controllers.observe.run_folder import RunFolder, read_jsonl
from tests.drills.drills import Watch, seconds_to_next_step, strike, wait_until
from tests.drills.resume import Controller

KINDS = ("trainer", "generator")
SFT_STEPS, STEPS = 4, 12
# The first death comes after this many GRPO steps, and the second death this many steps after the first step of the recovered run.
BETWEEN = 2


def flags(config: str, folder: Path) -> list[object]:
    """The arguments of the controller. The run writes a checkpoint every second step, so that a recovery repeats few steps."""
    values: dict[str, object] = {
        "--config": config,
        "--output-dir": folder,
        "--environment.task": "benchmarks.runs:digits",
        "--steps": STEPS,
        "--sft-steps": SFT_STEPS,
        "--sft.stop-at-answer-probability": 1,
        "--checkpoint-every": 2,
        "--evaluate-every": 1000,
    }
    arguments: list[object] = []
    for flag, value in values.items():
        arguments += [flag, value]
    return arguments


def last_step(folder: RunFolder) -> int:
    """The number of the last recorded step; -1 before the first step."""
    lines = read_jsonl(folder.metrics)
    return lines[-1]["step"] if lines else -1


def kill_and_wait(kind: str, step: int, watch: Watch, draw: random.Random) -> tuple[float, int]:
    """Wait until `step` is recorded, and kill a process of this kind, "trainer" or "generator".

    Returns the seconds from the death to the next step, and the number of the step that was then recorded last.

    Raises RuntimeError if the run ends before this next step, or if one of the waits takes longer than
    tests.drills.resume.RUN_TIMEOUT seconds.
    """
    folder, run = watch.folder, watch.run
    wait_until(lambda: last_step(folder) >= step, run, f"step {step}")
    num_restarts = len(read_jsonl(folder.restarts))
    moment = strike(watch, kind, "kill", draw)
    wait_until(
        lambda: any(line["seconds"] is not None for line in read_jsonl(folder.restarts)[num_restarts:]),
        run,
        f"the first step after the death of a {kind}",
    )
    seconds = seconds_to_next_step(read_jsonl(folder.restarts), watch.steps, moment)
    assert seconds is not None
    return seconds, last_step(folder)


def measure(config: str, further: list[str], seed: int) -> None:
    """Run the config, kill the two processes, and record the seconds. Raises SystemExit if the run has not recorded all steps at its end."""
    folder = RunFolder(f"runs/recovery-{config}-{datetime.now():%Y%m%d-%H%M%S}")
    draw = random.Random(seed)
    arguments = [*flags(config, folder.path), *further]
    found: dict[str, float] = {}
    log = Path(f"{folder.path}.log")
    with Controller("controllers.grpo", *arguments, log=log) as run, Watch(run, folder) as watch:
        step = SFT_STEPS
        for kind in KINDS:
            found[f"{kind}_seconds"], step = kill_and_wait(kind, step + BETWEEN, watch, draw)
        run.finish()
        run.wait_until_gone()
    steps = [line["step"] for line in read_jsonl(folder.metrics) if line["step"] > 0]
    if steps != list(range(1, SFT_STEPS + STEPS + 1)):
        raise SystemExit(f"the run has the steps {steps}: {folder.path}")
    text = f"a rank of the trainer {found['trainer_seconds']:.1f} s, a generator {found['generator_seconds']:.1f} s"
    results.add("recovery", config, found, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "config", choices=CONFIGS["controllers.grpo"], metavar="CONFIG", help="a config of controllers.grpo"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of the processes to kill")
    arguments, further = parser.parse_known_args()
    measure(arguments.config, further, arguments.seed)


if __name__ == "__main__":
    main()
