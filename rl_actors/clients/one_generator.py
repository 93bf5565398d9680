"""`OneGenerator`, one generator process. A GeneratorClient has one for each replica."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rl_actors.clients.base import ActorDiedError, ActorSilentError
from rl_actors.clients.call import Call
from rl_actors.clients.completions import Group
from rl_actors.clients.ranks import AnyTransport, Ranks
from rl_actors.config import GeneratorConfig
from rl_actors.generator import Generator
from rl_actors.processes import gpus, mps
from rl_actors.processes.output import LogRoute
from rl_actors.processes.spawn import LONGEST_CHECK_PAUSE, ProcessMesh, collect
from rl_actors.types import DeviceMemory, GeneratorInfo, Heartbeat, SamplingParams, Transfer
from rl_actors.validation import require_gpu
from rl_actors.vllm.core import EngineDiedError
from rl_actors.vllm.pull import SilentWorkerError

if TYPE_CHECKING:
    from monarch.actor import ActorMesh

    from rl_actors.processes.hosts import Hosts

STARTING = 120.0  # seconds of silence, at least, that a setup may take: on a busy machine an import does
NEWS_TIMEOUT = 1.0  # seconds after a failed heartbeat in which the news that the process has ended comes first


class OneGenerator(Ranks):
    """A Generator mesh with one process. A call raises ActorDiedError when a spawned one has ended."""

    def __init__(
        self,
        mesh: "ActorMesh[Generator] | None",
        *,
        name: str,
        config: GeneratorConfig | None,
        transport: AnyTransport,
        call_timeout: float,
        setup_timeout: float,
        logs: LogRoute | None,
        hosts: "Hosts | None" = None,
    ) -> None:
        """config, transport, logs and hosts are for a generator that is spawned."""
        super().__init__(
            mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs, hosts=hosts
        )
        self.config = config
        self._transport = transport
        self.last_pull: Transfer | None = None  # its num_bytes is 0 if nothing was transferred
        self.known: GeneratorInfo | None = None  # the newest info; None before the setup
        self._spawned = asyncio.Event()  # set when the spawn has succeeded or failed
        self._start()

    async def ready(self) -> None:
        await self.started

    async def _set_up(self) -> None:
        try:
            if self._mesh is None:
                assert self.config is not None
                processes = await self._spawn(1, process_environment(self.config))
                transport = await self._transport if isinstance(self._transport, Call) else self._transport
                self._mesh = processes.spawn(self.name, Generator, self.config, transport)
        finally:
            self._spawned.set()
        [self.known] = await self.ask("setup", timeout=self.setup_timeout)
        if self._processes is None:
            self._probes = await self.ask("probe", phase="setup", timeout=self.setup_timeout)

    @property
    def is_owned(self) -> bool:
        """True if the process is spawned here, not by the user."""
        return self.config is not None

    async def info(self) -> GeneratorInfo:
        self.known = await self._one("info")
        return self.known

    async def start_generate(
        self, prompts: list[list[int]], params: SamplingParams, seed_indices: list[int], adapter: str | None = None
    ) -> int:
        """Start a generate call. Returns its number, for finished_groups and abort_generate."""
        return await self._one("start_generate", prompts, params, seed_indices, adapter, phase="generate")

    async def finished_groups(self, call: int, at_least: int = 1) -> list[Group]:
        """The prompts that have finished since the last answer: `at_least`, or all that are left.

        Aborts the call if the wait fails or is cancelled.
        """
        try:
            return await self._one("finished_groups", call, at_least, phase="generate")
        except BaseException:
            await self.abort_generate(call)
            raise

    async def abort_generate(self, call: int) -> None:
        with contextlib.suppress(Exception):  # the generator may have ended
            await self._one("abort_generate", call)

    async def compute_logprobs(self, sequences: list[list[int]], adapter: str | None = None) -> list[Tensor]:
        return await self._one("compute_logprobs", sequences, adapter)

    async def load_adapter(self, name: str, directory: str) -> None:
        await self._one("load_adapter", name, directory)

    async def unload_adapter(self, name: str) -> None:
        await self._one("unload_adapter", name)

    async def pull(self, version: int, timeout: float, in_flight: bool = True) -> Transfer:
        self.last_pull = await self._one("pull_model_state_dict", version, timeout, in_flight)
        return self.last_pull

    async def sleep(self, level: int) -> DeviceMemory:
        return await self._one("sleep", level)

    async def wake(self) -> DeviceMemory:
        return await self._one("wake")

    async def _one(self, endpoint: str, *args: object, phase: str = "") -> Any:
        return (await self.ask(endpoint, *args, phase=phase, breaks=False))[0]

    async def ask(self, *args: Any, **kwargs: Any) -> list[Any]:
        """As in the base class, but a failed engine of a spawned process is an ActorDiedError."""
        try:
            return await super().ask(*args, **kwargs)
        except (EngineDiedError, SilentWorkerError) as error:
            if not self.is_owned:
                raise
            raise ActorDiedError(f"{self.name}: {error}", self.name) from error

    async def _silence(self, processes: ProcessMesh, seconds: float) -> ActorDiedError | ActorSilentError | None:
        """Silent is also a generator with requests whose engine does nothing."""
        await self._spawned.wait()
        if self._mesh is None:
            return None
        silence = Silence()
        limit = seconds if self.known else max(seconds, STARTING)
        pause = min(seconds / 20, LONGEST_CHECK_PAUSE)
        beat: asyncio.Task[list[Heartbeat]] | None = None
        try:
            while silence.seconds < limit:
                begin = time.monotonic()
                beat = beat or asyncio.ensure_future(collect(self._mesh.heartbeat))
                await asyncio.wait((beat,), timeout=pause)
                answer: Heartbeat | None = None
                if beat.done():
                    if (error := beat.exception()) is not None:
                        await asyncio.sleep(NEWS_TIMEOUT)
                        return ActorDiedError(f"{self.name}: {getattr(error, 'exception', error)}", self.name)
                    [answer] = beat.result()
                    beat = None
                    await asyncio.sleep(pause)
                silence.saw(answer, min(time.monotonic() - begin, 2 * pause))  # this process may have been suspended
                if silence.seconds == 0:
                    limit = seconds if self.known else limit
                    self._note_sign(0)
        finally:
            if beat is not None:
                beat.cancel()
        return ActorSilentError(f"{self.name}: no sign of life for {limit:g} s {self._phase()}", self.name)


class Silence:
    """Counts the seconds since an engine was idle or had worked since its last heartbeat."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_done = -1

    def saw(self, answer: Heartbeat | None, seconds: float) -> None:
        """answer: the heartbeat that came in these seconds, if any."""
        if answer is not None and (answer.is_idle or answer.num_done != self._num_done):
            self.seconds = 0.0
            self._num_done = answer.num_done
        else:
            self.seconds += seconds


def process_environment(config: GeneratorConfig) -> dict[str, str]:
    """Environment of a generator's process. Raises ValueError if its GPU is not visible."""
    environment = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    if config.gpu is None:
        return environment
    require_gpu(config)
    shared = mps.environment() if (config.engines_per_gpu or 1) > 1 else {}
    return environment | shared | gpus.environment(config.gpus())
