"""What `--plan` prints: the layout, the memory of a rank, and what would run where. Starts nothing."""

import itertools
import os
from dataclasses import asdict, replace
from typing import Any

import torch

from rl_actors import TrainerConfig, footprint, layouts

RANKS_SHOWN = 16
GIB = 1 << 30


def describe(config: Any) -> str:
    """The plan of a run's config, in lines."""
    trainer: TrainerConfig = config.trainer
    multiple = layouts.row_multiple(trainer)
    row = layouts.row_capacity(trainer)
    held = footprint.memory(trainer)
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
        "processes:",
        f"  {'controller':<12} this machine",
        *_ranks(trainer),
        *_reference(config),
        f"  {'generator-0':<12} {_device(config.generator.gpu or 0)}, vLLM in {config.generator.dtype}",
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


def _reference(config: Any) -> list[str]:
    if not getattr(config, "reference_kl", 0):
        return []
    held = size_text(footprint.memory(replace(config.trainer, optimizer=None)).total)
    return [f"  {'reference':<12} as many processes as the trainer's, beside them, each with at most {held}"]


def _device(rank: int) -> str:
    return f"GPU {rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "CPU"


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
