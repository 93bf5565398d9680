"""Training steps of a model with the shape of Qwen3-0.6B and random weights, on one GPU. Speed is not tested here."""

import math
import time

import pytest
import torch

from rl_actors import ModelConfig, OptimParams, Sample, TrainerClient, TrainerConfig, num_loss_tokens

pytestmark = pytest.mark.gpu


def test_a_0_6b_model_with_random_weights_has_the_loss_of_a_uniform_guess():
    length, rows = 4096, 4
    config = TrainerConfig(
        model=ModelConfig(),
        compute_dtype="bfloat16",
        activation_checkpointing="selective",
        max_sequence_length=length,
        tokens_per_row=length,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.model.vocab_size, (rows, length + 1), generator=generator)
    samples = [Sample.from_tokens(row[:1].tolist(), row[1:].tolist()) for row in tokens]
    with TrainerClient.spawn(config) as trainer:
        for _ in range(3):
            start = time.perf_counter()
            output = trainer.forward_backward(samples, loss="cross_entropy").result()
            params = OptimParams(learning_rate=1e-5, grad_divisor=num_loss_tokens(samples))
            result = trainer.optim_step(params).result()
            print(f"{time.perf_counter() - start:.2f} s for {rows * length} tokens", output.metrics, result)
        info = trainer.info().result()[0]
        print(info)
    # Random weights predict nothing, and two optimizer steps change them little. So the loss of the third step is about log(vocab_size), the
    # loss of a uniform guess.
    assert abs(output.metrics["loss:sum"] / (rows * length) - math.log(config.model.vocab_size)) < 0.5
    assert math.isfinite(result.grad_norm) and result.policy_version == 3
    assert info.device.startswith("cuda")
