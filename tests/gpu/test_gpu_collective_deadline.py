"""If a rank waits in an NCCL collective for a rank that hangs, the call ends after the trainer's collective_timeout.

The last test is of the stopwatch that times work on a GPU.
"""

import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from waiting import GUARD

from rl_actors import ModelConfig, Sample, TrainerClient, TrainerConfig
from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.engine import gpu
from rl_actors.losses import CrossEntropy

pytestmark = pytest.mark.gpu
DEADLINE = 20.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StopsTheLastRank(CrossEntropy):
    """A cross-entropy loss that stops the process of the last rank in the middle of a call."""

    def __call__(self, logprobs_BL: Tensor, *, loss_weights: Tensor):
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return CrossEntropy()(logprobs_BL, loss_weights=loss_weights)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["data_parallel_shard_degree", "tensor_parallel_degree"])
def test_a_call_ends_after_the_deadline_if_a_rank_is_stopped(layout):
    config = TrainerConfig(
        model=ModelConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64),
        compute_dtype="bfloat16",
        max_sequence_length=512,
        tokens_per_row=1024,
        collective_timeout=DEADLINE,
        call_timeout=GUARD,
    )
    setattr(config.parallelism, layout, 2)
    samples = [Sample.from_tokens([1, 2], [3] * length) for length in (100, 200, 300, 400)]
    trainer = TrainerClient.spawn(config)
    try:
        trainer.forward_backward(samples, loss="cross_entropy").result(GUARD)
        trainer.discard_gradients().result(GUARD)
        # A rank can answer forward_backward while the backward pass still runs on its GPU. If the pass then fails, the
        # next call, here info, raises the error.
        with pytest.raises((ActorDiedError, ActorSilentError), match="trainer: .*rank [01]"):
            trainer.forward_backward(samples, loss=StopsTheLastRank()).result(GUARD)
            trainer.info().result(GUARD)
    finally:
        trainer.kill().result(GUARD)


def test_a_stopwatch_measures_the_work_between_its_two_calls():
    watch = gpu.Stopwatch()
    torch.cuda._sleep(100_000_000)  # is not measured
    watch.start()
    torch.cuda._sleep(100_000_000)
    watch.stop()
    torch.cuda._sleep(100_000_000)
    once = watch.take()
    for _ in range(4):
        watch.start()
        torch.cuda._sleep(100_000_000)
        watch.stop()
    assert once > 0 and 3 < watch.take() / once < 5
    assert watch.take() == 0
