"""The transport of a trainer whose caller names none."""

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rl_actors.config import WeightsConfig

if TYPE_CHECKING:
    from rl_actors.transports.indexed import IndexedTransport

logger = logging.getLogger(__name__)


def default_transport(weights: WeightsConfig | None = None) -> "IndexedTransport":
    """A new transport: its index is in a torchstore, or in a small actor if torchstore is not
    installed.
    """
    if find_spec("torchstore") is None:
        from rl_actors.transports.index import IndexTransport

        logger.info("torchstore is not installed: a small actor keeps the index of the weights' versions")
        return IndexTransport(weights)
    from rl_actors.transports.torchstore import TorchStoreTransport

    return TorchStoreTransport(weights=weights)
