"""Seconds of a GRPO step of `controllers.grpo`, with random weights: synchronous, and with rollouts that run ahead of the trainer.

The second run is compared with the slower of generating and training, each alone, as the synchronous run measured them. The first two
steps of a run do not count. Further flags go to the controller.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import loop_run, random_weights, results
from configs.qwen3 import MODELS


def mean_step(figures: dict[str, Any]) -> float:
    """The mean, because steps of a run whose rollouts run ahead may alternate."""
    return statistics.fmean(figures["seconds"][loop_run.WARM_UP :])


def text(figures: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {figures['synchronous'][part]:.2f} s" for part in ("generate", "train", "sync"))
    line = f"step {figures['step_seconds']:.2f} s ({parts}), {figures['tokens_per_second']:,.0f} tokens/s"
    if "ahead" not in figures:
        return line
    ahead = results.against(figures["ahead_step_seconds"], figures["bound_seconds"], "s", digits=2)
    return f"{line}; staleness {figures['staleness']}: {ahead} of the slower part alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=["tiny", *MODELS])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staleness", type=int, default=1, help="of the second run; 0: none")
    arguments, further = parser.parse_known_args()
    model = loop_run.model_of(arguments.model)
    config = loop_run.default_config(arguments.model)
    with tempfile.TemporaryDirectory(dir=random_weights.scratch(model)) as directory:
        loop_run.write_model(model, Path(directory))
        settings = loop_run.settings_of(arguments.model, directory, arguments.steps)
        synchronous = loop_run.measure(settings, config, 0, further)
        seconds = mean_step(synchronous)
        num_tokens = settings.groups * settings.group_size * settings.new_tokens
        figures = {"step_seconds": seconds, "tokens_per_second": num_tokens / seconds, "synchronous": synchronous}
        if arguments.staleness:
            ahead = loop_run.measure(settings, config, arguments.staleness, further)
            bound = max(synchronous["generate"], synchronous["train"])
            figures |= {
                "staleness": arguments.staleness,
                "ahead_step_seconds": mean_step(ahead),
                "ahead_tokens_per_second": num_tokens / mean_step(ahead),
                "bound_seconds": bound,
                "ratio": bound / mean_step(ahead),
                "ahead": ahead,
            }
    results.add("grpo_step", f"{arguments.model} {config}", figures, text(figures))


if __name__ == "__main__":
    main()
