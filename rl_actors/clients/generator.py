"""The client of one or several generators with the same weights.

Most methods return a Call: `await` it, or call its `.result()`. fleet.py sends the calls to the
generators.
"""

import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from rl_actors import adapters
from rl_actors.clients.base import ATTACH_TIMEOUT, ActorDiedError, ActorSilentError, Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.completions import FinishedGroups, GenerateCall, Group
from rl_actors.clients.fleet import Fleet
from rl_actors.clients.limits import GeneratorLimits
from rl_actors.clients.one_generator import OneGenerator
from rl_actors.config import GeneratorConfig, RestartPolicy
from rl_actors.generator import Generator
from rl_actors.processes.output import LogRoute
from rl_actors.seeds import hashed_seed
from rl_actors.texts import TextCodec
from rl_actors.transports.base import Transport
from rl_actors.types import (
    MAX_NAMES_REPORTED,
    Completion,
    DeviceMemory,
    GeneratorInfo,
    GeneratorReturn,
    SamplingParams,
    Transfer,
)
from rl_actors.validation import require_config, require_gpu, validate_pull, validate_sampling_params
from rl_actors.vllm import sleeping
from rl_actors.vllm.start import require_machine

if TYPE_CHECKING:
    from monarch.actor import ActorMesh

    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")
Check = Callable[[GeneratorLimits], None]
"""Raises ValueError or TypeError for a call that the generator would refuse."""


