"""Random initial weights: a seed gives the same weights in every layout, on a CPU and on a GPU.

Unlike in torchtitan every rank draws all parameters on the CPU (9 s for a billion on one core), in
torchtitan's order if there are no adapters, and keeps its shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.models.common.param_init import skip_param_init


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialiser:
    name: str
    shape: torch.Size  # of the whole parameter
    initialise: Callable[[Tensor], object]  # in place


def take_initialisers(whole: nn.Module) -> list[Initialiser]:
    """Take an unparallelized model's initialisers; its init_weights then initialises only buffers."""
    taken: list[Initialiser] = []
    for prefix, module in whole.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        for name, parameter in parameters.items():
            initialise = module._param_init[name]
            # a tied embedding is drawn by the output projection
            if initialise is not skip_param_init:
                taken.append(Initialiser(name=f"{prefix}.{name}", shape=parameter.shape, initialise=initialise))
        module._param_init = dict.fromkeys(parameters, skip_param_init)
    return taken


@torch.no_grad()
def draw(initialisers: Sequence[Initialiser], model: nn.Module, seed: int) -> None:
    """Fill this rank's parameters. Raises RuntimeError if one has no initialiser."""
    held = {canonical_fqn(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    undrawn = set(held.values())
    torch.default_generator.manual_seed(seed)
    for initialiser in initialisers:
        # parameters of other stages too, or this rank's would get other numbers
        whole = torch.empty(initialiser.shape)
        initialiser.initialise(whole)
        if initialiser.name in held:
            assign(held[initialiser.name], whole)
            undrawn.discard(held[initialiser.name])
    if undrawn:
        names = [name for name, parameter in held.items() if parameter in undrawn]
        raise RuntimeError(f"torchtitan's model has no initialiser for {', '.join(names)}")


def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole CPU tensor, the same on all ranks, into a parameter or this rank's shard of it."""
    held = parameter
    if isinstance(parameter, DTensor):
        # distribute_tensor would copy twice, and move the whole tensor to the GPU
        shape, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
            whole = whole.narrow(dim, offset, size)
        held = parameter.to_local()
    held.copy_(whole)
