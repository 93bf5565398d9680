"""Independent references for the trainer: transformers' Qwen3 and a plain PyTorch loop."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rl_actors.config import ModelConfig
from rl_actors.types import OptimParams, Sample

VOCAB_SIZE = 64
BASE = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)


def save_qwen3(directory: Path, *, tied: bool) -> str:
    """A random Qwen3 with large weights: at std 0.02 logprobs are near -log(VOCAB_SIZE)."""
    model_config = replace(BASE, num_hidden_layers=3, tie_word_embeddings=tied)
    return save_random(directory, model_config, seed=int(tied))


def save_random(directory: Path, model_config: ModelConfig, *, seed: int = 0) -> str:
    """Random weights, of any dimensions and with experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config.to_hf()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=0.25, generator=generator)
    model.save_pretrained(directory)
    return str(directory)


def load_qwen3(path: str):
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def random_samples(lengths: Sequence[int], *, seed: int = 0, temperature: float = 1.0, **columns) -> list[Sample]:
    """Random tokens, split at random. columns: (generator, length of the completion) -> values."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        tokens = torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator).tolist()
        split = int(torch.randint(1, length + 1, (), generator=generator))
        values = {name: make(generator, length + 1 - split) for name, make in columns.items()}
        samples.append(Sample.from_tokens(tokens[:split], tokens[split:], temperature=temperature, **values))
    return samples


def ppo_samples(lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """With old_logprobs, advantages of both signs, and loss_weights between 0.5 and 1.5."""
    return random_samples(
        lengths,
        seed=seed,
        old_logprobs=lambda generator, count: -4 * torch.rand(count, generator=generator),
        advantages=lambda generator, count: torch.randn(count, generator=generator),
        loss_weights=lambda generator, count: 0.5 + torch.rand(count, generator=generator),
    )


def reference_logprobs(model, sample: Sample) -> Tensor:
    """[T] of one sample: log softmax(logits / temperature)."""
    logits = model(input_ids=sample.tokens[None]).logits[0] / sample.temperature
    return logits.log_softmax(-1).gather(-1, sample.targets[:, None])[:, 0]


def reference_training(model, batches: Sequence[Sequence[Sample]], params: OptimParams) -> list[tuple[float, float]]:
    """(loss, grad_norm) by step of plain PyTorch: cross entropy, clipping and AdamW."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    history = []
    for batch in batches:
        loss = -sum((sample.columns["loss_weights"] * reference_logprobs(model, sample)).sum() for sample in batch)
        (loss / params.grad_divisor).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), params.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), grad_norm.item()))
    return history
