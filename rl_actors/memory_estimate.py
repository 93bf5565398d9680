"""Estimates the memory of one rank from the config, by docs/layouts.md. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from rl_actors import layouts

if TYPE_CHECKING:
    from rl_actors.config import ModelConfig, TrainerConfig

FLOAT32 = 4  # bytes
BYTES = {"float32": FLOAT32, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Parameters of one shape, in one block or outside the blocks."""

    shape: tuple[int, ...]
    count: int = 1
    tensor_dim: int | None = None  # that tensor parallelism splits; None: whole
    is_expert: bool = False
    is_trained: bool = True


Part = tuple[int | None, list[Weight]]
"""(number of a block, its parameters); None: outside the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the rank that needs the most; see `memory` for pipelines."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int  # estimated
    is_on_host: bool = False  # parameters, gradients and optimizer (fsdp_cpu_offload)

    def on_device(self) -> Memory:
        return replace(self, parameters=0, gradients=0, optimizer=0) if self.is_on_host else self

    @property
    def total(self) -> int:
        """Bytes on the device."""
        held = self.on_device()
        return held.parameters + held.gradients + held.optimizer + held.buffers + held.activations


def memory(config: TrainerConfig) -> Memory:
    """At the peak of a forward_backward; only the activations are an estimate. In a pipeline of the
    rank with the most parameters, with the activations of the first, which saves the most. An
    optimizer by import path counts as Adam.
    """
    num_elements = num_trained_elements = num_trained_tensors = num_buffer_elements = 0
    for layer, weights in _held_parts(config):
        for weight in weights:
            elements = weight.count * math.prod(_local_shape(weight, config))
            num_elements += elements
            if weight.is_trained and config.optimizer is not None:
                num_trained_elements += elements
                num_trained_tensors += weight.count
        if layer is not None:
            num_buffer_elements += _buffers(config, layer)
    return Memory(
        parameters=FLOAT32 * num_elements,
        gradients=FLOAT32 * num_trained_elements,
        # Adam's two moments for each element, and a step count for each tensor
        optimizer=FLOAT32 * (2 * num_trained_elements + num_trained_tensors),
        buffers=FLOAT32 * num_buffer_elements,
        activations=_activations(config),
        is_on_host=config.fsdp_cpu_offload,
    )


def num_parameters(config: TrainerConfig) -> int:
    """Of the whole model, with its adapters."""
    blocks = [weight for layer in range(config.model.num_hidden_layers) for weight in block_weights(config, layer)]
    before, after = outer_weights(config)
    return sum(weight.count * math.prod(weight.shape) for weight in [*before, *blocks, *after])


def block_weights(config: TrainerConfig, layer: int) -> list[Weight]:
    model = config.model
    lora = config.lora
    d = model.hidden_size
    w = model.head_dim
    # width of all query heads, and of all key-value heads
    h = model.num_attention_heads * w
    k = model.num_key_value_heads * w
    is_base_trained = not lora.rank
    weights = [Weight(shape=(d,), count=2, is_trained=is_base_trained)]
    if model.has_qk_norm:
        weights.append(Weight(shape=(w,), count=2, is_trained=is_base_trained))
    # one matrix, but with adapters, which belong to one projection, three
    inputs = [(h + 2 * k, d)] if is_base_trained else [(h, d), (k, d), (k, d)]
    attention = [Weight(shape=shape, tensor_dim=0, is_trained=is_base_trained) for shape in inputs]
    attention.append(Weight(shape=(d, h), tensor_dim=1, is_trained=is_base_trained))
    weights += attention + (_adapters(attention, lora.rank) if lora.train_attn else [])
    if model.has_experts(layer):
        e = model.num_experts
        f = model.moe_intermediate_size
        weights.append(Weight(shape=(e, d), is_trained=is_base_trained))
        weights.append(Weight(shape=(e, f, d), count=2, tensor_dim=1, is_expert=True, is_trained=is_base_trained))
        weights.append(Weight(shape=(e, d, f), tensor_dim=2, is_expert=True, is_trained=is_base_trained))
        return weights
    mlp = [Weight(shape=(model.intermediate_size, d), tensor_dim=0, is_trained=is_base_trained)] * 2
    mlp.append(Weight(shape=(d, model.intermediate_size), tensor_dim=1, is_trained=is_base_trained))
    return weights + mlp + (_adapters(mlp, lora.rank) if lora.train_mlp else [])


def outer_weights(config: TrainerConfig) -> tuple[list[Weight], list[Weight]]:
    """Parameters before the blocks (embedding) and after them (norm, head unless tied)."""
    model = config.model
    lora = config.lora
    matrix = Weight(shape=(model.vocab_size, model.hidden_size), tensor_dim=0, is_trained=not lora.rank)
    after = [Weight(shape=(model.hidden_size,), is_trained=not lora.rank)]
    if config.head == "values":
        after.append(Weight(shape=(1, model.hidden_size)))
    elif not model.tie_word_embeddings:
        after += [matrix, *(_adapters([matrix], lora.rank) if lora.train_unembed else [])]
    return [matrix], after


def _adapters(weights: list[Weight], rank: int) -> list[Weight]:
    """A [rank, inputs] and B [outputs, rank] of each weight [outputs, inputs]. Tensor parallelism
    splits A with the inputs or B with the outputs.
    """
    if not rank:
        return []
    adapters = []
    for weight in weights:
        num_outputs, num_inputs = weight.shape
        adapters.append(Weight(shape=(rank, num_inputs), tensor_dim=1 if weight.tensor_dim == 1 else None))
        adapters.append(Weight(shape=(num_outputs, rank), tensor_dim=0 if weight.tensor_dim == 0 else None))
    return adapters


def _buffers(config: TrainerConfig, layer: int) -> int:
    """Elements of a block's buffers: sines and cosines, and the experts' counters and biases."""
    model = config.model
    counters = model.num_experts * (1 + bool(config.load_balance_coeff)) if model.has_experts(layer) else 0
    return 2 * model.head_dim * config.max_sequence_length + counters


def _held_parts(config: TrainerConfig) -> list[Part]:
    """Of the pipeline rank with the most parameters. Rank r of p has the stages r, r + p, r + 2 p, …"""
    num_layers = config.model.num_hidden_layers
    num_ranks = config.parallelism.pipeline_parallel_degree
    before, after = outer_weights(config)
    parts: list[Part] = [(layer, block_weights(config, layer)) for layer in range(num_layers)]
    if num_ranks == 1:
        return [(None, before), *parts, (None, after)]
    stages = [parts[blocks.start : blocks.stop] for blocks in layouts.stage_blocks(config)]
    stages[0].insert(0, (None, before))
    stages[-1].append((None, after))
    ranks = [list(chain.from_iterable(stages[rank::num_ranks])) for rank in range(num_ranks)]
    return max(ranks, key=_num_elements)


def _num_elements(parts: list[Part]) -> int:
    """Before sharding."""
    weights = chain.from_iterable(weights for _, weights in parts)
    return sum(weight.count * math.prod(weight.shape) for weight in weights)


def _local_shape(weight: Weight, config: TrainerConfig, *, gathered: bool = False) -> list[int]:
    """A parameter's shard on the first rank, the largest. gathered: after FSDP's all-gather."""
    parallel = config.parallelism
    shard = parallel.data_parallel_shard_degree * parallel.context_parallel_degree
    tensor = parallel.tensor_parallel_degree
    expert = parallel.expert_parallel_degree
    local = list(weight.shape)
    # FSDP shards dimension 0; with more ranks than experts, torchtitan shards experts along 1
    if weight.is_expert and expert > 1:
        # experts are divided among groups of ranks, in which FSDP shards them, without replicas
        local[0] = -(-local[0] // expert)
        shard = shard * tensor // expert
        sharded_dim = int(shard * expert > weight.shape[0])
    else:
        if weight.tensor_dim is not None:
            local[weight.tensor_dim] = -(-local[weight.tensor_dim] // tensor)
        sharded_dim = int(weight.is_expert and shard > weight.shape[0])
    if not gathered:
        local[sharded_dim] = -(-local[sharded_dim] // shard)
    return local


def _activations(config: TrainerConfig) -> int:
    """Bytes of activations, saved and of the running block, the head's input and its gradient, a
    chunk of logits, gathered weights and their gradients.
    """
    model = config.model
    parallel = config.parallelism
    tensor = parallel.tensor_parallel_degree
    size = 2 if config.compute_dtype == "bfloat16" else FLOAT32
    context = parallel.context_parallel_degree
    positions = layouts.row_capacity(config) * config.rows_per_microbatch // context
    d = model.hidden_size / (tensor if parallel.enable_sequence_parallel else 1)
    kept = running = 0.0
    for layer in range(model.num_hidden_layers):
        saved = _saved_by_policy(model, layer, d, tensor, context)
        kept += saved[config.activation_checkpointing]
        running = max(running, saved["none"])
    if config.optimizer is None:
        kept = 0.0
    blocks = positions * size * (kept * _microbatches_held(config) + running)
    hidden = positions * model.hidden_size * (size + FLOAT32)  # the head's input, and its gradient
    num_outputs = model.vocab_size if config.head == "logprobs" else 1
    logits = 4 * size * min(config.logprob_chunk_tokens, positions) * num_outputs / tensor
    return int(blocks + hidden + logits + _gathered(config, size))


def _microbatches_held(config: TrainerConfig) -> float:
    """Most activations saved on a pipeline's first rank, in units of one microbatch in all blocks: it
    begins with p - 1 forwards, or with v > 1 stages per rank p (v - 1) + 2 (p
    - 1) of one stage each, then alternates forward and backward. So it holds those and one more.
    """
    ranks = config.parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1.0
    per_rank = layouts.num_stages(config) // ranks
    ahead = ranks - 1 if per_rank == 1 else ranks * (per_rank - 1) + 2 * (ranks - 1)
    return (ahead + 1) / (ranks * per_rank)


def _saved_by_policy(model: ModelConfig, layer: int, d: float, tensor: int, context: int) -> dict[str, float]:
    """Elements that a block saves for each position of this rank, by activation_checkpointing.

    d: of a hidden state on this rank. tensor, context: degrees. Context parallelism gathers the
    keys and values of whole rows.
    """
    w = model.head_dim / tensor
    q = model.num_attention_heads * w
    kv = model.num_key_value_heads * w
    gathered = q + 2 * kv * context
    # Four tensors of the hidden size for norms and projections, attention's q, k and v, its output
    # twice, and q and k before norms.
    before_norms = q + kv if model.has_qk_norm else 0
    everything = 4 * d + before_norms + gathered + 2 * q
    if model.has_experts(layer):
        # each expert of a token reads a copy of its hidden state and writes one
        copies = 2 * model.hidden_size + 4 * model.moe_intermediate_size
        everything += model.num_experts_per_tok * copies / tensor
        width = model.num_experts_per_tok * model.moe_intermediate_size / tensor
    else:
        everything += 4 * model.intermediate_size / tensor
        width = model.intermediate_size / tensor
    selective = 2 * d + gathered + q + width
    return {"none": everything, "products": selective + d + width, "selective": selective, "full": d}


def _gathered(config: TrainerConfig, size: int) -> float:
    """Bytes of weights that FSDP has gathered, and of their float32 gradients before the reduction.

    FSDP holds embedding, head and two blocks whole at a time; in a pipeline all gradients until the
    call ends, and by torchtitan's default all weights.
    """
    parallel = config.parallelism
    is_whole = parallel.data_parallel_shard_degree * parallel.context_parallel_degree == 1
    if is_whole and size == FLOAT32 and not config.fsdp_cpu_offload:
        return 0.0
    is_pipeline = parallel.pipeline_parallel_degree > 1
    policy = parallel.fsdp_reshard_after_forward
    keeps_weights = policy == "never" or (policy == "default" and is_pipeline)
    weights = _gathered_elements(config, all_blocks=keeps_weights, only_trained=False)
    gradients = _gathered_elements(config, all_blocks=is_pipeline, only_trained=True)
    return weights * size + gradients * FLOAT32


def _gathered_elements(config: TrainerConfig, *, all_blocks: bool, only_trained: bool) -> int:
    """Elements gathered at the same time: outside the blocks, and all blocks or twice the largest."""
    outside = 0
    blocks = []
    for layer, weights in _held_parts(config):
        elements = 0
        for weight in weights:
            if weight.is_trained or not only_trained:
                elements += weight.count * math.prod(_local_shape(weight, config, gathered=True))
        if layer is None:
            outside += elements
        else:
            blocks.append(elements)
    return outside + (sum(blocks) if all_blocks else 2 * max(blocks, default=0))
