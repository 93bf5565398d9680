"""What a microbatch computed, on its way to the host from when it is known: nobody waits for the backward pass behind it.

B rows, L row length, N positions of them that hold samples.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from rl_actors.engine.batch import PackedBatch
from rl_actors.metrics import Partials, numbers_of

ToHost = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to copy a tensor to the host; what it returns waits for the copy."""


class MicrobatchOutput:
    """Of one microbatch. Keeps nothing on the device but until the copies are made."""

    def __init__(self, batch: PackedBatch, values: Mapping[str, Tensor], metrics: Partials, to_host: ToHost) -> None:
        """values: what was computed at every position of the whole rows, [B, L, ...]."""
        self.indices = [index for index, *_ in batch.spans]
        self.lengths = [end - start for _, _, start, end in batch.spans]
        self._index_N = batch.index_N
        self._values = {name: to_host(value.detach().flatten(0, 1).float()) for name, value in values.items()}
        self._metrics = numbers_of(metrics, to_host)

    def values(self) -> dict[str, Tensor]:
        """What was computed at the samples' positions, one sample behind the other: [N, ...] float32 on the host."""
        return {name: value()[self._index_N] for name, value in self._values.items()}

    def metrics(self) -> Partials:
        """Partials of numbers."""
        return self._metrics()
