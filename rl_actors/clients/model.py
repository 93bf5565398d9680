"""`ModelRanks`, the PolicyTrainer actors of a model, and `Session`, the only way to them: one call
at a time, in order, on all ranks.

>>> session.call(PolicyTrainer.export_lora, "/tmp/adapter")            # doctest: +SKIP
"""

import asyncio
import contextlib
import os
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

import cloudpickle

from rl_actors.clients.base import ActorSilentError
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.ranks import AnyTransport, Ranks
from rl_actors.config import TrainerConfig
from rl_actors.policy_trainer import CallHeader, PolicyTrainer
from rl_actors.processes import gpus
from rl_actors.processes.output import LogRoute
from rl_actors.processes.spawn import ProcessMesh
from rl_actors.transports.base import Transport
from rl_actors.transports.index import default_transport
from rl_actors.types import FIRST_TENANT, TrainerInfo

if TYPE_CHECKING:
    from monarch.actor import ActorMesh, ProcMesh

    from rl_actors.policy_trainer import Verb
    from rl_actors.processes.hosts import Hosts

CLOSE_SAVE_TIMEOUT = 60.0  # seconds that `close` waits for a checkpoint that is being written, at most
P = ParamSpec("P")
T = TypeVar("T")
Check = Callable[[TrainerLimits], None]  # raises for a call that the ranks would refuse

_turns: "weakref.WeakKeyDictionary[ProcMesh, asyncio.Lock]" = weakref.WeakKeyDictionary()
"""Models in the same processes take turns: else two ranks could start collectives in different orders."""


class ModelRanks(Ranks):
    """The only sender to the ranks of a model."""

    IF_DEAD: ClassVar[str] = (
        "close this client and spawn another; load_checkpoint brings back what save_checkpoint has written"
    )

    def __init__(
        self,
        mesh: "ActorMesh[PolicyTrainer] | None",
        *,
        name: str,
        call_timeout: float,
        setup_timeout: float,
        config: TrainerConfig | None,
        limits: TrainerLimits | None,
        logs: LogRoute | None,
        hosts: "Hosts | None",
        processes: "ProcMesh | ModelRanks | None",
        checkpoint: str,
        transport: AnyTransport,
        opens_transport: bool,
    ) -> None:
        super().__init__(
            mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs, hosts=hosts
        )
        self.config = config
        # None before the setup of a mesh that the caller spawned
        self.limits = TrainerLimits.of_config(config) if config is not None else limits
        self.session_id = uuid.uuid4().hex[:12]
        self.number = 0  # of the last request that was sent
        self.turn: asyncio.Lock  # held by the running call; made on the background event loop
        self.tenants: dict[str, Call[None]] = {}  # tenant that was not dropped -> the call that adds it
        self.versions: dict[str, int] = {}  # tenant -> its last reported policy_version
        # tenant -> why its calls are refused until it discards its gradients, which a timeout left unknown
        self.unanswered: dict[str, str] = {}
        self.writing: Call[None] | None = None  # writes the newest checkpoint, whichever tenant saved it
        self.transport = None if isinstance(transport, Call) else transport
        self._given_processes = processes
        self._stops_actor = mesh is None and processes is not None
        self._checkpoint = checkpoint
        self._opens_transport = opens_transport and mesh is None
        self._owns_transport = False
        self._proc_mesh: ProcMesh | None = None  # None for a mesh of actors that the caller spawned
        self.opened: Call[Transport | None] = in_background(
            self._open_transport(transport), f"{name}: opening the transport"
        )
        self._start()

    async def _open_transport(self, given: AnyTransport) -> Transport | None:
        if isinstance(given, Call):
            self.transport = await given
        if self.transport is not None or not self._opens_transport:
            return self.transport
        # A `close` during the opening waits for its end, and then closes the transport.
        async with self._spawning:
            self.require_open("setup")
            self.transport = default_transport()
            self._owns_transport = True
            await self.transport.open()
        return self.transport

    async def _set_up(self) -> None:
        if self._mesh is None:
            assert self.config is not None
            self._proc_mesh = await self._find_processes(self.config)
            self.turn = _turns.setdefault(self._proc_mesh, asyncio.Lock())
            self._mesh = self._proc_mesh.spawn(self.name, PolicyTrainer, self.config, await self.opened)
        else:
            self.turn = asyncio.Lock()
        await self.opened
        async with self.turn:
            infos: list[TrainerInfo] = await self.ask("setup", self.session_id, timeout=self.setup_timeout)
            version = infos[0].policy_version
            self.limits = TrainerLimits.of_info(infos[0])
            if self._processes is None:
                self._probes = await self.ask("probe", phase="setup", timeout=self.setup_timeout)
            if self._checkpoint:
                session = Session(self, self.name, self.require_open)
                version = await session.first(PolicyTrainer.load_checkpoint, os.path.abspath(self._checkpoint), False)
            self.versions[FIRST_TENANT] = version

    async def _find_processes(self, config: TrainerConfig) -> "ProcMesh":
        given = self._given_processes
        if given is None:
            environment = None if config.gpu is None else gpus.environment(config.gpus())
            return await self._spawn(config.num_processes(), environment)
        return await given.process_mesh() if isinstance(given, ModelRanks) else given

    async def process_mesh(self) -> "ProcMesh":
        """The processes, when the model is set up in them, for a model that shares them."""
        await self.started
        assert self._proc_mesh is not None
        return self._proc_mesh

    @property
    def watched(self) -> ProcessMesh | None:
        given = self._given_processes
        return given.watched if isinstance(given, ModelRanks) else super().watched

    def require_open(self, what: str) -> None:
        super().require_open(what)
        given = self._given_processes
        if isinstance(given, ModelRanks) and given.is_closed:
            raise RuntimeError(f"{self.name}: {what} is not possible: {given.name}, whose processes it uses, is closed")

    async def close(self) -> None:
        self.is_closed = True
        if self.writing is not None and (self._processes is not None or self._stops_actor):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.writing, CLOSE_SAVE_TIMEOUT)
        if self._stops_actor and self._mesh is not None:
            given = self._given_processes
            if not (isinstance(given, ModelRanks) and given.is_closed):  # closed ranks have ended their processes
                stopping: Awaitable[None] = self._mesh.stop()
                await stopping
        await super().close()
        if self._owns_transport and self.transport is not None:
            await self.transport.close()


