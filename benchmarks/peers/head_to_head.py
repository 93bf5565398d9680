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

from benchmarks.harness import random_weights, results
from benchmarks.harness.gpus import Watch
from benchmarks.learns import run
from benchmarks.peers import timing_task
from benchmarks.peers.trl_steps import Settings
from configs.qwen3 import MODELS
from configs.tiny import tiny
from controllers.observe.run_folder import RunFolder, read_jsonl

TINY = replace(tiny().trainer.model, vocab_size=4096)  # few of the random completions then end early
WARM_UP = 2
LIMIT = 400.0
MIB_PER_GIB = 1024
SETTINGS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "sdpa, microbatch 32": {"microbatch": 32},
    "sdpa, microbatch 32, bfloat16 masters": {"microbatch": 32, "masters": "bfloat16"},
    "flash_attention_4, microbatch 32": {"microbatch": 32, "attention": "flash_attention_4"},
    "sdpa, checkpointing, microbatch 64": {"microbatch": 64, "checkpointing": True},
}


def our_flags(settings: Settings, name: str, folder: Path) -> list[str]:
    config = f"qwen3_{name}_one_gpu" if torch.cuda.is_available() else "tiny"
    options = {"num_words": settings.prompt_tokens, "vocab_size": settings.vocab_size}
    flags = f"""--config {config} --output-dir {folder} --trainer.hf-path {settings.model}
        --task benchmarks.peers.timing_task:Parity --groups {settings.groups} --group-size {settings.group_size}
        --rollouts.max-staleness 0 --max-tokens {settings.new_tokens} --steps {settings.steps} --sft-steps 0
        --evaluate-every 1000000 --no-evaluate-first --checkpoint-every 0 --lr 1e-6"""
    return [*flags.split(), "--alphabet", "", "--environment.options", json.dumps(options)]


def ours(settings: Settings, name: str, further: list[str]) -> dict[str, Any]:
    """The figures of a run of controllers.grpo."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        watch = Watch("memory.used")
        seconds, status = run([*our_flags(settings, name, folder.path), *further], LIMIT)
        watch.stop()
        records = [record for record in read_jsonl(folder.metrics) if record["phase"] == "grpo"]
        if status or len(records) < settings.steps:
            raise SystemExit(f"controllers.grpo ended with {status} after {len(records)} of {settings.steps} steps")
        figures: dict[str, Any] = {"seconds": [record["time/step"] for record in records]}
        for part in ("generate", "train", "sync"):
            figures[part] = round(statistics.median(record[f"time/{part}"] for record in records[WARM_UP:]), 2)
        figures["start_seconds"] = round(seconds - sum(figures["seconds"]), 1)
        figures["mean_lengths"] = [record["tokens/generated"] for record in records]
        figures["device_peak_gib"] = [round(max(values) / MIB_PER_GIB, 1) for values in watch.between().values()]
        return figures


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


def settings_of(name: str, directory: str, steps: int) -> Settings:
    if name == "tiny":
        vocab_size = TINY.vocab_size
        sizes = {"prompt_tokens": 16, "new_tokens": 32, "groups": 8, "group_size": 8, "vllm": False, "bf16": False}
    else:
        vocab_size = MODELS[name].vocab_size
        sizes = {"prompt_tokens": 128, "new_tokens": 256, "groups": 32, "group_size": 16}
    return Settings(model=directory, vocab_size=vocab_size, steps=steps, **sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="0_6b" if torch.cuda.is_available() else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    arguments, further = parser.parse_known_args()
    model = TINY if arguments.model == "tiny" else MODELS[arguments.model]
    with tempfile.TemporaryDirectory(dir=random_weights.scratch(model)) as directory:
        timing_task.write_model(model, Path(directory))
        settings = settings_of(arguments.model, directory, arguments.steps)
        our_figures = ours(settings, arguments.model, further)
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
    results.add("peers", f"{arguments.model} TRL", figures, f"{text}; TRL with {best}")


if __name__ == "__main__":
    main()
