"""The client of one or several generators with the same weights. fleet.py sends its calls to them."""

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
from rl_actors.clients.base import ATTACH_TIMEOUT, Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.completions import FinishedGroups, GenerateCall, with_texts
from rl_actors.clients.fleet import Fleet
from rl_actors.clients.limits import GeneratorLimits
from rl_actors.clients.one_generator import OneGenerator
from rl_actors.clients.ranks import AnyTransport
from rl_actors.config import GeneratorConfig, RestartPolicy
from rl_actors.generator import Generator
from rl_actors.processes.output import LogRoute
from rl_actors.seeds import hashed_seed
from rl_actors.texts import TextCodec
from rl_actors.types import (
    MAX_NAMES_REPORTED,
    Completion,
    DeviceMemory,
    GeneratorInfo,
    GeneratorReturn,
    SamplingParams,
    Transfer,
)
from rl_actors.validation import (
    require_config,
    require_gpu,
    validate_pull,
    validate_sampling_params,
    validate_sequences,
)
from rl_actors.vllm import sleeping
from rl_actors.vllm.start import require_machine

if TYPE_CHECKING:
    from monarch.actor import ActorMesh

    from rl_actors.clients.remote import Connection
    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")
Check = Callable[[GeneratorLimits], None]  # raises for a call that the generator would refuse


