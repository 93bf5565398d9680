"""The client of one or several generators with the same weights.

Most methods return a Call: `await` the Call in an asynchronous program, or use its `.result()` in a REPL.
This file has the methods and the checks of their arguments. fleet.py sends the calls to the generators.
"""

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
from rl_actors.clients.finished_groups import FinishedGroups
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
"""A function that raises ValueError or TypeError for a call that the generator would refuse."""


class GeneratorClient(Client):
    """The client of one or several generators. Any number of calls can run at the same time. Each call waits until the
    generators are ready.

    If a generator that the client spawned dies, the client starts it again, as often as config.restarts allows. Running
    calls then only take longer.
    For bad input the method itself raises the error, before it returns a Call. Some checks need the generator's limits.
    If the caller spawned the mesh, the client does not know the limits before the setup. If a method is called earlier,
    these checks come after the setup, and the Call raises their errors.
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
        """mesh: a Generator mesh of one process, which the caller spawned and will stop. `spawn` passes None instead.

        `spawn` also passes config, transport, first_version, logs and hosts. `attach` passes limits.
        """
        super().__init__(mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs)
        self.config = config
        self._limits = GeneratorLimits.of_config(config) if config is not None else limits
        self._codec: TextCodec | None = None  # loaded for the first prompt that is a text
        self._transport = transport
        # Name of an adapter -> the Call of its load_adapter, which may still run or may have failed.
        self._loads: dict[str, Call[None]] = {}
        num_generators = 1 if config is None else config.replicas
        num_hosts = 1 if hosts is None else len(hosts)
        spawns: dict[str, Callable[[], OneGenerator]] = {}
        for index in range(num_generators):
            each = name if num_generators == 1 else f"{name}-{index}"
            spawns[each] = partial(
                self._spawn_one,
                mesh,
                name=each,
                config=None if config is None else config_of_replica(config, index, num_hosts),
                transport=transport,
                call_timeout=call_timeout,
                setup_timeout=setup_timeout,
                logs=self._logs,
                hosts=_host_of(index, hosts),
            )
        # The fleet must have no reference to this client. Otherwise the client would not be garbage-collected when the
        # user drops it.
        self._fleet = Fleet(
            spawns,
            RestartPolicy() if config is None else config.restarts,
            first_version=first_version,
            setup_timeout=setup_timeout,
            tell=_ignore if self._is_quiet else _print,
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
        """Spawn a process for each replica, and start vLLM in each process. Returns at once. Calls wait for the start.

        hosts: hosts that `rl_actors.processes.hosts.connect` returned. The replicas are spread over them round-robin.
        None: this host.
        transport: an open transport, or the Call that opens it. first_version: the Call of the trainer's
        push_model_state_dict. The result of this Call is the version that the generators pull first.
        Raises ValueError if no generator can be started from the config on this machine, and TypeError if `config` is
        not a GeneratorConfig.
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
        """A client of the generator that a running service owns. Calls of different clients can run at the same time.

        Waits until the service answers. Raises the errors that TrainerClient.attach raises. When this program ends, the
        service aborts the program's generate calls.
        certificates: folder of certificates for a tls:// address.
        """
        from rl_actors.clients import remote

        mesh, info = remote.attach(
            address, "generator", certificates=certificates, timeout=timeout, call_timeout=call_timeout
        )
        limits = GeneratorLimits.of_info(info)
        client = GeneratorClient(mesh, call_timeout=call_timeout, setup_timeout=timeout, limits=limits)
        client.keep(mesh.lease)
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
        """One GeneratorReturn for each time that a generator was healthy again after a death, the newest last."""
        return tuple(self._fleet.returns)

    @property
    def last_pull(self) -> Transfer | None:
        """Transfer of the slowest generator in the last pull_model_state_dict of this client. num_bytes is 0 if that
        generator had the version already.

        Before the first pull_model_state_dict: the transfer with which a generator first got first_version. None if no
        generator has pulled.
        """
        return self._fleet.last_pull

    def on_news(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with a line of text whenever a generator has died, is healthy again, or is not started again.

        Returns None. `tell` is called on the thread that all clients share.
        """
        self._fleet.tell = tell

    async def _is_alive(self, timeout: float) -> bool:
        return not self._closed and await self._fleet.answers_within(timeout)

    def seconds_silent(self) -> dict[str, float]:
        """For each generator that this client spawned, the seconds since its last sign of life: {"generator-0": 1.2}

        The client regularly asks each generator. The answer is a sign of life if the engine waits for requests, or if
        the engine has done some work since its last answer. Before the first sign of life, the seconds count from the
        generator's last start.
        """
        found: dict[str, float] = {}
        for replica in self._fleet.replicas:
            found |= replica.client.seconds_silent()
        return found

    async def _death(self, silent_after: float) -> ActorDiedError | ActorSilentError | None:
        """Wait until every generator is dead and will not be started again. Returns the error that ended the generator
        with index 0.

        Returns None if the start has failed, if the client was closed, or if the error is neither ActorDiedError nor ActorSilentError.
        A generator without a sign of life for silent_after seconds counts as dead. If config.restarts.silent_after is
        smaller, it replaces silent_after. The client starts a dead generator again if config.restarts allows it.
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
        """Version and limits of the generator, and the path of the file with its output.

        With several generators these are of the generator with the oldest weights. The field `replicas` has the infos
        of all generators.
        """
        return self._call("info", self._info)

    async def _info(self) -> GeneratorInfo:
        return await self._fleet.info()

    def load_adapter(self, name: str, directory: str) -> Call[None]:
        """Load an adapter (LoRA) from a directory in peft's format, such as one that `TrainerClient.export_lora` wrote.
        Later calls can name the adapter.

        Requests with different adapters, and requests without an adapter, run at the same time. The directory must stay
        unchanged until `unload_adapter` has answered, because vLLM may read it again. A generator on another host reads
        the directory of the same path on that host.
        Raises ValueError if the directory has no adapter, if the adapter's rank is above max_adapter_rank, if the
        config has max_adapters=0, or if an adapter of this name is loaded or being loaded. The Call fails with a
        ValueError if the adapter does not fit the model, or if this client is attached to a service.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"load_adapter: name={name!r}; it must be a string that is not empty")
        if self._has_adapter(name):
            raise ValueError(f"load_adapter: an adapter of the name {name!r} is loaded already; unload it first")
        path = Path(directory).absolute()
        adapters.rank_of(path)
        self._loads[name] = self._call(
            "load_adapter", self._load_adapter, name, str(path), check=lambda limits: limits.check_adapter(path)
        )
        return self._loads[name]

    async def _load_adapter(self, name: str, directory: str) -> None:
        await self._fleet.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> Call[None]:
        """Wait until all running calls that use the adapter have ended, and unload it. New calls cannot name it.

        Raises ValueError if this client has loaded no adapter of this name.
        """
        self._require_adapter(name)
        return self._call("unload_adapter", self._unload_adapter, name, self._loads.pop(name))

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
        """params.n completions of each prompt, in the order of the prompts. A prompt is a list of token ids, or a text.

        If there are texts, the generator's tokenizer encodes them, and the completions have a `text`.

        adapter: name of an adapter, as given to `load_adapter`. None: no adapter, or with lora.sync="adapter" the
        adapter of the last pull.
        Raises ValueError (TypeError for a wrong type) if a prompt or a parameter is out of its limits, or if the adapter is not loaded.
        """
        codec = self._codec_for(prompts)
        copies = _as_lists(
            prompts if codec is None else [codec.encode(p) if isinstance(p, str) else p for p in prompts]
        )
        chosen = SamplingParams() if params is None else params
        validate_sampling_params(chosen)  # this check does not need the generator's limits
        self._require_adapter(adapter)
        return self._call(
            "generate",
            self._generate,
            copies,
            chosen,
            adapter,
            codec,
            check=lambda limits: limits.check_prompts(copies, chosen),
            can_cancel=True,
        )

    async def _generate(
        self, prompts: list[list[int]], params: SamplingParams, adapter: str | None, codec: TextCodec | None
    ) -> list[list[Completion]]:
        call = await self.start_generate(prompts, params, adapter=adapter)
        groups = dict(await self.finished_groups(call, at_least=len(prompts)))
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
    ) -> FinishedGroups[list[Completion]]:
        """Iterator that gives (index of a prompt, its params.n completions) as soon as all completions of the prompt have finished.

        async for index, completions in generator.generate_each(prompts, params): …

        The completions are those that `generate` gives for the same seeds. All prompts start at once. If the caller leaves the loop
        early, the engine ends the unfinished requests. A plain `for` works, too.
        indices: for each prompt the number p from which its seeds are computed (see SamplingParams.seed). None: p is
        the prompt's index in the list.
        adapter: as in `generate`.
        Raises ValueError (TypeError for a wrong type) if a prompt or a parameter is out of its limits, if the adapter is not loaded, or if
        there are more or fewer indices than prompts. The loop raises any later error of the call.
        """
        copies, chosen = _as_lists(prompts), SamplingParams() if params is None else params
        validate_sampling_params(chosen)
        self._require_adapter(adapter)
        numbers = None if indices is None else list(indices)
        if numbers is not None and len(numbers) != len(copies):
            raise ValueError(f"generate_each got {len(copies)} prompts and {len(numbers)} indices")
        started = self._call(
            "generate",
            self.start_generate,
            copies,
            chosen,
            numbers,
            adapter,
            check=lambda limits: limits.check_prompts(copies, chosen),
        )
        return FinishedGroups(
            started, len(copies), fetch=self.finished_groups, abort=self.abort_generate, what=f"{self.name}: generate"
        )

    async def start_generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        indices: list[int] | None = None,
        adapter: str | None = None,
    ) -> int:
        """Coroutine: start to generate. Returns the number of this call, for `finished_groups` and `abort_generate`.

        Does not check its arguments. indices: as in generate_each.
        """
        await self._loaded(adapter)
        return await self._fleet.start_generate(prompts, params, indices, adapter)

    async def _loaded(self, adapter: str | None) -> None:
        """Wait until the adapter is loaded. If its load has failed, raises the error of the load."""
        if adapter is not None and (load := self._loads.get(adapter)) is not None:
            await load

    async def finished_groups(self, call: int, at_least: int = 1) -> list[tuple[int, list[Completion]]]:
        return await self._fleet.finished_groups(call, at_least)

    async def abort_generate(self, call: int) -> None:
        await self._fleet.abort_generate(call)

    def compute_logprobs(self, sequences: Sequence[Sequence[int]], *, adapter: str | None = None) -> Call[list[Tensor]]:
        """Logprob of every token after the first, at temperature 1: float32 [T - 1] for each sequence of T token ids.

        A sequence has at most max_model_len tokens. adapter: as in `generate`.
        """
        copies = _as_lists(sequences)
        self._require_adapter(adapter)
        return self._call(
            "compute_logprobs",
            self._compute_logprobs,
            copies,
            adapter,
            check=lambda limits: limits.check_sequences(copies),
        )

    async def _compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        await self._loaded(adapter)
        return await self._fleet.compute_logprobs(sequences, adapter)

    def pull_model_state_dict(self, version: int, timeout: float = 60.0, *, in_flight: bool = True) -> Call[int]:
        """Wait until the trainer has published `version` (see TrainerClient.push_model_state_dict), and replace the
        weights by this version. The answer is `version`.

        With lora.sync="adapter" the pull replaces only the adapter. If the version is not published within `timeout`
        seconds, the Call fails with a TimeoutError.
        in_flight=True: running requests go on and get their later tokens from the new weights. False: running requests
        end first, and requests that come meanwhile wait for the new weights.
        """
        validate_pull(version, timeout)
        return self._call("pull_model_state_dict", self._pull, version, timeout, in_flight)

    async def _pull(self, version: int, timeout: float, in_flight: bool = True) -> int:
        await self._fleet.pull(version, timeout, in_flight)
        self._version = version
        return version

    def sleep(self, level: Literal[1, 2] = 1) -> Call[DeviceMemory]:
        """Wait until the running requests have ended. Then let vLLM release the device memory of its weights and its
        key-value cache.

        Until `wake`, the generator refuses to generate, to compute logprobs, to pull and to load adapters. On a CPU no
        memory is released.
        level: 1 keeps the weights in the host's memory. 2 drops the weights: after `wake` the generator refuses to
        generate until a pull.
        Raises ValueError if the config has sleep_mode=False, or if level is 2 and no pull can bring all the weights.
        """
        if self.config is not None:
            sleeping.require_possible(self.config, level, has_transport=self._transport is not None)
        return self._call("sleep", self._sleep, level)

    async def _sleep(self, level: int) -> DeviceMemory:
        return await self._fleet.sleep(level)

    def wake(self) -> Call[DeviceMemory]:
        """Allocate the memory again that `sleep` released. Does nothing if the generator is awake."""
        return self._call("wake", self._wake)

    async def _wake(self) -> DeviceMemory:
        return await self._fleet.wake()

    def _call(
        self,
        what: str,
        send: Callable[..., Coroutine[object, None, T]],
        *arguments: object,
        check: Check | None = None,
        can_cancel: bool = False,
    ) -> Call[T]:
        """Send the call when the generator is ready. Check the call now if the limits are known, otherwise just before
        it is sent.
        """
        self._require_open(what)
        self._show_start()
        if check is not None and self._limits is not None:
            check(self._limits)
            check = None
        work = self._wait_and_send(send, arguments, check)
        return in_background(work, f"{self.name}: {what}", can_cancel=can_cancel)

    async def _wait_and_send(
        self, send: Callable[..., Coroutine[object, None, T]], arguments: tuple[object, ...], check: Check | None
    ) -> T:
        await self._started
        if check is not None:
            assert self._limits is not None
            check(self._limits)
        return await send(*arguments)


def _as_lists(prompts: Sequence[Any]) -> list[Sequence[int]]:
    """Copies of the prompts, because the caller may change them before they are sent. Tensors and arrays become lists."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return prompts  # type: ignore[return-value]  # validation raises an error that names the argument
    copies: list[Sequence[int]] = []
    for prompt in prompts:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        copies.append(list(prompt) if isinstance(prompt, list | tuple) else prompt)
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
    """Raises ValueError if no generator can be started from the config on this machine, and TypeError if `config` is
    not a GeneratorConfig.
    """
    require_config("GeneratorClient.spawn", config, GeneratorConfig)
    config.validate()
    require_gpu(config, num_hosts)
    require_machine(config)


def config_of_replica(config: GeneratorConfig, index: int, num_hosts: int = 1) -> GeneratorConfig:
    """The config of one replica. Its GPUs follow the GPUs of the replica before it on the same host. Its seed, for
    requests without a seed of their own, differs from the seeds of the other replicas.

    num_hosts: number of hosts. Replica i runs on host i % num_hosts.
    """
    if config.replicas == 1:
        return config
    gpu = config.gpu
    if torch.cuda.is_available():
        gpu = (config.gpu or 0) + index // num_hosts * config.tensor_parallel
    return replace(config, replicas=1, gpu=gpu, seed=hashed_seed(config.seed, index))
