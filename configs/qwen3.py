"""Configs of GRPO, supervised training and a Tinker server, with models of Qwen3's shapes. They are for H200 GPUs, which have 139 GiB of memory.

A run of a config with a size in its name, such as `qwen3_4b`, needs no download by default, because its weights are
random. Its task is two-digit addition, as in the config `tiny`. `--trainer.hf-path DIR` reads the weights from a
Hugging Face directory.
`python -m benchmarks random_weights 4b DIR` makes such a directory with random weights. A real run needs a task of your
own, `--trainer.hf-path DIR`, and `--alphabet ""`, which selects the tokenizer of DIR. The configs without a size in
their names, such as `qwen3`, take a model of any size.
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
    """GRPO with a model of your own. `--trainer.hf-path` takes a directory or a Hugging Face id, whose config.json gives the model's size.

    Trainer and generator share one GPU. If there is no GPU, both run on the CPU.
    """
    return GRPOConfig(
        **_own(),
        steps=100,
        rollouts=RolloutConfig(groups_per_step=32, group_size=8),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=2e-6, warmup_steps=5),
    )


def qwen3_sft() -> SFTConfig:
    """Supervised training of a model of your own, on the answers of problems or on the assistant's messages in
    conversations.
    """
    schedule = ScheduleConfig(kind="linear_warmup_linear", learning_rate=1e-5, warmup_steps=10)
    return SFTConfig(**_own(), steps=200, sft=SFTPhaseConfig(batch_size=64, schedule=schedule))


def qwen3_server() -> ServeConfig:
    """A Tinker server of a model of your own.

    `--serve-as NAME=DIRECTORY` names the model and its Hugging Face directory, which must have a tokenizer.

    Trainers and generator share one GPU. If there is no GPU, all of them run on the CPU.
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
    """Two GPUs: the trainer on the first, the generator on the second. The trainer recomputes no activations.

    `--plan` estimates 68 GiB for the trainer.
    """
    config = _apart("0_6b", tokens_per_row=32_768)
    config.trainer.activation_checkpointing = "none"
    return config


def qwen3_0_6b_one_gpu() -> GRPOConfig:
    """One GPU. vLLM takes 0.4 of the GPU's memory."""
    return _shared("0_6b", tokens_per_row=16_384, share=0.4)


def qwen3_1_7b() -> GRPOConfig:
    """Two GPUs: the trainer on the first, the generator on the second."""
    return _apart("1_7b", tokens_per_row=32_768)


def qwen3_1_7b_one_gpu() -> GRPOConfig:
    """One GPU. vLLM takes 0.35 of the GPU's memory."""
    return _shared("1_7b", tokens_per_row=16_384, share=0.35)


def qwen3_4b() -> GRPOConfig:
    """Two GPUs: the trainer on the first, the generator on the second."""
    return _apart("4b", tokens_per_row=16_384)


def qwen3_4b_one_gpu() -> GRPOConfig:
    """One GPU. vLLM takes 0.3 of the GPU's memory. Weights, gradients and Adam's moments take 60 GiB in float32."""
    return _shared("4b", tokens_per_row=8192, share=0.3)


def qwen3_8b() -> GRPOConfig:
    """Two GPUs: the trainer uses both, and the generator shares the first GPU with the trainer. vLLM takes 0.25 of the
    first GPU's memory.

    Weights, gradients and Adam's moments take 122 GiB. If they were all on one GPU, too little of its memory would be left for
    activations and vLLM. These flags run the generator on a third GPU, and let the trainer have longer rows:
    `--generator.gpu 2 --generator.gpu-memory-utilization 0.85 --trainer.tokens-per-row 16384`.
    """
    config = _shared("8b", tokens_per_row=8192, share=0.25)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    return config


def qwen3_8b_one_gpu() -> GRPOConfig:
    """One GPU. vLLM sleeps while the trainer works, and takes 0.65 of the GPU's memory while it generates.

    While vLLM generates, Adam's moments (61 GiB) are in the host's memory. The trainer's weights (31 GiB in float32) stay on the GPU.
    The host also holds two pushed versions of the weights (31 GiB together, in bfloat16).
    A checkpoint copies weights and moments (92 GiB) to the host before it is written. If the host has too little memory
    for this copy, use `--checkpoint-every 0`.
    """
    config = _shared("8b", tokens_per_row=8192, share=0.65)
    config.trainer.logprob_chunk_tokens = 4096
    config.colocation = ColocationConfig(enabled=True)
    config.generator.sleep_mode = True
    config.weights.path = "shared_memory"  # on the GPU the pushed versions would take memory from trainer and vLLM
    return config


def trainer(model: str, *, tokens_per_row: int) -> TrainerConfig:
    """Fast settings for a Hopper GPU: bfloat16 with master weights in float32, compiled blocks, logits in chunks, FlashAttention 4.

    The backward pass recomputes some activations (activation_checkpointing="selective").
    """
    config = TrainerConfig(
        model=replace(MODELS[model]),
        attention="flash4",
        compute_dtype="bfloat16",
        activation_checkpointing="selective",
        max_sequence_length=4096,
        tokens_per_row=tokens_per_row,
        logprob_chunk_tokens=8192,  # 2.5 GB of logits in bfloat16, and 2.5 GB for their gradient
        setup_timeout=600.0,
    )
    config.compile.enable = True
    return config


def _apart(model: str, *, tokens_per_row: int) -> GRPOConfig:
    config = _run(model, tokens_per_row, _generator(gpu=1, share=0.85))
    config.rollouts.max_staleness = 1  # the generator completes the next step's problems while the trainer works
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
