"""The clients of a trainer, of a value model such as PPO's critic, and of a model that only infers."""

import os
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rl_actors.clients.base import ATTACH_TIMEOUT, STEP_WAIT
from rl_actors.clients.call import Call
from rl_actors.clients.generator import GeneratorClient, check_config
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.model import ModelRanks
from rl_actors.clients.ranks import AnyTransport
from rl_actors.clients.training import TenantClient, TrainingClient
from rl_actors.config import GeneratorConfig, LoRAConfig, TrainerConfig
from rl_actors.parts import PARTS, HostMove, Part, of_all_ranks, require_parts
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import announce
from rl_actors.validation import require_config, require_gpus, require_optimizer, require_tenant

if TYPE_CHECKING:
    from monarch.actor import ActorMesh, ProcMesh

    from rl_actors.clients.remote import Connection
    from rl_actors.policy_trainer import Verb
    from rl_actors.processes.hosts import Hosts


class ModelClient(TrainingClient):
    """The client of a model. Calls run one at a time, in order, on all ranks.

    Bad input is refused in the caller's thread, but before the setup of a mesh that the caller
    spawned, whose limits are not known yet, just before the call is sent.
    """

    default_name: ClassVar[str] = "model"
    opens_transport: ClassVar[bool] = False  # whether the client opens a transport when its caller gives none

    def __init__(
        self,
        mesh: "ActorMesh[PolicyTrainer] | None",
        *,
        transport: AnyTransport = None,
        call_timeout: float = TrainerConfig.call_timeout,
        setup_timeout: float = TrainerConfig.setup_timeout,
        name: str = "",
        config: TrainerConfig | None = None,
        logs: LogRoute | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        checkpoint: str = "",
        limits: TrainerLimits | None = None,
        hosts: "Hosts | None" = None,
        connection: "Connection | None" = None,
    ) -> None:
        """mesh: of PolicyTrainers that the caller spawned and will stop. From `config` on: by `spawn`, `attach`."""
        super().__init__(name or self.default_name, is_owner=mesh is None, logs=logs, connection=connection)
        self.config = config
        self._is_quiet = self._is_quiet or processes is not None
        ranks = ModelRanks(
            mesh,
            name=self.name,
            call_timeout=call_timeout,
            setup_timeout=setup_timeout,
            config=config,
            limits=limits,
            logs=self._logs if processes is None else None,  # else the output is in the files of the given processes
            hosts=hosts,
            processes=processes.ranks if isinstance(processes, ModelClient) else processes,
            checkpoint=checkpoint,
            transport=transport,
            opens_transport=self.opens_transport,
        )
        self._drive(ranks, ranks.started)

    @classmethod
    def spawn(
        cls,
        config: TrainerConfig,
        *,
        transport: AnyTransport = None,
        name: str = "",
        logs: LogRoute | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        checkpoint: str = "",
        hosts: "Hosts | None" = None,
    ) -> Self:
        """Build the model in new or in given processes. Returns at once; calls wait for the start.

        transport: open, to be closed by the caller, or the call that opens it. None: a
        TrainerClient opens and closes that of transports/default.py; other clients have none.
        processes: a ProcMesh, or another client, to be closed later; its models take turns with
        this one. None: new processes, which end with this client.
        checkpoint: a directory of save_checkpoint. "": the weights of hf_path, or random ones.
        hosts: from `rl_actors.processes.hosts.connect`, for an even spread. None: this host.
        Raises ValueError for a wrong config, checkpoint or number of `processes`, or too few GPUs.
        """
        require_config(f"{cls.__name__}.spawn", config, TrainerConfig)
        config = cls._own_config(config)
        config.validate()
        count = config.num_processes()
        if processes is not None:
            _require_processes(processes, count)
        elif hosts is None:
            require_gpus(config)
        elif count % len(hosts):
            raise ValueError(f"{count} ranks cannot be spread evenly over {len(hosts)} hosts")
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
        """A client of the model that a running service owns. Paths are paths on its machine.

        >>> trainer = TrainerClient.attach("tcp://127.0.0.1:4400")             # doctest: +SKIP

        A client's first forward_backward opens a step, and its optim_step or discard_gradients
        closes it. Meanwhile these calls of other clients wait: forward_backward, optim_step,
        discard_gradients, save_checkpoint, load_checkpoint and profile. After step_wait seconds (at
        most half of call_timeout) they are refused, with the name of the client that has the step.
        The gradients of a client that leaves in its step are discarded.
        certificates: folder of certificates for a tls:// address. Raises TimeoutError after
        `timeout` seconds without an answer, ConnectionError if no service listens or it refuses the
        certificates, and ValueError for a wrong address, model or version of a package.
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
        return cls(
            mesh,
            call_timeout=call_timeout,
            setup_timeout=timeout,
            limits=TrainerLimits.of_info(info),
            connection=mesh.connection,
        )

    def offload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move parts (weights, gradients, optimizer state) from device memory to the host.

        A later call first brings back what it needs: weights for `forward`, pushes, pulls and
        exports; also gradients for forward_backward; also the optimizer state for save_checkpoint
        unless optimizer=False; all parts for optim_step, load_checkpoint and another tenant.
        Raises RuntimeError after a call that failed halfway, until a repair. No gain on a CPU.
        """
        require_parts("offload", parts)
        return self.session.queue("offload", lambda: self._move(PolicyTrainer.offload, list(parts)))

    def onload(self, parts: Collection[Part] = PARTS) -> Call[HostMove]:
        """Move the parts back to the devices, bit for bit."""
        require_parts("onload", parts)
        return self.session.queue("onload", lambda: self._move(PolicyTrainer.onload, list(parts)))

    async def _move(self, verb: "Verb[[list[Part]], HostMove]", parts: list[Part]) -> HostMove:
        return of_all_ranks(await self.session.send(verb, parts))

    def relay(self, endpoint: str, *arguments: object) -> Call[list[Any]]:
        """A service's road: send a call that an attached client has checked. Answers of all ranks."""
        session = self.session
        discards = endpoint == "discard_gradients"

        async def send() -> list[Any]:
            answers = await session.send(getattr(PolicyTrainer, endpoint), *arguments)
            if discards:
                session.repair()
            return answers

        return session.queue(endpoint, send, when_broken=discards)


