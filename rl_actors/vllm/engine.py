"""Runs vLLM's engine on a thread of its own. Callers wait on futures. This module does not use actors."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_actors.config import GeneratorConfig
from rl_actors.transports.base import Source
from rl_actors.types import DeviceMemory, Heartbeat, Transfer
from rl_actors.vllm.core import EngineDiedError, core_of
from rl_actors.vllm.pull import OneAdapter, SilentWorkerError, WholeWeights, apply_to_prompts, opened
from rl_actors.vllm.requests import NO_VERSION, EngineCall, Request
from rl_actors.vllm.sleeping import asleep, fall_asleep, wake_up
from rl_actors.vllm.start import start_vllm

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput
    from vllm import SamplingParams as VLLMParams
    from vllm.lora.request import LoRARequest

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """Work for the engine's thread."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]  # called instead of `run` if the engine has failed for good


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred(Generic[T]):
    """Work that starts only when no request is running, such as putting the engine to sleep."""

    run: Callable[[], T]
    done: "Future[T]"  # gets the result or the error of `run`


class EngineThread:
    """An LLMEngine, and the only thread that may use it.

    This thread also starts the engine. If another thread started it, there would be two pools of worker threads, because OpenMP makes a
    pool for each thread that computes. If two pools share the cores, their workers sleep between kernels, which slows every step.
    """

    engine: "LLMEngine"

    def __init__(self, config: GeneratorConfig, weights: WholeWeights | OneAdapter) -> None:
        """Wait until the engine has started. Raises the error of the start.

        weights: says whether a pull replaces all weights of the model or only an adapter.
        """
        self.config = config
        self.weights = weights
        self.core = core_of(config)
        self.version = NO_VERSION
        self.num_weights = 0  # how often the weights were replaced
        self.broken = ""  # why the model has no usable weights; empty if it holds all weights of one version
        # Requests that have not finished, by id. `Any` is here because their calls have results of different types.
        self.requests: dict[str, Request[Any]] = {}
        self.asleep = 0  # level of vLLM's sleep mode; 0: awake
        self.waiting: list[Deferred[Any]] = []  # work that begins when no request runs
        self.held: list[EngineCall[Any]] = []  # calls that start after the work in `waiting`
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.num_started = 0  # number of requests started; gives the next id
        self.adapters: dict[str, LoRARequest] = {}  # the adapters that load_adapter has loaded, by name
        self.num_loaded = 0  # number of adapters loaded so far; gives the next id
        self.is_idle = False  # True while the thread waits for a command and no request runs
        self.num_done = 0  # number of pieces of work that the thread has done; see _serve
        self.death = ""  # why the engine has failed for good; empty if it works
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(started,), name="vllm", daemon=True).start()
        started.result()

    def heartbeat(self) -> Heartbeat:
        """Whether the thread is idle, and how much work it has done.

        Raises EngineDiedError if the engine has failed for good.
        """
        if self.death:
            raise EngineDiedError(self.death)
        return Heartbeat(is_idle=self.is_idle, num_done=self.num_done)

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine's thread between two steps."""
        future: Future[T] = _running_future()
        self.commands.put(Command(partial(self._run_into, future, function), future.set_exception))
        return future

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        make_params: Callable[[int], list["VLLMParams"]],
        read: Callable[["RequestOutput"], T],
        adapter: str | None = None,
        *,
        name: str = "generate",
    ) -> EngineCall[T]:
        """Give all requests of a call to the engine, between two of its steps. vLLM decides in which steps they run.

        The returned EngineCall gives the results of the requests, or the first error.

        make_params, read: as in EngineCall. adapter: name of the loaded adapter with which the requests run. None: the
        adapter of the last pull if pulls bring adapters, or no adapter if pulls bring whole weights. name: the call's
        name in error texts.
        """
        call = EngineCall(prompts, make_params, read, adapter, name)
        self.commands.put(Command(partial(self._add_requests, call), call.fail))
        return call

    def abort(self, call: EngineCall[T]) -> None:
        """End the unfinished requests of a call. The call then fails. Does nothing if all requests have finished."""
        aborted = RuntimeError("the call was aborted")
        self.commands.put(Command(partial(self._abort_call, call, aborted), call.fail))

    def update(self, source: Source, version: int, *, in_flight: bool = True) -> "Future[Transfer]":
        """Replace the weights by those of the source, between two steps of the engine. If pulls bring only an adapter,
        replace the adapter.

        version: policy_version of the new weights.
        in_flight: True: running requests go on with the new weights. False: the update waits until the running requests
        have ended, and new requests wait until the update has ended.
        """
        load = partial(self._load_or_end, source, version)
        return self.submit(load) if in_flight else self._submit_drained(load)

    def load_adapter(self, name: str, directory: str) -> "Future[None]":
        """Load an adapter from a directory in peft's format. Requests can then use the adapter by its name.

        If an adapter of this name is loaded already: does nothing if it came from this directory, otherwise raises
        ValueError.
        The directory must exist until the adapter is unloaded. vLLM may drop the adapter from memory to load other
        adapters, and read the directory again later.
        """
        return self.submit(partial(self._load_adapter, name, directory))

    def unload_adapter(self, name: str) -> "Future[None]":
        """Forget an adapter. Does nothing if it is not loaded. Raises ValueError if requests use it."""
        return self.submit(partial(self._unload_adapter, name))

    def _load_adapter(self, name: str, directory: str) -> None:
        from vllm.lora.request import LoRARequest

        if name in self.adapters:
            if self.adapters[name].lora_path != directory:
                raise ValueError(f"adapter {name!r} is loaded already, from {self.adapters[name].lora_path}")
            return
        if self.asleep:
            raise asleep("load_adapter")
        # vLLM uses the adapter's name in the keys of its prefix cache. If a later adapter had the name of an earlier
        # one, its requests would get cached KV blocks of the earlier adapter. So each load gets a new name.
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
        """Release the GPU memory of the weights and of the KV cache when the running requests have ended.

        Later calls raise errors until `wake` is called. level: see sleeping.py.
        """
        return self._submit_drained(partial(self._fall_asleep, level))

    def wake(self) -> "Future[DeviceMemory]":
        """Allocate the memory again that `sleep` has released."""
        return self.submit(self._wake_up)

    def _submit_drained(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the engine's thread when the running requests have ended.

        Calls that come in the meantime start after the function.
        """
        deferred = Deferred(run=function, done=_running_future())
        self.commands.put(Command(partial(self.waiting.append, deferred), deferred.done.set_exception))
        return deferred.done

    def _fall_asleep(self, level: int) -> DeviceMemory:
        begin = time.perf_counter()
        if self.asleep:
            return DeviceMemory()
        num_bytes = fall_asleep(self.engine, level)
        self.asleep = level
        if level == 2:
            self.broken = "sleep(level=2) released its weights"
            self._set_version(NO_VERSION)
        return DeviceMemory(num_bytes=num_bytes, seconds=time.perf_counter() - begin)

    def _wake_up(self) -> DeviceMemory:
        begin = time.perf_counter()
        if not self.asleep:
            return DeviceMemory()
        num_bytes = wake_up(self.engine)
        self.asleep = 0
        return DeviceMemory(num_bytes=num_bytes, seconds=time.perf_counter() - begin)

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
        # If the version cannot be opened, the weights stay as they are.
        with opened(self.engine, source) as version, self.core.updating(self.engine):
            self._set_version(NO_VERSION)  # it stays NO_VERSION if the load fails
            try:
                load_seconds = self.weights.load(self.engine, source)
            except Exception as error:
                if not self.core.has_died():
                    self._break(f"the pull of version {wanted} failed while the weights were replaced: {error!r}")
                raise
            self.broken = ""
            if self.config.recompute_running:
                # The cached keys and values come from the old weights. vLLM drops them, and computes them again for
                # running requests.
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
        """Fail the running requests now, and later requests until a pull succeeds."""
        self.broken = why
        for call in {id(request.call): request.call for request in self.requests.values()}.values():
            self._abort_call(call, self._no_weights())

    def _no_weights(self) -> RuntimeError:
        return RuntimeError(f"the generator has no usable weights: {self.broken}; call pull_model_state_dict first")

    def _set_version(self, version: int) -> None:
        """Set the version of the weights. vLLM marks the tokens of later steps with this version."""
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
        # cache_salt is part of the hash by which vLLM's prefix cache finds a block. So a request finds only cached blocks
        # of requests that began with the same weights. The version would not be enough: after the load of a checkpoint a
        # trainer publishes other weights under a number that it has used before.
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
                apply_to_prompts(self.engine)
            self.weights.begin(self.engine)
        except Exception as error:
            started.set_exception(self._named(error))
            return
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while True:
                self._serve()
        except BaseException as error:
            logger.exception("vLLM's engine has failed")
            self._refuse_everything(f"vLLM's engine has failed: {error!r}" if self.core.recovers else str(error))

    def _refuse_everything(self, why: str) -> None:
        """Give all waiting and later callers an error.

        This method never returns. It refuses all later commands, and it keeps the engine's thread alive. If the thread
        ended, Linux would kill the vLLM processes that the thread has started. CHILD in core.py asks Linux for this.
        """
        self.death = f"{why}; spawn the generator again"
        for call in [*self.held, *(request.call for request in self.requests.values())]:
            call.fail(EngineDiedError(self.death))
        for deferred in self.waiting:
            deferred.done.set_exception(EngineDiedError(self.death))
        while True:
            self.commands.get().fail(EngineDiedError(self.death))

    def _on_death(self, error: BaseException) -> None:
        """Make the engine's thread raise the error and refuse all work. Any thread may call this method."""

        def end() -> None:
            raise error

        self.commands.put(Command(end, lambda _: None))

    def _serve(self) -> None:
        """Do one piece of work.

        If no request runs, do the deferred work. If there is none, wait for a command and run it.
        If requests run, run a waiting command. If no command waits, run a step of the engine.
        """
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
        """Do the deferred work, and then start the held calls. Called when no request runs."""
        waiting = self.waiting
        self.waiting = []
        calls = self.held
        self.held = []
        for deferred in waiting:
            self._run_into(deferred.done, deferred.run)
        for call in calls:
            self._add_requests(call)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            if not self.core.recovers:
                raise self.core.death(error) from None
            # After an error vLLM makes no progress until its running requests are aborted.
            failed = [request.call for request in self.requests.values()]
            self._abort(list(self.requests))
            for call in failed:
                call.fail(error)
            return
        for output in outputs:
            # A request is missing if an earlier output of this step has made its call fail.
            if output.finished and (request := self.requests.pop(output.request_id, None)):
                try:
                    request.call.put(request, output)
                except Exception as error:  # of this call alone
                    self._abort_call(request.call, error)

    def _run_into(self, future: "Future[T]", function: Callable[[], T]) -> None:
        """Put the result or the error of the function into the future."""
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(self._named(error))
        except BaseException as error:
            future.set_exception(error)

    def _named(self, error: Exception) -> Exception:
        """The error, or an EngineDiedError if vLLM's core has died and has caused the error."""
        if isinstance(error, ValueError | TypeError | EngineDiedError) or not self.core.has_died():
            return error
        return EngineDiedError(f"{self.core.death(error)}; spawn the generator again")

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)


def _running_future() -> "Future[T]":
    """A future in the state "running".

    A caller cannot cancel such a future, so the engine's thread can always set its result.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
