"""The transport that a trainer uses if its caller names none."""

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rl_actors.config import WeightsConfig

if TYPE_CHECKING:
    from rl_actors.transports.indexed import IndexedTransport

logger = logging.getLogger(__name__)


def default_transport(weights: WeightsConfig | None = None) -> "IndexedTransport":
    """A new transport, which the caller opens and closes. Its index lists the versions of the weights.

    The index is in a torchstore. If torchstore is not installed, the index is in a small actor.
    """
    if find_spec("torchstore") is None:
        from rl_actors.transports.index import IndexTransport

        logger.info("torchstore is not installed: a small actor keeps the index of the weights' versions")
        return IndexTransport(weights)
    from rl_actors.transports.torchstore import TorchStoreTransport

    return TorchStoreTransport(weights=weights)
