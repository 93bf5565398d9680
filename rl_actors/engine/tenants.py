"""Tenants: runs with LoRA adapters of their own over one frozen model, one in use at a time.

A switch copies weights, of which FSDP keeps views, and moves references to gradients and optimizer
state, all without messages.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rl_actors.engine import lora
from rl_actors.engine.build import BuiltModel
from rl_actors.engine.call_order import StepState
from rl_actors.engine.gpu import this_machine
from rl_actors.engine.gradients import local
from rl_actors.engine.offload import Offload, drop_gathered_weights
from rl_actors.types import FIRST_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Stash:
    """Of a tenant that is not in use, in the order of Tenants.trained and of the optimizers."""

    weights: list[Tensor]  # this rank's shards
    gradients: list[Tensor | None]
    states: list[dict[nn.Parameter, Any]]  # of each optimizer
    groups: list[list[dict[str, Any]]]  # settings of each optimizer's parameter groups


@dataclass(slots=True, kw_only=True)
class Tenant:
    step: StepState = field(default_factory=StepState)
    policy_version: int = 0
    steps_skipped: int = 0  # optim_steps whose gradient was not finite
    # None while in use
    stash: Stash | None = None


class Tenants:
    """The tenants of a trainer. The first, FIRST_TENANT, always exists."""

    def __init__(self, built: BuiltModel, memory: Offload) -> None:
        self.built = built
        self.memory = memory
        self.trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
        self.name_in_use = FIRST_TENANT
        self.in_use = Tenant()
        self.by_name = {FIRST_TENANT: self.in_use}
        self._new_groups = self._group_settings()

    def find(self, name: str) -> Tenant:
        """Raises ValueError for an unknown name."""
        if name not in self.by_name:
            raise ValueError(
                f"there is no tenant {name!r}; this trainer has {sorted(self.by_name)} ({FIRST_TENANT!r} is the first tenant)"
            )
        return self.by_name[name]

    def use(self, name: str) -> None:
        """Put a tenant's tensors into model and optimizers. Raises ValueError for an unknown name."""
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
        for optimizer, state in zip(self._optimizers, stash.states, strict=True):
            optimizer.state.update(state)
        self._set_groups(stash.groups)

    def add(self, name: str, seed: int) -> None:
        """Add a tenant and put it in use. Raises ValueError for a name that exists."""
        if name in self.by_name:
            raise ValueError(
                f"there is a tenant {name!r} already; this trainer has {sorted(self.by_name)} ({FIRST_TENANT!r} is the first tenant)"
            )
        self._put_aside()
        self.name_in_use = name
        self.in_use = Tenant()
        self.by_name[name] = self.in_use
        self._set_groups(self._new_groups)
        lora.initialise(self.built.model, seed)

    def drop(self, name: str) -> None:
        """Delete a tenant, even in its step. The first replaces it in use."""
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
        """Stash the tenant in use: copies of weights, references to the rest."""
        self.memory.onload()
        this_machine().wait()  # FSDP's streams read weights and write gradients
        drop_gathered_weights(self.built.model)
        self.in_use.stash = Stash(
            weights=[local(parameter.detach()).clone() for parameter in self.trained],
            gradients=[parameter.grad for parameter in self.trained],
            states=[dict(optimizer.state) for optimizer in self._optimizers],
            groups=self._group_settings(),
        )
        for parameter in self.trained:
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _group_settings(self) -> list[list[dict[str, Any]]]:
        """Settings of each optimizer's parameter groups, without the parameters."""
        return [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def _set_groups(self, settings: list[list[dict[str, Any]]]) -> None:
        for optimizer, settings_of_groups in zip(self._optimizers, settings, strict=True):
            for group, values in zip(optimizer.param_groups, settings_of_groups, strict=True):
                group.update(values)
