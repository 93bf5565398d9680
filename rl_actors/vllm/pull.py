"""The part of a pull that runs in the generator's actor. weights.py has the part that runs in vLLM's workers.

A pull loads one version of the trainer's weights into vLLM. It has two phases. First all workers open the version: they get access to its
tensors, or receive the tensors over the network. This changes nothing in the model. Then all workers load the version into the model.
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
"""The id that vLLM has for the adapter that every pull replaces. A generator that pulls an adapter has no other adapters."""
TIMED_OUT = "RPC call to answer timed out."
"""Text of vLLM's error when a worker does not answer. In the text, "answer" is the name of the worker's method that `_ask` calls. If
vLLM's engine core has its own process, that process sends only the text of an error, not the error's type. So `_ask` recognizes the error by
this text."""
ANSWER_SECONDS = 10.0
"""Seconds that a worker may take beyond the time limit of its work. A worker whose trainer hangs can then still answer with its own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A version that all workers have open."""

    path: str  # the way by which the bytes come, such as "shared_memory" or "tcp"
    reason: str  # why this path was chosen
    num_bytes: int
    seconds: float  # seconds that the slowest worker took to open the version


class WholeWeights:
    """The kind of pull that replaces every parameter of the model."""

    request: "LoRARequest | None" = None  # the adapter of a request that names none: no adapter

    def begin(self, engine: "LLMEngine") -> None:
        """Does nothing. Until the first pull the engine computes with the weights that it was started with."""

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Replace the weights by those of the open version. Returns the number of seconds that the slowest worker took.

        If the load fails, the model may hold weights of two versions.
        """
        return max(_ask(engine, source, "load", "load_version"))


class OneAdapter:
    """The kind of pull that replaces the adapter that every request uses. The model's own weights stay."""

    request: "LoRARequest | None" = None  # this adapter, for vLLM; None before `begin`

    def __init__(self, config: GeneratorConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: name and shape of every tensor of the adapter."""
        self.config = config
        self.shapes = shapes

    def begin(self, engine: "LLMEngine") -> None:
        """Load an adapter of zeros. The first pull replaces this adapter. So requests that began before the first pull continue with
        the pulled adapter."""
        from vllm.lora.request import LoRARequest

        source = LoadedTensors({name: torch.zeros(shape) for name, shape in self.shapes.items()})
        with opened(engine, source):
            self.load(engine, source)
        # vLLM finds the adapter by its number. It reads the path, here "in memory", only if it has no adapter of this number.
        self.request = LoRARequest("adapter", ADAPTER_ID, "in memory")

    def load(self, engine: "LLMEngine", source: Source) -> float:
        """Replace the adapter by the tensors of the open version. Returns the number of seconds that the slowest worker took."""
        lora = self.config.lora
        return max(
            _ask(engine, source, "load", "load_adapter", ADAPTER_ID, lora.rank, lora.alpha, adapters.modules(lora))
        )


def apply_to_prompts(engine: "LLMEngine") -> None:
    """Let all workers apply adapters of the output projection to the logprobs of prompts, too. vLLM itself applies them
    only to the logprobs of sampled tokens."""
    engine.collective_rpc("apply_to_prompts")


class SilentWorkerError(TimeoutError):
    """A worker did not answer in time. The engine cannot be used again, because it would take the late answer for the answer to its next call."""


@contextlib.contextmanager
def opened(engine: "LLMEngine", source: Source) -> Iterator[Opened]:
    """Open the version in all workers for as long as the context lasts. The model does not change."""
    silent = False
    try:
        # vLLM sends bytes to a worker in another process, but refuses objects of classes that it does not know. So the source is pickled here.
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
    """Call a method of WeightsExtension in all workers, and return their results. If the method fails in workers, raises the error
    of the first of these workers. Raises SilentWorkerError naming the phase if a worker does not answer."""
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