class TrainerClient(ModelClient):
    """The client of a trainer, for its first tenant.

    >>> trainer = TrainerClient.spawn(config)                                  # doctest: +SKIP
    >>> trainer.forward_backward(samples, loss="cross_entropy").result()       # doctest: +SKIP
    >>> trainer.optim_step(OptimParams(learning_rate=1e-3)).result()           # doctest: +SKIP
    """

    default_name: ClassVar[str] = "trainer"
    opens_transport: ClassVar[bool] = True

    def new_tenant(self, name: str, *, seed: int = 0) -> TenantClient:
        """Add another run on the same base model. Returns at once.

        Its adapters have the trainer's rank and layers. seed: of their first values.
        Raises ValueError without adapters, for a name in use, and if attached to a service.
        """
        if self._connection is not None:
            raise ValueError(f"{self.name} is attached to a service, whose trainer can have only one tenant")
        former = self.ranks.tenants.get(name)
        if former is not None and not former.failed():
            raise ValueError(f"{self.name} has a tenant {name!r} already")
        added = self.session.queue(
            "new_tenant",
            lambda: self.session.first(PolicyTrainer.new_tenant, name, seed),
            check=lambda limits: require_tenant(name, seed, limits.lora_rank),
        )
        self.ranks.tenants[name] = added
        return TenantClient(self, name, added)

    def drop_tenant(self, name: str) -> Call[None]:
        """Delete a tenant and all that it has. Raises ValueError if there is no such tenant."""
        self.ranks.tenants.pop(name, None)

        async def drop() -> None:
            await self.session.first(PolicyTrainer.drop_tenant, name)
            self.ranks.unanswered.pop(name, None)
            self.ranks.versions.pop(name, None)

        return self.session.queue("drop_tenant", drop, when_broken=True)

    def profile(self, directory: str, *, steps: int = 1) -> Call[None]:
        """Trace the next `steps` steps with torch.profiler. The last optim_step writes
        <directory>/rank-N.json. Raises RuntimeError within a step or another trace.
        """
        where = os.path.abspath(directory)
        return self.session.queue(
            "profile",
            lambda: self.session.first(PolicyTrainer.profile, where, steps),
            check=lambda limits: require_optimizer("profile", limits.optimizer),
        )

    def push_model_state_dict(self) -> Call[int]:
        """Publish the weights, so that generators can pull them. Returns their policy_version."""
        return self.session.call(PolicyTrainer.push_model_state_dict)

    def spawn_generator(
        self, config: GeneratorConfig | None = None, *, name: str = "generator", logs: LogRoute | None = None
    ) -> GeneratorClient:
        """Spawn a generator with the trainer's model and current weights. Returns at once.

        config: None: one for the trainer's model, if this client spawned it. Raises ValueError for
        a value model, for an expert bias (load_balance_coeff), and if attached to a service.
        """
        if self._connection is not None:
            raise ValueError(
                f"{self.name} is attached to a service and cannot add a generator to it; "
                f"to use the generator of the service, call GeneratorClient.attach({str(self._connection.address)!r})"
            )
        if self.config is not None:
            self.config.require_hf("spawn_generator")
        config = config or GeneratorConfig.of(self._known_config("spawn_generator"))
        check_config(config)  # before the push
        if self.config is not None:
            own = GeneratorConfig.of(self.config)
            stops = own.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
            config = replace(config, stop_token_ids=stops, tokenizer_path=config.tokenizer_path or own.tokenizer_path)
        push = self.session.queue("push_model_state_dict", partial(self._push_for, config.dtype))
        return GeneratorClient.spawn(config, transport=self.ranks.opened, name=name, logs=logs, first_version=push)

    async def _push_for(self, dtype: str) -> int:
        assert self.ranks.transport is not None
        # the generator has not started yet, so it cannot announce its dtype
        await announce(self.ranks.transport, dtype)
        return await self.session.first(PolicyTrainer.push_model_state_dict)

    def spawn_value_trainer(
        self,
        config: TrainerConfig | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        *,
        checkpoint: str = "",
        name: str = "value_trainer",
        logs: LogRoute | None = None,
    ) -> "ValueTrainerClient":
        """Spawn a value model, such as the critic of PPO. Returns at once.

        config: its field `head` becomes "values". None: that of this trainer, without adapters.
        processes: as in `spawn`; may be this client. checkpoint: also of a policy of the same
        dimensions, whose head then starts at zero.
        """
        own = config or replace(self._known_config("spawn_value_trainer"), lora=LoRAConfig())
        return ValueTrainerClient.spawn(own, processes=processes, checkpoint=checkpoint, name=name, logs=logs)

    def spawn_reference(
        self,
        config: TrainerConfig | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        *,
        checkpoint: str = "",
        name: str = "reference",
        logs: LogRoute | None = None,
    ) -> "ReferenceClient":
        """Spawn a model that only infers, such as a teacher with another config. Returns at once.

        config: None: that of this trainer. processes, checkpoint: as in `spawn`. `refresh(version)`
        of the client loads weights that this trainer has pushed.
        """
        own = config or self._known_config("spawn_reference")
        return ReferenceClient.spawn(
            own, transport=self.ranks.opened, processes=processes, checkpoint=checkpoint, name=name, logs=logs
        )

    def _known_config(self, call: str) -> TrainerConfig:
        if self.config is None:
            raise ValueError(f"{call} needs a TrainerConfig: this client did not spawn its trainer")
        return self.config


