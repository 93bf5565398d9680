"""Random initial weights. A seed gives the same weights in every layout of the ranks, on a CPU and on a GPU.

torchtitan's init_weights does not do this, because each rank draws its own shards on its own device. On a CPU the random generators of all
ranks have the same seed, so all shards of a parameter get the same numbers. A GPU draws other numbers than a CPU, and torchtitan gives
each stage of a pipeline a seed of its own.

In this module every rank draws all parameters of the model on the CPU, one after another, from a random generator with the same seed on all
ranks. The rank keeps only its own shards, and needs memory for only one whole parameter at a time. If the model has no adapters, its
parameters are drawn in torchtitan's order. In every layout such a model then gets the numbers that init_weights draws on a CPU with one rank.
Drawing a billion parameters takes about 9 s on one core.

If TrainerConfig.hf_path is set, `draw` is not called, because hf.py loads the weights from that directory.
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
    """torchtitan's initialiser of one parameter."""

    name: str
    shape: torch.Size  # of the whole parameter
    initialise: Callable[[Tensor], object]  # in place


def take_initialisers(whole: nn.Module) -> list[Initialiser]:
    """Take the initialisers off a model that is not parallelized yet. Afterwards the model's init_weights initialises only buffers.

    In the list a module's own parameters come before those of its children, but torchtitan initialises the children first. The two orders differ
    only for a module that has both children and its own parameters, such as a projection with adapters. A model without adapters has no such module.
    """
    taken: list[Initialiser] = []
    for prefix, module in whole.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        for name, parameter in parameters.items():
            initialise = module._param_init[name]
            # A tied embedding is skipped, because the initialiser of the output projection draws it.
            if initialise is not skip_param_init:
                taken.append(Initialiser(name=f"{prefix}.{name}", shape=parameter.shape, initialise=initialise))
        module._param_init = dict.fromkeys(parameters, skip_param_init)
    return taken


@torch.no_grad()
def draw(initialisers: Sequence[Initialiser], model: nn.Module, seed: int) -> None:
    """Fill the parameters of `model`, which is this rank's part of the whole model.

    Raises RuntimeError if a parameter has no initialiser.
    """
    held: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        held[canonical_fqn(name)] = parameter
    undrawn = set(held.values())
    torch.default_generator.manual_seed(seed)
    for initialiser in initialisers:
        # Parameters of other pipeline stages are drawn, too. Otherwise the random generator would give this rank's parameters other numbers.
        whole = torch.empty(initialiser.shape)
        initialiser.initialise(whole)
        if initialiser.name in held:
            assign(held[initialiser.name], whole)
            undrawn.discard(held[initialiser.name])
    if undrawn:
        names = [name for name, parameter in held.items() if parameter in undrawn]
        raise RuntimeError(f"torchtitan's model has no initialiser for {', '.join(names)}")


def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter. If the parameter is a DTensor, each rank copies only its shard.

    whole: a tensor on the CPU, with the same values on all ranks.
    """
    held = parameter
    if isinstance(parameter, DTensor):
        # torch's distribute_tensor would copy the shard twice, and would first move the whole tensor to the GPU if there is one.
        shape, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
            whole = whole.narrow(dim, offset, size)
        held = parameter.to_local()
    held.copy_(whole)
