"""Runs vLLM's engine on a thread of its own. Callers wait on futures. No actors."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_actors.config import GeneratorConfig
from rl_actors.transports.base import Source
from rl_actors.types import DeviceMemory, Heartbeat, Transfer
from rl_actors.vllm.core import EngineDiedError, core_of
from rl_actors.vllm.pull import OneAdapter, SilentWorkerError, WholeWeights, opened
from rl_actors.vllm.requests import NO_VERSION, EngineCall, Request
from rl_actors.vllm.sleeping import asleep
from rl_actors.vllm.start import start_vllm

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm import SamplingParams as VLLMParams
    from vllm.lora.request import LoRARequest

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[], None]
    fail: Callable[[BaseException], None]  # in its place, if the engine has failed for good


class EngineThread:
    """An LLMEngine, and the only thread that may use it, also at its start: OpenMP makes a pool of
    threads for each thread that computes, and two pools would slow every step.
    """

    engine: "LLMEngine"

    def __init__(self, config: GeneratorConfig, weights: WholeWeights | OneAdapter) -> None:
        """Wait for the engine's start, and raise its error. weights: what a pull replaces."""
        self.config = config
        self.weights = weights
        self.core = core_of(config)
        self.version = NO_VERSION
        self.num_weights = 0  # how often they were replaced
        self.broken = ""  # why there are no usable weights; "": they are those of one version
        # Unfinished, by id; their results differ in type.
        self.requests: dict[str, Request[Any]] = {}
        self.asleep = 0  # level of vLLM's sleep mode; 0: awake
        self.waiting: list[Command] = []  # for when no request runs, such as sleep
        self.held: list[EngineCall[Any]] = []  # for after `waiting`
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.num_started = 0  # gives the next id
        self.adapters: dict[str, LoRARequest] = {}  # of load_adapter, by name
        self.num_loaded = 0  # gives the next id
        self.is_idle = False  # waits for a command, and no request runs
        self.num_done = 0  # pieces of work, see _serve
        self.death = ""  # why the engine has failed for good
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(started,), name="vllm", daemon=True).start()
        started.result()

    def heartbeat(self) -> Heartbeat:
        """Raises EngineDiedError if the engine has failed for good."""
        if self.death:
            raise EngineDiedError(self.death)
        return Heartbeat(is_idle=self.is_idle, num_done=self.num_done)

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine's thread between two steps."""
        future, command = self._command(function)
        self.commands.put(command)
        return future

    def start(self, call: EngineCall[T]) -> EngineCall[T]:
        """Give all requests of a call to the engine."""
        self.commands.put(Command(partial(self._add_requests, call), call.fail))
        return call

    def abort(self, call: EngineCall[T]) -> None:
        """End a call's unfinished requests, if any. The call then fails."""
        aborted = RuntimeError("the call was aborted")
        self.commands.put(Command(partial(self._abort_call, call, aborted), call.fail))

    def update(self, source: Source, version: int, *, in_flight: bool = True) -> "Future[Transfer]":
        """Replace the weights, or the adapter, by the source's of `version`, between two steps.

        in_flight: running requests go on. False: they end first, and new ones wait.
        """
        load = partial(self._load_or_end, source, version)
        return self.submit(load) if in_flight else self._submit_drained(load)

    def load_adapter(self, name: str, directory: str) -> "Future[None]":
        """Load an adapter in peft's format, unless it is loaded. vLLM may read the directory again."""
        return self.submit(partial(self._load_adapter, name, directory))

    def unload_adapter(self, name: str) -> "Future[None]":
        """Raises ValueError if requests use it."""
        return self.submit(partial(self._unload_adapter, name))

    def _load_adapter(self, name: str, directory: str) -> None:
        from vllm.lora.request import LoRARequest

        if name in self.adapters:
            if self.adapters[name].lora_path != directory:
                raise ValueError(f"adapter {name!r} is loaded already, from {self.adapters[name].lora_path}")
            return
        if self.asleep:
            raise asleep("load_adapter")
        # vLLM's prefix cache is keyed by name, so another adapter must not get it
        self.num_loaded += 1
        request = LoRARequest(f"{name}#{self.num_loaded}", self.num_loaded, directory)
        self.engine.add_lora(request)
        self.adapters[name] = request

    def _unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            return
        calls = [request.call for request in self.requests.values()] + self.held
        if count := sum(call.adapter == name for call in calls):
            raise ValueError(f"adapter {name!r} cannot be unloaded: {count} running requests and waiting calls use it")
        self.engine.remove_lora(self.adapters.pop(name).lora_int_id)

    def _adapter_of(self, call: EngineCall[T]) -> "LoRARequest | None":
        if call.adapter is None:
            return self.weights.request
        if call.adapter not in self.adapters:
            raise ValueError(f"adapter={call.adapter!r} is not loaded; {len(self.adapters)} adapters are loaded")
        return self.adapters[call.adapter]

    def sleep(self, level: int) -> "Future[DeviceMemory]":
        """Release GPU memory after the running requests. Calls then fail until `wake`."""
        return self._submit_drained(partial(self._fall_asleep, level))

    def wake(self) -> "Future[DeviceMemory]":
        return self.submit(self._wake_up)

    def _submit_drained(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function when the running requests have ended. Later calls start after it."""
        future, command = self._command(function)
        self.commands.put(Command(partial(self.waiting.append, command), command.fail))
        return future

    def _command(self, function: Callable[[], T]) -> "tuple[Future[T], Command]":
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # its caller cannot cancel it
        return future, Command(partial(self._run_into, future, function), future.set_exception)

    def _fall_asleep(self, level: int) -> DeviceMemory:
        begin = time.perf_counter()
        if self.asleep:
            return DeviceMemory()
        self.engine.reset_prefix_cache()
        num_bytes = self._releasable_bytes()
        if torch.cuda.is_available():
            self.engine.sleep(level=level)
        self.asleep = level
        if level == 2:
            self.broken = "sleep(level=2) released its weights"
            self._set_version(NO_VERSION)
        return DeviceMemory(num_bytes=num_bytes, seconds=time.perf_counter() - begin)

    def _wake_up(self) -> DeviceMemory:
        begin = time.perf_counter()
        if not self.asleep:
            return DeviceMemory()
        if torch.cuda.is_available():
            self.engine.wake_up()
        self.asleep = 0
        return DeviceMemory(num_bytes=self._releasable_bytes(), seconds=time.perf_counter() - begin)

    def _releasable_bytes(self) -> int:
        """Of all ranks, 0 on a CPU."""
        return sum(self.engine.collective_rpc("releasable_bytes"))

    def _load_or_end(self, source: Source, wanted: int) -> Transfer:
        try:
            return self._load_weights(source, wanted)
        except SilentWorkerError as error:
            self._on_death(error)
            raise

    def _load_weights(self, source: Source, wanted: int) -> Transfer:
        begin = time.perf_counter()
        if self.asleep:
            raise asleep("pull_model_state_dict")
        # a version that does not open changes nothing
        with opened(self.engine, source) as version, self.core.updating(self.engine):
            self._set_version(NO_VERSION)  # kept if the load fails
            try:
                load_seconds = self.weights.load(self.engine, source)
            except Exception as error:
                if not self.core.has_died():
                    self._break(f"the pull of version {wanted} failed while the weights were replaced: {error!r}")
                raise
            self.broken = ""
            if self.config.recompute_running:
                # computed from the old weights
                self.engine.reset_prefix_cache(reset_running_requests=True)
            self._set_version(wanted)
        return Transfer(
            policy_version=wanted,
            path=version.path,
            reason=version.reason,
            num_bytes=version.num_bytes,
            seconds=time.perf_counter() - begin,
            phases={"read": version.seconds, "load": load_seconds},
        )

    def _break(self, why: str) -> None:
        """Fail running requests now, and later ones until a pull succeeds."""
        self.broken = why
        for call in {id(request.call): request.call for request in self.requests.values()}.values():
            self._abort_call(call, self._no_weights())

    def _no_weights(self) -> RuntimeError:
        return RuntimeError(f"the generator has no usable weights: {self.broken}; call pull_model_state_dict first")

    def _set_version(self, version: int) -> None:
        """vLLM marks the tokens of later steps with this version."""
        self.version = version
        self.num_weights += 1
        self.engine.set_weight_version(str(version))

    def _add_requests(self, call: EngineCall[T]) -> None:
        if self.waiting:
            self.held.append(call)
            return
        if self.asleep or self.broken:
            call.fail(asleep(call.name) if self.asleep else self._no_weights())
            return
        try:
            adapter = self._adapter_of(call)
            params_of_prompts = [call.make_params(index) for index in range(len(call.prompts))]
            for index, params_of_prompt in enumerate(params_of_prompts):
                for sample_index, params in enumerate(params_of_prompt):
                    request = Request(
                        call=call, prompt=index, sample_index=sample_index, num_of_prompt=len(params_of_prompt)
                    )
                    self._add_request(params, request, adapter)
        except Exception as error:
            self._abort_call(call, self._named(error))

    def _add_request(self, params: "VLLMParams", request: Request[T], adapter: "LoRARequest | None") -> None:
        from vllm.inputs.engine import tokens_input

        request_id = str(self.num_started)
        self.num_started += 1
        # so prefix-cached blocks are of the same weights; a version may return after load_checkpoint
        prompt = tokens_input(list(request.call.prompts[request.prompt]), cache_salt=str(self.num_weights))
        self.engine.add_request(request_id, prompt, params, lora_request=adapter)
        self.requests[request_id] = request

    def _abort_call(self, call: EngineCall[T], error: BaseException) -> None:
        if call in self.held:
            self.held.remove(call)
        self._abort([request_id for request_id, request in self.requests.items() if request.call is call])
        call.fail(error)

    def _run(self, started: "Future[None]") -> None:
        try:
            self.engine = start_vllm(self.config, self.core)
            self.core.watch(self.engine, self._on_death)
            self._set_version(NO_VERSION)
            if self.config.has_adapters:
                self.engine.collective_rpc("apply_to_prompts")
            self.weights.begin(self.engine)
        except BaseException as error:
            started.set_exception(self._named(error))
            return
        started.set_result(None)
        try:
            while True:
                self._serve()
        except BaseException as error:
            logger.exception("vLLM's engine has failed")
            self._refuse_everything(f"vLLM's engine has failed: {error!r}" if self.core.recovers else str(error))

    def _refuse_everything(self, why: str) -> None:
        """Fail all callers, for ever: Linux kills what this thread started if it ends (core.CHILD)."""
        self.death = f"{why}; spawn the generator again"
        for call in [*self.held, *(request.call for request in self.requests.values())]:
            call.fail(EngineDiedError(self.death))
        for command in self.waiting:
            command.fail(EngineDiedError(self.death))
        while True:
            self.commands.get().fail(EngineDiedError(self.death))

    def _on_death(self, error: BaseException) -> None:
        """Make the engine's thread raise the error."""

        def end() -> None:
            raise error

        self.commands.put(Command(end, lambda _: None))

    def _serve(self) -> None:
        """Deferred work if no request runs, else a waiting command, else a step. Waits if idle."""
        if self.waiting and not self.requests:
            self._end_drain()
        elif not self.requests or not self.commands.empty():
            self.is_idle = not self.requests
            command = self.commands.get()
            self.is_idle = False
            command.run()
        else:
            self._step()
        self.num_done += 1

    def _end_drain(self) -> None:
        """The deferred work, then the held calls. No request runs."""
        waiting = self.waiting
        self.waiting = []
        calls = self.held
        self.held = []
        for command in waiting:
            command.run()
        for call in calls:
            self._add_requests(call)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            if not self.core.recovers:
                raise self.core.death(error) from None
            # until its requests are aborted vLLM makes no progress
            failed = [request.call for request in self.requests.values()]
            self._abort(list(self.requests))
            for call in failed:
                call.fail(error)
            return
        for output in outputs:
            # missing if an earlier output failed its call
            if output.finished and (request := self.requests.pop(output.request_id, None)):
                try:
                    request.call.put(request, output)
                except Exception as error:  # of this call alone
                    self._abort_call(request.call, error)

    def _run_into(self, future: "Future[T]", function: Callable[[], T]) -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(self._named(error))

    def _named(self, error: BaseException) -> BaseException:
        """The error, or an EngineDiedError if the core's death has caused it."""
        is_other = isinstance(error, ValueError | TypeError | EngineDiedError) or not isinstance(error, Exception)
        if is_other or not self.core.has_died():
            return error
        return EngineDiedError(f"{self.core.death(error)}; spawn the generator again")

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)
