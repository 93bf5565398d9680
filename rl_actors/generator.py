"""The generator as a Monarch actor around a vLLM engine. Weights have Hugging Face's names and shapes.

A trainer publishes numbered versions of its weights through a transport. A pull reads one version into the engine.
"""

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
from rl_actors.stop_tokens import stop_token_ids
from rl_actors.transports.base import Manifest, Transport, announce, find
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
    """An actor that runs one vLLM engine. Many callers may call the actor at the same time. A pull replaces the weights in place."""

    # `setup` sets these four attributes.
    vocab_size: int
    parameters: dict[str, tuple[int, ...]]  # name and shape of every tensor of the model
    served: list[str]  # the layers on which adapters are possible, by peft's names
    expected: dict[str, tuple[int, ...]]  # name and shape of every tensor of a pull

    def __init__(self, config: GeneratorConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.transport = transport
        self.loaded_version_key = ""  # Manifest.key of the weights in the engine; "" if the weights are not from a pull
        self.last_pull: Transfer | None = None
        self._engine: EngineThread | None = None
        self.setting_up = asyncio.Lock()
        self.calls: dict[int, EngineCall[Completion]] = {}  # generate calls whose completions have not all been fetched
        self.numbers = itertools.count()

    @concurrent_endpoint
    @sends_errors
    async def setup(self) -> GeneratorInfo:
        """Start vLLM, if no earlier call has started it."""
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
        """A Probe in this actor's process. A Probe is an actor that answers even while this actor runs a call."""
        return await probe_here()

    @concurrent_endpoint
    @sends_errors
    async def heartbeat(self) -> Heartbeat:
        """A sign of life of the engine. Raises EngineDiedError if the engine has failed for good."""
        if self._engine is None:
            # The client counts a generator as dead if the generator is not idle and its num_done does not change for a while. Setup does
            # not change num_done. So during setup the heartbeat says that the generator is idle. If setup hangs, the client waits until
            # the time limit of setup. But if a process of the engine is stopped (SIGSTOP), the heartbeat says that the generator is not
            # idle. The client then counts the generator as dead before that limit.
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
        indices: list[int] | None = None,
        adapter: str | None = None,
    ) -> int:
        """Start params.n completions of every prompt. Returns the number of the call, for finished_groups. Many calls may run at a time.

        indices: for each prompt the number p from which its seeds are computed (see SamplingParams.seed). None: p is the prompt's index.
        adapter: name of the loaded adapter with which the requests run. If this adapter is not loaded, the call fails. None: no
        adapter, or with lora.sync="adapter" the adapter of the last pull.
        Raises ValueError if a prompt is empty or not shorter than max_model_len, or if a parameter is out of range.
        """
        validate_prompts(prompts, max_model_len=self.config.max_model_len, vocab_size=self.vocab_size)
        validate_sampling_params(params, vocab_size=self.vocab_size)

        def params_of(index: int) -> "list[VLLMParams]":
            # The engine accepts one token more than max_model_len (see start_vllm). So the limit is enforced here.
            room = self.config.max_model_len - len(prompts[index])
            place = index if indices is None else indices[index]
            return vllm_params(replace(params, max_tokens=min(params.max_tokens, room)), place, self.stop_token_ids)

        call = next(self.numbers)
        self.calls[call] = self.engine.start(prompts, params_of, partial(read_completion, params), adapter)
        return call

    @concurrent_endpoint
    @sends_errors
    async def finished_groups(self, call: int, at_least: int = 1) -> list[tuple[int, list[Completion]]]:
        """The groups that have finished since the last answer, in the order in which they finished.

        A group is a pair (index of a prompt, all completions of the prompt). Waits until `at_least` groups have
        finished, or all remaining groups if fewer remain.
        call: the number that start_generate returned. Raises the error of this generate call if the call fails.
        Raises ValueError if no generate call of this number is running.
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
        """End the unfinished requests of a generate call. Does nothing if the call has ended."""
        running = self.calls.pop(call, None)
        if running is not None:
            self.engine.abort(running)

    @concurrent_endpoint
    @sends_errors
    async def compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        """Log probability of every token after the first, given the tokens before it, at temperature 1.

        The answer has a float32 tensor [T - 1] for each sequence of T tokens. adapter: as in start_generate.
        """
        from vllm import SamplingParams as VLLMParams

        validate_sequences(sequences, max_model_len=self.config.max_model_len, vocab_size=self.vocab_size)
        params = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        call = self.engine.start(sequences, lambda _: [params], read_prompt_logprobs, adapter, name="compute_logprobs")
        finished = await asyncio.wrap_future(call.take(len(sequences)))
        logprobs = {index: results[0] for index, results in finished}
        return [logprobs[index] for index in range(len(sequences))]

    @concurrent_endpoint
    @sends_errors
    async def load_adapter(self, name: str, directory: str) -> None:
        """Load an adapter from a directory in peft's format. Requests can then name the adapter. Does nothing if it is loaded already.

        The directory must stay until the adapter is unloaded, because vLLM may read the directory again.
        Raises ValueError if the config allows no adapters, if the adapter does not fit the model, or if an adapter from another directory
        has this name.
        """
        config, folder = self.config, Path(directory)
        adapters.require_possible(folder, max_adapters=config.max_adapters, max_rank=config.max_adapter_rank)
        await asyncio.to_thread(adapters.require_fits, folder, self.parameters, self.served)
        await asyncio.wrap_future(self.engine.load_adapter(name, directory))

    @concurrent_endpoint
    @sends_errors
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Does nothing if it is not loaded. Raises ValueError if requests use it."""
        await asyncio.wrap_future(self.engine.unload_adapter(name))

    @concurrent_endpoint
    @sends_errors
    async def pull_model_state_dict(self, version: int, timeout: float = 60.0, in_flight: bool = True) -> Transfer:
        """Replace the weights by a published version. With lora.sync="adapter", replace only the adapter.

        Does nothing if the engine has this version already.

        If the version cannot be read, the generator keeps its weights. If the replacement fails in the middle, the generator refuses to
        generate until a pull has succeeded.
        in_flight=True: running requests go on with the new weights. False: the pull waits until running requests have ended, and new
        requests wait for the new weights.
        Raises TimeoutError if the version is not published in `timeout` seconds. Raises ValueError if a parameter is missing, unknown or of
        a wrong shape or dtype.
        """
        validate_pull(version, timeout)
        if self.transport is None:
            raise RuntimeError("pull_model_state_dict: this generator was made without a transport")
        manifest = await find(self.transport, version, timeout)
        if self.last_pull is not None and self.loaded_version_key == manifest.key:
            return replace(self.last_pull, num_bytes=0, seconds=0.0, phases={})
        check_manifest(manifest, self.expected)
        source = await self.transport.source(manifest)
        # If this pull fails in the middle, the engine is broken. The key then stays empty, so that the next pull loads the weights again.
        former, self.loaded_version_key = self.loaded_version_key, ""
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
        """Release the GPU memory of weights and KV cache when the running requests have ended, and refuse calls until `wake`.

        Does nothing if the generator sleeps already.

        level: 1 keeps the weights in the host's memory. 2 drops the weights: after `wake` the generator refuses to generate until a pull.
        """
        sleeping.require_possible(self.config, level, has_transport=self.transport is not None)
        released = await asyncio.wrap_future(self.engine.sleep(level))
        if self.engine.asleep == 2:
            self.loaded_version_key = ""  # so that a pull of the dropped version loads it again
        return released

    @concurrent_endpoint
    @sends_errors
    async def wake(self) -> DeviceMemory:
        """Allocate the GPU memory again that `sleep` has released. Does nothing if the generator is awake."""
        return await asyncio.wrap_future(self.engine.wake())

    def _note(self, loaded: Transfer) -> None:
        """Keep the last pull for `info`. Log the path over which the weights came, and the reason for the path, if path
        or reason has changed.
        """
        former, self.last_pull = self.last_pull, loaded
        if former is None or (former.path, former.reason) != (loaded.path, loaded.reason):
            logger.info("the weights come by %s: %s", loaded.path, loaded.reason)


def expected_tensors(directory: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model that a directory's config.json describes.

    If the output layer shares its weights with the embeddings, lm_head.weight is not among the tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        tensors |= by_expert(name, tuple(parameter.shape))
    return tensors


def by_expert(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors into which one parameter of transformers' model is split.

    transformers' model stacks the weights of all experts of a block in one parameter, and concatenates the gate and up projections along
    their outputs. The weight files of a Hugging Face directory have one tensor for each expert and each projection.
    The versions that a trainer pushes have the same tensors. A parameter outside the experts is not split.

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
    """Raises ValueError if parameters are missing, unknown or of a wrong shape or dtype. The error lists at most MAX_NAMES_REPORTED of them."""
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
