"""Checks the parallel layout of a config. The error about a refused layout suggests the nearest possible layouts.

A layout is possible if the trainer supports it, and if it is none of the combinations that `_require_verified` refuses for lack of a test. This
module does not import torch.
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
"""Every row length is a multiple of this number. So there are few different shapes, and the logits of a row can be split into equal chunks. A row
is one sequence of the model's input, with one or more samples."""

NUM_SUGGESTIONS = 3
"""Largest number of layouts that an error text suggests."""

PIPELINE_SCHEDULES = {"1F1B": 1, "Interleaved1F1B": 2}
"""Schedule -> its default number of stages per rank. Training with these schedules gives the same results as training in one process."""

LOAD_BALANCERS = (None, "headtail", "ptrr")
"""Possible values of parallelism.context_parallel_load_balancer."""

NOT_VERIFIED = "refused, because no test compares this combination with training in one process"


def row_multiple(config: TrainerConfig) -> int:
    """A number that divides the length of every row."""
    context = config.parallelism.context_parallel_degree
    tensor = config.parallelism.tensor_parallel_degree
    # Masks come in blocks of 128 positions, and every context-parallel rank gets whole blocks.
    parts = 128 * context if context > 1 else 1
    # Under expert parallelism each tensor-parallel rank routes an equal part of the positions.
    if config.parallelism.expert_parallel_degree > 1:
        parts = math.lcm(parts, context * tensor)
    return math.lcm(ROW_MULTIPLE, parts)


def row_capacity(config: TrainerConfig) -> int:
    """Largest number of positions of a row: tokens_per_row, rounded down to a multiple of row_multiple(config)."""
    return in_multiples(config.tokens_per_row, row_multiple(config))


def in_multiples(length: int, multiple: int) -> int:
    """in_multiples(300, 64) -> 256"""
    return length // multiple * multiple


def all_degrees(config: TrainerConfig) -> dict[str, int]:
    """The degrees of config.layout(), and the degree of expert_parallel. Expert parallelism uses the ranks of the other kinds of parallelism."""
    return config.layout() | {"expert_parallel": config.parallelism.expert_parallel_degree}


def described(layout: dict[str, int]) -> str:
    """described({"data_parallel_shard": 2, "tensor_parallel": 1}) -> "data_parallel_shard=2". If all degrees are 1, the text is "one process"."""
    return " x ".join(f"{name}={degree}" for name, degree in layout.items() if degree > 1) or "one process"


def validate(config: TrainerConfig) -> None:
    """Raises ValueError if the config's layout is not possible.

    The error text has the degrees that are refused, and the nearest possible layouts with the same number of processes.
    """
    num_processes = config.num_processes()
    expert = config.parallelism.expert_parallel_degree
    if expert < 1:
        raise ValueError(f"parallelism.expert_parallel_degree={expert}; it must be at least 1")
    try:
        require_possible(config)
    except ValueError as error:
        found = ", or ".join(map(described, nearest(config)))
        raise ValueError(
            f"{error}; nearest possible on {num_processes} processes: {found}" if found else str(error)
        ) from None


def require_possible(config: TrainerConfig) -> None:
    """Raises ValueError with the degrees that are refused, if the config's layout is not possible."""
    model = config.model
    parallel = config.parallelism
    tensor = parallel.tensor_parallel_degree
    context = parallel.context_parallel_degree
    balancer = parallel.context_parallel_load_balancer
    attention = config.attention
    _require_experts(config)
    _refuse_first(
        (
            balancer not in LOAD_BALANCERS,
            f"parallelism.context_parallel_load_balancer={balancer!r}; it must be 'headtail', 'ptrr' or None",
        ),
        (
            parallel.spmd_backend != "partial_dtensor",
            f"parallelism.spmd_backend={parallel.spmd_backend!r}; torch 2.13 works only with 'partial_dtensor'",
        ),
        (
            attention != "flex" and context > 1,
            f"parallelism.context_parallel_degree={context} with attention={attention!r}: "
            "torchtitan splits a row over several ranks only with flex attention",
        ),
        (
            attention != "flex" and config.compute_dtype != "bfloat16",
            f"attention={attention!r} with compute_dtype={config.compute_dtype!r}; this kernel computes only in bfloat16",
        ),
        (
            model.num_attention_heads % tensor > 0,
            f"model.num_attention_heads={model.num_attention_heads} is not divisible by "
            f"parallelism.tensor_parallel_degree={tensor}",
        ),
        (
            model.num_key_value_heads % tensor > 0,
            f"model.num_key_value_heads={model.num_key_value_heads} is not divisible by "
            f"parallelism.tensor_parallel_degree={tensor}",
        ),
    )
    if parallel.pipeline_parallel_degree > 1:
        _require_pipeline(config)
        _require_stages(config)
    _require_verified(config)
    capacity = row_capacity(config)
    if capacity < config.max_sequence_length:
        raise ValueError(
            f"tokens_per_row={config.tokens_per_row}, rounded down to a multiple of {row_multiple(config)}, is {capacity}: less than "
            f"max_sequence_length={config.max_sequence_length}"
        )


