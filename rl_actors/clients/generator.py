"""The client of a generator. Every method returns a Call: `await` it in a program, or use `.result()` in a REPL."""

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor

from rl_actors.clients.base import ATTACH_TIMEOUT, Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.finished_groups import FinishedGroups
from rl_actors.clients.limits import GeneratorLimits
from rl_actors.config import GeneratorConfig
from rl_actors.generator import Generator
from rl_actors.processes import gpus
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import Transport
from rl_actors.types import Completion, DeviceMemory, GeneratorInfo, SamplingParams, Transfer
from rl_actors.validation import require_config, require_gpu, validate_pull, validate_sampling_params
from rl_actors.vllm import sleeping
from rl_actors.vllm.start import require_machine

if TYPE_CHECKING:
    from monarch.actor import ActorMesh

FIRST_PULL_TIMEOUT = 60.0
"""Seconds that the first pull waits for its version. The pull begins after the answer of the push, so the version is published already."""

T = TypeVar("T")
Check = Callable[[GeneratorLimits], None]
"""A function that raises ValueError or TypeError for a call that the generator would refuse."""


class GeneratorClient(Client):
    """The client of one generator. Any number of calls run at the same time. Each waits until the generator is ready.

    Bad input is refused by the method, in the caller's thread. Some checks need the limits of the generator. A client that did not spawn
    it knows them after the setup; before that, these checks run when the call is sent.
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
    ) -> None:
        """Make a client of a Generator mesh, of one process, that the caller spawned and will stop.

        config, transport, first_version and logs are for `spawn`, which passes no mesh. limits are for `attach`.
        """
        super().__init__(mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs)
        self.config = config
        self._limits = GeneratorLimits.of_config(config) if config is not None else limits
        self._transport = transport
        self._first_version = first_version
        self.last_pull: Transfer | None = None  # of this client; without bytes if the generator had the version already
        self._start()

    @classmethod
    def spawn(
        cls,
        config: GeneratorConfig,
        *,
        transport: "Transport | Call[Transport] | Call[Transport | None] | None" = None,
        name: str = "generator",
        logs: LogRoute | None = None,
        first_version: Call[int] | None = None,
    ) -> "GeneratorClient":
        """Spawn a process on this host and start vLLM in it, and one more for each further replica. Returns at once; the answer to the
        first call waits for the start.

        transport: an open transport, or the call that opens it. first_version: the push of a version, which the generator pulls first.
        Raises ValueError if no generator can be started from the config on this machine, and TypeError if it is not a GeneratorConfig.
        """
        check_config(config)
        if config.replicas > 1:
            from rl_actors.clients.replicas import ReplicatedGenerator

            cls = ReplicatedGenerator
        return cls(
            None,
            name=name,
            call_timeout=config.call_timeout,
            setup_timeout=config.setup_timeout,
            config=config,
            transport=transport,
            logs=logs,
            first_version=first_version,
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
        """A client of the generator that a running service owns. The calls of all clients run at the same time.

        certificates: folder of certificates for a tls:// address. The calls of a client that ends are aborted. Waits for the service, and
        raises as TrainerClient.attach does.
        """
        from rl_actors.service import remote

        mesh, info = remote.attach(
            address, "generator", certificates=certificates, timeout=timeout, call_timeout=call_timeout
        )
        limits = GeneratorLimits.of_info(info)
        client = GeneratorClient(mesh, call_timeout=call_timeout, setup_timeout=timeout, limits=limits)
        client.keep(mesh.lease)
        return client

    async def _set_up(self) -> None:
        if self._mesh is None:
            assert self.config is not None
            processes = await self._spawn(1, process_environment(self.config))
            transport = await self._transport if isinstance(self._transport, Call) else self._transport
            self._mesh = processes.spawn(self.name, Generator, self.config, transport)
        infos: list[GeneratorInfo] = await self._ask(self._mesh.setup, "setup", self.setup_timeout)
        self._take(infos[0])
        if self._processes is None:
            self._probes = await self._ask(self._mesh.probe, "setup", self.setup_timeout)
        if self._first_version is not None:
            await self._pull(await self._first_version, FIRST_PULL_TIMEOUT)

    def _take(self, info: GeneratorInfo) -> None:
        self._limits = GeneratorLimits.of_info(info)
        if info.policy_version >= 0:
            self._version = info.policy_version

    def info(self) -> Call[GeneratorInfo]:
        """Version and limits of the generator, and the file of its output."""
        return self._call("info", self._info)

    async def _info(self) -> GeneratorInfo:
        return await self._one("info")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> Call[list[list[Completion]]]:
        """params.n completions of each prompt, in the order of the prompts.

        Raises ValueError (TypeError for a wrong type) if a prompt or a parameter is out of its limits.
        """
        copies, chosen = _as_lists(prompts), SamplingParams() if params is None else params
        validate_sampling_params(chosen)  # needs no limits of the generator
        return self._call(
            "generate", self._generate, copies, chosen, check=lambda limits: limits.check_prompts(copies, chosen)
        )

    async def _generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
        call = await self.start_generate(prompts, params)
        groups = dict(await self.finished_groups(call, at_least=len(prompts)))
        return [groups[index] for index in range(len(prompts))]

    def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        indices: Sequence[int] | None = None,
    ) -> FinishedGroups[list[Completion]]:
        """(index of a prompt, its params.n completions) of one prompt after the other, as soon as all completions of the prompt have finished.

        async for index, completions in generator.generate_each(prompts, params): …

        The completions are those that `generate` gives for the same seeds. All prompts start at once. Leaving the loop early ends the
        others in the engine. A plain `for` works, too.
        indices: for each prompt its index p in the seeds of SamplingParams; None: its place in the list.
        Raises ValueError (TypeError for a wrong type) if a prompt or a parameter is out of its limits; in the loop, the error of the call.
        """
        copies, chosen = _as_lists(prompts), SamplingParams() if params is None else params
        validate_sampling_params(chosen)
        numbers = None if indices is None else list(indices)
        if numbers is not None and len(numbers) != len(copies):
            raise ValueError(f"generate_each got {len(copies)} prompts and {len(numbers)} indices")
        started = self._call(
            "generate",
            self.start_generate,
            copies,
            chosen,
            numbers,
            check=lambda limits: limits.check_prompts(copies, chosen),
        )
        return FinishedGroups(
            started, len(copies), fetch=self.finished_groups, abort=self.abort_generate, what=f"{self.name}: generate"
        )

    async def start_generate(
        self, prompts: list[list[int]], params: SamplingParams, indices: list[int] | None = None
    ) -> int:
        """The number of the call. indices: for each prompt its index in the caller's list, on which its seeds depend; None: its place in `prompts`."""
        return await self._one("start_generate", prompts, params, indices, phase="generate")

    async def finished_groups(self, call: int, at_least: int = 1) -> list[tuple[int, list[Completion]]]:
        try:
            return await self._one("finished_groups", call, at_least, phase="generate")
        except BaseException:
            await self.abort_generate(call)
            raise

    async def abort_generate(self, call: int) -> None:
        with contextlib.suppress(Exception):  # the generator may have ended
            await self._one("abort_generate", call)

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> Call[list[Tensor]]:
        """Log probability of every token after the first, at temperature 1: float32 [T - 1] for each sequence.

        A sequence may have max_model_len tokens.
        """
        copies = _as_lists(sequences)
        return self._call(
            "compute_logprobs", self._compute_logprobs, copies, check=lambda limits: limits.check_sequences(copies)
        )

    async def _compute_logprobs(self, sequences: list[list[int]]) -> list[Tensor]:
        return await self._one("compute_logprobs", sequences)

    def pull_model_state_dict(self, version: int, timeout: float = 60.0, *, in_flight: bool = True) -> Call[int]:
        """Replace the weights by those published under `version`, waiting up to `timeout` seconds for them.

        in_flight: running requests go on, and their later tokens are the new policy's. Otherwise they end first, and requests that come
        meanwhile wait for the new weights.
        """
        validate_pull(version, timeout)
        return self._call("pull_model_state_dict", self._pull, version, timeout, in_flight)

    async def _pull(self, version: int, timeout: float, in_flight: bool = True) -> int:
        self.last_pull = await self._one("pull_model_state_dict", version, timeout, in_flight)
        self._version = version
        return version

    def sleep(self, level: Literal[1, 2] = 1) -> Call[DeviceMemory]:
        """Let vLLM give the memory of its weights and its cache back to the devices, when the running requests have ended.

        Calls are refused until `wake`. level: 1 keeps the weights on the host; 2 drops them, and the generator refuses to generate after
        `wake` until a pull. On a CPU no memory is released. Raises ValueError if the config has sleep_mode=False.
        """
        if self.config is not None:
            sleeping.require_possible(self.config, level, has_transport=self._transport is not None)
        return self._call("sleep", self._sleep, level)

    async def _sleep(self, level: int) -> DeviceMemory:
        return await self._one("sleep", level)

    def wake(self) -> Call[DeviceMemory]:
        """Take the memory again. Does nothing if the generator is awake."""
        return self._call("wake", self._wake)

    async def _wake(self) -> DeviceMemory:
        return await self._one("wake")

    def _call(
        self, what: str, send: Callable[..., Coroutine[object, None, T]], *arguments: object, check: Check | None = None
    ) -> Call[T]:
        """Check the call now, and send it when the generator is ready."""
        self._require_open(what)
        self._show_start()
        if check is not None and self._limits is not None:
            check(self._limits)
            check = None
        return in_background(self._wait_and_send(send, arguments, check), f"{self.name}: {what}")

    async def _wait_and_send(
        self, send: Callable[..., Coroutine[object, None, T]], arguments: tuple[object, ...], check: Check | None
    ) -> T:
        await self._started
        if check is not None:
            assert self._limits is not None
            check(self._limits)
        return await send(*arguments)

    async def _one(self, endpoint: str, *args: object, phase: str = "") -> Any:
        """The answer of an endpoint. phase: the name in error texts, if it is not the endpoint's."""
        answers: list[Any] = await self._ask(
            getattr(self._mesh, endpoint), phase or endpoint, self.call_timeout, *args, breaks=False
        )
        return answers[0]


def _as_lists(prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Copies of the prompts, because the caller may change them before they are sent. Tensors and arrays become lists."""
    if not isinstance(prompts, Sequence):
        return prompts  # type: ignore[unreachable]  # validation refuses it by name
    copies: list[Sequence[int]] = []
    for prompt in prompts:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        copies.append(list(prompt) if isinstance(prompt, list | tuple) else prompt)
    return copies


def check_config(config: GeneratorConfig) -> None:
    """Raises ValueError if no generator can be started from the config on this machine, and TypeError if it is not a GeneratorConfig."""
    require_config("GeneratorClient.spawn", config, GeneratorConfig)
    config.validate()
    require_gpu(config)
    require_machine(config)


def process_environment(config: GeneratorConfig) -> dict[str, str]:
    """The environment of a generator's process. Raises ValueError for a GPU that the program does not see."""
    environment = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    if config.gpu is None:
        return environment
    require_gpu(config)
    return environment | gpus.environment(config.gpus())
