"""`ModelClient`, the base class of the clients of a model. It sends calls to all ranks, one at a time and in order.

model_calls.py has the calls. trainer.py adds the calls that only a trainer has.
"""

import asyncio
import os
import uuid
import weakref
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import cloudpickle

from rl_actors.clients.base import ATTACH_TIMEOUT, STEP_WAIT, ActorSilentError, Client
from rl_actors.clients.call import Call, in_background
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.model_calls import Check, ModelCalls
from rl_actors.config import TrainerConfig
from rl_actors.parts import PARTS, HostMove, Part, of_all_ranks, require_parts
from rl_actors.policy_trainer import Order, PolicyTrainer
from rl_actors.processes import gpus
from rl_actors.processes.output import LogRoute
from rl_actors.processes.spawn import ProcessMesh
from rl_actors.transports.base import Transport
from rl_actors.transports.default import default_transport
from rl_actors.types import FIRST_TENANT, TrainerInfo
from rl_actors.validation import require_config, require_gpus

if TYPE_CHECKING:
    from monarch.actor import ActorMesh, ProcMesh

    from rl_actors.processes.hosts import Hosts

T = TypeVar("T")

_turns: "weakref.WeakKeyDictionary[ProcMesh, asyncio.Lock]" = weakref.WeakKeyDictionary()
"""One lock for each ProcMesh. Clients of the same processes take turns, because otherwise two ranks could start their collectives in
different orders and wait for ever."""


