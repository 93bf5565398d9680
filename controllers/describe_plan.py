"""Text of `--plan`: the layout, the memory of a rank, and which process runs where. Starts nothing."""

import itertools
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from rl_actors import TrainerConfig, layouts, memory_estimate

if TYPE_CHECKING:
    from controllers.run import RunConfig

RANKS_SHOWN = 16
GIB = 1 << 30
LESS_MEMORY = (
    "less is taken with a smaller --trainer.tokens-per-row or --generator.gpu-memory-utilization, with "
    "--trainer.activation-checkpointing full, or of each GPU with a larger --trainer.parallelism.data-parallel-shard-degree"
)


def describe(config: "RunConfig") -> str:
    """Plan of a run with this config, several lines."""
    trainer = config.trainer
    held = memory_estimate.memory(trainer)
    lines = [
        f"layout: {layouts.described(layouts.all_degrees(trainer))}",
        f"rows: at most {layouts.row_capacity(trainer):,} positions, multiples of {layouts.row_multiple(trainer)}; "
        f"{trainer.packing}, at most {trainer.rows_per_microbatch} in a microbatch",
        f"activation checkpointing: {trainer.activation_checkpointing}; forward and backward pass in {trainer.compute_dtype}",
        *_memory_of_a_rank(trainer, held),
        *_checkpoints(config),
        "processes:",
        f"  {'controller':<12} this machine",
        *_ranks(trainer),
        *_reference(config),
        f"  {'generator-0':<12} {_device(config.generator.gpu or 0)}, vLLM in {config.generator.dtype}",
        *_gpus(config, held.total),
    ]
    return "\n".join(lines)


def _memory_of_a_rank(trainer: TrainerConfig, held: memory_estimate.Memory) -> list[str]:
    lines = ["memory of the fullest rank, without what libraries take:"]
    for name, size in asdict(held).items():
        remark = " (estimated)" if name == "activations" else ""
        lines.append(f"  {name:<12} {size_text(size)}{remark}")
    total = f"{size_text(held.total)} of {size_text(_machine_memory())} on this machine{_shared(trainer)}"
    return [*lines, f"  {'total':<12} {total}"]


def _ranks(trainer: TrainerConfig) -> list[str]:
    """One line for each rank, with its index in every dimension of degree above 1.

    Consecutive ranks differ in the last dimension. They hold different experts, whatever else they share.
    """
    layout, expert = trainer.layout(), trainer.parallelism.expert_parallel_degree
    order = ["pipeline_parallel", *(name for name in layout if name != "pipeline_parallel")]
    places = itertools.product(*(range(layout[name]) for name in order))
    lines = []
    for rank, place in enumerate(itertools.islice(places, RANKS_SHOWN)):
        indices = [f"{name} {index}" for name, index in zip(order, place, strict=True) if layout[name] > 1]
        if expert > 1:
            indices.append(f"expert_parallel {rank % expert}")
        line = f"  {f'trainer-{rank}':<12} {_device(rank)}"
        lines.append(f"{line}: {', '.join(indices)}" if indices else line)
    left = trainer.num_processes() - len(lines)
    if left:
        lines.append(f"  and {left} more trainer processes")
    return lines


def _checkpoints(config: "RunConfig") -> list[str]:
    """The size of a checkpoint on disk: all trained parameters and their optimizer state, whatever the layout."""
    if not config.checkpoint_every:
        return []
    degrees = {f"{name}_degree": 1 for name in (*layouts.DEGREES, "expert_parallel")}
    whole = memory_estimate.memory(replace(config.trainer, parallelism=replace(config.trainer.parallelism, **degrees)))
    size = size_text(whole.gradients + whole.optimizer)  # gradients are as large as the trained parameters
    every, kept = config.checkpoint_every, config.keep_checkpoints
    return [f"checkpoints: {size} each on disk, every {every} steps; the newest {kept} are kept"]


def _reference(config: "RunConfig") -> list[str]:
    held = _held_by_reference(config)
    if not held:
        return []
    return [f"  {'reference':<12} as many processes as the trainer's, beside them, each with at most {size_text(held)}"]


def _held_by_reference(config: "RunConfig") -> int:
    if not getattr(config, "reference_kl", 0):
        return 0
    return memory_estimate.memory(replace(config.trainer, optimizer=None)).total


def _device(rank: int) -> str:
    if not torch.cuda.is_available():
        return "CPU"
    return f"GPU {rank}" + (", which is not here" if rank >= torch.cuda.device_count() else "")


def _gpus(config: "RunConfig", held_by_rank: int) -> list[str]:
    """One line for each GPU of this machine: which processes take how much of it."""
    if not torch.cuda.is_available():
        return []
    lines = ["GPUs, without what libraries take:"]
    ranks, generator = config.trainer.num_processes(), config.generator.gpu or 0
    held = {"trainer": held_by_rank, "reference": _held_by_reference(config)}
    for gpu in range(min(max(ranks, generator + 1), torch.cuda.device_count())):
        capacity = torch.cuda.get_device_properties(gpu).total_memory
        taken = {f"{name}-{gpu}": size for name, size in held.items() if size and gpu < ranks}
        if gpu == generator:
            taken["generator-0"] = round(config.generator.gpu_memory_utilization * capacity)
        parts = " + ".join(f"{name} {size_text(size)}" for name, size in taken.items())
        verdict = "" if sum(taken.values()) <= capacity else f": too much; {LESS_MEMORY}"
        lines.append(f"  {f'GPU {gpu}':<12} {parts} of {size_text(capacity)}{verdict}")
    return lines


def _machine_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shared(trainer: TrainerConfig) -> str:
    count = trainer.num_processes()
    return "" if torch.cuda.is_available() or count == 1 else f", which {count} ranks share"


def size_text(size: int) -> str:
    """size_text(3 << 29) -> "1.5 GiB". Sizes below one GiB are in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"
