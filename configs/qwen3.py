"""Configs of GRPO, SFT and a Tinker server for models of Qwen3's shapes, on H200 GPUs (139 GiB).

With a size in its name, such as `qwen3_4b`, a config has random weights and two-digit addition, and
downloads nothing. `--trainer.hf-path DIR` reads weights, `--alphabet ""` takes DIR's tokenizer, and
`python -m benchmarks random_weights 4b DIR` makes a DIR of random weights. Others take any size.
"""

from dataclasses import replace
from typing import TypedDict

import torch

from configs.tiny import addition, sft_phase
from controllers.algorithms.schedules import ScheduleConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.chat import ChatConfig
from controllers.rollouts.groups import RolloutConfig
from controllers.run.colocation import ColocationConfig
from controllers.sft import SFTConfig, SFTPhaseConfig
from controllers.tinker_server.config import ServeConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig

MODELS = {
    "0_6b": ModelConfig(),
    "1_7b": ModelConfig(hidden_size=2048, intermediate_size=6144),
    "4b": ModelConfig(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "8b": ModelConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
}


class _Own(TypedDict):
    trainer: TrainerConfig
    generator: GeneratorConfig
    chat: ChatConfig
    max_tokens: int


def qwen3() -> GRPOConfig:
    """GRPO with your own model, of the size in `--trainer.hf-path` (directory or id).

    One GPU, or the CPU.
    """
    return GRPOConfig(
        **_own(),
        steps=100,
        rollouts=RolloutConfig(groups_per_step=32, group_size=8),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=2e-6, warmup_steps=5),
    )


def qwen3_sft() -> SFTConfig:
    """SFT of your own model, on answers or on the assistant's messages."""
    schedule = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-5, warmup_steps=10)
    return SFTConfig(**_own(), steps=200, sft=SFTPhaseConfig(batch_size=64, schedule=schedule))


def qwen3_server() -> ServeConfig:
    """A Tinker server of your own model, on one GPU or the CPU.

    `--serve-as NAME=DIRECTORY` names the model and its Hugging Face directory with a tokenizer.
    """
    own = _own()
    return ServeConfig(name="qwen3", trainer=own["trainer"], generator=own["generator"])


def _own() -> _Own:
    if torch.cuda.is_available():
        generator = _generator(gpu=0, share=0.35)
        own = trainer("0_6b", tokens_per_row=8192)
    else:
        generator = GeneratorConfig(max_model_len=2048, enforce_eager=True)
        own = TrainerConfig(max_sequence_length=2048, tokens_per_row=2048)
    return {"trainer": own, "generator": generator, "chat": ChatConfig(enabled=True), "max_tokens": 512}


def qwen3_0_6b() -> GRPOConfig:
    """Two GPUs: trainer (`--plan`: 68 GiB), generator. No activation checkpointing."""
    config = _apart("0_6b", tokens_per_row=32_768)
    config.trainer.activation_checkpointing = "none"
    return config


def qwen3_0_6b_one_gpu() -> GRPOConfig:
    """One GPU, 0.4 of its memory for vLLM."""
    return _shared("0_6b", tokens_per_row=16_384, share=0.4)


def qwen3_1_7b() -> GRPOConfig:
    """Two GPUs: trainer, generator."""
    return _apart("1_7b", tokens_per_row=32_768)


def qwen3_1_7b_one_gpu() -> GRPOConfig:
    """One GPU, 0.35 of its memory for vLLM."""
    return _shared("1_7b", tokens_per_row=16_384, share=0.35)


def qwen3_4b() -> GRPOConfig:
    """Two GPUs: trainer, generator."""
    return _apart("4b", tokens_per_row=16_384)


def qwen3_4b_one_gpu() -> GRPOConfig:
    """One GPU, 0.3 of it for vLLM. Weights, gradients and Adam take 60 GiB in float32."""
    return _shared("4b", tokens_per_row=8192, share=0.3)


def qwen3_8b() -> GRPOConfig:
    """Two GPUs, sharded; the generator shares the first, with 0.25 of its memory for vLLM.

    Weights, gradients and Adam's moments take 122 GiB. With a third GPU for the generator:
    `--generator.gpu 2 --generator.gpu-memory-utilization 0.85 --trainer.tokens-per-row 16384`.
    """
    config = _shared("8b", tokens_per_row=8192, share=0.25)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    return config


def qwen3_8b_one_gpu() -> GRPOConfig:
    """One GPU, colocated: vLLM sleeps while the trainer works, and then takes 0.65 of the memory.

    Meanwhile Adam's moments (61 GiB) are on the host, and the weights (31 GiB in float32) stay on
    the GPU. The host also has two pushed versions (31 GiB in bfloat16), and at a checkpoint a copy
    of weights and moments (92 GiB); without room for it use `--checkpoint-every 0`.
    """
    config = _shared("8b", tokens_per_row=8192, share=0.65)
    config.trainer.logprob_chunk_tokens = 4096
    config.colocation = ColocationConfig(enabled=True)
    config.generator.sleep_mode = True
    config.weights.path = "shared_memory"  # on the GPU, pushed versions take memory
    return config


def trainer(model: str, *, tokens_per_row: int) -> TrainerConfig:
    """Fast settings for a Hopper GPU: mixed precision, compiled blocks, FlashAttention 4."""
    config = TrainerConfig(
        model=replace(MODELS[model]),
        attention="flash4",
        compute_dtype="bfloat16",
        activation_checkpointing="selective",
        max_sequence_length=4096,
        tokens_per_row=tokens_per_row,
        logprob_chunk_tokens=8192,  # 2.5 GB of logits in bfloat16, as much for the gradient
        setup_timeout=600.0,
    )
    config.compile.enable = True
    return config


def _apart(model: str, *, tokens_per_row: int) -> GRPOConfig:
    config = _run(model, tokens_per_row, _generator(gpu=1, share=0.85))
    config.rollouts.max_staleness = 1  # generates the next step's completions meanwhile
    return config


def _shared(model: str, *, tokens_per_row: int, share: float) -> GRPOConfig:
    return _run(model, tokens_per_row, _generator(gpu=0, share=share))


def _generator(*, gpu: int, share: float) -> GeneratorConfig:
    return GeneratorConfig(
        gpu=gpu,
        gpu_memory_utilization=share,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=1024,
        setup_timeout=600.0,
    )


def _run(model: str, tokens_per_row: int, generator: GeneratorConfig) -> GRPOConfig:
    return GRPOConfig(
        **addition(digits=2),
        trainer=trainer(model, tokens_per_row=tokens_per_row),
        generator=generator,
        steps=50,
        rollouts=RolloutConfig(groups_per_step=64, group_size=16),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-5, warmup_steps=5),
        sft=sft_phase(stop_at=0.2, learning_rate=1e-4),
        sft_steps=200,
    )
