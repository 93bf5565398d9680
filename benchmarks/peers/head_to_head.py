"""GRPO steps of `controllers.grpo` compared with TRL's GRPOTrainer: the same random weights, prompts, lengths, optimizer and GPU.

TRL runs in each of SETTINGS, one after the other, and the fastest counts. Ours runs as `--config qwen3_<size>_one_gpu`. The first two
steps of a side do not count. --python names the interpreter of an environment with TRL; default: this one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import loop_run, random_weights, results
from benchmarks.harness.gpus import Watch
from benchmarks.harness.loop_run import LIMIT, MIB_PER_GIB, WARM_UP
from benchmarks.peers.trl_steps import Settings
from configs.qwen3 import MODELS

SETTINGS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "sdpa, microbatch 32": {"microbatch": 32},
    "sdpa, microbatch 32, bfloat16 masters": {"microbatch": 32, "masters": "bfloat16"},
    "flash_attention_4, microbatch 32": {"microbatch": 32, "attention": "flash_attention_4"},
    "sdpa, checkpointing, microbatch 64": {"microbatch": 64, "checkpointing": True},
}


def theirs(settings: Settings, python: str) -> dict[str, Any] | None:
    """The figures of TRL in one setting, or None if it fails there, for example for lack of memory."""
    values = {field: getattr(settings, field) for field in settings.__dataclass_fields__}
    command = [python, str(Path(__file__).with_name("trl_steps.py")), json.dumps(values)]
    watch = Watch("memory.used")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        print(f"TRL did not end within {LIMIT:g} s", flush=True)
        return None
    finally:
        watch.stop()
    for line in answer.stdout.splitlines():
        if line.startswith("FIGURES "):
            figures = json.loads(line.removeprefix("FIGURES "))
            peaks = watch.between().values()
            return figures | {"device_peak_gib": [round(max(values) / MIB_PER_GIB, 1) for values in peaks]}
    print(f"TRL ended with {answer.returncode}:\n{answer.stderr[-2000:]}", flush=True)
    return None


def median(figures: dict[str, Any]) -> float:
    return statistics.median(figures["seconds"][WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="0_6b" if torch.cuda.is_available() else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    arguments, further = parser.parse_known_args()
    model = loop_run.model_of(arguments.model)
    config = "tiny" if arguments.model == "tiny" else f"qwen3_{arguments.model}_one_gpu"
    with tempfile.TemporaryDirectory(dir=random_weights.scratch(model)) as directory:
        loop_run.write_model(model, Path(directory))
        settings = loop_run.settings_of(arguments.model, directory, arguments.steps)
        our_figures = loop_run.measure(settings, config, 0, further)
        print(f"ours: {our_figures}", flush=True)
        by_setting = {}
        for name in arguments.settings:
            begin = time.perf_counter()
            figures = theirs(replace(settings, **SETTINGS[name]), arguments.python)
            print(f"TRL, {name}: {figures} after {time.perf_counter() - begin:.0f} s", flush=True)
            if figures is not None:
                by_setting[name] = figures
    if not by_setting:
        raise SystemExit("TRL ran in no setting")
    best = min(by_setting, key=lambda name: median(by_setting[name]))
    our_seconds = median(our_figures)
    their_seconds = median(by_setting[best])
    num_tokens = settings.groups * settings.group_size * settings.new_tokens
    figures = {
        "step_seconds": our_seconds,
        "peer_step_seconds": their_seconds,
        "ratio": their_seconds / our_seconds,
        "tokens_per_second": num_tokens / our_seconds,
        "peer_tokens_per_second": num_tokens / their_seconds,
        "setting": best,
        "ours": our_figures,
        "settings": {name: {**by_setting[name], "model": ""} for name in by_setting},
    }
    text = results.against(our_seconds, their_seconds, "s a step", digits=2)
    results.add("head_to_head", f"{arguments.model} TRL", figures, f"{text}; TRL with {best}")


if __name__ == "__main__":
    main()
