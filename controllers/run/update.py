"""An update: forward_backward chunk by chunk, which accumulates the gradient, then one optim_step."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from rl_actors import ForwardBackwardOutput, OptimParams, OptimResult, Sample, TrainerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    outputs: list[ForwardBackwardOutput]
    result: OptimResult


async def update(
    trainer: TrainerClient,
    samples: Sequence[Sample],
    params: OptimParams,
    backward: Callable[[Sequence[Sample]], Awaitable[ForwardBackwardOutput]],
    *,
    samples_per_call: int,
) -> Update:
    """backward: the call for one chunk, such as partial(trainer.forward_backward, loss=PPO())."""
    outputs = [await backward(chunk) for chunk in chunks(samples, samples_per_call)]
    return Update(outputs=outputs, result=await trainer.optim_step(params))


def chunks(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """The samples in their order, `size` at a time. The last chunk may be smaller."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]