class ValueTrainerClient(TrainerClient):
    """The client of a value model: `forward` returns V of the state before each target token.

    >>> critic = trainer.spawn_value_trainer()                                   # doctest: +SKIP
    >>> critic.forward_backward(samples, loss=ValueLoss(clip=0.5)).result()      # doctest: +SKIP

    Calls that need a language model, such as push_model_state_dict, raise ValueError.
    """

    default_name: ClassVar[str] = "value_trainer"
    opens_transport: ClassVar[bool] = False  # no generator loads a value model

    @classmethod
    def _own_config(cls, config: TrainerConfig) -> TrainerConfig:
        return replace(config, head="values")


class ReferenceClient(ModelClient):
    """The client of a model without gradients and optimizer. It refuses to train.

    >>> reference = trainer.spawn_reference()                                  # doctest: +SKIP
    >>> reference.refresh(trainer.push_model_state_dict().result()).result()    # doctest: +SKIP
    """

    default_name: ClassVar[str] = "reference"

    @classmethod
    def _own_config(cls, config: TrainerConfig) -> TrainerConfig:
        return replace(config, optimizer=None)

    def refresh(self, version: int) -> Call[int]:
        """Take the weights of one of the last two pushed versions, and return the version.

        They are rounded to the push's dtype: the widest that a generator has announced, or float32.
        Raises TimeoutError if it is not published within 60 s, ValueError for another model or
        only adapters, and RuntimeError without a transport.
        """
        return self.session.queue("refresh", lambda: self.session.first(PolicyTrainer.pull_model_state_dict, version))

    def load_checkpoint(self, path: str, *, optimizer: bool = False) -> Call[int]:
        """Load the weights of a checkpoint. Returns its policy_version. Refuses optimizer=True."""
        return super().load_checkpoint(path, optimizer=optimizer)


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
