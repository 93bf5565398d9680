"""Losses give the same numbers with two ranks of FSDP, tensor parallelism or context parallelism as in one process.

In the test ids FSDP2, TP2 and CP2, 2 is the number of ranks. The losses include those that combine all tokens of a sample, losses of top-K
targets and losses that the caller computes. The tests also compare entropies.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from references import VOCAB_SIZE, ppo_samples
from torch.testing import assert_close

from rl_actors import (
    GSPO,
    KL,
    PPO,
    IcePop,
    MemoryTransport,
    ModelConfig,
    OptimParams,
    Sample,
    TrainerClient,
    TrainerConfig,
)
from rl_actors.layouts import row_multiple

LENGTHS = [7, 31, 1, 64, 13, 3, 22]
PARAMS = OptimParams(learning_rate=0.0, grad_divisor=10.0)
WHOLE = PPO(
    kl=KL(coefficient=0.3), entropy_coefficient=0.2, correction=IcePop(low=0.1, level="sequence"), sequence_mean=True
)
WIDE = GSPO(ratio_low=0.5, ratio_high=2.0)


def with_columns(samples: list[Sample], **makers) -> list[Sample]:
    """Copies of the samples with more columns.

    makers: for each new column, a function that returns the column. Its arguments are a random generator and the number of positions.
    """
    draw = torch.Generator().manual_seed(7)
    made = []
    for sample in samples:
        columns = {name: make(draw, len(sample)) for name, make in makers.items()}
        made.append(replace(sample, columns={**sample.columns, **columns}))
    return made


def with_top_k() -> list[Sample]:
    samples = with_columns(
        ppo_samples(LENGTHS),
        target_ids=lambda draw, n: torch.randint(VOCAB_SIZE, (n, 5), generator=draw),
        target_weights=lambda draw, n: torch.randn(n, 5, generator=draw),
    )
    kept = ("loss_weights", "target_ids", "target_weights")
    return [replace(sample, columns={name: sample.columns[name] for name in kept}) for sample in samples]


def own_gspo(samples: list[Sample], logprobs: list[torch.Tensor]):
    """GSPO, computed by the caller."""
    total = torch.zeros(())
    for sample, p in zip(samples, logprobs, strict=True):
        w, a = sample.columns["loss_weights"], sample.columns["advantages"]
        ratio = (p - sample.columns["old_logprobs"])[w != 0].mean().exp()
        total = total - (w * torch.minimum(ratio * a, ratio.clamp(0.5, 2.0) * a)).sum()
    return total, {"samples:sum": len(samples)}


def train(trainer: TrainerClient) -> dict:
    """Take a step with each kind of loss. Returns {name: (output, grad_norm)}.

    Also asserts that a refused loss raises an error and leaves the trainer idle, with no open step.
    """
    numbers = {}
    near = with_columns(ppo_samples(LENGTHS), ref_logprobs=lambda draw, n: -4 * torch.rand(n, generator=draw))
    for name, samples, loss in [
        ("options", near, WHOLE),
        ("gspo", ppo_samples(LENGTHS), WIDE),
        ("top-K", with_top_k(), "cross_entropy"),
        ("named", ppo_samples(LENGTHS), "rl_actors.losses.policy:CISPO"),
    ]:
        output = trainer.forward_backward(samples, loss, entropy=True).result()
        numbers[name] = output, trainer.optim_step(PARAMS).result().grad_norm
    refused = {
        "it must be a scalar": lambda samples, logprobs: (logprobs[0], {}),
        "metric 'mine': the name must end in": lambda samples, logprobs: (logprobs[0].sum(), {"mine": 1.0}),
        "'logprob_grads' holds nan at position 0": lambda samples, logprobs: (logprobs[0].sum() * torch.nan, {}),
    }
    for message, loss in refused.items():
        with pytest.raises(ValueError, match=message):
            trainer.forward_backward_custom(ppo_samples(LENGTHS), loss).result()
    with pytest.raises(ValueError, match="loss 'nowhere:loss' cannot be used: No module named 'nowhere'"):
        trainer.forward_backward(ppo_samples(LENGTHS), "nowhere:loss").result()
    assert {info.state for info in trainer.info().result()} == {"idle"}
    custom = trainer.forward_backward_custom(ppo_samples(LENGTHS), own_gspo).result()
    numbers["custom"] = custom, trainer.optim_step(PARAMS).result().grad_norm
    return numbers


@pytest.fixture(scope="module")
def numbers_of(tied_qwen3):
    """numbers_of(shard, tensor, context) returns the result of `train` with these degrees of FSDP, tensor and context parallelism.

    `train` runs only once for each layout.
    """

    @cache
    def run(shard: int = 1, tensor: int = 1, context: int = 1) -> dict:
        limits = {"max_sequence_length": 64, "rows_per_microbatch": 2, "logprob_chunk_tokens": 50}
        config = TrainerConfig(model=ModelConfig.from_hf(tied_qwen3), hf_path=tied_qwen3, **limits)
        config.parallelism.data_parallel_shard_degree = shard
        config.parallelism.tensor_parallel_degree = tensor
        config.parallelism.context_parallel_degree = context
        config.tokens_per_row = row_multiple(config)
        with TrainerClient.spawn(config, transport=MemoryTransport()) as trainer:
            return train(trainer)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["FSDP2", "TP2", "CP2"])
def test_every_kind_of_loss_gives_the_same_numbers_on_two_ranks_as_in_one_process(numbers_of, layout):
    one, actual = numbers_of(), numbers_of(*layout)
    for name, (output, grad_norm) in actual.items():
        expected, expected_norm = one[name]
        print(name, output.metrics["loss:sum"], expected.metrics["loss:sum"], grad_norm, expected_norm)
        assert grad_norm == pytest.approx(expected_norm, rel=1e-5), name
        assert output.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5), name
        assert_close(output.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
        if name != "custom":
            assert [len(entropy) for entropy in output.entropy] == LENGTHS
            assert_close(output.entropy, expected.entropy, rtol=1e-5, atol=1e-5)
    assert [x.shape for x in actual["top-K"][0].target_logprobs] == [(length, 5) for length in LENGTHS]
    assert_close(actual["top-K"][0].target_logprobs, one["top-K"][0].target_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_loss_computed_by_the_caller_gives_the_numbers_of_the_built_in_loss(numbers_of):
    numbers = numbers_of()
    (custom, custom_norm), (built_in, norm) = numbers["custom"], numbers["gspo"]
    assert custom_norm == pytest.approx(norm, rel=1e-6)
    assert custom.metrics == {
        "samples:sum": len(LENGTHS),
        "loss:sum": pytest.approx(built_in.metrics["loss:sum"], rel=1e-6),
    }
    assert_close(custom.logprobs, built_in.logprobs, rtol=0, atol=0)
