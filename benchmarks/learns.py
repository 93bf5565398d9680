"""A run as a user starts it, supervised steps and then GRPO: held-out accuracy and time against their targets.

On a GPU the config is `small`, on a CPU `tiny`. Further flags go to the controller: `--steps 20` makes a short rehearsal. The line of
figures and the curve, learns-<config>.png beside it, are written also of a run that was stopped; --read makes them of one that was killed.
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
"""Targets: held-out accuracy after the last step, and the time from the command to its end."""
END_TIMEOUT = 60.0
"""Seconds until a run that is told to stop must have ended."""


def run(arguments: list[str], limit: float) -> tuple[float, int]:
    """Run the controller to its end, or for `limit` seconds; returns the seconds that it took and its exit status."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "controllers.grpo", *arguments])
    # It ends its actors and writes its report, however this process is asked to stop.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit:g} s", flush=True)
        process.terminate()
    except KeyboardInterrupt:  # the terminal told the controller, too
        pass
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
    return time.perf_counter() - begun, process.wait()


def figures(folder: RunFolder, seconds: float | None) -> dict[str, Any]:
    """seconds: of the whole command; None: not known, and the time of the steps alone counts."""
    config = config_from_json(GRPOConfig, folder.config.read_text())
    records = read_jsonl(folder.metrics)
    phases = {name: [record for record in records if record["phase"] == name] for name in ("sft", "grpo")}

    def total(key: str, of: list[dict[str, Any]]) -> float:
        return sum(record[key] or 0 for record in of)

    def accuracies(phase: str) -> list[float]:
        return [
            record["validation/accuracy"] for record in phases[phase] if record.get("validation/accuracy") is not None
        ]

    spent = {name: total("time/step", of) for name, of in phases.items()}
    parts = {name: total(f"time/{name}", phases["grpo"]) for name in ("generate", "train", "sync")}
    in_all = seconds if seconds is not None else sum(spent.values())
    return {
        "accuracy_before": (accuracies("sft") or [0.0])[-1],
        "accuracy": (accuracies("grpo") or [0.0])[-1],
        "accuracy_best": max(accuracies("grpo"), default=0.0),
        "seconds": round(in_all, 1),
        "seconds_beside_steps": round(in_all - sum(spent.values()), 1),
        "first_step_seconds": round(total("time/step", records[:1]), 1),
        **{f"{name}_steps": len(of) for name, of in phases.items()},
        **{f"{name}_seconds": round(value, 1) for name, value in (spent | parts).items()},
        "logprob_diff_mean": max((record.get("logprob_diff/mean") or 0.0 for record in phases["grpo"]), default=0.0),
        "tokens_trained": total("tokens/trained", records),
        "tokens_generated": total("tokens/generated", records),
        "parameters": memory_estimate.memory(config.trainer).parameters // memory_estimate.FLOAT32,
        "steps_planned": config.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "small" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--config", default=default, help="as the controller takes it")
    parser.add_argument("--output-dir", type=Path, help="folder of the run; default: runs/learns-<time>")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which the run is stopped")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="run nothing: read a run that is there")
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
    missed = [
        *([f"accuracy {found['accuracy']:.3f}, not {ACCURACY}"] if found["accuracy"] < ACCURACY else []),
        *([f"{found['seconds']:.0f} s, not {SECONDS:.0f}"] if found["seconds"] > SECONDS else []),
    ]
    sys.exit("missed: " + "; ".join(missed) if missed else None)


if __name__ == "__main__":
    main()
