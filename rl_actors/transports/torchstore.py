"""The default transport: its index is in a torchstore, by default in the process that opens it.

No tensor passes through the store: torchstore 0.1.2 sends them as messages, at 0.3 to 0.5 GB/s.
Monarch 0.7 refuses its controller, which mixes synchronous and asynchronous endpoints, so this
module replaces `torchstore.api.Controller` until a release has one that Monarch accepts.
"""

import asyncio
import inspect
import logging
import os
import uuid
from collections.abc import Callable

# torchstore sets this variable to this value, too, but then also prints a warning and configures logging.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

import torchstore
import torchstore.api
import torchstore.controller
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import endpoint, this_proc

from rl_actors.config import WeightsConfig
from rl_actors.processes.spawn import start_here
from rl_actors.transports.indexed import IndexedTransport

SHUTDOWN_TIMEOUT = 5.0
logger = logging.getLogger(__name__)


def _asynchronous(method: Callable[..., object]) -> EndpointProperty:

    async def call(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    call.__name__ = method.__name__
    return endpoint(call)


def _asynchronous_endpoints() -> dict[str, EndpointProperty]:
    found = {}
    for name, attribute in vars(torchstore.controller.Controller).items():
        if isinstance(attribute, EndpointProperty) and not inspect.iscoroutinefunction(attribute._method):
            found[name] = _asynchronous(attribute._method)
    return found


AsyncController = type(
    "AsyncController", (torchstore.controller.Controller,), {"__module__": __name__, **_asynchronous_endpoints()}
)
torchstore.api.Controller = AsyncController


class TorchStoreTransport(IndexedTransport):
    """Starts a store at `open`, or uses the caller's store named store_name."""

    def __init__(self, store_name: str | None = None, weights: WeightsConfig | None = None) -> None:
        super().__init__(weights)
        self.owns_store = store_name is None
        self.store_name = store_name or f"rl_actors_{uuid.uuid4().hex[:12]}"

    async def open(self) -> None:
        if self.owns_store and not self._is_open_here:
            start_here()
            # the index is small, and another process would take two seconds of CPU time
            await torchstore.initialize(store_name=self.store_name, mesh=this_proc())
            self._is_open_here = True

    async def close(self) -> None:
        if self._is_open_here:
            self._is_open_here = False
            try:
                await asyncio.wait_for(torchstore.shutdown(self.store_name), SHUTDOWN_TIMEOUT)
            except Exception as error:  # after a failure of Monarch the store may not answer
                logger.info("torchstore did not shut down: %r", error)

    async def put_object(self, key: str, value: object) -> None:
        await torchstore.put(key, value, self.store_name)

    async def get_object(self, key: str) -> object | None:
        if not await torchstore.exists(key, self.store_name):
            return None
        return await torchstore.get(key, store_name=self.store_name)

    async def delete_object(self, key: str) -> None:
        await torchstore.delete(key, store_name=self.store_name)
