"""vLLM's engine in this process. One thread owns it, and callers wait on futures. Knows no actors and no transports."""

import contextlib
import os
import pickle
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn

from rl_actors import adapters
from rl_actors.config import GeneratorConfig, LoRAConfig
from rl_actors.model_config import ModelConfig
from rl_actors.transports.base import Source
from rl_actors.vllm import cpu, gpu
from rl_actors.vllm.requests import EngineCall, Request

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput
    from vllm import SamplingParams as VLLMParams
    from vllm.lora.request import LoRARequest

T = TypeVar("T")

NO_VERSION = -1
"""policy_version of weights that no pull brought."""

# Without multiprocessing the engine runs in the actor's process.
ENGINE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
BATCH_INVARIANT_ENV = {"VLLM_BATCH_INVARIANT": "1"}  # vLLM reads it when its modules are imported

WORKER_EXTENSION = "rl_actors.vllm.weights.WeightsExtension"
"""Class whose methods vLLM adds to its workers. A pull calls them, so the bytes go straight into the process that computes."""


class Machine(Protocol):
    """The names that cpu.py and gpu.py share. The two modules are its implementations."""

    ENV: dict[str, str]  # environment of vLLM's process

    def require_possible(self, config: GeneratorConfig) -> None:
        """Raises ValueError naming the value and the reason if vLLM cannot run this config on the machine."""

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        """vLLM's arguments for the machine. Also sets up the process."""

    def reloading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Context manager for a reload of all weights."""


def this_machine() -> Machine:
    """vllm/gpu.py if torch sees a GPU, otherwise vllm/cpu.py."""
    if torch.cuda.is_available():
        return gpu
    return cpu


def require_machine(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason if this machine has no GPU and vLLM cannot run the config on a CPU.

    The limits of a GPU are checked in the generator's process. Reading them initializes CUDA, which takes memory of the GPU.
    """
    if not torch.cuda.is_available():
        cpu.require_possible(config)


def start_vllm(config: GeneratorConfig) -> "LLMEngine":
    """Start an LLMEngine in this process. It has the weights of config.hf_path, or without a path random ones until the first pull.

    The engine takes one token more than config.max_model_len. vLLM samples a token after every prompt, so without this room it would
    refuse to compute logprobs of a sequence of max_model_len tokens.
    Raises ValueError for a config that vLLM cannot run on this machine.
    """
    machine = this_machine()
    machine.require_possible(config)
    os.environ.update(ENGINE_ENV | machine.ENV)
    if config.batch_invariant:
        os.environ.update(BATCH_INVARIANT_ENV)
    with model_directory(config) as directory:
        return _llm_engine(replace(config, max_model_len=config.max_model_len + 1), directory, machine)


@contextlib.contextmanager
def model_directory(config: GeneratorConfig) -> Iterator[str]:
    """A directory with the model's config.json: config.hf_path, or a temporary one."""
    if config.hf_path:
        yield config.hf_path
        return
    with tempfile.TemporaryDirectory(prefix="rl_actors_model_") as directory:
        config.model.save(directory)
        yield directory


def _llm_engine(config: GeneratorConfig, directory: str, machine: Machine) -> "LLMEngine":
    from vllm import EngineArgs, LLMEngine

    options = machine.options(config)
    if config.lora.syncs_adapter:
        options |= adapter_options(config.lora)
    if config.max_model_len > ModelConfig.from_hf(directory).max_position_embeddings:
        # vLLM would refuse the extra token, because the model has no position for it. The model never needs this position, because the
        # last sampled token is not an input.
        options["hf_overrides"] = {"max_position_embeddings": config.max_model_len}
    args = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        load_format="auto" if config.hf_path else "dummy",
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        # "processed": log_softmax(logits / temperature) after top-p and top-k. This is the distribution that was sampled from.
        logprobs_mode="processed_logprobs",
        seed=config.seed,
        disable_log_stats=True,
        worker_extension_cls=WORKER_EXTENSION,
        **options,
    )
    return LLMEngine.from_engine_args(args)


def adapter_options(config: LoRAConfig) -> dict[str, object]:
    """vLLM's arguments for one adapter, which has only the modules of the config."""
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= config.rank),
        "lora_target_modules": adapters.modules(config),
    }


class WholeWeights:
    """A pull replaces every parameter of the model."""

    request: "LoRARequest | None" = None

    def begin(self, engine: "LLMEngine") -> None:
        """Does nothing: the engine keeps the weights that it was started with."""

    def load(self, engine: "LLMEngine", source: Source) -> None:
        # vLLM sends bytes to a worker in another process, but refuses objects of classes that it does not know.
        engine.collective_rpc("pull_weights", args=(pickle.dumps(source),))


