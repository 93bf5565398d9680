"""Runs `controllers.grpo` on the timing task and returns the seconds of its steps, for benchmarks of the whole loop."""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import random_weights
from benchmarks.harness.gpus import Watch
from benchmarks.learns import run
from benchmarks.peers import timing_task
from benchmarks.peers.trl_steps import Settings
from configs.qwen3 import MODELS
from configs.tiny import tiny
from controllers.observe.run_folder import RunFolder, read_jsonl
from rl_actors import ModelConfig

TINY = replace(tiny().trainer.model, vocab_size=4096)  # few of the random completions then end early
WARM_UP = 2
LIMIT = 400.0
MIB_PER_GIB = 1024


def model_of(name: str) -> ModelConfig:
    """The model of a size in MODELS, or of "tiny"."""
    return TINY if name == "tiny" else MODELS[name]


def write_model(model: ModelConfig, directory: Path) -> None:
    """Write a Hugging Face directory with random weights and the timing task's tokenizer of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    random_weights.write(model, directory)
    vocabulary = [
        timing_task.PAD,
        timing_task.END,
        *(f"w{index}" for index in range(timing_task.FIRST_TOKEN, model.vocab_size)),
    ]
    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=timing_task.PAD)
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=timing_task.PAD, eos_token=timing_task.END)
    tokenizer.save_pretrained(directory)


def settings_of(name: str, directory: str, steps: int) -> Settings:
    """The sizes of a step of the model in this directory."""
    if name == "tiny":
        sizes = {"prompt_tokens": 16, "new_tokens": 32, "groups": 8, "group_size": 8, "vllm": False, "bf16": False}
    else:
        sizes = {"prompt_tokens": 128, "new_tokens": 256, "groups": 32, "group_size": 16}
    return Settings(model=directory, vocab_size=model_of(name).vocab_size, steps=steps, **sizes)


def flags_of(settings: Settings, config: str, staleness: int, folder: Path) -> list[str]:
    options = {"num_words": settings.prompt_tokens, "vocab_size": settings.vocab_size}
    flags = f"""--config {config} --output-dir {folder} --trainer.hf-path {settings.model}
        --task benchmarks.peers.timing_task:Parity --groups {settings.groups} --group-size {settings.group_size}
        --rollouts.max-staleness {staleness} --max-tokens {settings.new_tokens} --steps {settings.steps} --sft-steps 0
        --updates-per-step 1 --epochs-per-step 1 --evaluate-every 1000000 --no-evaluate-first --checkpoint-every 0 --lr 1e-6"""
    alphabet = "auto" if config == "tiny" else ""  # auto: the dimensions of the directory, too
    return [*flags.split(), "--alphabet", alphabet, "--environment.options", json.dumps(options)]


def measure(settings: Settings, config: str, staleness: int, further: list[str]) -> dict[str, Any]:
    """The figures of a run; those of a part of a step are medians. Raises SystemExit if the run fails."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        watch = Watch("memory.used")
        seconds, status = run([*flags_of(settings, config, staleness, folder.path), *further], LIMIT)
        watch.stop()
        records = [record for record in read_jsonl(folder.metrics) if record["phase"] == "grpo"]
    if status or len(records) < settings.steps:
        raise SystemExit(f"controllers.grpo ended with {status} after {len(records)} of {settings.steps} steps")
    steps = [record["time/step"] for record in records]
    counted = records[WARM_UP:]
    return {
        "seconds": steps,
        **{
            part: statistics.median(record[f"time/{part}"] for record in counted)
            for part in ("generate", "train", "sync")
        },
        "start_seconds": seconds - sum(steps),
        "mean_lengths": [record["tokens/generated"] for record in records],
        "logprob_diff": max(record["logprob_diff/mean"] for record in records),
        "device_peak_gib": [round(max(values) / MIB_PER_GIB, 1) for values in watch.between().values()],
    }


def default_config(name: str) -> str:
    """The config as shipped for this model on the visible GPUs."""
    if not torch.cuda.is_available():
        return "tiny"
    return f"qwen3_{name}" if torch.cuda.device_count() > 1 else f"qwen3_{name}_one_gpu"