@dataclass(frozen=True, slots=True)
class Session:
    """The calls of one tenant."""

    ranks: ModelRanks
    name: str  # in error texts
    begin: Callable[[str], None]  # gets the name of each call before it is queued; raises after close
    tenant: str = FIRST_TENANT

    def call(self, verb: "Verb[P, T]", *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Queue a call. Its answer is rank 0's."""
        return self.queue(verb.__name__, lambda: self.first(verb, *args, **kwargs))

    def queue(
        self,
        what: str,
        work: Callable[[], Coroutine[object, None, T]],
        *,
        check: Check | None = None,
        when_broken: bool = False,
    ) -> Call[T]:
        """Queue `work`, which sends requests by `first` and `send`.

        check: runs now if the limits are known, else just before `work`. when_broken: run even
        after a timeout.
        """
        self.begin(what)
        if check is not None and self.ranks.limits is not None:
            check(self.ranks.limits)
            check = None
        return in_background(self._in_turn(work, check, when_broken), f"{self.name}: {what}")

    async def _in_turn(
        self, work: Callable[[], Coroutine[object, None, T]], check: Check | None, when_broken: bool
    ) -> T:
        await self.ranks.started
        async with self.ranks.turn:  # first come, first served
            broken = self.ranks.broken or self.ranks.unanswered.get(self.tenant)
            if broken and not when_broken:
                raise RuntimeError(f"{self.ranks.name} is broken: {broken}; call discard_gradients, or spawn it again")
            if check is not None:
                assert self.ranks.limits is not None
                check(self.ranks.limits)
            return await work()

    async def first(self, verb: "Verb[P, T]", *args: P.args, **kwargs: P.kwargs) -> T:
        """`send`, for the answer of rank 0."""
        return (await self.send(verb, *args, **kwargs))[0]

    async def send(self, verb: "Verb[P, T]", *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Send the next request, and return the answers of all ranks."""
        # pickled before the request gets its number: after a failure the ranks would refuse all later ones
        for arg in args:
            if callable(arg):
                cloudpickle.dumps(arg)
        self.ranks.number += 1
        header = CallHeader(session=self.ranks.session_id, number=self.ranks.number, tenant=self.tenant)
        try:
            answers: list[T] = await self.ranks.ask(verb.__name__, *args, named={**kwargs, "header": header})
        except ActorSilentError:
            self.ranks.unanswered[self.tenant] = str(self.ranks.broken)
            raise
        version = getattr(answers[0], "policy_version", None)
        if version is not None:
            self.ranks.versions[self.tenant] = version
        return answers

    def repair(self) -> None:
        """Record that the ranks answer again and that this tenant has no gradients."""
        self.ranks.broken = None
        self.ranks.unanswered.pop(self.tenant, None)

    async def infos(self) -> list[TrainerInfo]:
        infos: list[TrainerInfo] = await self.ranks.ask("info", self.tenant)
        return sorted(infos, key=lambda info: info.rank)

    async def written(self, path: str) -> None:
        """Wait until the newest checkpoint is on disk, while the ranks run other calls."""
        await self.ranks.ask("wait_for_checkpoint", phase=f"writing {path}", breaks=False)
