"""If a rank hangs during a call, another rank waits for it in a collective. The call then fails after collective_timeout,
the limit of the process groups. The client does not wait until its longer call_timeout has passed.
"""

import os
import signal
from dataclasses import dataclass

import pytest
import support
import torch.distributed as dist
from torch import Tensor
from waiting import GUARD

from rl_actors import TrainerClient
from rl_actors.clients.base import ActorSilentError
from rl_actors.losses import CrossEntropy

DEADLINE = 30.0  # seconds of collective_timeout, many times what a rank of this model waits on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class StopsTheLastRank(CrossEntropy):
    """Stops the process of the last rank in the middle of a call. The other rank goes on to the collectives of the backward pass."""

    def __call__(self, logprobs_BL: Tensor, *, loss_weights: Tensor):
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return CrossEntropy()(logprobs_BL, loss_weights=loss_weights)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}], ids=["FSDP", "tensor"])
def test_a_rank_that_stops_during_a_call_is_named_at_the_collective_timeout(layout):
    config = support.trainer_config(**layout, collective_timeout=DEADLINE, call_timeout=GUARD)
    trainer = TrainerClient.spawn(config)
    try:
        trainer.ready().result(GUARD)
        _, last = trainer.ranks.watched.processes
        with pytest.raises(ActorSilentError) as failure:
            trainer.forward_backward(support.random_samples(), loss=StopsTheLastRank()).result(GUARD)
        assert failure.value.actor == "trainer"
        assert str(failure.value).startswith(
            "trainer: rank 0 waited longer than collective_timeout=30 s for another rank, during forward_backward; "
            f"{last} did not answer for "
        )
        assert "Timed out waiting 30000ms" in "".join(failure.value.__cause__.__notes__)
        with pytest.raises(RuntimeError, match="rank 0 waited longer"):
            trainer.info().result(GUARD)
    finally:
        trainer.kill().result(GUARD)
