"""`ModelClient`, the base class of the clients of a model: its start, its processes, and the state
of its sessions.
"""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rl_actors.clients.base import ATTACH_TIMEOUT, STEP_WAIT, Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.model_calls import ModelCalls
from rl_actors.clients.session import Session, Shared
from rl_actors.config import TrainerConfig
from rl_actors.parts import PARTS, HostMove, Part, of_all_ranks, require_parts
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.processes import gpus
from rl_actors.processes.output import LogRoute
from rl_actors.processes.spawn import ProcessMesh
from rl_actors.transports.base import Transport
from rl_actors.transports.index import default_transport
from rl_actors.types import TrainerInfo
from rl_actors.validation import require_config, require_gpus

if TYPE_CHECKING:
    from monarch.actor import ActorMesh, ProcMesh

    from rl_actors.policy_trainer import Verb
    from rl_actors.processes.hosts import Hosts

_turns: "weakref.WeakKeyDictionary[ProcMesh, asyncio.Lock]" = weakref.WeakKeyDictionary()
"""One lock for each ProcMesh: clients of the same processes take turns, or two ranks could start
their collectives in different orders and wait for ever."""


class ModelClient(ModelCalls, Client):
    """The only sender to a model's ranks, which are PolicyTrainer actors. Calls run one at a time,
    in order, on all ranks.

    Bad input is refused in the caller's thread. Only a client of a mesh that the caller spawned
    does not know the model's
    limits before its setup: until then, the checks run just before the call is sent.
    """

    IF_DEAD: ClassVar[str] = (
        "close this client and spawn another; load_checkpoint brings back what save_checkpoint has written"
    )
    default_name: ClassVar[str] = "model"
    opens_transport: ClassVar[bool] = False  # whether the client opens a transport when its caller gives none

    def __init__(
        self,
        mesh: "ActorMesh[PolicyTrainer] | None",
        *,
        transport: Transport | Call[Transport] | Call[Transport | None] | None = None,
        call_timeout: float = TrainerConfig.call_timeout,
        setup_timeout: float = TrainerConfig.setup_timeout,
        name: str = "",
        config: TrainerConfig | None = None,
        logs: LogRoute | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        checkpoint: str = "",
        limits: TrainerLimits | None = None,
        hosts: "Hosts | None" = None,
    ) -> None:
        """Make a client of a PolicyTrainer mesh that the caller spawned and will stop.

        config, logs, processes, checkpoint and hosts are for `spawn`, which passes no mesh. limits
        are for `attach`.
        """
        name = name or self.default_name
        super().__init__(
            mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs, hosts=hosts
        )
        self.config = config
        self.shared = Shared(limits=TrainerLimits.of_config(config) if config is not None else limits)
        self._given_processes = processes
        if processes is not None:
            self._logs = None  # the output is in the files of the given processes
            self._is_quiet = True
        self._stops_actor = mesh is None and processes is not None
        self._checkpoint = checkpoint
        self._transport = None if isinstance(transport, Call) else transport
        self._owns_transport = False
        self._proc_mesh: ProcMesh | None = None  # None for a mesh of actors that the caller spawned
        self._opened: Call[Transport | None] = in_background(
            self._open_transport(transport), f"{name}: opening the transport"
        )
        self._start()

    @classmethod
    def spawn(
        cls,
        config: TrainerConfig,
        *,
        transport: Transport | Call[Transport] | Call[Transport | None] | None = None,
        name: str = "",
        logs: LogRoute | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        checkpoint: str = "",
        hosts: "Hosts | None" = None,
    ) -> Self:
        """Build the model in new or in given processes. Returns at once; the first answer comes
        after the start.

        transport: an open transport, which the caller closes, or the call that opens it. None: a
        TrainerClient opens and closes the one that transports/default.py chooses; other clients
        have none.
        processes: a ProcMesh, or another client, whose processes may hold other models. Clients of
        the same processes take turns; close the other client after this one. None: new processes,
        which end with this client.
        checkpoint: a directory of save_checkpoint with the weights to start from. "":
        config.hf_path, or random weights.
        hosts: from `rl_actors.processes.hosts.connect`; new processes are spread evenly over them.
        None: this host.
        Raises ValueError if no model can be built from the config, if this host has too few GPUs,
        if the processes cannot be spread evenly over `hosts`, if `checkpoint` is not a directory,
        or if `processes` has another number of processes than the config needs.
        """
        require_config(f"{cls.__name__}.spawn", config, TrainerConfig)
        config = cls._own_config(config)
        config.validate()
        if processes is None:
            require_evenly(config, hosts)
        else:
            _require_processes(processes, config.num_processes())
        if checkpoint and not os.path.isdir(checkpoint):
            raise ValueError(f"checkpoint={checkpoint!r} is not a directory")
        return cls(
            None,
            transport=transport,
            call_timeout=config.call_timeout,
            setup_timeout=config.setup_timeout,
            name=name,
            config=config,
            logs=logs,
            processes=processes,
            checkpoint=checkpoint,
            hosts=hosts,
        )

    @classmethod
    def _own_config(cls, config: TrainerConfig) -> TrainerConfig:
        """The config with which this kind of client builds the model."""
        return config

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        certificates: str = "",
        timeout: float = ATTACH_TIMEOUT,
        call_timeout: float = TrainerConfig.call_timeout,
        step_wait: float = STEP_WAIT,
    ) -> Self:
        """A client of the model that a running service owns. Any number of programs may attach,
        train and leave.

        >>> trainer = TrainerClient.attach("tcp://127.0.0.1:4400")             # doctest: +SKIP

        A client's first forward_backward opens a step, and its optim_step or discard_gradients
        closes it. Meanwhile these
        calls of other clients wait: forward_backward, optim_step, discard_gradients,
        save_checkpoint, load_checkpoint and profile. After step_wait seconds (at most half of
        call_timeout) they are refused, and the error names the client that has the step. The
        service discards the gradients of a client that leaves in the middle of its step. Paths of
        checkpoints and exports are paths on the service's machine.
        certificates: folder of certificates for a tls:// address.
        Raises TimeoutError if the service does not answer within `timeout` seconds, ConnectionError
        if no service listens or it refuses the certificates, and ValueError for a wrong address, a
        model that the service does not have, or another version of rl_actors, torch, Monarch or
        Python.
        """
        from rl_actors.clients import remote

        mesh, info = remote.attach(
            address,
            cls.default_name,
            certificates=certificates,
            timeout=timeout,
            step_wait=step_wait,
            call_timeout=call_timeout,
        )
        client = cls(mesh, call_timeout=call_timeout, setup_timeout=timeout, limits=TrainerLimits.of_info(info))
        client.keep(mesh.connection)
        return client

    @property
    def session(self) -> Session:
        """The calls of the first tenant."""
        return Session(self)

    @property
    def policy_version(self) -> int | None:
        """The first tenant's last reported policy_version. None before the first report."""
        return self.session.version

    async def _open_transport(
        self, given: Transport | Call[Transport] | Call[Transport | None] | None
    ) -> Transport | None:
        if isinstance(given, Call):
            self._transport = await given
        if self._mesh is not None or self._transport is not None or not self.opens_transport:
            return self._transport
        # A `close` during the opening waits for its end, and then closes the transport.
        async with self._spawning:
            self.require_open("setup")
            self._transport = default_transport()
            self._owns_transport = True
            await self._transport.open()
        return self._transport

    async def _set_up(self) -> None:
        session = self.session
        shared = self.shared
        if self._mesh is None:
            assert self.config is not None
            self._proc_mesh = await self._find_processes(self.config)
            shared.turn = _turns.setdefault(self._proc_mesh, asyncio.Lock())
            self._mesh = self._proc_mesh.spawn(self.name, PolicyTrainer, self.config, await self._opened)
        else:
            shared.turn = asyncio.Lock()
        await self._opened
        async with shared.turn:
            infos: list[TrainerInfo] = await self.ask("setup", shared.id, timeout=self.setup_timeout)
            version = infos[0].policy_version
            shared.limits = TrainerLimits.of_info(infos[0])
            if self._processes is None:
                self._probes = await self.ask("probe", phase="setup", timeout=self.setup_timeout)
            if self._checkpoint:
                version = await session.first(PolicyTrainer.load_checkpoint, os.path.abspath(self._checkpoint), False)
            shared.versions[session.tenant] = version

    async def _find_processes(self, config: TrainerConfig) -> "ProcMesh":
        given = self._given_processes
        if given is None:
            return await self._spawn(
                config.num_processes(), None if config.gpu is None else gpus.environment(config.gpus())
            )
        return await given.process_mesh if isinstance(given, ModelClient) else given

    @property
    def process_mesh(self) -> Awaitable["ProcMesh"]:
        """Gives the processes when the model is set up in them, to a client that shares them."""
        return self._processes_with_model()

    async def _processes_with_model(self) -> "ProcMesh":
        await self._started
        assert self._proc_mesh is not None
        return self._proc_mesh

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def watched(self) -> ProcessMesh | None:
        given = self._given_processes
        return given.watched if isinstance(given, ModelClient) else super().watched

    def require_open(self, what: str) -> None:
        super().require_open(what)
        given = self._given_processes
        if isinstance(given, ModelClient) and given.is_closed:
            raise RuntimeError(f"{self.name}: {what} is not possible: {given.name}, whose processes it uses, is closed")

    async def _close(self) -> None:
        if self._stops_actor and self._mesh is not None:
            given = self._given_processes
            if not (isinstance(given, ModelClient) and given.is_closed):  # a closed client has ended its processes
                stopping: Awaitable[None] = self._mesh.stop()
                await stopping
        await super()._close()
        if self._owns_transport and self._transport is not None:
            await self._transport.close()

    def offload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move parts (weights, gradients, optimizer state) to the host, and free their device
        memory. No gain on a CPU.

        The first offload allocates host memory, pinned beside a GPU, which later ones use again. A
        later call first brings
        back what it needs: weights for `forward`, pushes, pulls and exports; also gradients for
        forward_backward; also the optimizer state for save_checkpoint unless optimizer=False; all
        parts for optim_step, load_checkpoint and another tenant.
        Raises RuntimeError if a call failed halfway and neither discard_gradients nor
        load_checkpoint has repaired it.
        """
        require_parts("offload", parts)
        return self.session.queue("offload", lambda: self._move(PolicyTrainer.offload, list(parts)))

    def onload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move the parts back to the devices, bit for bit. Does nothing for parts that are there."""
        require_parts("onload", parts)
        return self.session.queue("onload", lambda: self._move(PolicyTrainer.onload, list(parts)))

    async def _move(self, verb: "Verb[[list[Part]], HostMove]", parts: list[Part]) -> HostMove:
        return of_all_ranks(await self.session.send(verb, parts))

    def relay(self, endpoint: str, *arguments: object) -> Call[list[Any]]:
        """A service's road: send a call that an attached client has checked. Answers of all ranks."""
        discards = endpoint == "discard_gradients"
        return self.session.queue(endpoint, lambda: self._relay(endpoint, arguments), when_broken=discards)

    async def _relay(self, endpoint: str, arguments: tuple[object, ...]) -> list[Any]:
        answers = await self.session.send(getattr(PolicyTrainer, endpoint), *arguments)
        if endpoint == "discard_gradients":
            self.session.repair()
        return answers


def require_evenly(config: TrainerConfig, hosts: "Hosts | None") -> None:
    """Raises ValueError if the ranks do not fit evenly on `hosts`, or on this host's GPUs."""
    if hosts is None:
        require_gpus(config)
    elif config.num_processes() % len(hosts):
        raise ValueError(f"{config.num_processes()} ranks cannot be spread evenly over {len(hosts)} hosts")


def _require_processes(processes: "ProcMesh | ModelClient", needed: int) -> None:
    """Raises ValueError if a model of `needed` ranks cannot be built in these processes."""
    if not isinstance(processes, ModelClient):
        count = processes.size()
    elif processes.config is None:
        raise ValueError(
            f"processes={processes!r}: that client did not spawn its mesh, so it does not know the processes; pass the ProcMesh itself"
        )
    else:
        count = processes.config.num_processes()
    if count != needed:
        raise ValueError(f"processes has {count} processes, but the layout of the config needs {needed}")
