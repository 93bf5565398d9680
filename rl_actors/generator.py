"""`Generator`, the Monarch actor around a vLLM engine. Weights have Hugging Face's names and shapes."""

import asyncio
import itertools
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from monarch.actor import Actor, concurrent_endpoint
from torch import Tensor

from rl_actors import adapters
from rl_actors.config import GeneratorConfig
from rl_actors.model_config import ModelConfig
from rl_actors.processes.errors import sends_errors
from rl_actors.processes.output import LOG_VARIABLE, route_library_logs
from rl_actors.processes.spawn import Probe, probe_here
from rl_actors.texts import stop_token_ids
from rl_actors.transports.base import Manifest, Transport, announce, wait_for_manifest
from rl_actors.types import (
    MAX_NAMES_REPORTED,
    Completion,
    DeviceMemory,
    GeneratorInfo,
    Heartbeat,
    SamplingParams,
    Transfer,
)
from rl_actors.validation import validate_prompts, validate_pull, validate_sampling_params, validate_sequences
from rl_actors.vllm import sleeping
from rl_actors.vllm.core import a_child_is_stopped
from rl_actors.vllm.engine import EngineThread
from rl_actors.vllm.pull import OneAdapter, WholeWeights
from rl_actors.vllm.requests import EngineCall, read_completion, read_prompt_logprobs, vllm_params
from rl_actors.vllm.start import model_directory

if TYPE_CHECKING:
    from vllm import SamplingParams as VLLMParams

logger = logging.getLogger(__name__)


