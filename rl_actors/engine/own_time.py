"""Measures how long a rank computes without waiting for other ranks.

The measured seconds show which rank of a trainer is slow.

The calls of a trainer take equally long on all ranks, because every rank waits in collectives for the slowest rank. So
this file measures only torch modules without a collective. These modules are a few transformer blocks, or only the
attention of these blocks if the blocks have collectives or the model has experts. Nothing is measured under context
parallelism, because attention then has collectives, too. Nothing is measured if compile.enable is set, because torch
then compiles each block into one graph, and a stopwatch cannot run in such a graph.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torchtitan.models.common import TransformerBlock

from rl_actors.config import TrainerConfig
from rl_actors.engine.machine import Machine

NUM_MODULES = 4
"""Largest number of modules that are measured on a rank. They are evenly spaced in the model."""


def local_modules(model: nn.Module, config: TrainerConfig) -> list[nn.Module]:
    """Modules of this rank that have no collective in their forward pass, and that take about equally long on equally fast ranks."""
    parallelism = config.parallelism
    if config.compile.enable or parallelism.context_parallel_degree > 1:
        return []
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    stride = max(1, -(-len(blocks) // NUM_MODULES))
    chosen = blocks[::stride]
    # Under tensor parallelism a block has collectives, but its inner attention has none. Under expert parallelism a block
    # with experts also has collectives. Without expert parallelism a block with experts still takes longer than a block
    # without experts, so a pipeline stage that has more blocks with experts would seem slow. In all these cases only the
    # inner attention is measured.
    if parallelism.tensor_parallel_degree > 1 or config.model.num_experts:
        return [block.attention.inner_attention for block in chosen]
    return chosen


class ComputeTimer:
    """Measures the forward passes that the modules make in training mode, and gives the mean seconds of one module for one token."""

    def __init__(self, modules: Sequence[nn.Module], machine: Machine) -> None:
        self._stopwatch = machine.Stopwatch()
        self._num_tokens = 0
        for module in modules:
            # FSDP's hooks gather the weights before the stopwatch starts, and free the weights after the stopwatch has stopped.
            module.register_forward_pre_hook(self._start)
            module.register_forward_hook(self._stop, prepend=True)

    def _start(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if module.training:
            self._stopwatch.start()

    def _stop(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if module.training:
            self._stopwatch.stop()
            hidden = inputs[0]  # [B, L, …]
            assert isinstance(hidden, Tensor)
            self._num_tokens += hidden.shape[0] * hidden.shape[1]

    def take(self) -> float | None:
        """Mean seconds that one module has needed for one token since the last `take`. None if nothing was measured.

        On a GPU this method waits until the measured work is done.
        """
        seconds = self._stopwatch.take()
        num_tokens = self._num_tokens
        self._num_tokens = 0
        return seconds / num_tokens if num_tokens else None
