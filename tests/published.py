"""Reads a published version as a generator would."""

import asyncio

from torch import Tensor

from rl_actors.transports.base import Manifest, Source, Transport


async def get_tensors(transport: Transport, manifest: Manifest) -> dict[str, Tensor]:
    """Copies of the version's tensors."""
    return await asyncio.to_thread(_copies, await transport.source(manifest))


def _copies(source: Source) -> dict[str, Tensor]:
    with source.open() as version:
        return {name: tensor.clone() for name, tensor in version.tensors()}
