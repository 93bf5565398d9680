"""A model that controllers.sft has trained on math_rl's additions until about a third of its answers are right."""

import subprocess
from pathlib import Path

from data_sets import write_additions
from recipes import ROOT

from configs.tiny_chat import write_tiny_chat

ANSWER_PROBABILITY = 0.3
SFT_SECONDS = 1800


def supervised_start(folder: Path) -> Path:
    """Train in this folder, and return the Hugging Face directory of the result."""
    write_tiny_chat(folder / "base")
    write_additions(folder / "additions.jsonl")
    task = ["--environment.task", folder / "additions.jsonl", "--environment.num-held-out", 128, "--max-tokens", 5]
    steps = ["--steps", 600, "--validate-every", 600, "--checkpoint-every", 600, "--sft.batch-size", 256]
    schedule = ["--sft.schedule.kind", "linear_warmup_linear", "--sft.schedule.warmup-steps", 10]
    rate = ["--sft.schedule.learning-rate", 3e-3, "--sft.stop-at-answer-probability", ANSWER_PROBABILITY]
    rows = ["--trainer.rows-per-microbatch", 4, "--trainer.logprob-chunk-tokens", 1 << 14]
    where = ["--trainer.hf-path", folder / "base", "--output-dir", folder / "run"]
    run_module("controllers.sft", "--config", "qwen3", *where, *task, *steps, *schedule, *rate, *rows)
    run_module("controllers.export", folder / "run", folder / "trained")
    return folder / "trained"


def run_module(*words: object) -> None:
    command = [str(ROOT / ".venv/bin/python"), "-m", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SFT_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
