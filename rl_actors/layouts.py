"""Which layouts a config can have, and the nearest to one that cannot be. Starts nothing, needs no torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rl_actors.config import TrainerConfig

ROW_MULTIPLE = 64
"""Row lengths are multiples of it, so that few shapes occur and the logprob chunks divide them."""

Policy = Literal["packed", "token_budget", "fixed"]

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
NUM_SUGGESTIONS = 3

PIPELINE_SCHEDULES = {"1F1B": 1, "Interleaved1F1B": 2}
"""Schedules that give the numbers of one process -> stages of a rank where their number is not given."""

NOT_SHOWN = "not shown to be right so far"


def row_multiple(config: TrainerConfig) -> int:
    """What the length of every row is a multiple of."""
    context, tensor = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    # Masks come in blocks of 128 positions, of which every context-parallel rank gets whole ones.
    parts = 128 * context if context > 1 else 1
    # Under expert parallelism each tensor-parallel rank routes an equal part of what its context-parallel rank holds.
    if config.parallelism.expert_parallel_degree > 1:
        parts = math.lcm(parts, context * tensor)
    return math.lcm(ROW_MULTIPLE, parts)


def row_capacity(config: TrainerConfig) -> int:
    """Positions that a row has at most: tokens_per_row, rounded down to the multiple."""
    return in_multiples(config.tokens_per_row, row_multiple(config))


def in_multiples(length: int, multiple: int) -> int:
    """in_multiples(300, 64) -> 256"""
    return length // multiple * multiple


def all_degrees(config: TrainerConfig) -> dict[str, int]:
    """The layout, and expert_parallel, whose ranks are those of the others."""
    return config.layout() | {"expert_parallel": config.parallelism.expert_parallel_degree}


def described(layout: dict[str, int]) -> str:
    """described({"data_parallel_shard": 2, "tensor_parallel": 1}) -> "data_parallel_shard=2"."""
    return " x ".join(f"{name}={degree}" for name, degree in layout.items() if degree > 1) or "one process"


def validate(config: TrainerConfig) -> None:
    """Raises ValueError with the numbers, and the nearest layouts of as many processes that can be."""
    size = config.num_processes()
    if (expert := config.parallelism.expert_parallel_degree) < 1:
        raise ValueError(f"parallelism.expert_parallel_degree={expert}; it must be at least 1")
    try:
        require_possible(config)
    except ValueError as error:
        found = ", or ".join(map(described, nearest(config)))
        raise ValueError(f"{error}; nearest on {size} processes: {found}" if found else str(error)) from None


def require_possible(config: TrainerConfig) -> None:
    """Raises ValueError with the numbers for a layout that no trainer can have."""
    model, parallel = config.model, config.parallelism
    tensor = parallel.tensor_parallel_degree
    _require_experts(config)
    if (balancer := parallel.context_parallel_load_balancer) not in (None, "headtail", "ptrr"):
        raise ValueError(
            f"parallelism.context_parallel_load_balancer={balancer!r}; it must be 'headtail', 'ptrr' or None"
        )
    if parallel.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"parallelism.spmd_backend={parallel.spmd_backend!r}; torch 2.13 works with 'partial_dtensor' only"
        )
    if config.attention != "flex" and parallel.context_parallel_degree > 1:
        raise ValueError(
            f"parallelism.context_parallel_degree={parallel.context_parallel_degree} with attention={config.attention!r}: "
            "torchtitan cuts rows for flex attention only"
        )
    if config.attention != "flex" and config.compute_dtype != "bfloat16":
        raise ValueError(
            f"attention={config.attention!r} with compute_dtype={config.compute_dtype!r}; it computes in bfloat16"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(model, name)) % tensor:
            raise ValueError(f"model.{name}={heads} is not divisible by parallelism.tensor_parallel_degree={tensor}")
    if parallel.pipeline_parallel_degree > 1:
        _require_pipeline(config)
    _require_shown(config)
    if (capacity := row_capacity(config)) < config.max_sequence_length:
        raise ValueError(
            f"tokens_per_row={config.tokens_per_row}, of which {capacity} are a multiple of {row_multiple(config)}, "
            f"is below max_sequence_length={config.max_sequence_length}"
        )


def _require_shown(config: TrainerConfig) -> None:
    """What nobody compared with one process: it may be right. tests/engine/test_parallel_layouts.py has what was."""
    model, parallel, lora = config.model, config.parallelism, config.lora
    cut = {name: degree for name, degree in all_degrees(config).items() if degree > 1}
    features = {
        "model.num_experts": model.num_experts,
        "lora.rank": lora.rank,
        "float8": config.float8,
        "compile.enable": config.compile.enable,
    }

    def refuse(names: Iterable[str], feature: str = "") -> None:
        named = ", ".join(f"{name}_degree={cut[name]}" for name in names)
        beside = f" with {feature}={features[feature]}" if feature else ""
        raise ValueError(f"parallelism.{named}{beside}: {NOT_SHOWN}")

    for name in ("context_parallel", "expert_parallel"):
        for feature in ("float8", "compile.enable"):
            if name in cut and features[feature]:
                refuse([name], feature)
    if "context_parallel" in cut and "tensor_parallel" in cut and "expert_parallel" not in cut:
        for feature in ("model.num_experts", "lora.rank"):
            if features[feature]:
                refuse(["context_parallel", "tensor_parallel"], feature)
    if "pipeline_parallel" not in cut:
        return
    others = [name for name in cut if name != "pipeline_parallel"]
    if len(others) > 1 or "expert_parallel" in cut:
        refuse(["pipeline_parallel", *others])
    for feature, shown in (
        ("model.num_experts", {"data_parallel_shard"}),
        ("lora.rank", {"data_parallel_shard", "context_parallel"}),
    ):
        if features[feature] and not set(others) <= shown:
            refuse(["pipeline_parallel", *others], feature)
    if parallel.pipeline_parallel_schedule == "Interleaved1F1B" and (model.num_experts or "context_parallel" in cut):
        beside = (
            f"model.num_experts={model.num_experts}"
            if model.num_experts
            else f"context_parallel_degree={cut['context_parallel']}"
        )
        raise ValueError(f"parallelism.pipeline_parallel_schedule='Interleaved1F1B' with {beside}: {NOT_SHOWN}")


def _require_experts(config: TrainerConfig) -> None:
    """Experts lie whole on the ranks of expert parallelism, which are those of data, context and tensor parallelism."""
    model, parallel = config.model, config.parallelism
    degree, tensor = parallel.expert_parallel_degree, parallel.tensor_parallel_degree
    if degree > 1 and not model.num_experts:
        raise ValueError(f"parallelism.expert_parallel_degree={degree} with model.num_experts=0")
    if degree > 1 and model.num_experts % degree:
        raise ValueError(
            f"model.num_experts={model.num_experts} is not divisible by parallelism.expert_parallel_degree={degree}"
        )
    ranks = parallel.data_parallel_shard_degree * parallel.context_parallel_degree * tensor
    if ranks % degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree={degree} does not divide data_parallel_shard x context_parallel x "
            f"tensor_parallel={ranks}, whose ranks hold the experts"
        )
    if degree > 1 and tensor > 1 and not parallel.enable_sequence_parallel:
        raise ValueError(
            f"parallelism.expert_parallel_degree={degree} and tensor_parallel_degree={tensor} with "
            "enable_sequence_parallel=False: torchtitan cannot put the experts' outputs back together"
        )
    if model.num_experts and degree == 1 and model.moe_intermediate_size % tensor:
        raise ValueError(
            f"model.moe_intermediate_size={model.moe_intermediate_size} is not divisible by "
            f"parallelism.tensor_parallel_degree={tensor}"
        )


def _require_pipeline(config: TrainerConfig) -> None:
    model, parallel, lora = config.model, config.parallelism, config.lora
    degree, schedule = parallel.pipeline_parallel_degree, parallel.pipeline_parallel_schedule
    pipeline = f"parallelism.pipeline_parallel_degree={degree}"
    if model.tie_word_embeddings:
        raise ValueError(
            f"{pipeline} with model.tie_word_embeddings=True: the embedding is on the first stage and the head on the last, "
            "and torchtitan does not tie weights across stages"
        )
    if schedule not in PIPELINE_SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule={schedule!r}; it must be one of {', '.join(PIPELINE_SCHEDULES)}"
        )
    if parallel.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv={parallel.pipeline_parallel_schedule_csv!r}: a file holds the "
            "schedule of one number of microbatches, and calls have any number"
        )
    if parallel.pipeline_parallel_microbatch_size != 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size={parallel.pipeline_parallel_microbatch_size}; "
            "rows_per_microbatch says how many rows a microbatch has"
        )
    if parallel.module_fqns_per_model_part is not None:
        raise ValueError(
            "parallelism.module_fqns_per_model_part is not supported; use …_layers_per_stage and …_less_layers"
        )
    if lora.rank and not (lora.train_attn or lora.train_mlp):
        raise ValueError(
            f"{pipeline} with an adapter on the output projection alone: no stage but the last would train anything"
        )
    if config.load_balance_coeff and config.activation_checkpointing != "none":
        raise ValueError(
            f"{pipeline} with load_balance_coeff={config.load_balance_coeff:g} and "
            f"activation_checkpointing={config.activation_checkpointing!r}: experts that are recomputed would count the padding of "
            "another microbatch"
        )
    if (given := parallel.pipeline_parallel_layers_per_stage) is not None and given < 1:
        raise ValueError(f"parallelism.pipeline_parallel_layers_per_stage={given}; it must be at least 1")
    first, last = parallel.pipeline_parallel_first_stage_less_layers, parallel.pipeline_parallel_last_stage_less_layers
    units, stages, per_rank = num_units(config), num_stages(config), PIPELINE_SCHEDULES[schedule]
    if stages % degree or (stages == degree) != (per_rank == 1):
        raise ValueError(
            f"{pipeline} with {schedule} and {parallel.pipeline_parallel_layers_per_stage} layers a stage has {stages} stages; "
            f"it must be {'one' if per_rank == 1 else 'two or more'} a rank"
        )
    if units // stages < max(1, first, last):
        raise ValueError(
            f"{pipeline} with {schedule} cuts model.num_hidden_layers={model.num_hidden_layers} into {stages} stages, "
            f"where embedding and head count as {first} and {last} layers: too few layers"
        )
    blocks = stage_blocks(config)
    if lora.rank and not (blocks[0] and (blocks[-1] or lora.train_unembed)):
        raise ValueError(
            f"{pipeline} with {schedule} and lora.rank={lora.rank} cuts model.num_hidden_layers={model.num_hidden_layers} into "
            f"{stages} stages, of which the {'last' if blocks[0] else 'first'} has no block, and so nothing to train"
        )


def num_units(config: TrainerConfig) -> int:
    """What torchtitan deals out to the stages of a pipeline: blocks, with the embedding and the head counted as so many."""
    parallel = config.parallelism
    ends = parallel.pipeline_parallel_first_stage_less_layers + parallel.pipeline_parallel_last_stage_less_layers
    return config.model.num_hidden_layers + ends


def num_stages(config: TrainerConfig) -> int:
    """The stages of all ranks of a pipeline together."""
    parallel = config.parallelism
    if (given := parallel.pipeline_parallel_layers_per_stage) is not None:
        return -(-num_units(config) // given)
    return parallel.pipeline_parallel_degree * PIPELINE_SCHEDULES[parallel.pipeline_parallel_schedule]


def stage_blocks(config: TrainerConfig) -> list[range]:
    """The blocks of every stage: torchtitan counts embedding and head as some blocks each, and gives the first stages what is left over."""
    num_layers, stages = config.model.num_hidden_layers, num_stages(config)
    first = config.parallelism.pipeline_parallel_first_stage_less_layers
    size, longer = divmod(num_units(config), stages)
    starts = [min(max(stage * size + min(stage, longer) - first, 0), num_layers) for stage in range(stages)]
    return [range(i, j) for i, j in pairwise([*starts, num_layers])]


def is_possible(config: TrainerConfig) -> bool:
    try:
        require_possible(config)
    except ValueError:
        return False
    return True


def nearest(config: TrainerConfig) -> list[dict[str, int]]:
    """The layouts of as many processes that can be and differ least, as factors, from the one of the config."""
    wanted = all_degrees(config)

    def distance(layout: dict[str, int]) -> tuple[float, int]:
        steps = sum(abs(math.log2(layout[name] / wanted[name])) for name in wanted)
        return round(steps, 6), -layout["data_parallel_shard"]

    possible = []
    for factors in _factorizations(config.num_processes(), len(DEGREES)):
        for expert in {wanted["expert_parallel"], 1}:
            layout = dict(zip(wanted, (*factors, expert), strict=True))
            tried = copy.copy(config)
            degrees = {f"{name}_degree": degree for name, degree in layout.items()}
            tried.parallelism = replace(config.parallelism, **degrees)
            if is_possible(tried):
                possible.append(layout)
    return sorted(possible, key=distance)[:NUM_SUGGESTIONS]


def _factorizations(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """_factorizations(2, 2) -> (1, 2), (2, 1)"""
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            yield from ((first, *rest) for rest in _factorizations(product // first, count - 1))
