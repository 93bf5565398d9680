"""Tests that the trainer's gradient of a batch is that of plain PyTorch, under each layout of LAYOUTS.

The gradient does not depend on the order of the samples, or on how they are split into calls, microbatches, rows and
chunks. The reference is transformers' Qwen3, one sample at a time, with PPO's formula written out. Trainer and
reference compute in float32.
"""

from itertools import pairwise

import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import load_qwen3, ppo_samples, reference_logprobs
from torch import Tensor
from waiting import GUARD

from rl_actors import PPO, MemoryTransport, ModelConfig, OptimParams, TrainerClient, TrainerConfig

LAYOUTS = {"1": (1, 1), "FSDP2": (2, 1), "TP2": (1, 2), "FSDP2 x TP2": (2, 2)}  # (data_parallel_shard, tensor_parallel)
LOW, HIGH, LONGEST = 0.8, 1.28, 64  # PPO's clipping of the ratio, and the length of the longest sample


@st.composite
def calls(draw):
    """(lengths of the samples, seed of their content, their order, ends, limits of the packing, grad_divisor).

    ends: each call gets a slice of the ordered samples, and these are the indices at which the slices end.
    """
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    ends = draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {len(lengths)}
    limits = {
        "tokens_per_row": draw(st.integers(LONGEST, 3 * LONGEST)),
        "rows_per_microbatch": draw(st.integers(1, 4)),
        "logprob_chunk_tokens": draw(st.integers(16, 600)),
    }
    return lengths, draw(st.integers(0, 1000)), order, sorted(ends), limits, draw(st.floats(0.5, 500.0))


def reference_gradients(model, samples) -> dict[str, Tensor]:
    model.zero_grad()
    for sample in samples:
        logprobs = reference_logprobs(model, sample)
        weights, advantages, old = (sample.columns[n] for n in ("loss_weights", "advantages", "old_logprobs"))
        ratio = torch.where(weights != 0, logprobs - old, 0.0).exp()
        (-(weights * torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages)).sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def reference_model(tied_qwen3):
    return load_qwen3(tied_qwen3)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def sharded(request, tied_qwen3, ranks):
    """(client, mesh) of a trainer under a layout. All examples of a layout use the same trainer."""
    shard, tensor = request.param
    limits = {"max_sequence_length": LONGEST, "tokens_per_row": LONGEST}
    config = TrainerConfig(model=ModelConfig.from_hf(tied_qwen3), hf_path=tied_qwen3, **limits)
    config.parallelism.data_parallel_shard_degree = shard
    config.parallelism.tensor_parallel_degree = tensor
    mesh = ranks(shard * tensor).spawn("properties", support.TestTrainer, config, MemoryTransport())
    client = TrainerClient(mesh, name="properties")
    yield client, mesh
    client.close().result()


@pytest.mark.slow
@settings(max_examples=25, derandomize=True, deadline=None)
@given(call=calls())
def test_every_order_and_split_of_the_samples_gives_the_gradient_of_plain_pytorch(sharded, reference_model, call):
    trainer, mesh = sharded
    lengths, seed, order, ends, limits, divisor = call
    samples = ppo_samples(lengths, seed=seed)
    expected = reference_gradients(reference_model, samples)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()

    mesh.pack.call(limits).get(timeout=GUARD)
    shuffled = [samples[index] for index in order]
    for start, end in pairwise([0, *ends]):
        trainer.forward_backward(shuffled[start:end], loss=PPO(ratio_low=LOW, ratio_high=HIGH)).result()
    actual = next(iter(mesh.whole_gradients.call().get(timeout=GUARD).values()))
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        allowed = 1e-5 * grad.norm() + 1e-7 * norm
        assert (actual[name] - grad).norm() <= allowed, (
            f"{name}: off by {(actual[name] - grad).norm()}, norm {grad.norm()}"
        )
    # This step clears the gradients for the next example. Its learning rate is 0, so it does not change the weights.
    result = trainer.optim_step(OptimParams(learning_rate=0.0, grad_divisor=divisor)).result()
    assert result.grad_norm == pytest.approx(float(norm) / divisor, rel=1e-5)
