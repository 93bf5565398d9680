"""The actor's side of a pull: what it asks vLLM's workers to do, and in which order. weights.py has the workers' side.

A pull has two phases. Workers first open the version, which changes nothing in the model. Then they load it.
"""

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_actors import adapters
from rl_actors.config import GeneratorConfig
from rl_actors.transports.base import LoadedTensors, Source
from rl_actors.transports.slots import actor_name

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.lora.request import LoRARequest

ADAPTER_ID = 1
"""vLLM's number of the adapter. There is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A version that all workers have open."""

    path: str  # of the bytes
    reason: str  # for the path
    num_bytes: int
    seconds: float  # of the slowest worker


class WholeWeights:
    """A pull replaces every parameter of the model."""

    request: "LoRARequest | None" = None

    def begin(self, engine: "LLMEngine") -> None:
        """Does nothing: the engine keeps the weights that it was started with."""

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Replace the weights by those of the open version. Returns seconds. If it fails, the model may hold weights of two versions."""
        return max(_ask(engine, source, "load", "load_version"))


class OneAdapter:
    """A pull replaces the adapter that every request uses. The model's own weights stay."""

    request: "LoRARequest | None" = None

    def __init__(self, config: GeneratorConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: name and shape of every tensor of the adapter."""
        self.config = config
        self.shapes = shapes

    def begin(self, engine: "LLMEngine") -> None:
        """Load an adapter of zeros. A request that is added before the first pull refers to it, and so continues with the pulled weights."""
        from vllm.lora.request import LoRARequest

        source = LoadedTensors({name: torch.zeros(shape) for name, shape in self.shapes.items()})
        with opened(engine, source):
            self.load(engine, source)
        # vLLM finds the adapter by its number. It would read the path only if there was none.
        self.request = LoRARequest("adapter", ADAPTER_ID, "in memory")

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Replace the adapter by the tensors of the open version. Returns seconds."""
        lora = self.config.lora
        return max(
            _ask(engine, source, "load", "load_adapter", ADAPTER_ID, lora.rank, lora.alpha, adapters.modules(lora))
        )


@contextlib.contextmanager
def opened(engine: "LLMEngine", source: Source) -> Iterator[Opened]:
    """Open the version in all workers for as long as the context lasts. The model does not change."""
    # vLLM sends bytes to a worker in another process, but refuses objects of classes that it does not know.
    try:
        answers = _ask(engine, source, "read", "open_version", pickle.dumps(source))
        path, reason, num_bytes, _ = answers[0]
        yield Opened(path=path, reason=reason, num_bytes=num_bytes, seconds=max(answer[-1] for answer in answers))
    finally:
        engine.collective_rpc("close_version")


def _ask(engine: "LLMEngine", source: Source, phase: str, method: str, *arguments: object) -> list[Any]:
    """The answers of all workers. Raises TimeoutError naming the phase."""
    begin_of_error = f"pull of {source.key}: {actor_name()}: {phase}"
    try:
        return engine.collective_rpc(method, timeout=source.timeout, args=arguments)
    except TimeoutError as error:
        if begin_of_error in str(error):
            raise
        raise TimeoutError(f"{begin_of_error} was not done within {source.timeout:g} s ({error})") from None