def _refuse_first(*refusals: tuple[bool, str]) -> None:
    """Raises ValueError with the message of the first (condition, message) whose condition is true."""
    for is_refused, message in refusals:
        if is_refused:
            raise ValueError(message)


def _require_verified(config: TrainerConfig) -> None:
    """Refuses the combinations below, because no test compares them with training in one process. They may still work.

    tests/engine/test_parallel_layouts.py has the layouts that are compared. Some other combinations are allowed although no test compares them,
    such as data_parallel_shard x context_parallel x tensor_parallel for a dense model.
    """
    degrees = all_degrees(config)
    context = degrees["context_parallel"] > 1
    tensor = degrees["tensor_parallel"] > 1
    expert = degrees["expert_parallel"] > 1
    pipeline = degrees["pipeline_parallel"] > 1
    beside_pipeline = [name for name, degree in degrees.items() if degree > 1 and name != "pipeline_parallel"]
    has_experts = config.model.num_experts > 0
    has_adapters = config.lora.rank > 0
    float8 = config.float8
    compiles = config.compile.enable
    interleaved = pipeline and config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"

    of_context = _named(degrees, ["context_parallel"])
    of_expert = _named(degrees, ["expert_parallel"])
    of_both = _named(degrees, ["context_parallel", "tensor_parallel"])
    of_pipeline = _named(degrees, ["pipeline_parallel", *beside_pipeline])
    of_schedule = "parallelism.pipeline_parallel_schedule='Interleaved1F1B'"
    with_experts = f"with model.num_experts={config.model.num_experts}"
    with_adapters = f"with lora.rank={config.lora.rank}"
    other_degrees = [name for name, degree in degrees.items() if degree > 1 and name != "data_parallel_shard"]
    offloads = config.fsdp_cpu_offload
    _refuse_first(
        (
            bool(offloads and other_degrees),
            f"fsdp_cpu_offload=True with {_named(degrees, other_degrees)}: {NOT_VERIFIED}",
        ),
        (offloads and has_experts, f"fsdp_cpu_offload=True {with_experts}: {NOT_VERIFIED}"),
        (offloads and float8, f"fsdp_cpu_offload=True with float8={float8}: {NOT_VERIFIED}"),
        (context and float8, f"{of_context} with float8={float8}: {NOT_VERIFIED}"),
        (context and compiles, f"{of_context} with compile.enable={compiles}: {NOT_VERIFIED}"),
        (expert and float8, f"{of_expert} with float8={float8}: {NOT_VERIFIED}"),
        (expert and compiles, f"{of_expert} with compile.enable={compiles}: {NOT_VERIFIED}"),
        (context and tensor and not expert and has_experts, f"{of_both} {with_experts}: {NOT_VERIFIED}"),
        (context and tensor and not expert and has_adapters, f"{of_both} {with_adapters}: {NOT_VERIFIED}"),
        (pipeline and (len(beside_pipeline) > 1 or expert), f"{of_pipeline}: {NOT_VERIFIED}"),
        (
            pipeline and has_experts and not set(beside_pipeline) <= {"data_parallel_shard"},
            f"{of_pipeline} {with_experts}: {NOT_VERIFIED}",
        ),
        (
            pipeline and has_adapters and not set(beside_pipeline) <= {"data_parallel_shard", "context_parallel"},
            f"{of_pipeline} {with_adapters}: {NOT_VERIFIED}",
        ),
        (interleaved and has_experts, f"{of_schedule} {with_experts}: {NOT_VERIFIED}"),
        (
            interleaved and context,
            f"{of_schedule} with context_parallel_degree={degrees['context_parallel']}: {NOT_VERIFIED}",
        ),
    )