class GeneratorClient(Client):
    """The client of one or several generators. Any number of calls run at a time, as soon as the
    generators are ready.

    A generator that the client spawned and that dies is started again, as often as config.restarts
    allows; calls then only take longer. Bad input is refused in the caller's thread; only before
    the setup of a mesh that the caller spawned, whose limits the client does not know, does the
    Call raise the error.
    """

    def __init__(
        self,
        mesh: "ActorMesh[Generator] | None",
        *,
        name: str = "generator",
        call_timeout: float = GeneratorConfig.call_timeout,
        setup_timeout: float = GeneratorConfig.setup_timeout,
        config: GeneratorConfig | None = None,
        transport: "Transport | Call[Transport] | Call[Transport | None] | None" = None,
        first_version: Call[int] | None = None,
        logs: LogRoute | None = None,
        limits: GeneratorLimits | None = None,
        hosts: "Hosts | None" = None,
    ) -> None:
        """mesh: a Generator mesh of one process, which the caller spawned and will stop.

        config, transport, first_version, logs and hosts are for `spawn`, limits for `attach`.
        """
        super().__init__(mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs)
        self.config = config
        self._limits = GeneratorLimits.of_config(config) if config is not None else limits
        self._codec: TextCodec | None = None  # loaded for the first prompt that is a text
        self._transport = transport
        # Name of an adapter -> the Call of its load_adapter, which may still run or may have
        # failed.
        self._loads: dict[str, Call[None]] = {}
        num_generators = 1 if config is None else config.num_engines
        num_hosts = 1 if hosts is None else len(hosts)
        engines = 1 if config is None else config.engines()[0]
        spawns: dict[str, Callable[[], OneGenerator]] = {}
        for index in range(num_generators):
            own_name = name if num_generators == 1 else f"{name}-{index}"
            spawns[own_name] = partial(
                self._spawn_one,
                mesh,
                name=own_name,
                config=None if config is None else config_of_engine(config, index, num_hosts),
                transport=transport,
                call_timeout=call_timeout,
                setup_timeout=setup_timeout,
                logs=self._logs,
                hosts=_host_of(index // engines, hosts),
            )
        # The fleet must not refer to this client, which could then not be garbage-collected.
        self._fleet = Fleet(
            spawns,
            RestartPolicy() if config is None else config.restarts,
            first_version=first_version,
            setup_timeout=setup_timeout,
            on_event=_ignore if self._is_quiet else _print,
        )
        self._start()

    _spawn_one = OneGenerator

    @classmethod
    def spawn(
        cls,
        config: GeneratorConfig,
        *,
        transport: "Transport | Call[Transport] | Call[Transport | None] | None" = None,
        name: str = "generator",
        logs: LogRoute | None = None,
        first_version: Call[int] | None = None,
        hosts: "Hosts | None" = None,
    ) -> "GeneratorClient":
        """Start vLLM in a new process for each replica. Returns at once; calls wait for the start.

        hosts: from `rl_actors.processes.hosts.connect`; the replicas go round-robin over them.
        None: this host.
        transport: an open transport, or the Call that opens it.
        first_version: the Call of a push_model_state_dict, whose version the generators pull first.
        Raises ValueError if no generator can be started from the config on this machine, and
        TypeError for another config.
        """
        check_config(config, num_hosts=1 if hosts is None else len(hosts))
        return cls(
            None,
            name=name,
            call_timeout=config.call_timeout,
            setup_timeout=config.setup_timeout,
            config=config,
            transport=transport,
            logs=logs,
            first_version=first_version,
            hosts=hosts,
        )

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        certificates: str = "",
        timeout: float = ATTACH_TIMEOUT,
        call_timeout: float = GeneratorConfig.call_timeout,
    ) -> "GeneratorClient":
        """A client of the generator that a running service owns. Clients' calls run at the same time.

        When this program ends, the service aborts its generate calls. Arguments and errors: as in
        TrainerClient.attach.
        """
        from rl_actors.clients import remote

        mesh, info = remote.attach(
            address, "generator", certificates=certificates, timeout=timeout, call_timeout=call_timeout
        )
        limits = GeneratorLimits.of_info(info)
        client = GeneratorClient(mesh, call_timeout=call_timeout, setup_timeout=timeout, limits=limits)
        client.keep(mesh.connection)
        return client

    async def _set_up(self) -> None:
        info = await self._fleet.start()
        self._limits = GeneratorLimits.of_info(info)
        if info.policy_version >= 0:
            self._version = info.policy_version

    @property
    def num_restarts(self) -> int:
        """Number of restarts, summed over all generators."""
        return self._fleet.num_restarts

    @property
    def returns(self) -> tuple[GeneratorReturn, ...]:
        """One record for each return to health after a death, the newest last."""
        return tuple(self._fleet.returns)

    @property
    def last_pull(self) -> Transfer | None:
        """The slowest transfer of the last pull_model_state_dict; num_bytes is 0 if the generator
        had the version.

        Before the first: the transfer of first_version. None if no generator has pulled.
        """
        return self._fleet.last_pull

    def on_news(self, on_event: Callable[[str], None]) -> None:
        """Call on_event(line) when a generator has died, is healthy again, or is not started again.

        It is called on the thread that all clients share.
        """
        self._fleet.on_event = on_event

    async def _is_alive(self, timeout: float) -> bool:
        return not self._closed and await self._fleet.answers_within(timeout)

    def seconds_silent(self) -> dict[str, float]:
        """Seconds since the last sign of life of each generator that this client spawned:
        {"generator-0": 1.2}

        A sign is an answer of an idle engine, or of one that has worked since its last answer; at
        first, the start.
        """
        seconds: dict[str, float] = {}
        for replica in self._fleet.replicas:
            seconds |= replica.client.seconds_silent()
        return seconds

    async def _death(self, silent_after: float) -> ActorDiedError | ActorSilentError | None:
        """Wait until every generator is dead and not started again. Returns the error that ended
        the first.

        None if the start has failed, if the client was closed, or for an error of another type.
        silent_after: seconds, at most config.restarts.silent_after.
        """
        self._fleet.expect_signs(silent_after)
        try:
            await self._started
            cause = await self._fleet.end()
        except Exception:  # the start has failed, or the client was closed
            return None
        return cause if isinstance(cause, ActorDiedError | ActorSilentError) else None

    async def _close(self) -> None:
        await self._fleet.close()
        await super()._close()

    async def _kill(self) -> None:
        await self._fleet.kill()

    def info(self) -> Call[GeneratorInfo]:
        """Version, limits and log file of the generator; of several, those of the one with the
        oldest weights.

        `replicas` then has the infos of all.
        """
        return self._call("info", self._fleet.info)

    def load_adapter(self, name: str, directory: str) -> Call[None]:
        """Load a LoRA adapter from a directory in peft's format, for calls that name it.

        Requests with and without adapters run at the same time. The directory must stay until
        `unload_adapter` has answered; on another host, the same path is read there.
        Raises ValueError if the directory has no adapter, for a rank above max_adapter_rank, for
        max_adapters=0, and for a name that is loaded or being loaded. The Call raises it for an
        adapter that does not fit the model, and if this client is attached to a service.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"load_adapter: name={name!r}; it must be a string that is not empty")
        if self._has_adapter(name):
            raise ValueError(f"load_adapter: an adapter of the name {name!r} is loaded already; unload it first")
        path = Path(directory).absolute()
        adapters.rank_of(path)
        self._loads[name] = self._call(
            "load_adapter",
            lambda: self._fleet.load_adapter(name, str(path)),
            check=lambda limits: limits.check_adapter(path),
        )
        return self._loads[name]

    def unload_adapter(self, name: str) -> Call[None]:
        """Unload an adapter when the calls that use it have ended. New calls cannot name it. Raises
        ValueError if this client has loaded no adapter of this name.
        """
        self._require_adapter(name)
        load = self._loads.pop(name)
        return self._call("unload_adapter", lambda: self._unload_adapter(name, load))

    async def _unload_adapter(self, name: str, load: Call[None]) -> None:
        await load
        await self._fleet.unload_adapter(name)

    def _has_adapter(self, name: str) -> bool:
        return name in self._loads and not self._loads[name].failed()

    def _require_adapter(self, adapter: str | None) -> None:
        if adapter is not None and not self._has_adapter(adapter):
            loaded = [repr(name) for name in list(self._loads) if self._has_adapter(name)]
            listed = ", ".join(loaded[:MAX_NAMES_REPORTED]) or "none"
            raise ValueError(
                f"adapter={adapter!r} is not loaded; the loaded adapters are {listed} ({len(loaded)} in all)"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> Call[list[list[Completion]]]:
        """params.n completions of each prompt, in the order of the prompts. A prompt is a list of
        token ids, or a text.

        Texts are encoded by the generator's tokenizer, and completions then have a `text`.

        adapter: a name given to `load_adapter`. None: none, or with lora.sync="adapter" that of the
        last pull.
        Raises ValueError (TypeError for a wrong type) for a prompt or a parameter out of its
        limits, or an adapter that is not loaded.
        """
        codec = self._codec_for(prompts)
        copies = _as_lists(
            prompts if codec is None else [codec.encode(p) if isinstance(p, str) else p for p in prompts]
        )
        chosen = self._checked(params, adapter)
        return self._call(
            "generate",
            lambda: self._generate(copies, chosen, adapter, codec),
            check=lambda limits: limits.check_prompts(copies, chosen),
            can_cancel=True,
        )

    def _checked(self, params: SamplingParams | None, adapter: str | None) -> SamplingParams:
        """The parameters, after the checks that do not need the generator's limits."""
        chosen = SamplingParams() if params is None else params
        validate_sampling_params(chosen)
        self._require_adapter(adapter)
        return chosen

    async def _generate(
        self, prompts: list[list[int]], params: SamplingParams, adapter: str | None, codec: TextCodec | None
    ) -> list[list[Completion]]:
        call = await self.start_generate(prompts, params, adapter=adapter)
        groups = dict(await call.take(len(prompts)))
        completions = [groups[index] for index in range(len(prompts))]
        if codec is None:
            return completions
        return [[replace(each, text=codec.decode(each.tokens)) for each in group] for group in completions]

    def _codec_for(self, prompts: object) -> TextCodec | None:
        """The tokenizer of the generator if there are texts among the prompts, else None. Raises TypeError if it has none."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            return None
        index = next((index for index, prompt in enumerate(prompts) if isinstance(prompt, str)), None)
        if index is None:
            return None
        if self._codec is None:
            limits = self._limits
            if limits is None or not (path := limits.tokenizer_path):
                reason = (
                    "is not set up yet, so wait for ready()"
                    if limits is None
                    else (
                        "has no tokenizer; give token ids, or name its directory in GeneratorConfig.tokenizer_path "
                        "(that of a run is RUN/tokenizer, or its model)"
                    )
                )
                raise TypeError(f"prompt {index} is the text {prompts[index]!r}, but {self.name} {reason}")
            self._codec = TextCodec.load(path)
        return self._codec

    def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        indices: Sequence[int] | None = None,
        *,
        adapter: str | None = None,
    ) -> FinishedGroups:
        """Iterator that gives (index of a prompt, its params.n completions) as soon as the prompt
        has finished.

        async for index, completions in generator.generate_each(prompts, params): …

        The completions are those of `generate` for the same seeds. All prompts start at once;
        leaving the loop early ends the open ones. A plain `for` works, too.
        indices: for each prompt, p of SamplingParams.seed. None: its index. adapter: as in
        `generate`.
        Raises ValueError (TypeError for a wrong type) as `generate` does, and for more or fewer
        indices than prompts. The loop raises later errors.
        """
        copies = _as_lists(prompts)
        chosen = self._checked(params, adapter)
        seed_indices = None if indices is None else list(indices)
        if seed_indices is not None and len(seed_indices) != len(copies):
            raise ValueError(f"generate_each got {len(copies)} prompts and {len(seed_indices)} indices")
        started = self._call(
            "generate",
            lambda: self.start_generate(copies, chosen, seed_indices, adapter),
            check=lambda limits: limits.check_prompts(copies, chosen),
        )
        return FinishedGroups(started, f"{self.name}: generate")

    async def start_generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seed_indices: list[int] | None = None,
        adapter: str | None = None,
    ) -> GenerateCall:
        """Coroutine: start to generate, unchecked. seed_indices: `indices` of generate_each."""
        await self._loaded(adapter)
        return await self._fleet.generate(prompts, params, seed_indices, adapter)

    async def finished_groups(self, call: GenerateCall, at_least: int = 1) -> list[Group]:
        """Coroutine: the finished prompts of a call, at_least or all that are left."""
        return await call.take(at_least)

    async def abort_generate(self, call: GenerateCall) -> None:
        """Coroutine: end the open prompts of a call."""
        await call.abort()

    async def _loaded(self, adapter: str | None) -> None:
        """Wait until the adapter is loaded. Raises the error of the load."""
        if adapter is not None and (load := self._loads.get(adapter)) is not None:
            await load

    def compute_logprobs(self, sequences: Sequence[Sequence[int]], *, adapter: str | None = None) -> Call[list[Tensor]]:
        """Logprob of every token after the first, at temperature 1: float32 [T - 1] for each
        sequence of T tokens.

        T is at most max_model_len. adapter: as in `generate`.
        """
        copies = _as_lists(sequences)
        self._require_adapter(adapter)
        return self._call(
            "compute_logprobs",
            lambda: self._compute_logprobs(copies, adapter),
            check=lambda limits: limits.check_sequences(copies),
        )

    async def _compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        await self._loaded(adapter)
        return await self._fleet.compute_logprobs(sequences, adapter)

    def pull_model_state_dict(self, version: int, timeout: float = 60.0, *, in_flight: bool = True) -> Call[int]:
        """Replace the weights (with lora.sync="adapter" only the adapter) by a pushed version. The
        answer is `version`.

        The Call raises TimeoutError if the version is not published within `timeout` seconds.
        in_flight=True: running requests get their later tokens from the new weights. False: they
        end first, and requests that come meanwhile wait for the new weights.
        """
        validate_pull(version, timeout)
        return self._call("pull_model_state_dict", lambda: self._pull(version, timeout, in_flight))

    async def _pull(self, version: int, timeout: float, in_flight: bool) -> int:
        await self._fleet.pull(version, timeout, in_flight)
        self._version = version
        return version

    def sleep(self, level: Literal[1, 2] = 1) -> Call[DeviceMemory]:
        """When the running requests have ended, release the device memory of the weights and the KV
        cache.

        Until `wake`, the generator refuses to generate, to compute logprobs, to pull and to load
        adapters. No memory is released on a CPU.
        level: 1 keeps the weights in the host's memory. 2 drops them: after `wake`, only a pull
        makes the generator usable.
        Raises ValueError for sleep_mode=False, and for level 2 if no pull can bring all the
        weights.
        """
        if self.config is not None:
            sleeping.require_possible(self.config, level, has_transport=self._transport is not None)
        return self._call("sleep", lambda: self._fleet.sleep(level))

    def wake(self) -> Call[DeviceMemory]:
        """Allocate the memory that `sleep` released. Does nothing if the generator is awake."""
        return self._call("wake", self._fleet.wake)

    def _call(
        self,
        what: str,
        send: Callable[[], Coroutine[object, None, T]],
        *,
        check: Check | None = None,
        can_cancel: bool = False,
    ) -> Call[T]:
        """Run `send` when all are ready. Checks now if the limits are known, else just before."""
        self.require_open(what)
        self.show_start()
        if check is not None and self._limits is not None:
            check(self._limits)
            check = None
        return in_background(self._when_ready(send, check), f"{self.name}: {what}", can_cancel=can_cancel)

    async def _when_ready(self, send: Callable[[], Coroutine[object, None, T]], check: Check | None) -> T:
        await self._started
        if check is not None:
            assert self._limits is not None
            check(self._limits)
        return await send()


def _as_lists(prompts: Sequence[Any]) -> list[list[int]]:
    """Copies of the prompts, which the caller may change. Tensors and arrays become lists."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return prompts  # type: ignore[return-value]  # validation raises an error that names the argument
    copies: list[list[int]] = []
    for prompt in prompts:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        copies.append(list(prompt) if isinstance(prompt, list | tuple) else prompt)  # type: ignore[arg-type]
    return copies


