"""Tenants. A tenant is one of several runs that share the model of a trainer. The runs use the model one after the
other.

All tenants train LoRA adapters over the same frozen weights. These weights are called the base.

Each tenant has its own adapters, gradients, optimizer state, policy_version, and state of its training step
(call_order.py).

At a switch of tenants each rank works only on its own shards, without messages to other ranks. So a switch works in
every parallel layout.
FSDP keeps views of the adapters' weights, so a switch copies new values into the memory of these weights. A switch
does not copy gradients and optimizer state. It only takes the references to the old tenant's tensors out of the model and
the optimizers, and puts references to the new tenant's tensors there.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rl_actors.engine import lora
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.call_order import StepState
from rl_actors.engine.gradients import local
from rl_actors.engine.machine import this_machine
from rl_actors.engine.offload import Offload
from rl_actors.types import FIRST_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Stash:
    """Tensors and optimizer settings of a tenant that is not in use.

    `weights` and `gradients` have the order of Tenants.trained. `states` and `groups` have the order of the optimizers.
    """

    weights: list[Tensor]  # this rank's shards
    gradients: list[Tensor | None]
    states: list[dict[nn.Parameter, Any]]  # the `state` of each torch optimizer
    groups: list[list[dict[str, Any]]]  # the settings of the parameter groups of each torch optimizer


@dataclass(slots=True, kw_only=True)
class Tenant:
    """The state of one run that trains adapters over the base."""

    step: StepState = field(default_factory=StepState)
    policy_version: int = 0
    steps_skipped: int = 0  # number of optim_steps whose gradient was not finite
    # None while the tenant is in use, because the model and the optimizers then have its tensors.
    stash: Stash | None = None


class Tenants:
    """The tenants of a trainer. Exactly one tenant is in use. The first tenant, whose name is FIRST_TENANT, always exists."""

    def __init__(self, built: BuiltModel, memory: Offload) -> None:
        self.built = built
        self.memory = memory
        self.trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
        self.name_in_use = FIRST_TENANT
        self.in_use = Tenant()
        self.by_name = {FIRST_TENANT: self.in_use}
        self._new_groups = self._group_settings()

    def find(self, name: str) -> Tenant:
        """The tenant of this name. Raises ValueError for an unknown name."""
        if name not in self.by_name:
            raise ValueError(
                f"there is no tenant {name!r}; this trainer has {sorted(self.by_name)} ({FIRST_TENANT!r} is the first tenant)"
            )
        return self.by_name[name]

    def use(self, name: str) -> None:
        """Put the tensors of a tenant into the model and the optimizers. Does nothing if this tenant is in use already.

        Raises ValueError for an unknown name.
        """
        tenant = self.find(name)
        if tenant is self.in_use:
            return
        self._put_aside()
        stash = tenant.stash
        tenant.stash = None
        assert stash is not None
        self.name_in_use = name
        self.in_use = tenant
        with torch.no_grad():
            for parameter, weight, gradient in zip(self.trained, stash.weights, stash.gradients, strict=True):
                local(parameter).copy_(weight)
                parameter.grad = gradient
        for optimizer, state, groups in zip(self._optimizers, stash.states, stash.groups, strict=True):
            optimizer.state.update(state)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)

    def add(self, name: str, seed: int) -> None:
        """Add a tenant, and put it in use.

        The initial values of the tenant's adapters depend on `seed`. Raises ValueError for a name that exists already.
        """
        if name in self.by_name:
            raise ValueError(
                f"there is a tenant {name!r} already; this trainer has {sorted(self.by_name)} ({FIRST_TENANT!r} is the first tenant)"
            )
        self._put_aside()
        self.name_in_use = name
        self.in_use = Tenant()
        self.by_name[name] = self.in_use
        for optimizer, groups in zip(self._optimizers, self._new_groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        lora.initialise(self.built.model, seed)

    def drop(self, name: str) -> None:
        """Delete a tenant, even in the middle of its step. If the tenant is in use, the first tenant is put in use instead.

        Raises ValueError for an unknown name and for the first tenant.
        """
        tenant = self.find(name)
        if name == FIRST_TENANT:
            raise ValueError("the first tenant of a trainer cannot be dropped; it ends with the trainer")
        if tenant is self.in_use:
            self.use(FIRST_TENANT)
        del self.by_name[name]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.built.optimizers.optimizers)

    def _put_aside(self) -> None:
        """Move the tensors of the tenant in use into a new stash.

        The stash gets copies of the weights. The gradients and the optimizer states move into the stash without copies.
        """
        self.memory.onload()
        this_machine().wait()  # FSDP reads weights and writes gradients on its own CUDA streams
        self.memory.drop_gathered_weights()
        weights = [local(parameter.detach()).clone() for parameter in self.trained]
        self.in_use.stash = Stash(
            weights=weights,
            gradients=[parameter.grad for parameter in self.trained],
            states=[dict(optimizer.state) for optimizer in self._optimizers],
            groups=self._group_settings(),
        )
        for parameter in self.trained:
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _group_settings(self) -> list[list[dict[str, Any]]]:
        """The settings of the parameter groups of each optimizer, without the parameters."""
        found = []
        for optimizer in self._optimizers:
            settings = [dict(group) for group in optimizer.param_groups]
            for group in settings:
                del group["params"]
            found.append(settings)
        return found