def _named(degrees: dict[str, int], names: list[str]) -> str:
    """_named({"tensor_parallel": 2, ...}, ["tensor_parallel"]) -> "parallelism.tensor_parallel_degree=2" """
    return "parallelism." + ", ".join(f"{name}_degree={degrees[name]}" for name in names)


def _require_experts(config: TrainerConfig) -> None:
    """Refuse expert parallelism that is not possible with this model and layout, and tensor parallelism that cannot split an expert.

    Expert parallelism has no ranks of its own. The ranks of data_parallel_shard, context_parallel and tensor_parallel hold the experts.
    """
    model = config.model
    parallel = config.parallelism
    degree = parallel.expert_parallel_degree
    tensor = parallel.tensor_parallel_degree
    ranks = parallel.data_parallel_shard_degree * parallel.context_parallel_degree * tensor
    expert_parallel = f"parallelism.expert_parallel_degree={degree}"
    _refuse_first(
        (degree > 1 and not model.num_experts, f"{expert_parallel} with model.num_experts=0"),
        (
            degree > 1 and model.num_experts % degree > 0,
            f"model.num_experts={model.num_experts} is not divisible by {expert_parallel}",
        ),
        (
            ranks % degree > 0,
            f"{expert_parallel} does not divide data_parallel_shard x context_parallel x tensor_parallel={ranks}, "
            "the number of ranks that hold the experts",
        ),
        (
            degree > 1 and tensor > 1 and not parallel.enable_sequence_parallel,
            f"{expert_parallel} and tensor_parallel_degree={tensor} with enable_sequence_parallel=False: "
            "torchtitan cannot put the experts' outputs back together",
        ),
        (
            model.num_experts > 0 and degree == 1 and model.moe_intermediate_size % tensor > 0,
            f"model.moe_intermediate_size={model.moe_intermediate_size} is not divisible by "
            f"parallelism.tensor_parallel_degree={tensor}",
        ),
    )


def _require_pipeline(config: TrainerConfig) -> None:
    """Refuse options that are not supported in a pipeline."""
    parallel = config.parallelism
    lora = config.lora
    schedule = parallel.pipeline_parallel_schedule
    csv = parallel.pipeline_parallel_schedule_csv
    microbatch_size = parallel.pipeline_parallel_microbatch_size
    per_stage = parallel.pipeline_parallel_layers_per_stage
    pipeline = f"parallelism.pipeline_parallel_degree={parallel.pipeline_parallel_degree}"
    _refuse_first(
        (
            config.ties_head,
            f"{pipeline} with model.tie_word_embeddings=True: the embedding is on the first stage and the head on the last, "
            "and torchtitan does not tie weights across stages",
        ),
        (
            schedule not in PIPELINE_SCHEDULES,
            f"parallelism.pipeline_parallel_schedule={schedule!r}; it must be one of {', '.join(PIPELINE_SCHEDULES)}",
        ),
        (
            bool(csv),
            f"parallelism.pipeline_parallel_schedule_csv={csv!r}: a CSV file has the schedule for one number of "
            "microbatches, but this number differs from call to call",
        ),
        (
            microbatch_size != 1,
            f"parallelism.pipeline_parallel_microbatch_size={microbatch_size}; it must be 1, because rows_per_microbatch sets the size "
            "of a microbatch",
        ),
        (
            parallel.module_fqns_per_model_part is not None,
            "parallelism.module_fqns_per_model_part is not supported; use pipeline_parallel_layers_per_stage, "
            "pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers",
        ),
        (
            lora.rank > 0 and not (lora.train_attn or lora.train_mlp),
            f"{pipeline} with an adapter only on the output projection: only the last stage would train anything",
        ),
        (
            config.load_balance_coeff > 0 and config.activation_checkpointing != "none",
            f"{pipeline} with load_balance_coeff={config.load_balance_coeff:g} and "
            f"activation_checkpointing={config.activation_checkpointing!r}: the counts of tokens per expert must leave out padding. "
            "Each forward pass subtracts the padding of the newest microbatch, but a recomputed forward pass may belong to an earlier "
            "microbatch",
        ),
        (
            per_stage is not None and per_stage < 1,
            f"parallelism.pipeline_parallel_layers_per_stage={per_stage}; it must be at least 1",
        ),
    )


