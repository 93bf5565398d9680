"""Measures a run of the config `tiny`, which `make grpo` runs: the seconds of each part of the start, of the closing, and of the whole command.

python -m benchmarks startup                                  # three starts
python -m benchmarks startup --whole                          # three whole runs
python -m benchmarks startup --whole --seeds 0 1 2 3 4        # one whole run with each seed
python -m benchmarks startup --model 0_6b                     # three starts on a GPU with full caches

Without `--whole` a run has one supervised step (with `--model` none) and one GRPO step. Further flags are passed on to the controller. With
`--model` one more run before the others fills the caches of compiled kernels. The files that a run writes show when each part ends. The part
`imports` begins with the command. `spawn`, `engines` and `first_step` each begin when the part before ends:

- imports: until config.json exists. The run has then checked the config, and built the task and the tokenizer.
- spawn: until the log files of trainer and generator exist.
- engines: until trainer and generator are ready.
- first_step: until the first line of metrics.jsonl. This part contains the first weight sync and the first evaluation.
- closing: from the last line of metrics.jsonl to the end of the command.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import loop_run, results
from configs.qwen3 import MODELS
from controllers.observe.run_folder import RunFolder, read_jsonl

POLL = 0.01  # seconds between two checks of a run's files
PARTS = ("imports", "spawn", "engines", "first_step", "first_line", "closing", "seconds")
"""The measured times of a run, in seconds. first_line is the sum of the four parts before it. seconds is the time of the whole command."""
SHORT = ("--sft-steps", "1", "--steps", "1")


def measure(command: Sequence[str], folder: RunFolder) -> dict[str, float]:
    """Run a command that trains in `folder`, and return the times that PARTS lists. Raises SystemExit if the command fails."""
    begun = time.time()  # the clock of the files' modification times
    process = subprocess.Popen(command)
    configured = _wait(process, lambda: folder.config.exists()) - begun
    logs = folder.path / "logs"
    spawned = _wait(process, lambda: any(logs.glob("trainer-*.log")) and any(logs.glob("generator-*.log"))) - begun
    first_line = _wait(process, lambda: bool(read_jsonl(folder.metrics))) - begun
    status = process.wait()
    seconds = time.time() - begun
    if status:
        raise SystemExit(f"exit status {status} of {' '.join(command)}")
    first_step = read_jsonl(folder.metrics)[0]["time/step"]
    return {
        "imports": configured,
        "spawn": spawned - configured,
        "engines": first_line - first_step - spawned,
        "first_step": first_step,
        "first_line": first_line,
        "closing": begun + seconds - folder.metrics.stat().st_mtime,
        "seconds": seconds,
    }


def _wait(process: subprocess.Popen, is_there: Callable[[], bool]) -> float:
    """Wait until `is_there()` is true, and return the time. Raises SystemExit if the process ends earlier."""
    while not is_there():
        if process.poll() is not None and not is_there():
            raise SystemExit(f"the run ended with exit status {process.returncode} before its first step was recorded")
        time.sleep(POLL)
    return time.time()


def accuracy(folder: RunFolder) -> float:
    """Held-out accuracy at the last evaluation of a run."""
    found = [line.get("eval/reward") for line in read_jsonl(folder.metrics)]
    return [accuracy for accuracy in found if accuracy is not None][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 0, 0], help="a run with each of these seeds")
    parser.add_argument(
        "--whole", action="store_true", help="whole runs instead of runs of one supervised step and one GRPO step"
    )
    parser.add_argument("--model", choices=["tiny", *MODELS], default="tiny", help="as `--config qwen3_…_one_gpu`")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="startup_") as directory:
        measure_all(options, flags, Path(directory))


def command_of(options: argparse.Namespace, seed: int, folder: RunFolder, weights: Path) -> list[str]:
    command = [sys.executable, "-m", "controllers.grpo", "--seed", str(seed)]
    if options.model == "tiny":
        return [*command, "--config", "tiny", "--output-dir", str(folder.path), *(() if options.whole else SHORT)]
    if not weights.is_dir():
        weights.mkdir()
        loop_run.write_model(MODELS[options.model], weights)
    settings = loop_run.settings_of(options.model, str(weights), steps=1)
    return [*command, *loop_run.flags_of(settings, f"qwen3_{options.model}_one_gpu", 0, folder.path)]


def measure_all(options: argparse.Namespace, flags: Sequence[str], directory: Path) -> None:
    runs: list[dict[str, float]] = []
    accuracies: list[float] = []
    steps: list[int] = []
    if options.model != "tiny":
        first = RunFolder(directory / "first")
        filled = measure([*command_of(options, 0, first, directory / "weights"), *flags], first)
        print(f"with the caches as they were: first line after {filled['first_line']:.1f} s", flush=True)
    for number, seed in enumerate(options.seeds):
        folder = RunFolder(directory / f"run-{number}")
        runs.append(measure([*command_of(options, seed, folder, directory / "weights"), *flags], folder))
        accuracies.append(round(accuracy(folder), 3))
        steps.append(read_jsonl(folder.metrics)[-1]["step"])
        times = ", ".join(f"{part} {runs[-1][part]:.1f} s" for part in PARTS)
        print(f"seed {seed}: {steps[-1]} steps, {times}, accuracy {accuracies[-1]}", flush=True)
    figures: dict[str, Any] = {part: round(median(run[part] for run in runs), 2) for part in PARTS}
    figures |= {f"{part}_of_runs": [round(run[part], 2) for run in runs] for part in ("first_line", "seconds")}
    figures["seeds"] = options.seeds
    name, text = "start", f"first line of metrics.jsonl after {figures['first_line']:.1f} s"
    if options.whole:
        figures |= {"accuracy": min(accuracies), "accuracy_of_runs": accuracies, "steps": steps}
        name = "whole run"
        text = f"{figures['seconds']:.0f} s; lowest held-out accuracy {figures['accuracy']:.3f}; {text}"
    else:
        parts = ", ".join(f"{part.replace('_', ' ')} {figures[part]:.1f} s" for part in PARTS[:4])
        text += f" ({parts}); closing {figures['closing']:.1f} s"
    if options.model != "tiny":
        name = f"{options.model} {name}"
    results.add("startup", name + ", changed" * bool(flags), figures, text)


if __name__ == "__main__":
    main()
