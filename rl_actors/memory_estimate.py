"""What a rank of a layout holds, by arithmetic: docs/layouts.md has the formulas in words. Starts nothing, needs no torch.

D hidden size, H, K, W: query heads, key-value heads, head width; I MLP width, V vocabulary, E experts; N positions of a microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_actors import layouts

if TYPE_CHECKING:
    from rl_actors.config import ModelConfig, TrainerConfig

FLOAT32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Equal parameters of one block, or one outside of the blocks."""

    shape: tuple[int, ...]
    count: int = 1
    tensor_dim: int | None = None  # which dimension tensor parallelism splits; None: each rank has the whole
    is_expert: bool = False
    trained: bool = True


Part = tuple[int | None, list[Weight]]
"""(block, its parameters); None: before or behind the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the rank that holds most."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int  # an estimate

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


def memory(config: TrainerConfig) -> Memory:
    """What a rank holds at the peak of a forward_backward, by the formulas of docs/layouts.md.

    All but the activations is exact; of a pipeline it is the rank with the most parameters.
    An optimizer by import path is counted as Adam.
    """
    parts = _held_parts(config)
    weights = [weight for _, part in parts for weight in part]
    local = [(weight, weight.count * math.prod(_local_shape(weight, config))) for weight in weights]
    trained = [pair for pair in local if pair[0].trained and config.optimizer is not None]
    num_trained = sum(elements for _, elements in trained)
    return Memory(
        parameters=FLOAT32 * sum(elements for _, elements in local),
        gradients=FLOAT32 * num_trained,
        # Two moments, and the number of steps of each tensor.
        optimizer=FLOAT32 * (2 * num_trained + sum(weight.count for weight, _ in trained)),
        buffers=FLOAT32 * sum(_buffers(config, layer) for layer, _ in parts if layer is not None),
        activations=_activations(config),
    )


def block_weights(config: TrainerConfig, layer: int) -> list[Weight]:
    """The parameters of block `layer`."""
    model, lora = config.model, config.lora
    d, w = model.hidden_size, model.head_dim
    h, k = model.num_attention_heads * w, model.num_key_value_heads * w
    base = not lora.rank
    weights = [Weight(shape=(d,), count=2, trained=base), Weight(shape=(w,), count=2, trained=base)]
    # Query, key and value are one matrix, but for adapters, which belong to one projection.
    inputs = [(h + 2 * k, d)] if base else [(h, d), (k, d), (k, d)]
    attention = [*(Weight(shape=shape, tensor_dim=0, trained=base) for shape in inputs)]
    attention.append(Weight(shape=(d, h), tensor_dim=1, trained=base))
    weights += attention + (_adapters(attention, lora.rank) if lora.train_attn else [])
    if model.has_experts(layer):
        e, f = model.num_experts, model.moe_intermediate_size
        weights.append(Weight(shape=(e, d), trained=base))
        weights.append(Weight(shape=(e, f, d), count=2, tensor_dim=1, is_expert=True, trained=base))
        weights.append(Weight(shape=(e, d, f), tensor_dim=2, is_expert=True, trained=base))
        return weights
    mlp = [Weight(shape=(model.intermediate_size, d), tensor_dim=0, trained=base)] * 2
    mlp.append(Weight(shape=(d, model.intermediate_size), tensor_dim=1, trained=base))
    return weights + mlp + (_adapters(mlp, lora.rank) if lora.train_mlp else [])


def outer_weights(config: TrainerConfig) -> tuple[list[Weight], list[Weight]]:
    """(the embedding, the norm and head behind the blocks); a tied head is the embedding."""
    model, lora = config.model, config.lora
    matrix = Weight(shape=(model.vocab_size, model.hidden_size), tensor_dim=0, trained=not lora.rank)
    behind = [Weight(shape=(model.hidden_size,), trained=not lora.rank)]
    if not model.tie_word_embeddings:
        behind += [matrix, *(_adapters([matrix], lora.rank) if lora.train_unembed else [])]
    return [matrix], behind


def _adapters(weights: list[Weight], rank: int) -> list[Weight]:
    """A reads what the weight reads and B writes what it writes, so one of the two is cut as the weight is."""
    if not rank:
        return []
    pairs = [
        (
            Weight(shape=(rank, weight.shape[1]), tensor_dim=1 if weight.tensor_dim == 1 else None),
            Weight(shape=(weight.shape[0], rank), tensor_dim=0 if weight.tensor_dim == 0 else None),
        )
        for weight in weights
    ]
    return [adapter for pair in pairs for adapter in pair]


def _buffers(config: TrainerConfig, layer: int) -> int:
    """Elements of block `layer`: sines and cosines of the positions, the experts' counters and bias."""
    model = config.model
    counters = model.num_experts * (1 + bool(config.load_balance_coeff)) if model.has_experts(layer) else 0
    return 2 * model.head_dim * config.max_sequence_length + counters


