"""The results of one microbatch, and their copy to the host.

The copy begins after the microbatch's forward pass and before its backward pass. So a caller that reads the results does not wait for the
backward pass.

In names and shapes of tensors, B is the number of rows, L the length of a row, and N the number of positions of all samples together.
"""

from collections.abc import Mapping

from torch import Tensor

from rl_actors.engine.batch import PackedBatch
from rl_actors.metrics import HostCopy, Partials, PartialsCopy


class MicrobatchOutput:
    """Values and metrics of one microbatch. The constructor begins their copy to the host."""

    def __init__(
        self, batch: PackedBatch, values: Mapping[str, Tensor], metrics: Partials, to_host: type[HostCopy]
    ) -> None:
        """Begin the copies. values: by name, a tensor [B, L, ...] over all positions of the whole rows. to_host: the class that copies."""
        self.indices = [index for index, *_ in batch.spans]
        self.lengths = [end - start for _, _, start, end in batch.spans]
        self._index_N = batch.index_N
        self._values = {name: to_host(value.detach().flatten(0, 1).float()) for name, value in values.items()}
        self._metrics = PartialsCopy(metrics, to_host)

    def values(self) -> dict[str, Tensor]:
        """The values at the positions of the samples, one sample after another, as float32 tensors [N, ...] on the host.

        Waits until the values are copied.
        """
        return {name: copy.wait()[self._index_N] for name, copy in self._values.items()}

    def metrics(self) -> Partials:
        """The metrics as Partials whose entries are numbers and not tensors. Waits until the metrics are copied."""
        return self._metrics.wait()