class OneAdapter:
    """A pull replaces the adapter that every request uses. The model's own weights stay."""

    request: "LoRARequest | None" = None

    def __init__(self, config: GeneratorConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: name and shape of every tensor of the adapter."""
        self.config = config
        self.shapes = shapes

    def begin(self, engine: "LLMEngine") -> None:
        """Load an adapter of zeros. A request that is added before the first pull refers to it, and so continues with the pulled weights."""
        self._write_and_load(engine, {name: torch.zeros(shape) for name, shape in self.shapes.items()})
        # vLLM finds a loaded adapter by its id. It reads the path only if the adapter is not loaded.
        self.request = _adapter_request("loaded")

    def load(self, engine: "LLMEngine", source: Source) -> None:
        with source.open() as version:
            self._write_and_load(engine, dict(version.tensors()))

    def _write_and_load(self, engine: "LLMEngine", tensors: Mapping[str, Tensor]) -> None:
        with tempfile.TemporaryDirectory(prefix="rl_actors_adapter_") as directory:
            adapters.write(Path(directory), tensors, self.config.lora, base=self.config.hf_path)
            engine.add_lora(_adapter_request(directory, load_inplace=True))


def _adapter_request(path: str, **options: bool) -> "LoRARequest":
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, path, **options)


class EngineThread:
    """An LLMEngine and the one thread that may touch it.

    The thread also starts the engine, because OpenMP makes a pool of workers for each thread that computes. If two pools share the cores,
    their workers go to sleep between kernels, which slows every step.
    """

    engine: "LLMEngine"

    def __init__(self, start: Callable[[], "LLMEngine"], weights: WholeWeights | OneAdapter) -> None:
        """Wait until `start` has made the engine. Raises the error of `start`."""
        self.weights = weights
        self.version = NO_VERSION
        # Requests that have not finished, by id. Their calls have results of different types.
        self.requests: dict[str, Request[Any]] = {}
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.num_started = 0  # number of requests started; gives the next id
        self.failure: BaseException | None = None
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(start, started), name="vllm", daemon=True).start()
        started.result()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine's thread between two steps."""
        self._require_alive()
        future: Future[T] = _running_future()
        self.commands.put(partial(_run_into, future, function))
        return future

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        make_params: Callable[[int], list["VLLMParams"]],
        read: Callable[["RequestOutput", Request[T]], T],
    ) -> EngineCall[T]:
        """Start all requests of a call, in the same step. Their results, or the first error, come out of the call."""
        self._require_alive()
        call = EngineCall(prompts, make_params, read)
        self.commands.put(partial(self._add_requests, call))
        return call

    def abort(self, call: EngineCall[T]) -> None:
        """End the requests of a call that have not finished. The call then fails."""
        if self.failure is None:
            self.commands.put(partial(self._abort_call, call, RuntimeError("the call was aborted")))

    def _add_requests(self, call: EngineCall[T]) -> None:
        try:
            params_of_prompts = [call.make_params(index) for index in range(len(call.prompts))]
            for index, params_of_prompt in enumerate(params_of_prompts):
                for place, params in enumerate(params_of_prompt):
                    self._add_request(
                        params,
                        Request(
                            call=call,
                            prompt=index,
                            place=place,
                            num_of_prompt=len(params_of_prompt),
                            versions=[(0, self.version)],
                        ),
                    )
        except Exception as error:
            self._abort_call(call, error)

    def _add_request(self, params: "VLLMParams", request: Request[T]) -> None:
        request_id = str(self.num_started)
        self.num_started += 1
        tokens = {"prompt_token_ids": list(request.call.prompts[request.prompt])}
        self.engine.add_request(request_id, tokens, params, lora_request=self.weights.request)
        self.requests[request_id] = request

    def _abort_call(self, call: EngineCall[T], error: BaseException) -> None:
        self._abort([request_id for request_id, request in self.requests.items() if request.call is call])
        call.fail(error)

    def load_weights(self, source: Source, version: int) -> None:
        """Replace the weights by those that the source opens. Call it on the engine's thread.

        Running requests continue with the new weights. Their `versions` say from which token on.
        """
        self.version = NO_VERSION  # it stays NO_VERSION if the load fails
        self.weights.load(self.engine, source)
        # The cached keys and values are those of the old weights. vLLM drops them, and computes those of running requests again.
        self.engine.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        for (
            state
        ) in self.engine.output_processor.request_states.values():  # its keys are vLLM's ids; external_req_id is ours
            request = self.requests[state.external_req_id]
            request.versions.append((len(state.detokenizer.output_token_ids), version))

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"vLLM's thread ended: {self.failure!r}; spawn the generator again")

    def _run(self, start: Callable[[], "LLMEngine"], started: "Future[None]") -> None:
        try:
            self.engine = start()
            self.weights.begin(self.engine)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._serve()
        except BaseException as error:  # the thread ends now, so all callers must get this error
            self.failure = error
            for request in self.requests.values():
                request.call.fail(error)
            raise

    def _serve(self) -> None:
        """Run the commands that are waiting, then one step of the engine, again and again. Without requests wait for a command."""
        while True:
            while not self.commands.empty() or not self.requests:
                self.commands.get()()
            try:
                for output in self.engine.step():
                    if output.finished:
                        request = self.requests.pop(output.request_id)
                        request.call.put(request, output)
            except Exception as error:
                # After an error vLLM makes no progress until the requests that it was running are aborted.
                failed = [request.call for request in self.requests.values()]
                self._abort(list(self.requests))
                for call in failed:
                    call.fail(error)

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)


def _running_future() -> "Future[T]":
    """A future that is running already. Nobody can cancel it, so the engine's thread can always set its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _run_into(future: "Future[T]", function: Callable[[], T]) -> None:
    """Put the result or the error of the function into the future."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
