"""Describes a run before it starts (`--plan`), and refuses one that needs too much memory."""

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch

from controllers.run.hosts import HostsConfig
from rl_actors import TrainerConfig, layouts, memory_estimate
from rl_actors.config import DEGREES
from rl_actors.vllm.cpu import KV_CACHE_BYTES

if TYPE_CHECKING:
    from controllers.run.config import RunConfig

RANKS_SHOWN = 16
GIB = 1 << 30
ADVICE_FOR_A_GPU = (
    "to take less, lower --trainer.tokens-per-row or --generator.gpu-memory-utilization, set "
    "--trainer.activation-checkpointing full, or raise --trainer.parallelism.data-parallel-shard-degree to use more GPUs"
)
ADVICE_WITHOUT_A_GPU = (
    "to take less, choose a smaller model, lower --trainer.tokens-per-row or --trainer.rows-per-microbatch, or set "
    "--trainer.activation-checkpointing full; on a machine with GPUs the run takes GPU memory instead"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The memory of a GPU, or of a machine without, and the bytes of each process there."""

    place: str  # "GPU 0" or "this machine"
    phase: str = ""  # _Phase.name
    capacity: int  # bytes
    taken: dict[str, int]  # name of a process, or of several processes -> bytes

    @property
    def total(self) -> int:
        return sum(self.taken.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def parts(self) -> str:
        """ "trainer-0 9.0 GiB + generator-0 35.0 GiB" """
        return " + ".join(f"{name} {size_text(size)}" for name, size in self.taken.items())


def describe(config: "RunConfig") -> str:
    """The plan, as a text of several lines."""
    trainer = config.trainer
    held = memory_estimate.memory(trainer)
    lines = [
        f"layout: {layouts.described(layouts.all_degrees(trainer))}",
        f"rows: at most {layouts.row_capacity(trainer):,} positions, multiples of {layouts.row_multiple(trainer)}; "
        f"{trainer.packing}, at most {trainer.rows_per_microbatch} in a microbatch",
        *config.plan_lines(),
        f"activation checkpointing: {trainer.activation_checkpointing}; forward and backward pass in {trainer.compute_dtype}",
        *_memory_of_a_rank(trainer, held),
        *_turns(config),
        *_checkpoints(config),
        "processes:",
        f"  {'controller':<12} this machine",
        *_ranks("trainer", trainer, config.hosts),
        *_partners(config),
        *_generator(config),
    ]
    if not config.hosts.addresses:
        lines.append("totals, not counting the memory of libraries:")
        for demand in demands(config):
            where = f"{demand.place} {demand.phase}".rstrip()
            verdict = "" if demand.fits else ": too much"
            lines.append(f"  {where}: {demand.parts()} of {size_text(demand.capacity)}{verdict}")
    return "\n".join(lines)


def require_memory(config: "RunConfig", *, trains: bool = True) -> None:
    """Raise ValueError if processes need more than their GPU, or the machine, has. Not with
    hosts.addresses. trains: False for an evaluation."""
    all_demands = [] if config.hosts.addresses else demands(config, trains=trains)
    if (demand := next((each for each in all_demands if not each.fits), None)) is None:
        return
    advice = ADVICE_FOR_A_GPU if torch.cuda.is_available() else ADVICE_WITHOUT_A_GPU
    when = f"while {demand.phase}" if demand.phase and not demand.phase.startswith("in ") else demand.phase
    needed = f"{size_text(demand.total)} {when}".rstrip()
    raise ValueError(
        f"{demand.place} has {size_text(demand.capacity)}, but its processes need {needed} ({demand.parts()}), not counting the "
        f"memory of CUDA and other libraries; {advice}"
    )


def demands(config: "RunConfig", *, trains: bool = True) -> list[Demand]:
    """A Demand for each used GPU and phase, or one for the whole machine."""
    models = config.models() if trains else {}
    phases = _phases(config) if trains else [_Phase(name="", held={})]
    if torch.cuda.is_available():
        return _demands_of_gpus(config, models, phases)
    capacity = psutil.virtual_memory().total
    taken = {}
    for name, model in models.items():
        ranks = model.num_processes()
        names = f"{name}-0" if ranks == 1 else f"{name}-0 to {name}-{ranks - 1}"
        taken[names] = ranks * max(phase.held[name] for phase in phases)
    for name in _gpus_of_generators(config):
        taken[name] = _held_by_generator(config)
    return [Demand(place="this machine", capacity=capacity, taken=taken)]


def _demands_of_gpus(config: "RunConfig", models: dict[str, TrainerConfig], phases: "list[_Phase]") -> list[Demand]:
    gpus_of_models = {name: model.gpus() for name, model in models.items()}
    gpus_of_generators = _gpus_of_generators(config)
    engines, _ = config.generator.engines()
    found = []
    for gpu in range(torch.cuda.device_count()):
        if not any(gpu in gpus for gpus in (*gpus_of_models.values(), *gpus_of_generators.values())):
            continue
        capacity = torch.cuda.get_device_properties(gpu).total_memory
        for phase in phases:
            taken = {}
            for name, gpus in gpus_of_models.items():
                if gpu in gpus and phase.held[name]:
                    taken[f"{name}-{gpu - gpus.start}"] = phase.held[name]
            for name, gpus in gpus_of_generators.items():
                if gpu in gpus and not phase.sleeps:
                    taken[name] = round(config.generator.gpu_memory_utilization * capacity / engines)
            found.append(Demand(place=f"GPU {gpu}", phase=phase.name, capacity=capacity, taken=taken))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """A part of a step and the memory that processes hold in it."""

    name: str  # "generating", "in optim_step"; empty if nothing is colocated
    held: dict[str, int]  # name of a model, such as "trainer" -> bytes that one rank holds
    sleeps: bool = False  # True: the generator holds no memory


def _phases(config: "RunConfig") -> list[_Phase]:
    """One phase, or several if trainer and generator are colocated."""
    totals = {name: memory_estimate.memory(model).total for name, model in config.models().items()}
    if not config.colocation.enabled:
        return [_Phase(name="", held=totals)]
    held = memory_estimate.memory(config.trainer).on_device()
    parts = config.colocation.parts
    weights = held.parameters + held.buffers
    kept = (0 if "weights" in parts else weights) + (0 if "optimizer" in parts else held.optimizer)
    # passes after a first optimizer step run with the optimizer's state on the GPU
    meets_optimizer = config.versions_per_step > 1 or "optimizer" not in parts
    passes = weights + held.gradients + held.activations + (held.optimizer if meets_optimizer else 0)
    steps = weights + held.gradients + held.optimizer
    others = dict(totals)
    found = []
    if config.critic_is_colocated():
        others["critic"] = 0
        waiting = weights + (0 if "optimizer" in parts else held.optimizer)
        found = [_Phase(name="training the critic", held={**totals, "trainer": waiting}, sleeps=True)]
    return [
        _Phase(name="generating", held={**others, "trainer": kept}),
        *found,
        _Phase(name="in forward_backward", held={**others, "trainer": passes}, sleeps=True),
        _Phase(name="in optim_step", held={**others, "trainer": steps}, sleeps=True),
    ]


def _turns(config: "RunConfig") -> list[str]:
    if not config.colocation.enabled:
        return []
    held = memory_estimate.memory(config.trainer).on_device()
    sizes = {"weights": held.parameters + held.buffers, "optimizer": held.optimizer}
    on_host = {part: sizes[part] for part in config.colocation.parts if part in sizes}
    lines = ["trainer and generator take turns; memory of a rank of the trainer in each phase:"]
    lines += [f"  {phase.name:<20} {size_text(phase.held['trainer'])}" for phase in _phases(config)]
    listed = ", ".join(f"{part} {size_text(size)}" for part, size in on_host.items()) or "nothing"
    return [*lines, f"  {'on the host':<20} {listed}, while the generator works; pinned memory if there is a GPU"]


def _memory_of_a_rank(trainer: TrainerConfig, held: memory_estimate.Memory) -> list[str]:
    lines = ["memory of the fullest rank, not counting the memory of libraries:"]
    on_device = held.on_device()
    for name in ("parameters", "gradients", "optimizer", "buffers", "activations"):
        size = getattr(held, name)
        remark = " (estimated)" if name == "activations" else ""
        if getattr(on_device, name) != size:
            remark = " in the host's memory, not in the total"
        lines.append(f"  {name:<12} {size_text(size)}{remark}")
    return [*lines, f"  {'total':<12} {size_text(held.total)}"]


def _ranks(name: str, model: TrainerConfig, hosts: HostsConfig) -> list[str]:
    """A line for each of the first RANKS_SHOWN ranks: device and index in every degree above 1."""
    layout = model.layout()
    expert = model.parallelism.expert_parallel_degree
    order = ["pipeline_parallel", *(kind for kind in layout if kind != "pipeline_parallel")]
    places = itertools.product(*(range(layout[kind]) for kind in order))
    lines = []
    for rank, place in enumerate(itertools.islice(places, RANKS_SHOWN)):
        indices = [f"{kind} {index}" for kind, index in zip(order, place, strict=True) if layout[kind] > 1]
        if expert > 1:
            indices.append(f"expert_parallel {rank % expert}")
        host = hosts.of_rank(rank, model.num_processes())
        line = f"  {f'{name}-{rank}':<12} {host or _device(model.gpus()[rank])}"
        lines.append(f"{line}: {', '.join(indices)}" if indices else line)
    left = model.num_processes() - len(lines)
    if left:
        lines.append(f"  and {left} more {name} processes")
    return lines


def _checkpoints(config: "RunConfig") -> list[str]:
    """A line with the size on disk, which does not depend on the layout."""
    if not config.checkpoint_every:
        return []
    wholes = [_whole_model(model) for model in config.models().values()]
    # as large as their gradients; `whole.parameters` also counts frozen ones
    size = sum(whole.gradients + whole.optimizer for whole in wholes)
    every = config.checkpoint_every
    kept = config.keep_checkpoints
    return [f"checkpoints: {size_text(size)} each on disk, every {every} steps; the newest {kept} are kept"]


def _gpus_of_generators(config: "RunConfig") -> dict[str, range]:
    """{"generator-0": range(2, 4), …}"""
    if not config.has_generator:
        return {}
    all_gpus = config.generator.gpus()
    each = config.generator.tensor_parallel
    engines, _ = config.generator.engines()
    gpus = {}
    for index in range(config.generator.num_engines):
        first = index // engines * each
        gpus[f"generator-{index}"] = all_gpus[first : first + each]
    return gpus


def _generator(config: "RunConfig") -> list[str]:
    lines = []
    engines, why = config.generator.engines()
    for index, (name, gpus) in enumerate(_gpus_of_generators(config).items()):
        on_this_machine = " and ".join(dict.fromkeys(_device(gpu) for gpu in gpus))
        devices = config.hosts.of_replica(index // engines) or on_this_machine
        ranks = f", {len(gpus)} ranks" if len(gpus) > 1 else ""
        lines.append(f"  {name:<12} {devices}, vLLM in {config.generator.dtype}{ranks}")
    if lines and torch.cuda.is_available():
        lines.append(f"  engines on a GPU: {engines} ({why})")
    return lines


def _partners(config: "RunConfig") -> list[str]:
    """Reference and critic."""
    lines = []
    for name, model in config.models().items():
        if name != "trainer":
            held = size_text(memory_estimate.memory(model).total)
            lines += [f"{line}, at most {held} of memory" for line in _ranks(name, model, config.hosts)]
    return lines


def _held_by_generator(config: "RunConfig") -> int:
    """Without GPUs: its weights, and a KV cache for each rank."""
    num_parameters = memory_estimate.num_parameters(config.trainer)
    caches = config.generator.tensor_parallel * (config.generator.kv_cache_bytes or KV_CACHE_BYTES)
    return num_parameters * memory_estimate.BYTES[config.generator.dtype] + caches


def _whole_model(trainer: TrainerConfig) -> memory_estimate.Memory:
    """The memory of the model in one process."""
    degrees = {f"{name}_degree": 1 for name in (*DEGREES, "expert_parallel")}
    return memory_estimate.memory(replace(trainer, parallelism=replace(trainer.parallelism, **degrees)))


def _device(rank: int) -> str:
    if not torch.cuda.is_available():
        return "CPU"
    return f"GPU {rank}" + (", which this machine does not have" if rank >= torch.cuda.device_count() else "")


def size_text(size: int) -> str:
    """size_text(3 << 29) -> "1.5 GiB". Sizes below one GiB are in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"
