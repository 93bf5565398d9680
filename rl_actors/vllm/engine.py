"""vLLM in this process: one thread owns the engine, callers wait on futures. Knows no actors and no transports."""

import contextlib
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor

from rl_actors import adapters
from rl_actors.config import GeneratorConfig, LoRAConfig
from rl_actors.types import Completion, SamplingParams
from rl_actors.vllm import cpu, gpu

NO_VERSION = -1
"""policy_version of weights that were not pulled."""

# The engine must share the actor's process.
ENGINE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
BATCH_INVARIANT_ENV = {"VLLM_BATCH_INVARIANT": "1"}  # read as vLLM's modules are imported


def this_machine() -> ModuleType:
    """vllm/gpu.py or vllm/cpu.py: what differs between the machines is theirs."""
    return gpu if torch.cuda.is_available() else cpu


def start_vllm(config: GeneratorConfig) -> Any:
    """An LLMEngine in this process: on the weights of config.hf_path, else on random ones until the first pull.

    Raises ValueError for adapters that vLLM cannot apply on this machine, and for a batch-invariant mode that it does not have there.
    """
    this_machine().require_possible(config)
    os.environ.update(ENGINE_ENV | this_machine().ENV)
    if config.batch_invariant:
        os.environ.update(BATCH_INVARIANT_ENV)
    with model_directory(config) as directory:
        return _llm_engine(config, directory)


@contextlib.contextmanager
def model_directory(config: GeneratorConfig) -> Iterator[str]:
    """A directory that holds the model's config.json."""
    if config.hf_path:
        yield config.hf_path
        return
    with tempfile.TemporaryDirectory(prefix="rl_actors_model_") as directory:
        config.model.save(directory)
        yield directory


def _llm_engine(config: GeneratorConfig, directory: str) -> Any:
    from vllm import EngineArgs, LLMEngine

    args = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        load_format="auto" if config.hf_path else "dummy",
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        # log_softmax(logits / temperature) after top-p and top-k: the distribution that was sampled from
        logprobs_mode="processed_logprobs",
        seed=config.seed,
        disable_log_stats=True,
        **this_machine().options(config),
        **(adapter_options(config.lora) if config.lora.syncs_adapter else {}),
    )
    return LLMEngine.from_engine_args(args)


def adapter_options(config: LoRAConfig) -> dict[str, Any]:
    """vLLM's arguments for one adapter at a time, of these modules alone."""
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= config.rank),
        "lora_target_modules": adapters.modules(config),
    }


class WholeWeights:
    """What a pull brings is every parameter."""

    request = None

    def begin(self, engine: Any) -> None:
        """Leave the weights that the engine was started with."""

    def load(self, engine: Any, tensors: Mapping[str, Tensor]) -> None:
        with this_machine().reloading(engine):
            engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})


class OneAdapter:
    """What a pull brings is the adapter that every request uses; the weights under it stay."""

    request: Any = None

    def __init__(self, config: GeneratorConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.config = config
        self.shapes = shapes

    def begin(self, engine: Any) -> None:
        """An adapter of zeros: a request that runs during the first pull is to go on under what is pulled."""
        self.load(engine, {name: torch.zeros(shape) for name, shape in self.shapes.items()})
        self.request = _adapter_request("loaded")  # by its number; vLLM reads the path of what is not loaded alone

    def load(self, engine: Any, tensors: Mapping[str, Tensor]) -> None:
        with tempfile.TemporaryDirectory(prefix="rl_actors_adapter_") as directory:
            adapters.write(Path(directory), tensors, self.config.lora, base=self.config.hf_path)
            engine.add_lora(_adapter_request(directory, load_inplace=True))


def _adapter_request(path: str, **options: bool) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, path, **options)


@dataclass(slots=True, kw_only=True)
class GenerateCall:
    """One generate or compute_logprobs call: its requests finish in any order, its future when all have."""

    future: Future
    results: list[Any]
    num_open: int


@dataclass(slots=True, kw_only=True)
class _Request:
    call: GenerateCall
    index: int  # in call.results
    read: Callable[[Any, "_Request"], Any]  # vLLM's output -> the result
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token, policy_version) of each stretch


class EngineThread:
    """An LLMEngine and the one thread that may touch it.

    The thread also starts the engine: OpenMP keeps a pool of threads for each thread that computes, and with two pools on the
    same cores it lets workers sleep between kernels.
    """

    def __init__(self, start: Callable[[], Any], weights: WholeWeights | OneAdapter) -> None:
        """Wait until `start` has made the engine. Raises what it raises."""
        self.engine: Any = None
        self.weights = weights
        self.version = NO_VERSION
        self.requests: dict[str, _Request] = {}
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.num_started = 0
        self.failure: BaseException | None = None
        started: Future = Future()
        threading.Thread(target=self._run, args=(start, started), name="vllm", daemon=True).start()
        started.result()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Run a function on the engine's thread between two steps."""
        self._require_alive()
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
        self._require_alive()
        future = _running_future()

        def command() -> None:
            started: list[str] = []
            try:
                per_prompt = [make_params(index) for index in range(len(prompts))]
                total = sum(map(len, per_prompt))
                call = GenerateCall(future=future, results=[None] * total, num_open=total)
                for prompt, all_params in zip(prompts, per_prompt, strict=True):
                    for params in all_params:
                        request_id = str(self.num_started)
                        self.num_started += 1
                        self.engine.add_request(
                            request_id, {"prompt_token_ids": list(prompt)}, params, lora_request=self.weights.request
                        )
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
        self.version = NO_VERSION  # what a load that fails half way leaves
        self.weights.load(self.engine, tensors)
        # Keys and values of the old weights must not serve the new ones: running requests are computed again.
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        for state in self.engine.output_processor.request_states.values():  # their keys are vLLM's own ids
            request = self.requests[state.external_req_id]
            request.versions.append((len(state.detokenizer.output_token_ids), version))

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"vLLM's thread ended: {self.failure!r}; spawn the generator again")

    def _run(self, start: Callable[[], Any], started: Future) -> None:
        try:
            self.engine = start()
            self.weights.begin(self.engine)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._serve()
        except BaseException as error:  # nobody would answer the callers any more
            self.failure = error
            for request in self.requests.values():
                if not request.call.future.done():
                    request.call.future.set_exception(error)
            raise

    def _serve(self) -> None:
        while True:
            while not self.commands.empty() or not self.requests:
                self.commands.get()()
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


def vllm_params(params: SamplingParams, prompt: int) -> list[Any]:
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
            skip_clone=True,  # made for this request alone
        )
        for i in range(params.n)
    ]


def read_completion(output: Any, request: _Request) -> Completion:
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


def read_prompt_logprobs(output: Any, _: _Request) -> Tensor:
    tokens = output.prompt_token_ids
    # The first token has no logprob.
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([by_token[token].logprob for token, by_token in pairs])
