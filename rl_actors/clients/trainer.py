"""The client of a trainer. Most methods return a Call: `await` the Call in async code, or call its `.result()` elsewhere. new_tenant and the
methods that begin with spawn_ return a client."""

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rl_actors.clients.call import Call
from rl_actors.clients.generator import GeneratorClient, check_config
from rl_actors.clients.model import ModelClient
from rl_actors.clients.model_calls import TrainingCalls
from rl_actors.clients.tenant import Access, TenantClient
from rl_actors.config import GeneratorConfig, LoRAConfig, TrainerConfig
from rl_actors.processes.output import LogRoute
from rl_actors.transports.base import announce
from rl_actors.validation import require_optimizer

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

    from rl_actors.clients.reference import ReferenceClient
    from rl_actors.clients.value_trainer import ValueTrainerClient

CLOSE_SAVE_TIMEOUT = 60.0
"""Largest number of seconds that `close` waits for a checkpoint that is being written."""


class TrainerClient(TrainingCalls, ModelClient):
    """The client of a trainer. Its base class ModelClient has `spawn` and `attach` and sends calls in order. TrainingCalls has the calls
    that train, save and export.

    >>> trainer = TrainerClient.spawn(config)                                  # doctest: +SKIP
    >>> trainer.forward_backward(samples, loss="cross_entropy").result()       # doctest: +SKIP
    >>> trainer.optim_step(OptimParams(learning_rate=1e-3)).result()           # doctest: +SKIP
    """

    default_name: ClassVar[str] = "trainer"
    opens_transport: ClassVar[bool] = True

    _writing: Call[None] | None = None
    _tenants: dict[str, TenantClient]  # the tenants that this client has added and not dropped

    def _start(self) -> None:
        self._tenants = {}
        super()._start()

    async def _close(self) -> None:
        if self._writing is not None and (self._processes is not None or self._stops_actor):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._writing, CLOSE_SAVE_TIMEOUT)
        await super()._close()

    async def _write(self, path: str) -> None:
        # The ranks write a checkpoint in the background and run other calls meanwhile. So this method sends wait_for_checkpoint at once,
        # without waiting for the answers of earlier calls.
        assert self._mesh is not None
        await self._ask(self._mesh.wait_for_checkpoint, f"writing {path}", self.call_timeout, breaks=False)

    def new_tenant(self, name: str, *, seed: int = 0) -> TenantClient:
        """Add a tenant: another run on the same base model. Returns the client of the tenant at once.

        A tenant has its own adapters, gradients, optimizer and policy_version. The adapters are initialized with this seed. They have the same
        rank as the trainer's adapters and are on the same layers. The trainer runs one call at a time, and the calls of a tenant run in the
        order in which they were made. The calls of this TrainerClient work on the first tenant, which every trainer has.
        Raises ValueError if the trainer has no adapters, if another tenant has the name, or if this client is attached to a service.
        """
        if self._lease is not None:
            raise ValueError(f"{self.name} is attached to a service, whose trainer can have only one tenant")
        former = self._tenants.get(name)
        if former is not None and not former.ready().failed():
            raise ValueError(f"{self.name} has a tenant {name!r} already")
        made: Call[None] = self._in_turn(
            "new_tenant", self._first, "new_tenant", name, seed, check=lambda limits: limits.check_tenant(name, seed)
        )
        self._tenants[name] = TenantClient(self, name, made, self._access())
        return self._tenants[name]

    def _access(self) -> Access:
        return Access(
            in_turn=self._in_turn,
            send=self._send,
            infos=self._infos,
            mend=self._mend_tenant,
            write=self._write,
            limits=lambda: self._limits,
            writing=lambda: self._writing,
            set_writing=self._set_writing,
        )

    def _set_writing(self, writing: Call[None] | None) -> None:
        self._writing = writing

    def drop_tenant(self, name: str) -> Call[None]:
        """Delete a tenant with its adapters, gradients and optimizer state. The name can then be used again. Raises ValueError if there is no such
        tenant."""
        self._tenants.pop(name, None)
        return self._in_turn("drop_tenant", self._drop_tenant, name, mends=True)

    async def _drop_tenant(self, name: str) -> None:
        await self._ordered("drop_tenant", name)
        self._unanswered.pop(name, None)

    def profile(self, directory: str, *, steps: int = 1) -> Call[None]:
        """Trace the next `steps` training steps with torch.profiler. Each rank N writes <directory>/rank-N.json before the optim_step of
        the last traced step returns.

        A trace holds whole steps. So the call raises RuntimeError between a forward_backward and the optim_step or discard_gradients that ends
        the step. It also raises RuntimeError if an earlier trace has not ended, and ValueError if `steps` is below 1.
        """
        return self._in_turn(
            "profile",
            self._first,
            "profile",
            os.path.abspath(directory),
            steps,
            check=lambda limits: require_optimizer("profile", limits.optimizer),
        )

    def push_model_state_dict(self) -> Call[int]:
        """Publish the weights, so that generators can pull them. Returns the policy_version of these weights."""
        return self._in_turn("push_model_state_dict", self._first, "push_model_state_dict")

    def spawn_generator(
        self, config: GeneratorConfig | None = None, *, name: str = "generator", logs: LogRoute | None = None
    ) -> GeneratorClient:
        """Spawn a generator with the model and the current weights of the trainer. Returns the generator's client at once. The first call of that
        client waits until the generator has started.

        config: the config of the generator. None: a config for the trainer's model.
        Raises ValueError for a value model and for a model with an expert bias (load_balance_coeff), because vLLM cannot run these models as the
        trainer does. Also raises ValueError if this client is attached to a service, or if `config` is None and this client did not spawn its
        trainer.
        """
        if self._lease is not None:
            raise ValueError(
                f"{self.name} is attached to a service and cannot add a generator to it; "
                f"to use the generator of the service, call GeneratorClient.attach({str(self._lease.address)!r})"
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
        push = self._in_turn("push_model_state_dict", self._push_for, config.dtype)
        return GeneratorClient.spawn(config, transport=self._opened, name=name, logs=logs, first_version=push)

    async def _push_for(self, dtype: str) -> int:
        assert self._transport is not None
        await announce(self._transport, dtype)  # the generator has not started yet, so it cannot announce its dtype
        return await self._first("push_model_state_dict")

    def spawn_value_trainer(
        self,
        config: TrainerConfig | None = None,
        processes: "ProcMesh | ModelClient | None" = None,
        *,
        checkpoint: str = "",
        name: str = "value_trainer",
        logs: LogRoute | None = None,
    ) -> "ValueTrainerClient":
        """Spawn a value model, such as the critic of PPO. Returns its client at once. The first call of that client waits until the value model has
        started.

        config: the config of the value model. Its field `head` is set to "values". None: the config of this trainer, without adapters.
        processes: see `spawn`. If `processes` is this client, the value model runs in the processes of this trainer.
        checkpoint: see `spawn`. The checkpoint of a policy with the same dimensions is allowed, too. The head of the value model then starts at
        zero.
        Raises ValueError as `spawn` does, and if `config` is None and this client did not spawn its trainer.
        """
        from rl_actors.clients.value_trainer import ValueTrainerClient

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
        """Spawn a model that only infers. Returns its client at once. The first call of that client waits until the model has started.

        The client's method `refresh(version)` loads the weights of a version that this trainer has pushed. A program may have several such models,
        for example a teacher with another config.
        config: the config of the model. None: the config of this trainer.
        processes, checkpoint: see `spawn`.
        Raises ValueError as `spawn` does, and if `config` is None and this client did not spawn its trainer.
        """
        from rl_actors.clients.reference import ReferenceClient

        own = config or self._known_config("spawn_reference")
        return ReferenceClient.spawn(
            own, transport=self._opened, processes=processes, checkpoint=checkpoint, name=name, logs=logs
        )

    def _known_config(self, call: str) -> TrainerConfig:
        if self.config is None:
            raise ValueError(f"{call} needs a TrainerConfig: this client did not spawn its trainer")
        return self.config
