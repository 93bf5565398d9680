"""An update, which accumulates the gradient by chunks and takes a step, and the weight sync."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from controllers.run.config import RunConfig
from controllers.run.run import Run
from rl_actors import ForwardBackwardOutput, OptimResult, ReferenceClient, Sample, TrainerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    outputs: list[ForwardBackwardOutput]
    result: OptimResult


async def update(
    config: RunConfig,
    trainer: TrainerClient,
    samples: Sequence[Sample],
    backward: Callable[[Sequence[Sample]], Awaitable[ForwardBackwardOutput]],
    learning_rate: float,
    grad_divisor: float,
) -> Update:
    """backward: the call for one chunk, such as partial(trainer.forward_backward, loss=PPO())."""
    outputs = [await backward(chunk) for chunk in chunks(samples, config.samples_per_forward_backward)]
    params = config.optimizer.params(learning_rate=learning_rate, grad_divisor=grad_divisor)
    return Update(outputs=outputs, result=await trainer.optim_step(params))


def chunks(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """The samples in their order, `size` at a time. The last chunk may be smaller."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


async def forward(
    model: TrainerClient | ReferenceClient, samples: Sequence[Sample], size: int
) -> list[ForwardBackwardOutput]:
    """The outputs of calls of at most `size` samples."""
    return [await model.forward(chunk) for chunk in chunks(samples, size)]


async def sync(run: Run[Any]) -> int:
    """Publish the trainer's weights and load them into the generator. Returns their version."""
    with run.timer("sync"):
        await run.colocation.to_trainer()
        version = await run.trainer.push_model_state_dict()
        await run.colocation.to_generator()
        await run.generator.pull_model_state_dict(version)
    return version
