"""A model's optimizer, also by import path, and its `Hyperparameters`, set before each step."""

import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from rl_actors.config import OptimizerConfig
from rl_actors.engine.gradients import local
from rl_actors.types import OptimParams
from rl_actors.validation import HYPERPARAMETERS, supported_hyperparameters


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without the segment that activation checkpointing inserts into their names."""
    return ((canonical_fqn(name), parameter) for name, parameter in model.named_parameters())


class _StepsShards:
    """Adam is elementwise, so it can step local shards: DTensor's dispatch takes time."""

    def _init_group(self, group: dict[str, object], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


class Adam(_StepsShards, torch.optim.Adam):
    """torch's Adam on local shards. Its state is still of DTensors."""


class AdamW(_StepsShards, torch.optim.AdamW):
    """torch's AdamW on local shards. Its state is still of DTensors."""


class Optimizers(OptimizersContainer):
    """torchtitan's container, also for import paths, which get only the config's arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return pkgutil.resolve_name(name) if ":" in name else {"Adam": Adam, "AdamW": AdamW}[name]

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, object]:
        is_path = ":" in config.param_groups[0].optimizer_name
        return {} if is_path else OptimizersContainer._build_impl_kwargs(config)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, configs: list[ParamGroupConfig], impl_kwargs: dict[str, object]
    ) -> tuple[dict[str, list[dict[str, object]]], dict[str, list[str]]]:
        # it reads only the names, which activation checkpointing changes
        canonical = SimpleNamespace(named_parameters=lambda: named_parameters(model))
        return OptimizersContainer._build_param_groups(canonical, configs, impl_kwargs)


class NoOptimizers:
    """For a trainer that only infers."""

    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def zero_grad(self) -> None:
        """Does nothing."""


class Hyperparameters:
    """Builds a model's optimizer, and writes OptimParams into its groups before each step.

    A parameter belongs to the first group whose pattern its name matches, else to a last one with
    multipliers of 1.
    """

    def __init__(self, config: OptimizerConfig, model: nn.Module, trained: list[str]) -> None:
        """trained: names of the whole model's trained parameters; `model` may be a pipeline stage.

        Raises ValueError if a pattern matches no name that earlier patterns leave.
        """
        self.name = config.name
        names = [name for name, parameter in named_parameters(model) if parameter.requires_grad]
        groups: dict[str, tuple[float, float]] = {}
        for pattern, multipliers in {**config.groups, "": (1.0, 1.0)}.items():
            if pattern and not any(re.search(pattern, name) for name in trained):
                raise ValueError(
                    f"optimizer.groups: the pattern {pattern!r} matches none of the parameters that remain after the "
                    f"earlier patterns: {trained}"
                )
            if any(re.search(pattern, name) for name in names):
                groups[pattern] = multipliers
            names = [name for name in names if not re.search(pattern, name)]
            trained = [name for name in trained if not re.search(pattern, name)]
        self.multipliers = list(groups.values())
        # a placeholder; 0, so that a step with it would change nothing
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
        """The fields of validation.HYPERPARAMETERS that this optimizer has."""
        return supported_hyperparameters(self.optimizer.param_groups[0])

    def set(self, params: OptimParams) -> None:
        keys = {"lr", *(HYPERPARAMETERS[name] for name in self.supported)}
        for group, (rate, decay) in zip(self.optimizer.param_groups, self.multipliers, strict=True):
            values = {
                "lr": params.learning_rate * rate,
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay * decay,
            }
            group.update({key: values[key] for key in keys})