class Generator(Actor):
    """One vLLM engine, for many calls at a time. A pull replaces the weights in place."""

    # set by `setup`
    vocab_size: int
    parameters: dict[str, tuple[int, ...]]  # of every tensor of the model
    served: list[str]  # layers that can have adapters, by peft's names
    expected: dict[str, tuple[int, ...]]  # of every tensor of a pull

    def __init__(self, config: GeneratorConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.transport = transport
        self.loaded_version_key = ""  # Manifest.key of the engine's weights; "" if not from a pull
        self.last_pull: Transfer | None = None
        self._engine: EngineThread | None = None
        self.setting_up = asyncio.Lock()
        self.calls: dict[int, EngineCall[Completion]] = {}  # whose completions have not all been fetched
        self.numbers = itertools.count()

    @concurrent_endpoint
    @sends_errors
    async def setup(self) -> GeneratorInfo:
        """Start vLLM once."""
        async with self.setting_up:
            if self._engine is None:
                route_library_logs("generator")
                if self.transport is not None:
                    await announce(self.transport, self.config.dtype)
                self._engine = await asyncio.to_thread(self._start)
        return self.described()

    @concurrent_endpoint
    @sends_errors
    async def info(self) -> GeneratorInfo:
        return self.described()

    def described(self) -> GeneratorInfo:
        return GeneratorInfo(
            policy_version=self.engine.version,
            max_model_len=self.config.max_model_len,
            vocab_size=self.vocab_size,
            logs=os.environ[LOG_VARIABLE],
            last_pull=self.last_pull,
            asleep=self.engine.asleep,
            max_adapters=self.config.max_adapters,
            max_adapter_rank=self.config.max_adapter_rank,
            tokenizer_path=self.config.tokenizer_path or self.config.hf_path,
        )

    @concurrent_endpoint
    async def probe(self) -> Probe:
        """An actor in this process that answers even while this actor runs a call."""
        return await probe_here()

    @concurrent_endpoint
    @sends_errors
    async def heartbeat(self) -> Heartbeat:
        """Raises EngineDiedError if the engine has failed for good."""
        if self._engine is None:
            # who is not idle and does nothing counts as dead, so setup is idle unless stopped (SIGSTOP)
            return Heartbeat(is_idle=not await asyncio.to_thread(a_child_is_stopped), num_done=0)
        return self._engine.heartbeat()

    @property
    def engine(self) -> EngineThread:
        if self._engine is None:
            raise RuntimeError("the generator is not set up: call setup first, as GeneratorClient does")
        return self._engine

    def _start(self) -> EngineThread:
        with model_directory(self.config) as directory:
            self.parameters = expected_tensors(directory)
            self.served = adapters.served(ModelConfig.from_hf(directory))
            own = self.config.stop_token_ids
            self.stop_token_ids = stop_token_ids(directory) if own is None else own
        self.vocab_size = self.parameters["model.embed_tokens.weight"][0]
        lora = self.config.lora
        self.expected = adapters.shapes(lora, self.parameters) if lora.syncs_adapter else self.parameters
        weights = OneAdapter(self.config, self.expected) if lora.syncs_adapter else WholeWeights()
        return EngineThread(self.config, weights)

    @concurrent_endpoint
    @sends_errors
    async def start_generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seed_indices: list[int] | None = None,
        adapter: str | None = None,
    ) -> int:
        """Start params.n completions of every prompt. Returns the call's number, for finished_groups.

        seed_indices: for each prompt, p of SamplingParams.seed. None: its index. adapter: as in
        GeneratorClient.generate. Raises ValueError for a prompt that is empty or too long, or a
        parameter out of range.
        """
        validate_prompts(prompts, max_model_len=self.config.max_model_len, vocab_size=self.vocab_size)
        validate_sampling_params(params, vocab_size=self.vocab_size)

        def params_of(index: int) -> "list[VLLMParams]":
            # here, because the engine accepts one token more (see start_vllm)
            room = self.config.max_model_len - len(prompts[index])
            seed_index = index if seed_indices is None else seed_indices[index]
            limited = replace(params, max_tokens=min(params.max_tokens, room))
            return vllm_params(limited, seed_index, self.stop_token_ids)

        call = next(self.numbers)
        self.calls[call] = self.engine.start(EngineCall(prompts, params_of, partial(read_completion, params), adapter))
        return call

    @concurrent_endpoint
    @sends_errors
    async def finished_groups(self, call: int, at_least: int = 1) -> list[tuple[int, list[Completion]]]:
        """(Index, completions) of the prompts finished since the last answer: `at_least`, or all that
        are left. Raises the error of the generate call, and ValueError if no such call is running.
        """
        if call not in self.calls:
            raise ValueError(
                f"no generate call {call} is running: it has given all its completions, has failed, or was aborted"
            )
        running = self.calls[call]
        try:
            return await asyncio.wrap_future(running.take(at_least))
        finally:
            if running.is_over():
                self.calls.pop(call, None)

    @concurrent_endpoint
    @sends_errors
    async def abort_generate(self, call: int) -> None:
        running = self.calls.pop(call, None)
        if running is not None:
            self.engine.abort(running)

    @concurrent_endpoint
    @sends_errors
    async def compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        """Logprobs at temperature 1: float32 [T - 1] for each sequence of T tokens."""
        from vllm import SamplingParams as VLLMParams

        validate_sequences(sequences, max_model_len=self.config.max_model_len, vocab_size=self.vocab_size)
        params = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        call = self.engine.start(
            EngineCall(sequences, lambda _: [params], read_prompt_logprobs, adapter, name="compute_logprobs")
        )
        finished = await asyncio.wrap_future(call.take(len(sequences)))
        logprobs = {index: results[0] for index, results in finished}
        return [logprobs[index] for index in range(len(sequences))]

    @concurrent_endpoint
    @sends_errors
    async def load_adapter(self, name: str, directory: str) -> None:
        """Load an adapter for requests that name it. Its directory must stay: vLLM may read it again.
        Raises ValueError if the config allows none, it does not fit, or another has this name.
        """
        config = self.config
        folder = Path(directory)
        adapters.require_possible(folder, max_adapters=config.max_adapters, max_rank=config.max_adapter_rank)
        await asyncio.to_thread(adapters.require_fits, folder, self.parameters, self.served)
        await asyncio.wrap_future(self.engine.load_adapter(name, directory))

    @concurrent_endpoint
    @sends_errors
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises ValueError if requests use it."""
        await asyncio.wrap_future(self.engine.unload_adapter(name))

    @concurrent_endpoint
    @sends_errors
    async def pull_model_state_dict(self, version: int, timeout: float = 60.0, in_flight: bool = True) -> Transfer:
        """Replace the weights, or with lora.sync="adapter" the adapter, by a published version,
        unless the engine has it.

        A version that cannot be read changes nothing; after a failure in the middle, only a pull
        makes the generator usable. Raises TimeoutError after `timeout` seconds without the version,
        and ValueError for a wrong set, shape or dtype of parameters.
        """
        validate_pull(version, timeout)
        if self.transport is None:
            raise RuntimeError("pull_model_state_dict: this generator was made without a transport")
        manifest = await wait_for_manifest(self.transport, version, timeout)
        if self.last_pull is not None and self.loaded_version_key == manifest.key:
            return replace(self.last_pull, num_bytes=0, seconds=0.0, phases={})
        check_manifest(manifest, self.expected)
        source = await self.transport.source(manifest)
        # after a failure in the middle it stays empty, so that the next pull loads the weights again
        former = self.loaded_version_key
        self.loaded_version_key = ""
        try:
            loaded = await asyncio.wrap_future(self.engine.update(source, version, in_flight=in_flight))
        except Exception:
            if not self.engine.broken:
                self.loaded_version_key = former
            raise
        self.loaded_version_key = manifest.key
        self._note(loaded)
        return loaded

    @concurrent_endpoint
    @sends_errors
    async def sleep(self, level: int = 1) -> DeviceMemory:
        """Release the GPU memory when the running requests have ended; see GeneratorClient.sleep."""
        sleeping.require_possible(self.config, level, has_transport=self.transport is not None)
        released = await asyncio.wrap_future(self.engine.sleep(level))
        if self.engine.asleep == 2:
            self.loaded_version_key = ""  # so that a pull loads it again
        return released

    @concurrent_endpoint
    @sends_errors
    async def wake(self) -> DeviceMemory:
        """Allocate the GPU memory again that `sleep` has released."""
        return await asyncio.wrap_future(self.engine.wake())

    def _note(self, loaded: Transfer) -> None:
        """Keep the last pull for `info`, and log its path when it changes."""
        former = self.last_pull
        self.last_pull = loaded
        if former is None or (former.path, former.reason) != (loaded.path, loaded.reason):
            logger.info("the weights come by %s: %s", loaded.path, loaded.reason)


def expected_tensors(directory: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, without a tied lm_head.weight."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        tensors |= by_expert(name, tuple(parameter.shape))
    return tensors


def by_expert(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers' model stacks in one parameter: one an expert and projection.

    by_expert("mlp.experts.gate_up_proj", (2, 64, 8))
        -> {"mlp.experts.0.gate_proj.weight": (32, 8), "mlp.experts.0.up_proj.weight": (32, 8), "mlp.experts.1.gate_proj.weight": …}
    """
    block, _, stacked = name.rpartition(".")
    if not block.endswith(".experts"):
        return {name: shape}
    num_experts, num_outputs, num_inputs = shape
    parts = stacked.removesuffix("_proj").split("_")
    part_shape = (num_outputs // len(parts), num_inputs)
    return {f"{block}.{expert}.{part}_proj.weight": part_shape for expert in range(num_experts) for part in parts}


def check_manifest(manifest: Manifest, expected: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError for parameters that are missing, unknown or of a wrong shape or dtype."""
    published = manifest.tensors
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - published.keys())]
    wrong += [f"{name} is unknown" for name in sorted(published.keys() - expected.keys())]
    for name in sorted(expected.keys() & published.keys()):
        shape, dtype = published[name]
        if shape != expected[name] or not dtype.is_floating_point:
            wrong.append(f"{name} is {shape} {dtype}, expected {expected[name]} in a floating-point dtype")
    if wrong:
        listed = "; ".join(wrong[:MAX_NAMES_REPORTED])
        raise ValueError(f"version {manifest.version} does not fit the model: {listed} ({len(wrong)} in all)")
