"""FSDP over two ranks (FSDP2), tensor parallelism over two ranks (TP2) and both together give the same numbers as one process.

Every layout starts from the same weights. The ranks are real processes. The samples have odd lengths and fill several rows.
"""

from dataclasses import dataclass
from functools import cache

import pytest
from references import ppo_samples
from torch import Tensor
from torch.testing import assert_close

from rl_actors import PPO, MemoryTransport, ModelConfig, OptimParams, TrainerClient, TrainerConfig, num_loss_tokens

LENGTHS = [7, 31, 1, 64, 13, 3, 22, 45, 9]
LOSS = PPO(ratio_low=0.8, ratio_high=1.28)
LAYOUTS = {"FSDP2": (2, 1), "TP2": (1, 2), "FSDP2 x TP2": (2, 2)}  # (data_parallel_shard, tensor_parallel)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Results of three calls of forward_backward, two of optim_step and one of forward. An optim_step follows each of the first two
    calls of forward_backward, and the forward comes at the end.
    """

    losses: list[float]  # one for each forward_backward
    grad_norms: list[float]  # one for each optim_step
    logprobs: list[list[Tensor]]  # for each forward_backward and for the forward: a tensor for each sample


def config(hf_path: str, shard: int, tensor: int) -> TrainerConfig:
    limits = {"max_sequence_length": 64, "tokens_per_row": 64, "rows_per_microbatch": 2, "logprob_chunk_tokens": 50}
    made = TrainerConfig(model=ModelConfig.from_hf(hf_path), hf_path=hf_path, **limits)
    made.parallelism.data_parallel_shard_degree = shard
    made.parallelism.tensor_parallel_degree = tensor
    return made


def train(trainer: TrainerClient, save_to: str) -> Numbers:
    samples = ppo_samples(LENGTHS)
    params = OptimParams(learning_rate=1e-3, weight_decay=0.1, grad_divisor=num_loss_tokens(samples))
    losses, grad_norms, logprobs = [], [], []
    for step in range(3):
        output = trainer.forward_backward(samples, loss=LOSS).result()
        losses.append(output.metrics["loss:sum"])
        logprobs.append(output.logprobs)
        if step < 2:
            grad_norms.append(trainer.optim_step(params).result().grad_norm)
    logprobs.append(trainer.forward(samples).result().logprobs)
    trainer.discard_gradients().result()
    trainer.save_checkpoint(save_to).result()
    return Numbers(losses=losses, grad_norms=grad_norms, logprobs=logprobs)


@pytest.fixture(scope="module")
def numbers_of(tied_qwen3, tmp_path_factory, ranks):
    """numbers_of(shard, tensor) returns (Numbers, path of the checkpoint after two steps). Each layout is trained only once."""
    folder = tmp_path_factory.mktemp("layouts")

    @cache
    def run(shard: int, tensor: int) -> tuple[Numbers, str]:
        path = str(folder / f"shard{shard}-tensor{tensor}")
        made, processes = config(tied_qwen3, shard, tensor), ranks(shard * tensor)
        with TrainerClient.spawn(made, transport=MemoryTransport(), processes=processes) as trainer:
            return train(trainer, path), path

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_process(numbers_of, layout):
    (one, _), (actual, _) = numbers_of(1, 1), numbers_of(*layout)
    print(actual.losses, one.losses, actual.grad_norms, one.grad_norms)
    assert actual.losses == pytest.approx(one.losses, rel=1e-5)
    assert actual.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
    assert_close(actual.logprobs[0], one.logprobs[0], rtol=1e-5, atol=1e-5)
    # Adam's first steps divide by the gradient's own size, so a rounding difference of a small gradient grows in the weights.
    assert_close(actual.logprobs[1:], one.logprobs[1:], rtol=5e-5, atol=1e-5)
    assert [len(logprobs) for logprobs in actual.logprobs[0]] == LENGTHS
    assert one.losses[0] != pytest.approx(one.losses[2], rel=1e-3)  # the steps changed the weights


@pytest.mark.slow
def test_one_process_continues_from_a_checkpoint_of_fsdp2(numbers_of, make_engine):
    # `train` does not wait until the checkpoint is on disk, but the `close` of the trainer's client does.
    saved, path = numbers_of(2, 1)
    engine = make_engine()
    assert engine.load_checkpoint(path) == 2
    loss = engine.forward_backward(ppo_samples(LENGTHS), LOSS).metrics["loss:sum"]
    print(loss, saved.losses[2])
    assert loss == pytest.approx(saved.losses[2], rel=1e-6)


@pytest.mark.slow
def test_tp2_continues_from_a_checkpoint_of_fsdp2_and_refuses_a_missing_checkpoint(numbers_of, tied_qwen3):
    saved, path = numbers_of(2, 1)
    with TrainerClient.spawn(config(tied_qwen3, 1, 2), transport=MemoryTransport()) as trainer:
        assert trainer.load_checkpoint(path).result() == 2
        loss = trainer.forward_backward(ppo_samples(LENGTHS), loss=LOSS).result().metrics["loss:sum"]
        trainer.discard_gradients().result()
        # Every rank refuses a missing checkpoint before it waits for another rank. So nothing hangs, and the trainer's
        # state stays as it was.
        with pytest.raises(ValueError, match=r"nowhere is not a checkpoint: it holds no \.metadata"):
            trainer.load_checkpoint("nowhere").result()
        assert [info.state for info in trainer.info().result()] == ["idle"] * 2
    print(loss, saved.losses[2])
    assert loss == pytest.approx(saved.losses[2], rel=1e-6)
