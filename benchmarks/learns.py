"""A whole run as a user starts it, supervised steps and then GRPO: held-out accuracy and time against their targets.

The config is `small` on a GPU and `tiny` on a CPU. Further flags go to the controller: `--steps 20` makes a short rehearsal. The line of
results and the curve learns-<config>.png are also written for a run that was stopped; for a run that was killed, --read writes them.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import results
from controllers.cli import config_from_json
from controllers.grpo import GRPOConfig
from controllers.report import write_report
from controllers.run_folder import RunFolder, read_jsonl
from rl_actors import memory_estimate

ACCURACY, SECONDS = 0.95, 480.0
"""Targets: held-out accuracy after the last step, and seconds from the start of the command to its end."""
END_TIMEOUT = 60.0
"""Seconds that a run may take to stop."""


def run(arguments: list[str], limit: float) -> tuple[float, int]:
    """Run the controller to its end, or for `limit` seconds. Returns the seconds that it took and its exit status."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "controllers.grpo", *arguments])

    def pass_on(signum: int, frame: object) -> None:
        process.terminate()

    # The controller closes its actors and writes its report, also when this process is told to stop.
    signal.signal(signal.SIGTERM, pass_on)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit:g} s", flush=True)
        process.terminate()
    except KeyboardInterrupt:  # the terminal sends it to the controller as well
        pass
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
    return time.perf_counter() - begun, process.wait()


def figures(folder: RunFolder, seconds: float | None) -> dict[str, Any]:
    """Figures of a run from its records. seconds: of the whole command; None: unknown, then only the time of the steps counts."""
    config = config_from_json(GRPOConfig, folder.config.read_text())
    records = read_jsonl(folder.metrics)
    sft = [record for record in records if record["phase"] == "sft"]
    grpo = [record for record in records if record["phase"] == "grpo"]
    accuracies_before, accuracies = _accuracies(sft), _accuracies(grpo)
    spent = {
        "sft": _total("time/step", sft),
        "grpo": _total("time/step", grpo),
        "generate": _total("time/generate", grpo),
        "train": _total("time/train", grpo),
        "sync": _total("time/sync", grpo),
    }
    of_steps = spent["sft"] + spent["grpo"]
    in_all = seconds if seconds is not None else of_steps
    differences = [record.get("logprob_diff/mean") or 0.0 for record in grpo]
    return {
        "accuracy_before": accuracies_before[-1] if accuracies_before else 0.0,
        "accuracy": accuracies[-1] if accuracies else 0.0,
        "accuracy_best": max(accuracies, default=0.0),
        "seconds": round(in_all, 1),
        "seconds_beside_steps": round(in_all - of_steps, 1),
        "first_step_seconds": round(_total("time/step", records[:1]), 1),
        "sft_steps": len(sft),
        "grpo_steps": len(grpo),
        **{f"{name}_seconds": round(value, 1) for name, value in spent.items()},
        "logprob_diff_mean": max(differences, default=0.0),
        "tokens_trained": _total("tokens/trained", records),
        "tokens_generated": _total("tokens/generated", records),
        "parameters": memory_estimate.memory(config.trainer).parameters // memory_estimate.FLOAT32,
        "steps_planned": config.steps,
    }


def _total(key: str, records: list[dict[str, Any]]) -> float:
    return sum(record[key] or 0 for record in records)


def _accuracies(records: list[dict[str, Any]]) -> list[float]:
    """The held-out accuracies of the steps that measured one."""
    found = [record.get("validation/accuracy") for record in records]
    return [accuracy for accuracy in found if accuracy is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "small" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--config", default=default, help="a config of the controller")
    parser.add_argument("--output-dir", type=Path, help="folder of the run; default: runs/learns-<time>")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which the run is stopped")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="run nothing: read the records of this run")
    options, flags = parser.parse_known_args()
    folder = RunFolder(options.read or options.output_dir or f"runs/learns-{datetime.now():%Y%m%d-%H%M%S}")
    if options.read:
        name, seconds = folder.path.name, None
    elif folder.holds_run:
        sys.exit(f"{folder.path} holds a run; --read reads it")
    else:
        name = options.config + ", changed" * bool(flags)
        seconds, _ = run(["--config", options.config, "--output-dir", str(folder.path), *flags], options.limit)
    if not folder.holds_run:
        sys.exit(f"{folder.path} holds no run")
    write_report(folder.path)
    found = figures(folder, seconds)
    results.add("learns", name, found)
    shutil.copy(folder.reward_png, results.FOLDER / f"learns-{options.config}.png")
    missed = []
    if found["accuracy"] < ACCURACY:
        missed.append(f"accuracy {found['accuracy']:.3f}, not {ACCURACY}")
    if found["seconds"] > SECONDS:
        missed.append(f"{found['seconds']:.0f} s, not {SECONDS:.0f}")
    sys.exit("missed: " + "; ".join(missed) if missed else None)


if __name__ == "__main__":
    main()