def _print(line: str) -> None:
    if sys.stderr.isatty() or hasattr(sys, "ps1"):
        print(line, file=sys.stderr)


def _ignore(line: str) -> None: ...


def _host_of(replica: int, hosts: "Hosts | None") -> "Hosts | None":
    if hosts is None:
        return None
    host = replica % len(hosts)
    return hosts.part(host, host + 1)


def check_config(config: GeneratorConfig, num_hosts: int = 1) -> None:
    """Raises ValueError, or TypeError for no GeneratorConfig, if this machine cannot start one."""
    require_config("GeneratorClient.spawn", config, GeneratorConfig)
    config.validate()
    require_gpu(config, num_hosts)
    require_machine(config)


def config_of_engine(config: GeneratorConfig, index: int, num_hosts: int = 1) -> GeneratorConfig:
    """The config of one engine of one replica, with a seed of its own: GPUs after those of the replica before it on the same
    host, shared by the engines of a replica.

    Replica i runs on host i % num_hosts.
    """
    if config.num_engines == 1:
        return config
    engines = config.engines()[0]
    gpu = config.gpu
    if torch.cuda.is_available():
        gpu = (config.gpu or 0) + index // engines // num_hosts * config.tensor_parallel
    return replace(
        config,
        replicas=1,
        engines_per_gpu=engines,
        max_num_seqs=math.ceil(config.max_num_seqs / engines),
        gpu_memory_utilization=config.gpu_memory_utilization / engines,
        kv_cache_bytes=config.kv_cache_bytes and config.kv_cache_bytes // engines,
        gpu=gpu,
        seed=hashed_seed(config.seed, index),
    )
