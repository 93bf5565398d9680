"""What vLLM 0.32's reload of weights leaves out on a CPU, where kernels compute with weights packed from the model's. Not for a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def packed_anew(engine: Any) -> Iterator[None]:
    """Around a reload of all weights."""
    engine.apply_model(_forget_packed_experts)
    yield
    engine.apply_model(_repack_tied_head)


def _forget_packed_experts(model: Any) -> None:
    """vLLM packs the experts of a block only while it makes their kernel; without one a reload makes it again.

    With one it puts the weights unpacked where the kernel reads packed ones, or fails where packing had padded them.
    """
    for experts in getattr(model, "moe_layers", ()):
        experts.routed_experts.quant_method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:
    """A reload leaves the kernel of a tied head with the weights it was packed from at start."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
