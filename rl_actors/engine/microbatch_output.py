"""The results of one microbatch, and their copy to the host.

B rows, L positions of a row, N positions of all samples.
"""

from collections.abc import Mapping

from torch import Tensor

from rl_actors.engine.batch import PackedBatch
from rl_actors.metrics import HostCopy, Partials, PartialsCopy


class MicrobatchOutput:
    """Values and metrics of one microbatch. Their copy begins before the backward pass, so a reader
    does not wait for it.
    """

    def __init__(
        self, batch: PackedBatch, values: Mapping[str, Tensor], metrics: Partials, to_host: type[HostCopy]
    ) -> None:
        """values: by name, [B, L, ...] over whole rows."""
        self.indices = [index for index, *_ in batch.spans]
        self.lengths = [end - start for _, _, start, end in batch.spans]
        self._index_N = batch.index_N
        self._values = {name: to_host(value.detach().flatten(0, 1).float()) for name, value in values.items()}
        self._metrics = PartialsCopy(metrics, to_host)

    def values(self) -> dict[str, Tensor]:
        """The values at the samples' positions, [N, ...] float32 on the host. Waits for the copy."""
        return {name: copy.wait()[self._index_N] for name, copy in self._values.items()}

    def metrics(self) -> Partials:
        """The metrics as numbers. Waits for the copy."""
        return self._metrics.wait()