def _held_parts(config: TrainerConfig) -> list[Part]:
    """(block, its parameters) of the pipeline rank with the most parameters; the embedding and the head are no blocks.

    torchtitan deals stages around the ranks.
    """
    num_layers, num_ranks = config.model.num_hidden_layers, config.parallelism.pipeline_parallel_degree
    before, behind = outer_weights(config)
    parts: list[Part] = [(layer, block_weights(config, layer)) for layer in range(num_layers)]
    if num_ranks == 1:
        return [(None, before), *parts, (None, behind)]
    stages = [[parts[layer] for layer in blocks] for blocks in layouts.stage_blocks(config)]
    stages[0], stages[-1] = [(None, before), *stages[0]], [*stages[-1], (None, behind)]
    ranks = [[part for stage in stages[rank::num_ranks] for part in stage] for rank in range(num_ranks)]
    return max(ranks, key=lambda held: sum(_elements(part) for _, part in held))


def _elements(weights: list[Weight]) -> int:
    return sum(weight.count * math.prod(weight.shape) for weight in weights)


def _local_shape(weight: Weight, config: TrainerConfig, *, gathered: bool = False) -> list[int]:
    """The shard of the first rank, which is the largest: shards are rounded up. gathered: what FSDP makes whole to compute with."""
    parallel = config.parallelism
    shard = parallel.data_parallel_shard_degree * parallel.context_parallel_degree
    tensor, expert = parallel.tensor_parallel_degree, parallel.expert_parallel_degree
    local, sharded_dim = list(weight.shape), 0
    if weight.is_expert and expert > 1:
        # Experts go around first; the ranks that are left of those without copies shard them.
        local[0] = -(-local[0] // expert)
        shard = shard * tensor // expert
        sharded_dim = int(shard * expert > weight.shape[0])
    else:
        if weight.tensor_dim is not None:
            local[weight.tensor_dim] = -(-local[weight.tensor_dim] // tensor)
        # More ranks than experts: torchtitan cuts through each.
        sharded_dim = int(weight.is_expert and shard > weight.shape[0])
    if not gathered:
        local[sharded_dim] = -(-local[sharded_dim] // shard)
    return local


def _activations(config: TrainerConfig) -> int:
    """Saved for the backward pass, one block's more while it runs, a chunk of logits, and weights that FSDP gathered."""
    model, parallel = config.model, config.parallelism
    tensor = parallel.tensor_parallel_degree
    size = 2 if config.compute_dtype == "bfloat16" else FLOAT32
    context = parallel.context_parallel_degree
    positions = layouts.row_capacity(config) * config.rows_per_microbatch // context
    d = model.hidden_size / (tensor if parallel.enable_sequence_parallel else 1)
    kept = running = 0.0
    for layer in range(model.num_hidden_layers):
        saved = _saved_by_block(model, layer, d, tensor, context)
        selectively = _saved_selectively(model, layer, d, tensor, context)
        every_product = selectively + d + _width(model, layer) / tensor
        kept += {"none": saved, "products": every_product, "selective": selectively, "full": d}[
            config.activation_checkpointing
        ]
        running = max(running, saved)
    if config.optimizer is None:
        kept = 0.0
    blocks = positions * size * (kept * _under_way(config) + running)
    hidden = positions * model.hidden_size * (size + FLOAT32)  # what the head reads, and its gradient
    logits = 4 * size * min(config.logprob_chunk_tokens, positions) * model.vocab_size / tensor
    return int(blocks + hidden + logits + _gathered(config, size))


def _under_way(config: TrainerConfig) -> float:
    """How many times all blocks' activations of one microbatch the first rank of a pipeline holds at most.

    Of p ranks with v stages each, it has done p (v - 1) + 2 (p - 1) forwards of a stage before it goes on with one forward and one
    backward in turn; with one stage a rank it has done p - 1.
    """
    ranks = config.parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1.0
    of_rank = layouts.num_stages(config) // ranks
    ahead = ranks - 1 if of_rank == 1 else ranks * (of_rank - 1) + 2 * (ranks - 1)
    return (ahead + 1) / (ranks * of_rank)


def _saved_by_block(model: ModelConfig, layer: int, d: float, tensor: int, context: int) -> float:
    """Elements a position. Context parallelism gathers the keys and values of whole rows for attention."""
    w = model.head_dim / tensor
    q, kv = model.num_attention_heads * w, model.num_key_value_heads * w
    # Norms and projections read four of D; q and k before their norms, q, k and v in attention, its output twice.
    attention = 4 * d + (q + kv) + (q + 2 * kv * context) + 2 * q
    if not model.has_experts(layer):
        return attention + 4 * model.intermediate_size / tensor
    # Each of a token's experts reads a copy of it and writes one.
    return attention + model.num_experts_per_tok * (2 * model.hidden_size + 4 * model.moe_intermediate_size) / tensor


def _saved_selectively(model: ModelConfig, layer: int, d: float, tensor: int, context: int) -> float:
    """Elements a position: the block's input, attention, and every second matrix product."""
    w = model.head_dim / tensor
    q, kv = model.num_attention_heads * w, model.num_key_value_heads * w
    return 2 * d + (q + 2 * kv * context) + q + _width(model, layer) / tensor


def _width(model: ModelConfig, layer: int) -> int:
    """Of what a token passes through in the MLP, in all its experts together."""
    return (
        model.num_experts_per_tok * model.moe_intermediate_size if model.has_experts(layer) else model.intermediate_size
    )


def _gathered(config: TrainerConfig, size: int) -> float:
    """Bytes of weights that FSDP gathered in the compute dtype, and of their float32 gradients that wait for reduction.

    Two whole blocks at a time, embedding and head; in a pipeline all that the rank holds, by torchtitan's default until the call ends.
    """
    parallel = config.parallelism
    if parallel.data_parallel_shard_degree * parallel.context_parallel_degree == 1 and size == FLOAT32:
        return 0.0
    parts, is_pipeline = _held_parts(config), parallel.pipeline_parallel_degree > 1
    policy = parallel.fsdp_reshard_after_forward
    keeps_weights = policy == "never" or (policy == "default" and is_pipeline)

    def elements(*, whole: bool, trained: bool) -> float:
        counts = [
            (
                layer,
                sum(
                    weight.count * math.prod(_local_shape(weight, config, gathered=True))
                    for weight in weights
                    if weight.trained or not trained
                ),
            )
            for layer, weights in parts
        ]
        blocks = [count for layer, count in counts if layer is not None]
        outer = sum(count for layer, count in counts if layer is None)
        return outer + (sum(blocks) if whole else 2 * max(blocks, default=0))

    return elements(whole=keeps_weights, trained=False) * size + elements(whole=is_pipeline, trained=True) * FLOAT32
