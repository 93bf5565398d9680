"""Measures the held-out accuracy and the time of a whole run: supervised steps, then GRPO.

This program starts the run as a user would, with `python -m controllers.grpo`. The process of this command is called
the controller. If the accuracy or the time misses its target, the exit status is 1.

The config is `small` on a GPU and `tiny` on a CPU. Unknown flags are passed on to the controller, for example
`--steps 20` for a short trial. At the end of the run this program records the result, even if the run was stopped
early. If this program was killed, a second call with `--read FOLDER` records the result.
"""

import argparse
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import results
from controllers import config_file
from controllers.grpo import GRPOConfig
from controllers.observe.report import write_report
from controllers.observe.run_folder import RunFolder, read_jsonl
from rl_actors import memory_estimate

ACCURACY, SECONDS = 0.95, 480.0
"""Targets: the held-out accuracy after the last step, and the seconds from the start of the command to its end."""
END_TIMEOUT = 60.0
"""Seconds that the controller may take to close after Ctrl-C or the time limit. After this time it is killed."""


def run(arguments: list[str], limit: float) -> tuple[float, int]:
    """Run the controller until it ends, or for `limit` seconds. Returns the seconds that it took and its exit status."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "controllers.grpo", *arguments])

    def pass_on(signum: int, frame: object) -> None:
        process.terminate()

    # If this process gets SIGTERM, the controller gets it too, so that it can close its actors and write its report.
    signal.signal(signal.SIGTERM, pass_on)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit:g} s", flush=True)
        process.terminate()
    except KeyboardInterrupt:  # the terminal sends Ctrl-C to the controller, too
        pass
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
    return time.perf_counter() - begun, process.wait()


def figures(folder: RunFolder, seconds: float | None) -> dict[str, Any]:
    """Figures of a run, computed from its records.

    seconds: time of the whole command. None: the sum of the step times is used instead.
    """
    config = config_file.from_json(GRPOConfig, folder.config.read_text())
    records = read_jsonl(folder.metrics)
    sft = [record for record in records if record["phase"] == "sft"]
    grpo = [record for record in records if record["phase"] == "grpo"]
    accuracies_before, accuracies = _accuracies(sft), _accuracies(grpo)
    part_seconds = {
        "sft": _total("time/step", sft),
        "grpo": _total("time/step", grpo),
        "generate": _total("time/generate", grpo),
        "train": _total("time/train", grpo),
        "sync": _total("time/sync", grpo),
    }
    step_seconds = part_seconds["sft"] + part_seconds["grpo"]
    run_seconds = seconds if seconds is not None else step_seconds
    differences = [record.get("logprob_diff/mean") or 0.0 for record in grpo]
    return {
        "accuracy_before": accuracies_before[-1] if accuracies_before else 0.0,
        "accuracy": accuracies[-1] if accuracies else 0.0,
        "accuracy_best": max(accuracies, default=0.0),
        "seconds": round(run_seconds, 1),
        "seconds_beside_steps": round(run_seconds - step_seconds, 1),
        "first_step_seconds": round(_total("time/step", [*sft, *grpo][:1]), 1),
        "sft_steps": len(sft),
        "grpo_steps": len(grpo),
        **{f"{name}_seconds": round(value, 1) for name, value in part_seconds.items()},
        "logprob_diff_mean": max(differences, default=0.0),
        "tokens_trained": _total("tokens/trained", records),
        "tokens_generated": _total("tokens/generated", records),
        "parameters": memory_estimate.memory(config.trainer).parameters // memory_estimate.FLOAT32,
        "steps_planned": config.steps,
    }


def _total(key: str, records: list[dict[str, Any]]) -> float:
    """The sum of a metric over all records. A value of null counts as 0."""
    return sum(record[key] or 0 for record in records)


def _accuracies(records: list[dict[str, Any]]) -> list[float]:
    """The held-out accuracies of the steps that measured one."""
    found = [record.get("eval/reward") for record in records]
    return [accuracy for accuracy in found if accuracy is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "small" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--config", default=default, help="a config of controllers.grpo")
    parser.add_argument("--output-dir", type=Path, help="folder of the run; default: runs/learns-<time>")
    parser.add_argument("--limit", type=float, default=540.0, help="stop the run after this many seconds")
    parser.add_argument(
        "--read", type=Path, metavar="FOLDER", help="start no run; record the result of the run in this folder"
    )
    options, flags = parser.parse_known_args()
    folder = RunFolder(options.read or options.output_dir or f"runs/learns-{datetime.now():%Y%m%d-%H%M%S}")
    if options.read:
        name, seconds = folder.path.name, None
    elif folder.holds_run:
        sys.exit(f"{folder.path} already holds a run; --read {folder.path} records its result")
    else:
        name = options.config + ", changed" * bool(flags)
        seconds, _ = run(["--config", options.config, "--output-dir", str(folder.path), *flags], options.limit)
    if not folder.holds_run:
        sys.exit(f"{folder.path} holds no run")
    write_report(folder.path)
    found = figures(folder, seconds)
    accuracies = f"{found['accuracy_before']:.3f} to {found['accuracy']:.3f}"
    results.add("learns", name, found, f"held-out accuracy {accuracies} in {found['seconds']:.0f} s")
    missed = []
    if found["accuracy"] < ACCURACY:
        missed.append(f"accuracy {found['accuracy']:.3f}, below {ACCURACY}")
    if found["seconds"] > SECONDS:
        missed.append(f"{found['seconds']:.0f} s, above {SECONDS:.0f}")
    sys.exit("missed targets: " + "; ".join(missed) if missed else None)


if __name__ == "__main__":
    main()
