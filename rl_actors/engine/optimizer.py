"""torchtitan's optimizer container with optimizers by import path, and the hyperparameters that come with each call. Knows no gradients."""

import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from rl_actors.config import OptimizerConfig
from rl_actors.engine.gradients import local
from rl_actors.types import OptimParams
from rl_actors.validation import HYPERPARAMETERS, supported_hyperparameters


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Under the names of the model itself: activation checkpointing puts a segment of its own into torch's."""
    return ((canonical_fqn(name), parameter) for name, parameter in model.named_parameters())


class _OfShards:
    """Adam goes element by element, so a rank steps its own shards as plain tensors, without DTensor's dispatch."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


class Adam(_OfShards, torch.optim.Adam):
    """torch's, and its state is DTensors as torch's."""


class AdamW(_OfShards, torch.optim.AdamW):
    """torch's, and its state is DTensors as torch's."""


class Optimizers(OptimizersContainer):
    """Adam and AdamW with torchtitan's arguments; "module:Class" as that class makes itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return pkgutil.resolve_name(name) if ":" in name else {"Adam": Adam, "AdamW": AdamW}[name]

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        is_path = ":" in config.param_groups[0].optimizer_name
        return {} if is_path else OptimizersContainer._build_impl_kwargs(config)

    @staticmethod
    def _build_param_groups(model: nn.Module, *args: Any) -> tuple[dict[str, list], dict[str, list[str]]]:
        # It asks for names and parameters alone, and would search the patterns in torch's names.
        renamed: Any = SimpleNamespace(named_parameters=lambda: named_parameters(model))
        return OptimizersContainer._build_param_groups(renamed, *args)


class NoOptimizers:
    """In the place of torchtitan's container where nothing is trained."""

    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def zero_grad(self) -> None:
        """There are no gradients."""


class Hyperparameters:
    """Writes an OptimParams into the parameter groups, each with its multipliers.

    A group of the config holds the parameters whose name its pattern is found in and no earlier one's; the rest is a last group.
    """

    def __init__(self, config: OptimizerConfig, model: nn.Module, trained: list[str]) -> None:
        """trained: the names of all trained parameters, of which a rank's pipeline stages hold some.

        Raises ValueError for a pattern that is found in none of them that is left.
        """
        self.name = config.name
        names = [name for name, parameter in named_parameters(model) if parameter.requires_grad]
        groups: dict[str, tuple[float, float]] = {}
        for pattern, multipliers in {**config.groups, "": (1.0, 1.0)}.items():
            if pattern and not any(re.search(pattern, name) for name in trained):
                raise ValueError(f"optimizer.groups: the pattern {pattern!r} is found in none of {trained}")
            if any(re.search(pattern, name) for name in names):
                groups[pattern] = multipliers
            names, trained = ([name for name in some if not re.search(pattern, name)] for some in (names, trained))
        self.multipliers = list(groups.values())
        # Every hyperparameter comes with optim_step; lr=0 would only be used by a step that nobody asked for.
        self.optimizers = Optimizers.Config(
            param_groups=[ParamGroupConfig(pattern=pattern, optimizer_name=config.name) for pattern in groups],
            implementation=config.implementation,
            optimizer_factory_kwargs_by_name={config.name: {"lr": 0.0, **config.arguments}},
        ).build(model_parts=[model])
        (self.optimizer,) = self.optimizers.optimizers
        for group in self.optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0

    @property
    def supported(self) -> tuple[str, ...]:
        """Fields of validation.HYPERPARAMETERS that the optimizer has."""
        return supported_hyperparameters(self.optimizer.param_groups[0])

    def set(self, params: OptimParams) -> None:
        """The next step uses these."""
        keys = {"lr", *(HYPERPARAMETERS[name] for name in self.supported)}
        for group, (rate, decay) in zip(self.optimizer.param_groups, self.multipliers, strict=True):
            values = {
                "lr": params.learning_rate * rate,
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay * decay,
            }
            group.update({key: values[key] for key in keys})
