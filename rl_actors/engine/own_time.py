"""Measures how long a rank computes without waiting for others, to show which rank is slow.

Not with context parallelism (attention has collectives) or compile.enable (a stopwatch cannot run
in a compiled block).
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torchtitan.models.common import TransformerBlock

from rl_actors.config import TrainerConfig
from rl_actors.engine.cpu import Machine

NUM_MODULES = 4
"""At most, of a rank, evenly spaced."""


def local_modules(model: nn.Module, config: TrainerConfig) -> list[nn.Module]:
    """Modules without a collective that take equally long on equal ranks."""
    parallelism = config.parallelism
    if config.compile.enable or parallelism.context_parallel_degree > 1:
        return []
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    stride = max(1, -(-len(blocks) // NUM_MODULES))
    chosen = blocks[::stride]
    # Blocks have collectives under tensor and, with experts, expert parallelism, and blocks with
    # experts take longer than others, so a stage with more of them would seem slow.
    if parallelism.tensor_parallel_degree > 1 or config.model.num_experts:
        return [block.attention.inner_attention for block in chosen]
    return chosen


class ComputeTimer:
    """Times the modules' forward passes in training mode."""

    def __init__(self, modules: Sequence[nn.Module], machine: Machine) -> None:
        self._stopwatch = machine.stopwatch()
        self._num_tokens = 0
        for module in modules:
            # inside FSDP's hooks, which gather and free the weights
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
        """Mean seconds of one module for one token since the last `take`. Waits for the GPU."""
        seconds = self._stopwatch.take()
        num_tokens = self._num_tokens
        self._num_tokens = 0
        return seconds / num_tokens if num_tokens else None
