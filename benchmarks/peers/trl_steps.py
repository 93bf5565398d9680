"""Runs a few steps of TRL's GRPOTrainer and prints a line of JSON: seconds of each step, peak memory of the process, seconds to start.

Imports nothing of this project, so it runs in any environment with TRL: python benchmarks/peers/trl_steps.py '{"model": …}'.
The fields of the argument are those of `Settings`.
"""

import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str  # directory with weights and a tokenizer of words, as loop_run.py writes it
    vocab_size: int
    prompt_tokens: int
    new_tokens: int
    groups: int
    group_size: int
    steps: int
    microbatch: int = 8
    attention: str = "sdpa"
    checkpointing: bool = False
    masters: str = "float32"  # dtype of the weights that the optimizer steps
    bf16: bool = True  # autocast
    vllm: bool = True  # colocated; False: transformers generates
    vllm_share: float = 0.4


def config_of(settings: Settings, output: str) -> Any:
    from trl import GRPOConfig

    num_samples = settings.groups * settings.group_size
    engine = {}
    if settings.vllm:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings.vllm_share,
            "vllm_max_model_length": settings.prompt_tokens + settings.new_tokens,
        }
    return GRPOConfig(
        output_dir=output,
        max_steps=settings.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        per_device_train_batch_size=settings.microbatch,
        gradient_accumulation_steps=num_samples // settings.microbatch,
        num_generations=settings.group_size,
        max_completion_length=settings.new_tokens,
        generation_kwargs={"ignore_eos": True} if settings.vllm else {"min_new_tokens": settings.new_tokens},
        beta=0.0,
        temperature=1.0,
        bf16=settings.bf16,
        use_cpu=not settings.vllm,
        gradient_checkpointing=settings.checkpointing,
        model_init_kwargs={"dtype": settings.masters, "attn_implementation": settings.attention},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **engine,
    )


def parity(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word) for word in re.findall(r"\d+", text)) % 2) for text in completions]


def main() -> None:
    begin = time.perf_counter()
    settings = Settings(**json.loads(sys.argv[1]))
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    prompts = []
    for index in range(settings.groups * settings.steps):
        draw = random.Random(index)
        prompts.append(" ".join(f"w{draw.randrange(2, settings.vocab_size)}" for _ in range(settings.prompt_tokens)))
    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=settings.model,
            reward_funcs=parity,
            args=config_of(settings, output),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(settings.model),
            callbacks=[clock],
        )
        started = time.perf_counter() - begin
        trainer.train()
    # a step lasts from the end of the one before, because TRL generates before `on_step_begin` of transformers' loop
    ends = [clock.marks[0], *clock.marks[1::2]]
    seconds = [round(after - before, 3) for before, after in zip(ends, ends[1:], strict=False)]
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    figures = {
        "seconds": seconds,
        "start_seconds": round(started, 1),
        "mean_lengths": lengths,
        "peak_gib": round(peak, 1),
    }
    print("FIGURES " + json.dumps({**asdict(settings), **figures}), flush=True)


if __name__ == "__main__":
    main()
