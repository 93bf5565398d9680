"""`Publisher` chooses dtype and stream of versions, publishes them and deletes old ones."""

import time
import uuid
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_actors.transports.base import Gather, Manifest, Transport, publish, transfer_dtype
from rl_actors.types import Transfer

VERSIONS_KEPT = 2


class Publisher:
    """Keeps the newest VERSIONS_KEPT versions. Every call is a collective of the ranks."""

    def __init__(self, transport: Transport, *, rank: int, gather: Gather) -> None:
        self.transport = transport
        self.rank = rank
        self.gather = gather
        self.published: list[Manifest] = []
        self.dtype: torch.dtype | None = None  # of this stream; None before the first push
        self.start_stream()

    def start_stream(self) -> None:
        """Begin a new stream, which may use version numbers again."""
        self.stream = self.gather(uuid.uuid4().hex[:12])[0]

    async def publish(
        self, version: int, make_weights: Callable[[torch.dtype], Mapping[str, Tensor]]
    ) -> Transfer | None:
        """Publish make_weights(dtype) in the dtype of `transfer_dtype`; a new one begins a new
        stream. None if the version is already published in this stream.
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