class ModelClient(ModelCalls, Client):
    """The client of a model's ranks, which are PolicyTrainer actors. No other client may call these actors. A client of another model may
    share their processes. Calls run one at a time on all ranks, in the order in which they came.

    A method refuses bad input in the caller's thread. Some checks need the model's limits, such as the vocabulary size. A client of a mesh
    that the caller spawned learns the limits in its setup. If a call is made before the end of the setup, the checks run just before the
    call is sent.
    """

    IF_DEAD: ClassVar[str] = (
        "close this client and spawn another; load_checkpoint brings back what save_checkpoint has written"
    )
    default_name: ClassVar[str] = "model"
    opens_transport: ClassVar[bool] = False
    """True if the client opens a transport when its caller gives none."""

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

        config, logs, processes, checkpoint and hosts are for `spawn`, which passes no mesh. limits are for `attach`.
        """
        name = name or self.default_name
        super().__init__(
            mesh, name=name, call_timeout=call_timeout, setup_timeout=setup_timeout, logs=logs, hosts=hosts
        )
        self.config = config
        self._limits = TrainerLimits.of_config(config) if config is not None else limits
        self._given_processes = processes
        if processes is not None:
            self._logs, self._is_quiet = None, True  # the output is in the files of the given processes
        self._stops_actor = mesh is None and processes is not None
        self._checkpoint = checkpoint
        self._transport = None if isinstance(transport, Call) else transport
        self._owns_transport = False
        self._session = uuid.uuid4().hex[:12]
        self._number = 0  # number of the last request that was sent
        # A tenant is one of several training runs that share the model. If a call of a tenant got no answer in time, the tenant's gradients are
        # unknown. The client then refuses the tenant's calls until the tenant calls discard_gradients. {tenant: the reason of the refusal}
        self._unanswered: dict[str, str] = {}
        self._proc_mesh: ProcMesh | None = None  # the processes; None for a mesh of actors that the caller spawned
        self._turn: asyncio.Lock  # held by the running call; made on the background event loop
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
        """Build the model in new or in given processes. Returns at once. The answer to the first call comes after the start.

        transport: an open transport, or the call that opens it; the caller closes the transport. None: a TrainerClient opens and closes the transport
        that transports/default.py chooses; other clients have no transport.
        processes: a ProcMesh, or another client whose processes are used. The model is built in these processes, which may hold other models
        already. Close the other client after this client. Clients of the same processes take turns. None: new processes, which end when
        this client is closed.
        checkpoint: a directory that a trainer of the same model wrote by save_checkpoint. The model starts with the weights of this
        checkpoint. Empty: the model starts with the weights of config.hf_path, or with random weights if hf_path is empty.
        hosts: hosts that `rl_actors.processes.hosts.connect` returned; new processes are spread evenly over them. None: this host.
        Raises ValueError if no model can be built from the config, if this host has too few GPUs, if the processes cannot be spread evenly
        over `hosts`, if `checkpoint` is not a directory, or if `processes` does not have as many processes as the config needs.
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
        """A client of the model that a running service owns. Any number of programs may attach, train and leave.

        >>> trainer = TrainerClient.attach("tcp://127.0.0.1:4400")             # doctest: +SKIP

        The calls of all clients run one at a time. The first forward_backward of a client opens a step. The next optim_step or
        discard_gradients of this client closes the step. While the step is open, these calls of other clients wait: forward_backward,
        optim_step, discard_gradients, save_checkpoint, load_checkpoint and profile. They wait at most step_wait seconds, and at most half of
        call_timeout. Then they are refused, and the error names the client that has the step. If a client leaves the service while its step
        is open, the service discards the gradients of this step.
        Paths of checkpoints and exports are paths on the service's machine.
        certificates: folder of certificates for a tls:// address.
        Raises TimeoutError if the service does not answer within `timeout` seconds. Raises ConnectionError if no service listens at the
        address, or if certificates are refused. Raises ValueError if the address is wrong, if the service has no such model, or if the
        service has another version of rl_actors, torch, Monarch or Python.
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
        client.keep(mesh.lease)
        return client

    async def _open_transport(
        self, given: Transport | Call[Transport] | Call[Transport | None] | None
    ) -> Transport | None:
        if isinstance(given, Call):
            self._transport = await given
        if self._mesh is not None or self._transport is not None or not self.opens_transport:
            return self._transport
        # A `close` during the opening waits for the end of the opening, and then closes the transport.
        async with self._spawning:
            self._require_open("setup")
            self._transport, self._owns_transport = default_transport(), True
            await self._transport.open()
        return self._transport

    async def _set_up(self) -> None:
        if self._mesh is None:
            assert self.config is not None
            self._proc_mesh = await self._find_processes(self.config)
            self._turn = _turns.setdefault(self._proc_mesh, asyncio.Lock())
            self._mesh = self._proc_mesh.spawn(self.name, PolicyTrainer, self.config, await self._opened)
        else:
            self._turn = asyncio.Lock()
        await self._opened
        async with self._turn:
            infos: list[TrainerInfo] = await self._ask(self._mesh.setup, "setup", self.setup_timeout, self._session)
            self._version = infos[0].policy_version
            self._limits = TrainerLimits.of_info(infos[0])
            if self._processes is None:
                self._probes = await self._ask(self._mesh.probe, "setup", self.setup_timeout)
            if self._checkpoint:
                self._version = await self._first("load_checkpoint", os.path.abspath(self._checkpoint), False)

    async def _find_processes(self, config: TrainerConfig) -> "ProcMesh":
        given = self._given_processes
        if given is None:
            return await self._spawn(
                config.num_processes(), None if config.gpu is None else gpus.environment(config.gpus())
            )
        return await given.process_mesh if isinstance(given, ModelClient) else given

    @property
    def process_mesh(self) -> Awaitable["ProcMesh"]:
        """An awaitable that gives the processes when the model is set up in them. A client that shares the processes awaits this property."""
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

    def _require_open(self, what: str) -> None:
        super()._require_open(what)
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

    def info(self) -> Call[list[TrainerInfo]]:
        """The TrainerInfo of every rank, in the order of the ranks."""
        return self._in_turn("info", self._infos)

    async def _infos(self, *tenant: str) -> list[TrainerInfo]:
        assert self._mesh is not None
        infos: list[TrainerInfo] = await self._ask(self._mesh.info, "info", self.call_timeout, *tenant)
        return sorted(infos, key=lambda info: info.rank)

    def offload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move the given parts (weights, gradients, optimizer state) to host memory, and free their memory on the devices.

        The first offload allocates the host memory, and later offloads use it again. On a machine with a GPU this memory is pinned. On a CPU
        an offload saves no memory.
        Every later call first brings back the parts that the call needs. `forward`, pushes, pulls and exports need the weights.
        forward_backward needs the weights and the gradients. save_checkpoint needs the weights and, unless optimizer=False, the optimizer
        state. optim_step, load_checkpoint and a call of another tenant need all parts.
        Raises RuntimeError if an earlier call failed halfway and neither discard_gradients nor load_checkpoint has repaired the trainer.
        """
        require_parts("offload", parts)
        return self._in_turn("offload", self._move, "offload", list(parts))

    def onload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move the parts back to the devices, bit for bit. Does nothing for parts that are on the devices already."""
        require_parts("onload", parts)
        return self._in_turn("onload", self._move, "onload", list(parts))

    async def _move(self, endpoint: str, parts: list[Part]) -> HostMove:
        return of_all_ranks(await self._ordered(endpoint, parts))

    def relay(self, endpoint: str, *arguments: object) -> Call[list[Any]]:
        """Send a call that a client in another program has checked, and return the answers of all ranks. A service calls this method for
        the clients that are attached to it."""
        return self._in_turn(endpoint, self._relay, endpoint, *arguments, mends=endpoint == "discard_gradients")

    async def _relay(self, endpoint: str, *arguments: object) -> list[Any]:
        answers = await self._ordered(endpoint, *arguments)
        if endpoint == "discard_gradients":
            self._mend()
        return answers

    def _mend(self) -> None:
        self._mend_tenant(FIRST_TENANT)

    def _mend_tenant(self, tenant: str) -> None:
        self._broken = None
        self._unanswered.pop(tenant, None)

    def _in_turn(
        self,
        what: str,
        send: Callable[..., Awaitable[T]],
        *arguments: object,
        check: Check | None = None,
        mends: bool = False,
        tenant: str = FIRST_TENANT,
    ) -> Call[T]:
        """See ModelCalls. tenant: the tenant that makes the call."""
        self._require_open(what)
        self._show_start()
        if check is not None and self._limits is not None:
            check(self._limits)
            check = None
        name = self.name if tenant == FIRST_TENANT else f"{self.name}, tenant {tenant}"
        return in_background(self._wait_and_send(tenant, send, arguments, check, mends), f"{name}: {what}")

    async def _wait_and_send(
        self,
        tenant: str,
        send: Callable[..., Awaitable[T]],
        arguments: tuple[object, ...],
        check: Check | None,
        mends: bool,
    ) -> T:
        await self._started
        async with self._turn:  # first come, first served
            broken = self._broken or self._unanswered.get(tenant)
            if broken and not mends:
                raise RuntimeError(f"{self.name} is broken: {broken}; call discard_gradients, or spawn it again")
            if check is not None:
                assert self._limits is not None
                check(self._limits)
            return await send(*arguments)

    async def _ordered(self, endpoint: str, *args: object) -> list[Any]:
        answers = await self._send(FIRST_TENANT, endpoint, *args)
        self._remember_version(answers[0])
        return answers

    async def _send(self, tenant: str, endpoint: str, *args: object) -> list[Any]:
        """The answers of all ranks to the next request of this client's session."""
        # Callable arguments are pickled here to check that they can be sent, before the request gets a number. If a request with a number
        # never arrived, the ranks would refuse all later numbers.
        for arg in args:
            if callable(arg):
                cloudpickle.dumps(arg)
        self._number += 1
        order = Order(session=self._session, number=self._number, tenant=tenant)
        try:
            return await self._ask(getattr(self._mesh, endpoint), endpoint, self.call_timeout, *args, order=order)
        except ActorSilentError:
            self._unanswered[tenant] = str(self._broken)
            raise


def require_evenly(config: TrainerConfig, hosts: "Hosts | None") -> None:
    """Raises ValueError if the ranks cannot be spread evenly over `hosts`. If `hosts` is None, raises ValueError if this host has too few
    GPUs for the ranks."""
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
