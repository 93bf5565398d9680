"""The clients of a trainer, of a value model such as PPO's critic, and of a model that only infers.

Most methods return a Call: `await` it, or call its `.result()`.
"""

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rl_actors.clients.call import Call
from rl_actors.clients.generator import GeneratorClient, check_config
from rl_actors.clients.model import ModelClient
from rl_actors.clients.model_calls import TrainingCalls
from rl_actors.clients.tenant import TenantClient
from rl_actors.config import GeneratorConfig, LoRAConfig, TrainerConfig
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import announce
from rl_actors.validation import require_optimizer

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

CLOSE_SAVE_TIMEOUT = 60.0
"""Largest number of seconds that `close` waits for a checkpoint that is being written."""


class TrainerClient(TrainingCalls, ModelClient):
    """The client of a trainer, for its first tenant.

    >>> trainer = TrainerClient.spawn(config)                                  # doctest: +SKIP
    >>> trainer.forward_backward(samples, loss="cross_entropy").result()       # doctest: +SKIP
    >>> trainer.optim_step(OptimParams(learning_rate=1e-3)).result()           # doctest: +SKIP
    """

    default_name: ClassVar[str] = "trainer"
    opens_transport: ClassVar[bool] = True

    _tenants: dict[str, TenantClient]  # the tenants that this client has added and not dropped

    def _start(self) -> None:
        self._tenants = {}
        super()._start()

    async def _close(self) -> None:
        if self.shared.writing is not None and (self._processes is not None or self._stops_actor):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.shared.writing, CLOSE_SAVE_TIMEOUT)
        await super()._close()

    def new_tenant(self, name: str, *, seed: int = 0) -> TenantClient:
        """Add another run on the same base model, with its own adapters, gradients, optimizer and
        policy_version.

        Its adapters have the rank and the layers of the trainer's, and are initialized with this
        seed. Returns at once. The trainer runs one call at a time, each tenant's in the order in
        which they were made.
        Raises ValueError if the trainer has no adapters, if a tenant has the name, or if this
        client is attached to a service.
        """
        if self._connection is not None:
            raise ValueError(f"{self.name} is attached to a service, whose trainer can have only one tenant")
        former = self._tenants.get(name)
        if former is not None and not former.ready().failed():
            raise ValueError(f"{self.name} has a tenant {name!r} already")
        added = self.session.queue(
            "new_tenant",
            lambda: self.session.first(PolicyTrainer.new_tenant, name, seed),
            check=lambda limits: limits.check_tenant(name, seed),
        )
        self._tenants[name] = TenantClient(self, name, added)
        return self._tenants[name]

    def drop_tenant(self, name: str) -> Call[None]:
        """Delete a tenant and all that it has. Raises ValueError if there is no such tenant."""
        self._tenants.pop(name, None)
        return self.session.queue("drop_tenant", lambda: self._drop_tenant(name), when_broken=True)

    async def _drop_tenant(self, name: str) -> None:
        await self.session.first(PolicyTrainer.drop_tenant, name)
        self.session.of(name).forget()

    def profile(self, directory: str, *, steps: int = 1) -> Call[None]:
        """Trace the next `steps` steps with torch.profiler. Rank N writes <directory>/rank-N.json
        in the last optim_step.

        Raises RuntimeError in the middle of a step or of another trace, and ValueError if `steps`
        is below 1.
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

        config: None: a config for the trainer's model.
        Raises ValueError for a model that vLLM cannot run as the trainer does: a value model, or
        one with an expert bias (load_balance_coeff). Also if this client is attached to a service,
        or did not spawn its trainer and gets no config.
        """
        if self._connection is not None:
            raise ValueError(
                f"{self.name} is attached to a service and cannot add a generator to it; "
                f"to use the generator of the service, call GeneratorClient.attach({str(self._connection.address)!r})"
            )
        if self.config is not None:
            self.config.require_hf("spawn_generator")
        if config is None:
            if self.config is None:
                raise ValueError("spawn_generator needs a GeneratorConfig: this client did not spawn its trainer")
            config = GeneratorConfig.of(self.config)
        check_config(config)  # before the push
        if self.config is not None:
            own = GeneratorConfig.of(self.config)
            stops = own.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
            config = replace(config, stop_token_ids=stops, tokenizer_path=config.tokenizer_path or own.tokenizer_path)
        dtype = config.dtype
        push = self.session.queue("push_model_state_dict", lambda: self._push_for(dtype))
        return GeneratorClient.spawn(config, transport=self._opened, name=name, logs=logs, first_version=push)

    async def _push_for(self, dtype: str) -> int:
        assert self._transport is not None
        await announce(self._transport, dtype)  # the generator has not started yet, so it cannot announce its dtype
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

        config: its field `head` becomes "values". None: the config of this trainer, without
        adapters.
        processes: see `spawn`; may be this client. checkpoint: also one of a policy of the same
        dimensions, whose head then starts at zero.
        Raises ValueError as `spawn` does, and if this client did not spawn its trainer and gets no
        config.
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

        config: None: the config of this trainer. processes, checkpoint: see `spawn`.
        `refresh(version)` of the client loads weights that this trainer has pushed.
        Raises ValueError as `spawn` does, and if this client did not spawn its trainer and gets no
        config.
        """
        own = config or self._known_config("spawn_reference")
        return ReferenceClient.spawn(
            own, transport=self._opened, processes=processes, checkpoint=checkpoint, name=name, logs=logs
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
    """The client of a model without gradients and optimizer, in its own or in another client's
    processes.

    >>> reference = trainer.spawn_reference()                                  # doctest: +SKIP
    >>> reference.forward(samples).result().logprobs                            # doctest: +SKIP
    >>> reference.refresh(trainer.push_model_state_dict().result()).result()    # doctest: +SKIP
    """

    default_name: ClassVar[str] = "reference"

    @classmethod
    def _own_config(cls, config: TrainerConfig) -> TrainerConfig:
        return replace(config, optimizer=None)

    def refresh(self, version: int) -> Call[int]:
        """Take the weights of a pushed version, and return the version. Waits up to 60 s for it to
        be published.

        The values are rounded to the dtype of the push: the widest that a generator has announced,
        or float32. Only the two versions that were pushed last can be read.
        Raises TimeoutError if the version is not there in time, ValueError if it holds another
        model or only adapters, and RuntimeError if this client has no transport.
        """
        return self.session.queue("refresh", lambda: self.session.first(PolicyTrainer.pull_model_state_dict, version))

    def load_checkpoint(self, path: str, *, optimizer: Literal[False] = False) -> Call[int]:
        """Load the weights of a checkpoint of save_checkpoint, of any parallel layout. Returns its
        policy_version.
        """
        return self._load_checkpoint(path, optimizer=optimizer)
