"""A short run of a config, from a Hugging Face directory with random weights. This program starts the run as a user would, with
`python -m controllers.grpo`.

The run has sixteen supervised steps and two GRPO steps. It loads weights, trains, gives the new weights to the generator and samples. The
reward is the share of digits among a completion's characters, because almost untrained weights already earn a part of such a reward. Unknown
flags are passed on to controllers.grpo.
"""

import argparse
import multiprocessing
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import random_weights, results
from benchmarks.harness.gpus import Watch
from benchmarks.learns import run
from configs import CONFIGS
from configs.tiny import addition
from controllers.environments import Environment, Problem, build_environment
from controllers.grpo import GRPOConfig
from controllers.observe.run_folder import RunFolder, read_jsonl

STEPS = 2
LIMIT = 480.0  # seconds after which the run is stopped
MIB_PER_GIB = 1024


def share_of_digits(problem: Problem, completion: str) -> float:
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def digits(*, seed: int, num_held_out: int, **_: Any) -> Environment:
    """Two-digit addition with share_of_digits as its reward. `--environment.task` names this function.

    This function ignores the options of the config's own task.
    """
    config = addition(digits=2)["environment"]
    config.seed, config.num_held_out = seed, num_held_out
    environment = build_environment(config)
    environment.reward = share_of_digits
    return environment


def flags(name: str, weights: Path, folder: Path) -> list[str]:
    values = {
        "--config": name,
        "--trainer.hf-path": weights,
        "--output-dir": folder,
        "--environment.task": "benchmarks.runs:digits",
        "--steps": STEPS,
        "--checkpoint-every": 0,
        "--sft-steps": 16,
        "--sft.stop-at-answer-probability": 1,
        "--sft.batch-size": 1024,
        "--sft.schedule.learning-rate": 3e-4,
        "--sft.schedule.warmup-steps": 5,
    }
    arguments = []
    for flag, value in values.items():
        arguments += [flag, str(value)]
    return arguments


def figures(first: dict[str, Any], updates: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run. first: the record of its first step. updates: the records of the GRPO steps that were not skipped.

    The differences of logprobs and the KL divergence are the largest values of all updates. The times of generating,
    training and syncing are the shortest times of all updates.
    """
    differences = {
        "difference_mean": "logprob_diff/mean",
        "difference_max": "logprob_diff/max",
        "kl": "kl/policy_generator",
    }
    found: dict[str, Any] = {"updates": len(updates)}
    for name, key in differences.items():
        found[name] = max(record[key] for record in updates)
    found["rewards"] = [round(record["reward/mean"], 4) for record in updates]
    for part in ("generate", "train", "sync"):
        found[f"{part}_seconds"] = min(record[f"time/{part}"] for record in updates)
    found["first_step_seconds"] = first["time/step"]
    return found


def measure(name: str, further: list[str]) -> None:
    """Run the config and record the result of the run. Raises SystemExit if the run failed or made no update."""
    config: GRPOConfig = CONFIGS["controllers.grpo"][name]()
    folder = RunFolder(f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
    # If trainer and generator take turns on a GPU (ColocationConfig), the run keeps much of the trainer's state in the host's memory. To leave
    # memory for that state, the weights are then not written to /dev/shm, whose files are in the host's memory, too.
    parent = None if config.colocation.enabled else random_weights.scratch(config.trainer.model)
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        weights = Path(scratch) / "model"
        # A separate process writes the weights and ends. On a GPU, writing creates a CUDA context. In the benchmark's own
        # process this context would take GPU memory during the run.
        arguments = (config.trainer.model, weights)
        writer = multiprocessing.get_context("spawn").Process(target=random_weights.write, args=arguments)
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"the weights were not written: exit status {writer.exitcode}")
        memory = Watch("memory.used")
        seconds, status = run([*flags(name, weights, folder.path), *further], limit=LIMIT)
        memory.stop()
    records = read_jsonl(folder.metrics)
    updates = [record for record in records if record["phase"] == "grpo" and not record.get("skipped")]
    if status or not updates:
        raise SystemExit(f"exit status {status} after {len(records)} steps and {len(updates)} updates: {folder.path}")
    first = next(record for record in records if record["step"] > 0)
    found = figures(first, updates) | {"seconds": round(seconds, 1)}
    peaks = memory.between()
    if peaks:  # empty without a GPU
        found["peak_gib"] = [round(max(values) / MIB_PER_GIB, 1) for values in peaks.values()]
        found["generator_share"] = config.generator.gpu_memory_utilization
    results.add("runs", name + ", changed" * bool(further), found, text(found))


def text(figures: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {figures[f'{part}_seconds']:.3g} s" for part in ("generate", "train", "sync"))
    shown = (
        f"{figures['updates']} updates; mean difference of logprobs {figures['difference_mean']:.1e}, worst token "
        f"{figures['difference_max']:.1e}; shortest times: {parts}; {figures['seconds']:.0f} s in all"
    )
    if "peak_gib" in figures:
        shown += f"; peak {' and '.join(f'{peak:.0f}' for peak in figures['peak_gib'])} GiB"
        shown += f"; vLLM may take {figures['generator_share']:.0%} of its GPU"
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "config", choices=CONFIGS["controllers.grpo"], metavar="CONFIG", help="a config of controllers.grpo"
    )
    arguments, further = parser.parse_known_args()
    measure(arguments.config, further)


if __name__ == "__main__":
    main()
