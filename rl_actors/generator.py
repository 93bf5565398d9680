"""The generator as a Monarch actor: the real vLLM engine in the actor's process, its model in Hugging Face layout.

One thread owns the engine; callers wait on futures, so any number of them may call `generate` at the same time.
"""

import asyncio
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint
from torch import Tensor

from rl_actors.config import GeneratorConfig
from rl_actors.errors import sends_errors
from rl_actors.transports.base import Manifest, Transport, find
from rl_actors.types import Completion, SamplingParams

NO_VERSION = -1
"""policy_version of weights that were not pulled."""

# The engine must share the actor's process, and helper kernels compiled at first use would cost twelve seconds on a CPU.
ENGINE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
CPU_BATCHED_TOKENS = 4096
CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}


@dataclass(slots=True, kw_only=True)
class _Call:
    """One generate or compute_logprobs call: its requests finish in any order, its future when all have."""

    future: Future
    results: list[Any]
    num_open: int


@dataclass(slots=True, kw_only=True)
class _Request:
    call: _Call
    index: int  # in call.results
    read: Callable[[Any, "_Request"], Any]  # vLLM's output -> the result
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token, policy_version) of each stretch


class Engine:
    """vLLM's LLMEngine and the one thread that may touch it."""

    def __init__(self, config: GeneratorConfig, model_directory: str, *, has_weights: bool) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu:
            type(current_platform).simple_compile_backend = "eager"
            memory: dict[str, Any] = {
                "kv_cache_memory_bytes": config.kv_cache_bytes,
                # vLLM 0.32 fails in a step that splits the prompt of a seeded request: "CPU Generator does not use offset".
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(config.max_model_len, config.max_num_seqs, CPU_BATCHED_TOKENS),
            }
        else:
            memory = {"gpu_memory_utilization": config.gpu_memory_utilization}
        args = EngineArgs(
            model=model_directory,
            skip_tokenizer_init=True,
            load_format="auto" if has_weights else "dummy",
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=config.enforce_eager or on_cpu,
            # log_softmax(logits / temperature) after top-p and top-k: the distribution that was sampled from
            logprobs_mode="processed_logprobs",
            seed=config.seed,
            disable_log_stats=True,
            **memory,
        )
        self.engine = LLMEngine.from_engine_args(args)
        self.version = NO_VERSION
        self.requests: dict[str, _Request] = {}
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.num_started = 0
        self.thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self.thread.start()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Run a function on the engine's thread between two steps."""
        future = _running_future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.commands.put(command)
        return future

    def start(self, prompts: Sequence[Sequence[int]], make_params: Callable[[int], list[Any]], read) -> Future:
        """Start all requests of a call; its future gets their results in order, or the first error."""
        future = _running_future()

        def command() -> None:
            started: list[str] = []
            try:
                per_prompt = [make_params(index) for index in range(len(prompts))]
                total = sum(map(len, per_prompt))
                call = _Call(future=future, results=[None] * total, num_open=total)
                for prompt, all_params in zip(prompts, per_prompt, strict=True):
                    for params in all_params:
                        request_id = str(self.num_started)
                        self.num_started += 1
                        self.engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
                        request = _Request(call=call, index=len(started), read=read, versions=[(0, self.version)])
                        self.requests[request_id] = request
                        started.append(request_id)
            except Exception as error:
                self._abort(started)
                future.set_exception(error)

        self.commands.put(command)
        return future

    def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        """Replace the weights between two steps. Running requests go on under the new ones, which their versions show."""
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        self.engine.apply_model(_repack_tied_head)
        # Keys and values of the old weights must not serve the new ones: running requests are computed again.
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        for state in self.engine.output_processor.request_states.values():  # their keys are vLLM's own ids
            request = self.requests[state.external_req_id]
            request.versions.append((len(state.detokenizer.output_token_ids), version))

    def _run(self) -> None:
        while True:
            while not self.commands.empty() or not self.requests:
                command = self.commands.get()
                if command is None:
                    return
                command()
            try:
                for output in self.engine.step():
                    if output.finished:
                        self._finish(output)
            except Exception as error:
                # vLLM stays wedged until the requests that it was running are gone.
                failed = {id(request.call): request.call for request in self.requests.values()}
                self._abort(list(self.requests))
                for call in failed.values():
                    call.future.set_exception(error)

    def _finish(self, output: Any) -> None:
        request = self.requests[output.request_id]
        call = request.call
        call.results[request.index] = request.read(output, request)
        del self.requests[output.request_id]
        call.num_open -= 1
        if call.num_open == 0:
            call.future.set_result(call.results)

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)


