"""What a vLLM worker does at a pull: it opens the version that a source names, and loads the tensors one at a time.

vLLM adds the methods of WeightsExtension to its worker class. They run in the worker's process, which is the actor's own or another one.
"""

import contextlib
import logging
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_actors.transports.base import OpenVersion, Source
from rl_actors.vllm.start import this_machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
NO_WEIGHTS_TO_LOAD = {
    "RotaryEmbedding: Failed to load weights",  # a table of cosines, which no checkpoint holds
    # A tied head has the weights of the embedding. A pull refuses any other head without weights.
    "ParallelLMHead: Failed to load weights",
}
"""Warnings of a reload that are dropped, because these layers never have weights of their own to load."""


class WeightsExtension:
    """Methods that vLLM's worker gets. `collective_rpc` calls them by name."""

    if TYPE_CHECKING:  # the worker's own
        vllm_config: VllmConfig

        def get_model(self) -> nn.Module: ...
        def reload_weights(self, *, weights_iterator: Iterator[tuple[str, Tensor]]) -> None: ...

    def pull_weights(self, payload: bytes) -> None:
        """Replace all weights by those of a pickled Source. If it fails, the model may hold weights of two versions."""
        source: Source = pickle.loads(payload)
        dtype = self.vllm_config.model_config.dtype
        reloading = this_machine().reloading(self.get_model())
        with source.open() as version, reloading, quiet_about_layers_without_weights():
            self.reload_weights(weights_iterator=cast_tensors(version, dtype))


def cast_tensors(version: OpenVersion, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version in this dtype, one at a time."""
    for name, tensor in version.tensors():
        yield name, tensor.to(dtype)


@contextlib.contextmanager
def quiet_about_layers_without_weights() -> Iterator[None]:
    """Drop the warnings in NO_WEIGHTS_TO_LOAD, which vLLM would log at every pull."""
    logger = logging.getLogger(RELOAD_LOGGER)
    logger.addFilter(_is_of_a_layer_with_weights)
    try:
        yield
    finally:
        logger.removeFilter(_is_of_a_layer_with_weights)


def _is_of_a_layer_with_weights(record: logging.LogRecord) -> bool:
    return record.getMessage() not in NO_WEIGHTS_TO_LOAD
