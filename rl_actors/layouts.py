"""Which parallel layouts of a trainer are possible, and the nearest to one that is refused. Imports no torch.

A layout is possible if the trainer supports it and a test compares it with training in one process
(tests/engine/test_parallel_layouts.py), or at least its parts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_actors.config import TrainerConfig

ROW_MULTIPLE = 64
"""Divides every row length, so that shapes are few and logits split into equal chunks."""

NUM_SUGGESTIONS = 3
"""Most layouts that an error text suggests."""

PIPELINE_SCHEDULES = {"1F1B": 1, "Interleaved1F1B": 2}
"""Schedule -> its default number of stages per rank."""

LOAD_BALANCERS = (None, "headtail", "ptrr")
"""Possible values of parallelism.context_parallel_load_balancer."""

NOT_VERIFIED = "refused, because no test compares this combination with training in one process"


def row_multiple(config: TrainerConfig) -> int:
    """Divides the length of every row of this layout."""
    context = config.parallelism.context_parallel_degree
    tensor = config.parallelism.tensor_parallel_degree
    # masks come in blocks of 128 positions, of which every context-parallel rank gets whole ones
    parts = 128 * context if context > 1 else 1
    # under expert parallelism each tensor-parallel rank routes an equal part of the positions
    if config.parallelism.expert_parallel_degree > 1:
        parts = math.lcm(parts, context * tensor)
    return math.lcm(ROW_MULTIPLE, parts)


def row_capacity(config: TrainerConfig) -> int:
    """Most positions of a row: tokens_per_row, rounded down to a multiple of row_multiple."""
    return in_multiples(config.tokens_per_row, row_multiple(config))


def in_multiples(length: int, multiple: int) -> int:
    """in_multiples(300, 64) -> 256"""
    return length // multiple * multiple


def all_degrees(config: TrainerConfig) -> dict[str, int]:
    """config.layout() and the degree of expert_parallel, which uses the ranks of the other kinds."""
    return config.layout() | {"expert_parallel": config.parallelism.expert_parallel_degree}


def described(layout: dict[str, int]) -> str:
    """{"data_parallel_shard": 2, "tensor_parallel": 1} -> "data_parallel_shard=2"; "one process"."""
    return " x ".join(f"{name}={degree}" for name, degree in layout.items() if degree > 1) or "one process"


def validate(config: TrainerConfig) -> None:
    """Raises ValueError with the refused degrees, and the nearest possible layouts with as many processes."""
    num_processes = config.num_processes()
    expert = config.parallelism.expert_parallel_degree
    if expert < 1:
        raise ValueError(f"parallelism.expert_parallel_degree={expert}; it must be at least 1")
    if refusal := next(_refusals(config), None):
        found = ", or ".join(map(described, nearest(config)))
        raise ValueError(f"{refusal}; nearest possible on {num_processes} processes: {found}" if found else refusal)


def is_possible(config: TrainerConfig) -> bool:
    return next(_refusals(config), None) is None


def nearest(config: TrainerConfig) -> list[dict[str, int]]:
    """At most NUM_SUGGESTIONS possible layouts with as many processes, the nearest first."""
    wanted = all_degrees(config)
    possible = []
    for factors in _factorizations(config.num_processes(), len(config.layout())):
        for expert in {wanted["expert_parallel"], 1}:
            layout = dict(zip(wanted, (*factors, expert), strict=True))
            tried = copy.copy(config)
            degrees = {f"{name}_degree": degree for name, degree in layout.items()}
            tried.parallelism = replace(config.parallelism, **degrees)
            if is_possible(tried):
                possible.append(layout)
    return sorted(possible, key=lambda layout: _distance(layout, wanted))[:NUM_SUGGESTIONS]


def _refusals(config: TrainerConfig) -> Iterator[str]:
    """The reasons for which this layout is not possible. Only the first is sure to be right."""
    yield from _of_experts(config)
    yield from _of_attention(config)
    if config.parallelism.pipeline_parallel_degree > 1:
        yield from _of_pipeline(config)
        yield from _of_stages(config)
    yield from _of_unverified(config)
    capacity = row_capacity(config)
    if capacity < config.max_sequence_length:
        yield (
            f"tokens_per_row={config.tokens_per_row}, rounded down to a multiple of {row_multiple(config)}, is {capacity}: less than "
            f"max_sequence_length={config.max_sequence_length}"
        )


def _of_attention(config: TrainerConfig) -> Iterator[str]:
    parallel = config.parallelism
    context = parallel.context_parallel_degree
    balancer = parallel.context_parallel_load_balancer
    attention = config.attention
    if balancer not in LOAD_BALANCERS:
        yield f"parallelism.context_parallel_load_balancer={balancer!r}; it must be 'headtail', 'ptrr' or None"
    if parallel.spmd_backend != "partial_dtensor":
        yield f"parallelism.spmd_backend={parallel.spmd_backend!r}; torch 2.13 works only with 'partial_dtensor'"
    if attention != "flex" and context > 1:
        yield (
            f"parallelism.context_parallel_degree={context} with attention={attention!r}: "
            "torchtitan splits a row over several ranks only with flex attention"
        )
    if attention != "flex" and config.compute_dtype != "bfloat16":
        yield f"attention={attention!r} with compute_dtype={config.compute_dtype!r}; this kernel computes only in bfloat16"
    tensor = parallel.tensor_parallel_degree
    for name in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config.model, name) % tensor:
            heads = f"model.{name}={getattr(config.model, name)}"
            yield f"{heads} is not divisible by parallelism.tensor_parallel_degree={tensor}"


def _of_unverified(config: TrainerConfig) -> Iterator[str]:
    """Combinations that no test compares with training in one process. They may still work."""
    degrees = all_degrees(config)
    context = degrees["context_parallel"] > 1
    expert = degrees["expert_parallel"] > 1
    pipeline = degrees["pipeline_parallel"] > 1
    beside_shard = {name for name, degree in degrees.items() if degree > 1} - {"data_parallel_shard"}
    beside_pipeline = [name for name, degree in degrees.items() if degree > 1 and name != "pipeline_parallel"]
    has_experts = config.model.num_experts > 0
    has_adapters = config.lora.rank > 0
    of_context = _named(degrees, ["context_parallel"])
    of_expert = _named(degrees, ["expert_parallel"])
    of_pipeline = _named(degrees, ["pipeline_parallel", *beside_pipeline])
    with_experts = f"with model.num_experts={config.model.num_experts}"
    with_adapters = f"with lora.rank={config.lora.rank}"
    if config.fsdp_cpu_offload:
        if beside_shard:
            others = _named(degrees, [name for name in degrees if name in beside_shard])
            yield f"fsdp_cpu_offload=True with {others}: {NOT_VERIFIED}"
        if has_experts:
            yield f"fsdp_cpu_offload=True {with_experts}: {NOT_VERIFIED}"
        if config.float8:
            yield f"fsdp_cpu_offload=True with float8=True: {NOT_VERIFIED}"
    for is_used, name in ((context, of_context), (expert, of_expert)):
        if is_used and config.float8:
            yield f"{name} with float8=True: {NOT_VERIFIED}"
        if is_used and config.compile.enable:
            yield f"{name} with compile.enable=True: {NOT_VERIFIED}"
    if context and degrees["tensor_parallel"] > 1 and not expert and (has_experts or has_adapters):
        of_both = _named(degrees, ["context_parallel", "tensor_parallel"])
        yield f"{of_both} {with_experts if has_experts else with_adapters}: {NOT_VERIFIED}"
    if not pipeline:
        return
    if len(beside_pipeline) > 1 or expert:
        yield f"{of_pipeline}: {NOT_VERIFIED}"
    if has_experts and not set(beside_pipeline) <= {"data_parallel_shard"}:
        yield f"{of_pipeline} {with_experts}: {NOT_VERIFIED}"
    if has_adapters and not set(beside_pipeline) <= {"data_parallel_shard", "context_parallel"}:
        yield f"{of_pipeline} {with_adapters}: {NOT_VERIFIED}"
    if config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B":
        interleaved = "parallelism.pipeline_parallel_schedule='Interleaved1F1B'"
        if has_experts:
            yield f"{interleaved} {with_experts}: {NOT_VERIFIED}"
        if context:
            yield f"{interleaved} with context_parallel_degree={degrees['context_parallel']}: {NOT_VERIFIED}"


def _named(degrees: dict[str, int], names: list[str]) -> str:
    """_named({"tensor_parallel": 2, ...}, ["tensor_parallel"]) -> "parallelism.tensor_parallel_degree=2" """
    return "parallelism." + ", ".join(f"{name}_degree={degrees[name]}" for name in names)


def _of_experts(config: TrainerConfig) -> Iterator[str]:
    """The ranks of data_parallel_shard, context_parallel and tensor_parallel hold the experts."""
    model = config.model
    parallel = config.parallelism
    degree = parallel.expert_parallel_degree
    tensor = parallel.tensor_parallel_degree
    ranks = parallel.data_parallel_shard_degree * parallel.context_parallel_degree * tensor
    expert_parallel = f"parallelism.expert_parallel_degree={degree}"
    if degree > 1 and not model.num_experts:
        yield f"{expert_parallel} with model.num_experts=0"
    if model.num_experts % degree:
        yield f"model.num_experts={model.num_experts} is not divisible by {expert_parallel}"
    if ranks % degree:
        yield (
            f"{expert_parallel} does not divide data_parallel_shard x context_parallel x tensor_parallel={ranks}, "
            "the number of ranks that hold the experts"
        )
    if degree > 1 and tensor > 1 and not parallel.enable_sequence_parallel:
        yield (
            f"{expert_parallel} and tensor_parallel_degree={tensor} with enable_sequence_parallel=False: "
            "torchtitan cannot put the experts' outputs back together"
        )
    if model.num_experts and degree == 1 and model.moe_intermediate_size % tensor:
        width = f"model.moe_intermediate_size={model.moe_intermediate_size}"
        yield f"{width} is not divisible by parallelism.tensor_parallel_degree={tensor}"


def _of_pipeline(config: TrainerConfig) -> Iterator[str]:
    """Options that are not supported in a pipeline."""
    parallel = config.parallelism
    lora = config.lora
    schedule = parallel.pipeline_parallel_schedule
    csv = parallel.pipeline_parallel_schedule_csv
    microbatch_size = parallel.pipeline_parallel_microbatch_size
    per_stage = parallel.pipeline_parallel_layers_per_stage
    pipeline = f"parallelism.pipeline_parallel_degree={parallel.pipeline_parallel_degree}"
    if config.ties_head:
        yield (
            f"{pipeline} with model.tie_word_embeddings=True: the embedding is on the first stage and the head on the last, "
            "and torchtitan does not tie weights across stages"
        )
    if schedule not in PIPELINE_SCHEDULES:
        yield f"parallelism.pipeline_parallel_schedule={schedule!r}; it must be one of {', '.join(PIPELINE_SCHEDULES)}"
    if csv:
        yield (
            f"parallelism.pipeline_parallel_schedule_csv={csv!r}: a CSV file has the schedule for one number of "
            "microbatches, but this number differs from call to call"
        )
    if microbatch_size != 1:
        yield (
            f"parallelism.pipeline_parallel_microbatch_size={microbatch_size}; it must be 1, because rows_per_microbatch sets the size "
            "of a microbatch"
        )
    if parallel.module_fqns_per_model_part is not None:
        yield (
            "parallelism.module_fqns_per_model_part is not supported; use pipeline_parallel_layers_per_stage, "
            "pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers"
        )
    if lora.rank > 0 and not (lora.train_attn or lora.train_mlp):
        yield f"{pipeline} with an adapter only on the output projection: only the last stage would train anything"
    if config.load_balance_coeff > 0 and config.activation_checkpointing != "none":
        yield (
            f"{pipeline} with load_balance_coeff={config.load_balance_coeff:g} and "
            f"activation_checkpointing={config.activation_checkpointing!r}: the counts of tokens per expert must leave out padding. "
            "Each forward pass subtracts the padding of the newest microbatch, but a recomputed forward pass may belong to an earlier "
            "microbatch"
        )
    if per_stage is not None and per_stage < 1:
        yield f"parallelism.pipeline_parallel_layers_per_stage={per_stage}; it must be at least 1"


def _of_stages(config: TrainerConfig) -> Iterator[str]:
    """Numbers of layers that cannot be split into the stages of the schedule."""
    parallel = config.parallelism
    lora = config.lora
    degree = parallel.pipeline_parallel_degree
    schedule = parallel.pipeline_parallel_schedule
    first = parallel.pipeline_parallel_first_stage_less_layers
    last = parallel.pipeline_parallel_last_stage_less_layers
    stages = num_stages(config)
    has_one_per_rank = PIPELINE_SCHEDULES[schedule] == 1
    pipeline = f"parallelism.pipeline_parallel_degree={degree} with {schedule}"
    layers = f"splits model.num_hidden_layers={config.model.num_hidden_layers} into {stages} stages"
    if stages % degree or (stages == degree) != has_one_per_rank:
        yield (
            f"{pipeline} and pipeline_parallel_layers_per_stage={parallel.pipeline_parallel_layers_per_stage} gives {stages} stages; "
            f"every rank must have {'one stage' if has_one_per_rank else 'the same number of stages, at least two'}"
        )
    if num_units(config) // stages < max(1, first, last):
        yield (
            f"{pipeline} {layers}, where embedding and head count as {first} and {last} layers: "
            "too few layers for this number of stages"
        )
    blocks = stage_blocks(config)
    first_trains = len(blocks[0]) > 0
    last_trains = len(blocks[-1]) > 0 or lora.train_unembed
    if lora.rank and not (first_trains and last_trains):
        idle = "last" if first_trains else "first"
        yield f"{pipeline} and lora.rank={lora.rank} {layers}; the {idle} stage has no block and would train nothing"


def num_units(config: TrainerConfig) -> int:
    """Layers that torchtitan distributes over the stages: blocks, and those that embedding and head count as."""
    parallel = config.parallelism
    ends = parallel.pipeline_parallel_first_stage_less_layers + parallel.pipeline_parallel_last_stage_less_layers
    return config.model.num_hidden_layers + ends


def num_stages(config: TrainerConfig) -> int:
    """Over all ranks of the pipeline."""
    parallel = config.parallelism
    per_stage = parallel.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        return math.ceil(num_units(config) / per_stage)
    return parallel.pipeline_parallel_degree * PIPELINE_SCHEDULES[parallel.pipeline_parallel_schedule]


def stage_blocks(config: TrainerConfig) -> list[range]:
    """The blocks of every stage: torchtitan splits num_units(config) evenly; the first stages get one of the rest each."""
    num_layers = config.model.num_hidden_layers
    stages = num_stages(config)
    first = config.parallelism.pipeline_parallel_first_stage_less_layers
    size, longer = divmod(num_units(config), stages)
    starts = []
    for stage in range(stages):
        unit = stage * size + min(stage, longer)
        starts.append(min(max(unit - first, 0), num_layers))
    return [range(start, end) for start, end in pairwise([*starts, num_layers])]


def _distance(layout: dict[str, int], wanted: dict[str, int]) -> tuple[float, int]:
    """Sort key: the sum of |log2(degree / wanted degree)|, then the larger data_parallel_shard first."""
    steps = sum(abs(math.log2(layout[name] / wanted[name])) for name in wanted)
    return round(steps, 6), -layout["data_parallel_shard"]


def _factorizations(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` positive integers with this product: _factorizations(2, 2) -> (1, 2), (2, 1)"""
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factorizations(product // first, count - 1):
                yield first, *rest