def _require_stages(config: TrainerConfig) -> None:
    """Refuse a number of layers that cannot be split into the stages of the schedule."""
    model = config.model
    parallel = config.parallelism
    lora = config.lora
    degree = parallel.pipeline_parallel_degree
    schedule = parallel.pipeline_parallel_schedule
    first = parallel.pipeline_parallel_first_stage_less_layers
    last = parallel.pipeline_parallel_last_stage_less_layers
    stages = num_stages(config)
    has_one_per_rank = PIPELINE_SCHEDULES[schedule] == 1
    pipeline = f"parallelism.pipeline_parallel_degree={degree} with {schedule}"
    if stages % degree or (stages == degree) != has_one_per_rank:
        raise ValueError(
            f"{pipeline} and pipeline_parallel_layers_per_stage={parallel.pipeline_parallel_layers_per_stage} gives {stages} stages; "
            f"every rank must have {'one stage' if has_one_per_rank else 'the same number of stages, at least two'}"
        )
    if num_units(config) // stages < max(1, first, last):
        raise ValueError(
            f"{pipeline} splits model.num_hidden_layers={model.num_hidden_layers} into {stages} stages, "
            f"where embedding and head count as {first} and {last} layers: too few layers for this number of stages"
        )
    blocks = stage_blocks(config)
    first_trains = len(blocks[0]) > 0
    last_trains = len(blocks[-1]) > 0 or lora.train_unembed
    if lora.rank and not (first_trains and last_trains):
        raise ValueError(
            f"{pipeline} and lora.rank={lora.rank} splits model.num_hidden_layers={model.num_hidden_layers} into "
            f"{stages} stages; the {'last' if first_trains else 'first'} stage has no block and would train nothing"
        )


def num_units(config: TrainerConfig) -> int:
    """Number of layers that torchtitan distributes over the stages of a pipeline.

    The embedding counts as pipeline_parallel_first_stage_less_layers layers, and the head as pipeline_parallel_last_stage_less_layers.
    """
    parallel = config.parallelism
    ends = parallel.pipeline_parallel_first_stage_less_layers + parallel.pipeline_parallel_last_stage_less_layers
    return config.model.num_hidden_layers + ends


def num_stages(config: TrainerConfig) -> int:
    """Number of stages of a pipeline, over all its ranks."""
    parallel = config.parallelism
    per_stage = parallel.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        return math.ceil(num_units(config) / per_stage)
    return parallel.pipeline_parallel_degree * PIPELINE_SCHEDULES[parallel.pipeline_parallel_schedule]


def stage_blocks(config: TrainerConfig) -> list[range]:
    """The transformer blocks of every stage.

    torchtitan splits num_units(config) layers evenly over the stages. The layers that remain go to the first stages, one layer to each.
    The ranges leave out the layers that stand for the embedding or the head.
    """
    num_layers = config.model.num_hidden_layers
    stages = num_stages(config)
    first = config.parallelism.pipeline_parallel_first_stage_less_layers
    size, longer = divmod(num_units(config), stages)
    starts = []
    for stage in range(stages):
        unit = stage * size + min(stage, longer)
        starts.append(min(max(unit - first, 0), num_layers))
    return [range(start, end) for start, end in pairwise([*starts, num_layers])]


def is_possible(config: TrainerConfig) -> bool:
    """True if require_possible does not refuse the config."""
    try:
        require_possible(config)
    except ValueError:
        return False
    return True


def nearest(config: TrainerConfig) -> list[dict[str, int]]:
    """At most NUM_SUGGESTIONS possible layouts with the config's number of processes. The nearest to the config's layout is first; see _distance."""
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


def _distance(layout: dict[str, int], wanted: dict[str, int]) -> tuple[float, int]:
    """Sort key of layouts: the sum of |log2(degree / wanted degree)|. Among equal sums the larger data_parallel_shard comes first."""
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
