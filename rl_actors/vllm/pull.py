"""The actor's part of a pull; in weights.py all workers open a version, then all load it."""

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
"""vLLM's id for the adapter of the pulls."""
TIMED_OUT = "RPC call to answer timed out."
"""vLLM's error for a silent worker. A core in its own process sends no type."""
ANSWER_SECONDS = 10.0
"""Seconds beyond the work's limit, for a worker's own error about a hanging trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A version that all workers have open."""

    path: str  # such as "shared_memory" or "tcp"
    reason: str
    num_bytes: int
    seconds: float  # of the slowest worker


class WholeWeights:
    """A pull replaces every parameter."""

    request: "LoRARequest | None" = None  # of a request that names none

    def begin(self, engine: "LLMEngine") -> None:
        """Does nothing: the engine starts with weights."""

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Returns the slowest worker's seconds. After a failure the model may mix two versions."""
        return max(_ask(engine, source, "load", "load_version"))


class OneAdapter:
    """A pull replaces the adapter that every request uses."""

    request: "LoRARequest | None" = None  # None before `begin`

    def __init__(self, config: GeneratorConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of the adapter's tensors, by name."""
        self.config = config
        self.shapes = shapes

    def begin(self, engine: "LLMEngine") -> None:
        """Load an adapter of zeros, which the first pull replaces under running requests."""
        from vllm.lora.request import LoRARequest

        source = LoadedTensors({name: torch.zeros(shape) for name, shape in self.shapes.items()})
        with opened(engine, source):
            self.load(engine, source)
        # vLLM finds it by number, and does not read the path
        self.request = LoRARequest("adapter", ADAPTER_ID, "in memory")

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Returns the slowest worker's seconds."""
        lora = self.config.lora
        arguments = (ADAPTER_ID, lora.rank, lora.alpha, adapters.modules(lora))
        return max(_ask(engine, source, "load", "load_adapter", *arguments))


class SilentWorkerError(TimeoutError):
    """A worker did not answer. The engine would take its late answer for the next call's."""


@contextlib.contextmanager
def opened(engine: "LLMEngine", source: Source) -> Iterator[Opened]:
    """The version open in all workers. The model does not change."""
    silent = False
    try:
        # vLLM sends bytes to other processes, but no classes that it does not know
        answers = _ask(engine, source, "read", "open_version", pickle.dumps(source))
        path, reason, num_bytes, _ = answers[0]
        yield Opened(path=path, reason=reason, num_bytes=num_bytes, seconds=max(answer[-1] for answer in answers))
    except SilentWorkerError:
        silent = True
        raise
    finally:
        if not silent:
            _ask(engine, source, "close", "close_version")


def _ask(engine: "LLMEngine", source: Source, phase: str, method: str, *arguments: object) -> list[Any]:
    """The results of a WeightsExtension method in all workers, or the first one's error."""
    timeout = source.timeout + ANSWER_SECONDS
    try:
        answers = engine.collective_rpc("answer", timeout=timeout, args=(method, *arguments))
    except Exception as error:
        if TIMED_OUT not in str(error):
            raise
        where = f"pull of {source.manifest.key}: {actor_name()}: {phase}"
        raise SilentWorkerError(f"{where} was not done by every worker within {timeout:g} s") from None
    for rank, (_, failure) in enumerate(answers):
        if failure:
            raised = pickle.loads(failure)
            raised.add_note(f"in vLLM's worker of rank {rank}")
            raise raised
    return [result for result, _ in answers]
