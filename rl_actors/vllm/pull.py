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
"""The number of the adapter in vLLM. There is only one adapter."""
TIMED_OUT = "RPC call to answer timed out."
"""Text of vLLM's error when a worker does not answer. A core in a process of its own sends only the text of an error."""
ANSWER_SECONDS = 10.0
"""Seconds that a worker may take beyond the time limit of its work. A worker whose trainer hangs can then still answer with its own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A version that all workers have open."""

    path: str  # by which the bytes come
    reason: str  # why they come by this path
    num_bytes: int
    seconds: float  # of the slowest worker


class WholeWeights:
    """A pull replaces every parameter of the model."""

    request: "LoRARequest | None" = None

    def begin(self, engine: "LLMEngine") -> None:
        """Does nothing: the engine keeps the weights that it was started with."""

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Replace the weights by those of the open version. Returns the seconds of the slowest worker.

        If it fails, the model may hold weights of two versions.
        """
        return max(_ask(engine, source, "load", "load_version"))


class OneAdapter:
    """A pull replaces the adapter that every request uses. The model's own weights stay."""

    request: "LoRARequest | None" = None

    def __init__(self, config: GeneratorConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: name and shape of every tensor of the adapter."""
        self.config = config
        self.shapes = shapes

    def begin(self, engine: "LLMEngine") -> None:
        """Load an adapter of zeros. Requests from before the first pull refer to it, and so continue with the pulled weights."""
        from vllm.lora.request import LoRARequest

        source = LoadedTensors({name: torch.zeros(shape) for name, shape in self.shapes.items()})
        with opened(engine, source):
            self.load(engine, source)
        # vLLM finds the adapter by its number. It would read the path only if it did not find the adapter.
        self.request = LoRARequest("adapter", ADAPTER_ID, "in memory")

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Replace the adapter by the tensors of the open version. Returns the seconds of the slowest worker."""
        lora = self.config.lora
        return max(
            _ask(engine, source, "load", "load_adapter", ADAPTER_ID, lora.rank, lora.alpha, adapters.modules(lora))
        )


def apply_to_prompts(engine: "LLMEngine") -> None:
    """Let all workers apply adapters of the output projection to the logprobs of prompts, too. vLLM itself does so only for samples."""
    engine.collective_rpc("apply_to_prompts")


class SilentWorkerError(TimeoutError):
    """A worker did not answer in time. The engine is lost, because the late answer would be taken for the answer to the next call."""


@contextlib.contextmanager
def opened(engine: "LLMEngine", source: Source) -> Iterator[Opened]:
    """Open the version in all workers for as long as the context lasts. The model does not change."""
    silent = False
    try:
        # vLLM sends bytes to a worker in another process, but refuses objects of classes that it does not know.
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
    """The results of a method of WeightsExtension in all workers. Raises the first error, and SilentWorkerError naming the phase."""
    timeout = source.timeout + ANSWER_SECONDS
    try:
        answers = engine.collective_rpc("answer", timeout=timeout, args=(method, *arguments))
    except Exception as error:
        if TIMED_OUT not in str(error):
            raise
        where = f"pull of {source.key}: {actor_name()}: {phase}"
        raise SilentWorkerError(f"{where} was not done by every worker within {timeout:g} s") from None
    for rank, (_, failure) in enumerate(answers):
        if failure:
            raised = pickle.loads(failure)
            raised.add_note(f"in vLLM's worker of rank {rank}")
            raise raised
    return [result for result, _ in answers]
