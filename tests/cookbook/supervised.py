"""Trains a model with controllers.sft for the test of math_rl, a recipe of tinker-cookbook that trains addition by RL.

The trained model adds well, but answers half of the questions with "no". So the recipe can raise the reward within a few
steps, because the model only has to learn to answer every question.
"""

import subprocess
from pathlib import Path

from data_sets import write_additions
from recipes import ROOT

from configs.tiny_chat import write_tiny_chat

SFT_SECONDS = 1800


def supervised_start(folder: Path) -> Path:
    """Train in this folder, and return the Hugging Face directory of the trained model."""
    write_tiny_chat(folder / "base")
    write_additions(folder / "answered.jsonl")
    write_additions(folder / "half.jsonl", refused=0.5)
    adds = ["--steps", 600, "--sft.schedule.learning-rate", 3e-3, "--sft.stop-at-answer-probability", 0.6]
    train(folder / "base", folder / "answered.jsonl", folder / "adds", *adds)
    refuses = ["--steps", 40, "--sft.schedule.learning-rate", 1e-3]
    train(folder / "adds", folder / "half.jsonl", folder / "trained", *refuses)
    return folder / "trained"


def train(base: Path, task: Path, trained: Path, *flags: object) -> None:
    """Train the model in the directory `base` on the conversations in the file `task`, and export the model to `trained`."""
    run = trained.with_name(f"run-{trained.name}")
    where = ["--trainer.hf-path", base, "--environment.task", task, "--output-dir", run]
    rows = ["--trainer.max-sequence-length", 256, "--trainer.tokens-per-row", 256, "--trainer.rows-per-microbatch", 32]
    fixed = ["--environment.num-held-out", 128, "--max-tokens", 5, "--evaluate-every", 600, "--sft.batch-size", 128]
    schedule = ["--sft.schedule.kind", "linear_warmup_linear", "--sft.schedule.warmup-steps", 10]
    chunk = ["--trainer.logprob-chunk-tokens", 1 << 14]
    run_module("controllers.sft", "--config", "qwen3", *where, *rows, *fixed, *schedule, *chunk, *flags)
    run_module("controllers.program.export", run, trained)


def run_module(*words: object) -> None:
    command = [str(ROOT / ".venv/bin/python"), "-m", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SFT_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