def _running_future() -> Future:
    """A future that a caller who goes away cannot cancel, so that the engine's thread can always answer it."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


class Generator(Actor):
    """n samples for many callers; weights are replaced in place. One process, one engine."""

    def __init__(self, config: GeneratorConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.transport = transport
        self._engine: Engine | None = None
        self.setting_up = asyncio.Lock()

    @concurrent_endpoint
    @sends_errors
    async def setup(self) -> int:
        """Start vLLM on first call; returns the policy_version of its weights, -1 before the first pull."""
        async with self.setting_up:
            if self._engine is None:
                self._engine = await asyncio.to_thread(self._start)
        return self.engine.version

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the generator is not set up: call setup first, as GeneratorClient does")
        return self._engine

    def _start(self) -> Engine:
        os.environ.update(ENGINE_ENV)
        if not torch.cuda.is_available():
            os.environ.update(CPU_ENV)
        if self.config.hf_path:
            self.expected = expected_tensors(self.config.hf_path)
            return Engine(self.config, self.config.hf_path, has_weights=True)
        directory = tempfile.mkdtemp(prefix="rl_actors_model_")
        try:
            self.config.model.save(directory)
            self.expected = expected_tensors(directory)
            return Engine(self.config, directory, has_weights=False)
        finally:
            shutil.rmtree(directory)

    @concurrent_endpoint
    @sends_errors
    async def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
        """n completions of every prompt, in order. Many calls may run at the same time.

        Raises ValueError for a prompt that is empty or longer than max_model_len, and for parameters out of range.
        """
        limits = {"max_model_len": self.config.max_model_len, "vocab_size": self.expected_vocab_size}
        validate_prompts(prompts, params, **limits)
        requests = self.engine.start(prompts, lambda index: _vllm_params(params, index), _read_completion)
        results = await asyncio.wrap_future(requests)
        return [results[i : i + params.n] for i in range(0, len(results), params.n)]

    @concurrent_endpoint
    @sends_errors
    async def compute_logprobs(self, sequences: list[list[int]]) -> list[Tensor]:
        """Log probability of every token after the first, given those before it, at temperature 1: float32 [T - 1] each."""
        from vllm import SamplingParams as VLLMParams

        one_token = SamplingParams(max_tokens=1)
        validate_prompts(
            sequences, one_token, max_model_len=self.config.max_model_len, vocab_size=self.expected_vocab_size
        )
        params = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        return await asyncio.wrap_future(self.engine.start(sequences, lambda _: [params], _read_prompt_logprobs))

    @concurrent_endpoint
    @sends_errors
    async def pull_model_state_dict(self, version: int, timeout: float = 60.0) -> int:
        """Replace the weights by a published version; a no-op when it is held.

        Raises TimeoutError when the version is not published in time, ValueError unless every parameter arrived whole.
        """
        if self.transport is None:
            raise RuntimeError("pull_model_state_dict: this generator was made without a transport")
        manifest = await find(self.transport, version, timeout)
        if self.held_key == manifest.key:
            return version
        tensors = await self.transport.get_tensors(manifest)
        check_tensors(tensors, self.expected, manifest)
        dtype = getattr(torch, self.config.dtype)
        cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.held_key = ""  # a load that fails half way leaves no version that is held
        await asyncio.wrap_future(self.engine.submit(lambda: self.engine.load_weights(cast, version)))
        self.held_key = manifest.key
        return version

    held_key = ""

    @property
    def expected_vocab_size(self) -> int:
        return self.expected["model.embed_tokens.weight"][0]


def _repack_tied_head(model: Any) -> None:
    """vLLM's reload leaves the CPU kernel of a tied head with the weights it was packed from at start; pack it again."""
    head = model.lm_head
    if hasattr(head, "cpu_linear") and model.config.tie_word_embeddings:
        head.quant_method.process_weights_after_loading(head)


def expected_tensors(directory: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, from transformers' model of config.json; a tied head is not a parameter of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], manifest: Manifest) -> None:
    """Raises ValueError listing missing, unknown and misshapen parameters."""
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    wrong += [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        tensor, (_, dtype) = tensors[name], manifest.tensors[name]
        if tuple(tensor.shape) != expected[name] or tensor.dtype != dtype or not dtype.is_floating_point:
            wrong.append(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {expected[name]} {dtype}")
    if wrong:
        raise ValueError(
            f"version {manifest.version} does not fit the model: {'; '.join(wrong[:10])} ({len(wrong)} in all)"
        )


def validate_prompts(prompts: Any, params: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError naming the prompt or the parameter, its value and the limit."""
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        raise ValueError(f"prompts is {prompts!r}; give a list of at least 1 prompt")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
            raise TypeError(f"prompt {index} is {prompt!r}; it must be a list of token ids")
        if not 0 < len(prompt) < max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; it must have 1 to {max_model_len - 1} (max_model_len={max_model_len})"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            outside = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt {index} holds the id {outside}, but ids are 0 to {vocab_size - 1}")
    limits: dict[str, tuple[Callable[[Any], bool], str]] = {
        "max_tokens": (lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        "n": (lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        # vLLM would silently sample at 0.01 what is colder.
        "temperature": (lambda x: x == 0 or 0.01 <= x <= 2, "0 (greedy) or in [0.01, 2]"),
        "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
        "top_k": (lambda x: isinstance(x, int) and x >= 0, "an integer of at least 0"),
        "seed": (lambda x: x is None or (isinstance(x, int) and 0 <= x < 1 << 62), "None or in [0, 2**62)"),
        "stop_token_ids": (lambda x: all(0 <= token < vocab_size for token in x), f"ids of 0 to {vocab_size - 1}"),
    }
    for name, (holds, limit) in limits.items():
        if not holds(getattr(params, name)):
            raise ValueError(f"{name}={getattr(params, name)}; it must be {limit}")


def _vllm_params(params: SamplingParams, prompt: int) -> list[Any]:
    """One vLLM request a completion: then every completion has its own seed, and a stretch of versions of its own."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    return [
        VLLMParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=list(params.stop_token_ids),
            seed=None if params.seed is None else params.seed + prompt * params.n + i,
            ignore_eos=params.ignore_stop,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for i in range(params.n)
    ]


def _read_completion(output: Any, request: _Request) -> Completion:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    versions: list[int] = []
    ends = [start for start, _ in request.versions[1:]] + [len(tokens)]
    for (_, version), end in zip(request.versions, ends, strict=True):
        versions += [version] * (end - len(versions))
    return Completion(
        tokens=tokens,
        logprobs=[by_token[token].logprob for token, by_token in zip(tokens, completion.logprobs, strict=True)],
        policy_versions=versions,
        finish_reason=completion.finish_reason,
    )


def _read_prompt_logprobs(output: Any, _: _Request) -> Tensor:
    tokens = output.prompt_token_ids
    # The first token has no logprob.
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([by_token[token].logprob for token, by_token in pairs])
