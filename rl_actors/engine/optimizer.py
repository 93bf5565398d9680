"""`Optimizers` holds a model's optimizers, and `Hyperparameters` sets their learning rate, betas and weight decay before each step.

`Optimizers` is torchtitan's container. It can also make an optimizer that the config names by its import path.
"""

import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from rl_actors.config import OptimizerConfig
from rl_actors.engine.gradients import local
from rl_actors.types import OptimParams
from rl_actors.validation import HYPERPARAMETERS, supported_hyperparameters


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters, with the names that they have without activation checkpointing.

    Activation checkpointing inserts a segment into the names that torch gives. This function removes the segment.
    """
    return ((canonical_fqn(name), parameter) for name, parameter in model.named_parameters())


class _StepsShards:
    """Makes Adam work on a rank's own shards as plain tensors. This saves the time of DTensor's dispatch.

    Adam works element by element, so the result is the same.
    """

    def _init_group(self, group: dict[str, object], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


class Adam(_StepsShards, torch.optim.Adam):
    """torch's Adam, which here works on a rank's shards. Its state consists of DTensors, like the state of torch's Adam."""


class AdamW(_StepsShards, torch.optim.AdamW):
    """torch's AdamW, which here works on a rank's shards. Its state consists of DTensors, like the state of torch's AdamW."""


class _CanonicalNames:
    """Takes the place of the model in torchtitan's _build_param_groups. Its parameters have the names from `named_parameters` above.

    _build_param_groups calls no method of the model except named_parameters().
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return named_parameters(self.model)


class Optimizers(OptimizersContainer):
    """torchtitan's container of optimizers.

    Adam and AdamW get torchtitan's arguments for their implementation (a loop, foreach or fused).

    If the config names an optimizer by its import path, the optimizer gets only the arguments in the config.
    """

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
        # torchtitan would search the patterns in torch's names of the parameters, which activation checkpointing changes.
        return OptimizersContainer._build_param_groups(_CanonicalNames(model), configs, impl_kwargs)


class NoOptimizers:
    """A container without optimizers, for a trainer that only infers."""

    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def zero_grad(self) -> None:
        """Does nothing, because there are no gradients."""


class Hyperparameters:
    """Builds a model's optimizer, and writes the values of an OptimParams into the optimizer's parameter groups before each step.

    The config gives each group a pattern, and multipliers of the learning rate and the weight decay. A parameter belongs
    to the first group whose pattern its name matches. A last group holds the parameters that match no pattern,
    and its multipliers are 1.
    """

    def __init__(self, config: OptimizerConfig, model: nn.Module, trained: list[str]) -> None:
        """trained: the names of all trained parameters of the whole model.

        `model` has only the parameters of this rank's pipeline stages, so a pattern may match no name in `model`.

        Raises ValueError if a pattern matches none of the names in `trained` that remain after the earlier patterns.
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
        # Each optim_step sets its own learning rate, so lr is only a placeholder here. It is 0, so a step that still used
        # the placeholder would change no parameter.
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
        """The fields of OptimParams that validation.HYPERPARAMETERS lists and that this optimizer has."""
        return supported_hyperparameters(self.optimizer.param_groups[0])

    def set(self, params: OptimParams) -> None:
        """Make the next step use these values."""
        keys = {"lr", *(HYPERPARAMETERS[name] for name in self.supported)}
        for group, (rate, decay) in zip(self.optimizer.param_groups, self.multipliers, strict=True):
            values = {
                "lr": params.learning_rate * rate,
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay * decay,
            }
            group.update({key: values[key] for key in keys})