class GeneratorClient(Client):
    """Runs any number of calls at a time, as soon as the generators are ready.

    A generator that the client spawned and that dies is started again, as often as config.restarts
    allows; calls then only take longer. Bad input is refused in the caller's thread, but before the
    setup of a mesh that the caller spawned, whose limits are not known yet, by the Call.
    """

    def __init__(
        self,
        mesh: "ActorMesh[Generator] | None",
        *,
        name: str = "generator",
        call_timeout: float = GeneratorConfig.call_timeout,
        setup_timeout: float = GeneratorConfig.setup_timeout,
        config: GeneratorConfig | None = None,
        transport: AnyTransport = None,
        first_version: Call[int] | None = None,
        logs: LogRoute | None = None,
        limits: GeneratorLimits | None = None,
        hosts: "Hosts | None" = None,
        connection: "Connection | None" = None,
    ) -> None:
        """mesh: of one Generator that the caller spawned and will stop. From `config` on: by `spawn`, `attach`."""
        super().__init__(name, is_owner=mesh is None, logs=logs, connection=connection)
        self.config = config
        self._version: int | None = None
        self._limits = GeneratorLimits.of_config(config) if config is not None else limits
        self._codec: TextCodec | None = None  # loaded for the first prompt that is a text
        self._transport = transport
        # name of an adapter -> the Call of its load_adapter, which may run or have failed
        self._loads: dict[str, Call[None]] = {}
        num_generators = 1 if config is None else config.num_engines
        num_hosts = 1 if hosts is None else len(hosts)
        engines = 1 if config is None else config.engines()[0]
        spawns: dict[str, Callable[[], OneGenerator]] = {}
        for index in range(num_generators):
            host = index // engines % num_hosts
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
                hosts=None if hosts is None else hosts.part(host, host + 1),
            )
        # The fleet must not refer to this client, which could then not be garbage-collected.
        self._fleet = Fleet(
            spawns,
            RestartPolicy() if config is None else config.restarts,
            name=name,
            engines_per_gpu=engines,
            first_version=first_version,
            setup_timeout=setup_timeout,
            on_event=_print if not self._is_quiet else lambda line: None,
        )
        self._actors = self._fleet
        self._start(in_background(self._set_up(), f"{name}: setup"))

    _spawn_one = OneGenerator

    @classmethod
    def spawn(
        cls,
        config: GeneratorConfig,
        *,
        transport: AnyTransport = None,
        name: str = "generator",
        logs: LogRoute | None = None,
        first_version: Call[int] | None = None,
        hosts: "Hosts | None" = None,
    ) -> "GeneratorClient":
        """Start vLLM in a new process for each replica. Returns at once; calls wait for the start.

        hosts: from `rl_actors.processes.hosts.connect`, used round-robin. None: this host.
        transport: an open transport, or the Call that opens it.
        first_version: the Call of a push_model_state_dict, whose version the generators pull first.
        Raises ValueError if no generator can be started from the config on this machine.
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
        """A client of a service's generator; see TrainerClient.attach. Its end aborts its generate calls."""
        from rl_actors.clients import remote

        mesh, info = remote.attach(
            address, "generator", certificates=certificates, timeout=timeout, call_timeout=call_timeout
        )
        limits = GeneratorLimits.of_info(info)
        return GeneratorClient(
            mesh, call_timeout=call_timeout, setup_timeout=timeout, limits=limits, connection=mesh.connection
        )

    async def _set_up(self) -> None:
        info = await self._fleet.start()
        self._limits = GeneratorLimits.of_info(info)
        if info.policy_version >= 0:
            self._version = info.policy_version

    @property
    def policy_version(self) -> int | None:
        return self._version

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
        """The slowest transfer of the last pull, with num_bytes=0 if the version was there; None: no pull."""
        return self._fleet.last_pull

    def on_news(self, on_event: Callable[[str], None]) -> None:
        """Call on_event(line), on the clients' thread, when a generator dies, is back or is not restarted."""
        self._fleet.on_event = on_event

    def info(self) -> Call[GeneratorInfo]:
        """Of several generators, the info of the one with the oldest weights; `replicas` has all."""
        return self._call("info", self._fleet.info)

    def load_adapter(self, name: str, directory: str) -> Call[None]:
        """Load a LoRA adapter from a directory in peft's format, for calls that name it.

        The directory must stay until `unload_adapter` has answered; hosts read the same path.
        Raises ValueError for no adapter, a rank above max_adapter_rank, max_adapters=0 and a name
        in use. The Call raises it for an adapter that does not fit, and if attached to a service.
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
            check=lambda limits: adapters.require_possible(
                path, max_adapters=limits.max_adapters, max_rank=limits.max_adapter_rank
            ),
        )
        return self._loads[name]

    def unload_adapter(self, name: str) -> Call[None]:
        """Unload an adapter when the calls that use it have ended. New calls cannot name it."""
        self._require_adapter(name)
        load = self._loads.pop(name)

        async def unload() -> None:
            await load
            await self._fleet.unload_adapter(name)

        return self._call("unload_adapter", unload)

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
        """params.n completions of each prompt, in the order of the prompts.

        prompts: token ids, or texts, whose completions have a `text`. adapter: a name given to
        `load_adapter`. None: none, or with lora.sync="adapter" that of the last pull.
        """
        copies, chosen, codec = self._prepared(prompts, params, adapter)

        async def generate() -> list[list[Completion]]:
            call = await self.start_generate(copies, chosen, adapter=adapter)
            groups = dict(await call.take(len(copies)))
            return [with_texts(groups[index], codec) for index in range(len(copies))]

        return self._call(
            "generate",
            generate,
            check=lambda limits: limits.check_prompts(copies, chosen),
            adapter=adapter,
            can_cancel=True,
        )

    def _prepared(
        self, prompts: Sequence[Sequence[int] | str], params: SamplingParams | None, adapter: str | None
    ) -> tuple[list[list[int]], SamplingParams, TextCodec | None]:
        """Copies of the prompts as token ids, the checked parameters, and the tokenizer if there are texts."""
        codec = self._codec_for(prompts)
        if codec is not None:
            prompts = [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        chosen = SamplingParams() if params is None else params
        validate_sampling_params(chosen)
        self._require_adapter(adapter)
        return _as_lists(prompts), chosen, codec

    def _codec_for(self, prompts: Sequence[Any]) -> TextCodec | None:
        """The tokenizer of the generator if there are texts among the prompts, else None. Raises TypeError if it has none."""
        index = _first_text(prompts)
        if index is None:
            return None
        if self._codec is None:
            text = f"prompt {index} is the text {prompts[index]!r}, but {self.name}"
            if self._limits is None:
                raise TypeError(f"{text} is not set up yet, so wait for ready()")
            if not self._limits.tokenizer_path:
                raise TypeError(
                    f"{text} has no tokenizer; give token ids, or name its directory in GeneratorConfig.tokenizer_path "
                    "(that of a run is RUN/tokenizer, or its model)"
                )
            self._codec = TextCodec.load(self._limits.tokenizer_path)
        return self._codec

    def generate_each(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | None = None,
        indices: Sequence[int] | None = None,
        *,
        adapter: str | None = None,
    ) -> FinishedGroups:
        """Iterator that gives (index, params.n completions) of each prompt that has finished.

        async for index, completions in generator.generate_each(prompts, params): …

        A plain `for` works, too. Leaving the loop early ends the open prompts. The completions are
        those of `generate` for the same seeds.
        indices: for each prompt, p of SamplingParams.seed. None: its index. Others: see `generate`.
        """
        copies, chosen, codec = self._prepared(prompts, params, adapter)
        seed_indices = None if indices is None else list(indices)
        if seed_indices is not None and len(seed_indices) != len(copies):
            raise ValueError(f"generate_each got {len(copies)} prompts and {len(seed_indices)} indices")
        started = self._call(
            "generate",
            lambda: self.start_generate(copies, chosen, seed_indices, adapter),
            check=lambda limits: limits.check_prompts(copies, chosen),
            adapter=adapter,
        )
        return FinishedGroups(started, f"{self.name}: generate", codec)

    async def start_generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seed_indices: list[int] | None = None,
        adapter: str | None = None,
    ) -> GenerateCall:
        """Coroutine: start to generate, unchecked. seed_indices: `indices` of generate_each."""
        return await self._fleet.generate(prompts, params, seed_indices, adapter)

    def compute_logprobs(self, sequences: Sequence[Sequence[int]], *, adapter: str | None = None) -> Call[list[Tensor]]:
        """Logprob of every token after the first, at temperature 1: float32 [T - 1] for each
        sequence of T <= max_model_len token ids. adapter: as in `generate`.
        """
        if (index := _first_text(sequences)) is not None:
            raise TypeError(
                f"sequence {index} is the text {sequences[index]!r}; give its token ids, such as "
                "TextCodec.load(directory).encode(text) of rl_actors.texts, with the directory of the tokenizer"
            )
        copies = _as_lists(sequences)
        self._require_adapter(adapter)
        return self._call(
            "compute_logprobs",
            lambda: self._fleet.compute_logprobs(copies, adapter),
            check=lambda limits: validate_sequences(
                copies, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size
            ),
            adapter=adapter,
        )

    def pull_model_state_dict(self, version: int, timeout: float = 60.0, *, in_flight: bool = True) -> Call[int]:
        """Replace the weights (with lora.sync="adapter" only the adapter) by a pushed version.

        Raises TimeoutError if the version is not published within `timeout` seconds.
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
        """When the running requests have ended, release the device memory of weights and KV cache.

        Until `wake`, other calls are refused. No memory is released on a CPU. level: 1 keeps the
        weights in the host's memory. 2 drops them, so that a pull must follow `wake`.
        Raises ValueError for sleep_mode=False, and for level 2 if no pull can bring all weights.
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
        adapter: str | None = None,
        can_cancel: bool = False,
    ) -> Call[T]:
        """Run `send` when all are ready. Checks now if the limits are known, else just before."""
        self._begin(what)
        if check is not None and self._limits is not None:
            check(self._limits)
            check = None
        load = None if adapter is None else self._loads[adapter]
        return in_background(self._when_ready(send, check, load), f"{self.name}: {what}", can_cancel=can_cancel)

    async def _when_ready(
        self, send: Callable[[], Coroutine[object, None, T]], check: Check | None, load: Call[None] | None
    ) -> T:
        await self._started
        if load is not None:
            await load
        if check is not None:
            assert self._limits is not None
            check(self._limits)
        return await send()


def _first_text(prompts: Sequence[Any]) -> int | None:
    """The index of the first prompt that is a text."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return None  # validation raises an error that names the argument
    return next((index for index, prompt in enumerate(prompts) if isinstance(prompt, str)), None)


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


def check_config(config: GeneratorConfig, num_hosts: int = 1) -> None:
    """Raises ValueError, or TypeError for no GeneratorConfig, if this machine cannot start one."""
    require_config("GeneratorClient.spawn", config, GeneratorConfig)
    config.validate()
    require_gpu(config, num_hosts)
    require_machine(config)


def config_of_engine(config: GeneratorConfig, index: int, num_hosts: int = 1) -> GeneratorConfig:
    """The config of one engine, with a seed of its own. Replica i is on host i % num_hosts, on GPUs
    after those of the replica before it there, which its engines share.
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
        shares_gpu=config.shares_gpu or engines > 1,
        max_num_seqs=math.ceil(config.max_num_seqs / engines),
        gpu_memory_utilization=config.gpu_memory_utilization / engines,
        kv_cache_bytes=config.kv_cache_bytes and config.kv_cache_bytes // engines,
        gpu=gpu,
        seed=hashed_seed(config.seed, index),
    )
