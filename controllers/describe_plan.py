"""What `--plan` prints: the layout, the memory of a rank, and what would run where. Starts nothing."""

import itertools
import os
from dataclasses import asdict, replace
from typing import Any

import torch

from rl_actors import TrainerConfig, layouts, memory_estimate

RANKS_SHOWN = 16
GIB = 1 << 30
LESS_MEMORY = (
    "less is taken with a smaller --trainer.tokens-per-row or --generator.gpu-memory-utilization, with "
    "--trainer.activation-checkpointing full, or of each GPU with a larger --trainer.parallelism.data-parallel-shard-degree"
)


def describe(config: Any) -> str:
    """The plan of a run's config, in lines."""
    trainer: TrainerConfig = config.trainer
    multiple = layouts.row_multiple(trainer)
    row = layouts.row_capacity(trainer)
    held = memory_estimate.memory(trainer)
    lines = [
        f"layout: {layouts.described(layouts.all_degrees(trainer))}",
        f"rows: at most {row:,} positions, multiples of {multiple}; {trainer.packing}, at most {trainer.rows_per_microbatch} in a microbatch",
        f"activation checkpointing: {trainer.activation_checkpointing}; forward and backward pass in {trainer.compute_dtype}",
        "memory of the fullest rank, without what libraries take:",
        *(
            f"  {name:<12} {size_text(size)}{' (estimated)' if name == 'activations' else ''}"
            for name, size in asdict(held).items()
        ),
        f"  {'total':<12} {size_text(held.total)} of {size_text(_machine_memory())} on this machine{_shared(trainer)}",
        *_checkpoints(config),
        "processes:",
        f"  {'controller':<12} this machine",
        *_ranks(trainer),
        *_reference(config),
        f"  {'generator-0':<12} {_device(config.generator.gpu or 0)}, vLLM in {config.generator.dtype}",
        *_gpus(config, held.total),
    ]
    return "\n".join(lines)


def _ranks(trainer: TrainerConfig) -> list[str]:
    """One line a rank with its place in every dimension that is cut; the last dimension is that of neighbours.

    Neighbours hold different experts, whatever else they share.
    """
    layout, expert = trainer.layout(), trainer.parallelism.expert_parallel_degree
    order = ["pipeline_parallel", *(name for name in layout if name != "pipeline_parallel")]
    places = itertools.product(*(range(layout[name]) for name in order))
    lines = []
    for rank, place in enumerate(itertools.islice(places, RANKS_SHOWN)):
        cut = [f"{name} {i}" for name, i in zip(order, place, strict=True) if layout[name] > 1]
        named = ", ".join(cut + ([f"expert_parallel {rank % expert}"] if expert > 1 else []))
        lines.append(f"  {f'trainer-{rank}':<12} {_device(rank)}" + (f": {named}" if named else ""))
    left = trainer.num_processes() - len(lines)
    return lines + ([f"  and {left} more trainer processes"] if left else [])


def _checkpoints(config: Any) -> list[str]:
    """What a checkpoint takes on disk: what is trained and its optimizer's state, whole."""
    if not config.checkpoint_every:
        return []
    degrees = {f"{name}_degree": 1 for name in (*layouts.DEGREES, "expert_parallel")}
    whole = memory_estimate.memory(replace(config.trainer, parallelism=replace(config.trainer.parallelism, **degrees)))
    size = size_text(whole.gradients + whole.optimizer)  # gradients are as large as what is trained
    return [
        f"checkpoints: {size} each on disk, every {config.checkpoint_every} steps; the newest {config.keep_checkpoints} are kept"
    ]


def _reference(config: Any) -> list[str]:
    if not (held := _held_by_reference(config)):
        return []
    return [f"  {'reference':<12} as many processes as the trainer's, beside them, each with at most {size_text(held)}"]


def _held_by_reference(config: Any) -> int:
    return (
        memory_estimate.memory(replace(config.trainer, optimizer=None)).total
        if getattr(config, "reference_kl", 0)
        else 0
    )


def _device(rank: int) -> str:
    if not torch.cuda.is_available():
        return "CPU"
    return f"GPU {rank}" + (", which is not here" if rank >= torch.cuda.device_count() else "")


def _gpus(config: Any, of_a_rank: int) -> list[str]:
    """What is taken of each GPU of this machine."""
    if not torch.cuda.is_available():
        return []
    lines = ["GPUs, without what libraries take:"]
    ranks, generator = config.trainer.num_processes(), config.generator.gpu or 0
    beside = {"trainer": of_a_rank, "reference": _held_by_reference(config)}
    for gpu in range(min(max(ranks, generator + 1), torch.cuda.device_count())):
        there = torch.cuda.get_device_properties(gpu).total_memory
        taken = {f"{name}-{gpu}": size for name, size in beside.items() if size and gpu < ranks}
        if gpu == generator:
            taken["generator-0"] = round(config.generator.gpu_memory_utilization * there)
        total = sum(taken.values())
        parts = " + ".join(f"{name} {size_text(size)}" for name, size in taken.items())
        verdict = "" if total <= there else f": too much; {LESS_MEMORY}"
        lines.append(f"  {f'GPU {gpu}':<12} {parts} of {size_text(there)}{verdict}")
    return lines


def _machine_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shared(trainer: TrainerConfig) -> str:
    count = trainer.num_processes()
    return "" if torch.cuda.is_available() or count == 1 else f", which {count} ranks share"


def size_text(size: int) -> str:
    """size_text(3 << 29) -> "1.5 GiB"; below one, in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"
