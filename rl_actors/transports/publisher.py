"""`Publisher`, which publishes versions of a trainer's weights and deletes old versions.

A version is the weights of one policy_version. A stream is a sequence of versions in one dtype (see Manifest). A Publisher chooses the dtype
and the stream. The function `publish` of base.py then puts the version into a transport, from which generators pull it.
"""

import time
import uuid
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_actors.transports.base import Gather, Manifest, Transport, publish, transfer_dtype
from rl_actors.types import Transfer

VERSIONS_KEPT = 2


class Publisher:
    """Publishes versions into a transport. Deletes the oldest version when there are more than VERSIONS_KEPT versions.

    Every rank of a trainer has a Publisher. All ranks must make the same calls, because each call is a collective.
    """

    def __init__(self, transport: Transport, *, rank: int, gather: Gather) -> None:
        self.transport, self.rank, self.gather = transport, rank, gather
        self.published: list[Manifest] = []
        self.dtype: torch.dtype | None = None  # dtype of the versions of this stream; None before the first push
        self.start_stream()

    def start_stream(self) -> None:
        """Begin a new stream, with the same name on all ranks. The new stream may use version numbers of the former stream again."""
        self.stream = self.gather(uuid.uuid4().hex[:12])[0]

    async def publish(
        self, version: int, make_weights: Callable[[torch.dtype], Mapping[str, Tensor]]
    ) -> Transfer | None:
        """Publish make_weights(dtype). dtype is the widest of the dtypes that generators have announced in the transport, or float32 if no generator
        has announced one. A new dtype begins a new stream.

        Returns None, and publishes nothing, if the version is still published in the current stream.
        """
        dtype = self.gather(await transfer_dtype(self.transport) if self.rank == 0 else None)[0]
        if dtype != self.dtype:
            self.dtype = dtype
            self.start_stream()
        if any(manifest.stream == self.stream and manifest.version == version for manifest in self.published):
            return None
        begin = time.perf_counter()
        weights = make_weights(dtype)
        collected = time.perf_counter()
        manifest = await publish(
            self.transport,
            weights,
            stream=self.stream,
            version=version,
            rank=self.rank,
            gather=self.gather,
            dtype=dtype,
        )
        self.published.append(manifest)
        while len(self.published) > VERSIONS_KEPT:
            expired = self.published.pop(0)
            if self.rank == 0:
                await self.transport.delete(expired)
        end = time.perf_counter()
        return Transfer(
            policy_version=version,
            path=self.transport.kind,
            num_bytes=manifest.num_bytes,
            seconds=end - begin,
            phases={"collect": collected - begin, "write": end - collected},
        )
