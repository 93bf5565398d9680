"""The estimate of a rank's memory, compared with the memory that an engine holds. The estimate is exact for parameters,
gradients and optimizer state. For activations it is right within a factor of 1.5.
"""

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from references import ppo_samples
from torch.distributed.pipelining.schedules import _get_warmup_ops
from torch.distributed.tensor import DTensor

from rl_actors import PPO, LoRAConfig, ModelConfig, OptimizerConfig, OptimParams, TrainerConfig
from rl_actors.memory_estimate import _gathered, _held_parts, _microbatches_held, memory

DENSE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": (1,)}
MODELS = {
    "tied": ModelConfig(**DENSE, **HEADS),
    "untied": ModelConfig(**DENSE, **HEADS, tie_word_embeddings=False),
    "Llama": ModelConfig(**DENSE, **HEADS, architecture="llama"),
    "experts": ModelConfig(**DENSE, **HEADS, **EXPERTS),
}


def train(engine, lengths: list[int]) -> None:
    engine.forward_backward(ppo_samples(lengths), PPO())
    engine.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=9))
    engine.forward_backward(ppo_samples(lengths), PPO())


def held(engine) -> tuple[int, ...]:
    """Bytes of parameters, gradients, optimizer state and buffers."""
    parameters = list(engine.built.model.parameters())
    states = [state for part in engine.built.optimizers.optimizers for state in part.state.values()]
    grads = [p.grad for p in parameters if p.grad is not None]
    moments = [tensor for state in states for tensor in state.values()]
    kinds = (parameters, grads, moments, engine.built.model.buffers())
    return tuple(sum(local(tensor).nbytes for tensor in tensors) for tensors in kinds)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("name", MODELS)
def test_parameters_gradients_and_optimizer_are_exact(make_engine, name):
    engine = make_engine("", model=MODELS[name])
    train(engine, [40, 7, 30])
    expected = memory(engine.config)
    assert held(engine) == (expected.parameters, expected.gradients, expected.optimizer, expected.buffers)


@pytest.mark.parametrize(
    "lora",
    [LoRAConfig(rank=4, train_mlp=False), LoRAConfig(rank=3, train_attn=False), LoRAConfig(rank=5, train_unembed=True)],
    ids=["attention", "mlp", "everything"],
)
def test_only_adapters_have_gradients_and_optimizer_state(make_engine, untied_qwen3, lora):
    engine = make_engine(untied_qwen3, lora=lora)
    train(engine, [40, 7, 30])
    expected = memory(engine.config)
    assert held(engine) == (expected.parameters, expected.gradients, expected.optimizer, expected.buffers)
    assert expected.gradients < 0.3 * expected.parameters


def test_a_trainer_that_only_infers_holds_neither_gradients_nor_optimizer_state(make_engine, tied_qwen3):
    engine = make_engine(optimizer=None)
    engine.forward(ppo_samples([40, 7, 30]), PPO())
    engine.discard_gradients()
    expected, trains = memory(engine.config), memory(replace(engine.config, optimizer=OptimizerConfig()))
    assert held(engine) == (expected.parameters, 0, 0, expected.buffers)
    assert (expected.gradients, expected.optimizer) == (0, 0) and expected.activations < trains.activations


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize(("num_ranks", "less"), [(2, (1, 1)), (3, (1, 1)), (3, (2, 1)), (4, (1, 2)), (4, (0, 0))])
def test_the_fullest_rank_of_a_pipeline_holds_the_blocks_that_torchtitan_gives_it(num_ranks, less, schedule):
    # Imported here, because the engine must set torchtitan's device before other modules of torchtitan are imported.
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    # With this large vocabulary the rank with the most memory is the first or the last rank.
    config = TrainerConfig(model=replace(MODELS["untied"], num_hidden_layers=14, vocab_size=151_936))
    parallel = config.parallelism
    parallel.pipeline_parallel_degree, parallel.pipeline_parallel_schedule = num_ranks, schedule
    parallel.pipeline_parallel_first_stage_less_layers, parallel.pipeline_parallel_last_stage_less_layers = less
    stages = _generate_llm_fqn_per_model_part(num_ranks * (1 if schedule == "1F1B" else 2), 14, *less)
    ranks = [list(chain.from_iterable(stages[rank::num_ranks])) for rank in range(num_ranks)]
    blocks = [f"layers.{layer}" for layer, _ in _held_parts(config) if layer is not None]
    most = max(len(rank) - ("norm" in rank) for rank in (ranks[0], ranks[-1]))
    assert len(blocks) + 1 == most
    assert blocks in ([name for name in rank if "layers" in name] for rank in (ranks[0], ranks[-1]))


def of_layout(**degrees) -> TrainerConfig:
    config = TrainerConfig(model=replace(MODELS["untied"], num_hidden_layers=14), max_sequence_length=64)
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    config.tokens_per_row = 128 * config.parallelism.context_parallel_degree
    return config


@pytest.mark.parametrize(("num_ranks", "of_rank"), [(2, 1), (2, 2), (4, 1), (4, 2), (2, 4)])
def test_the_first_rank_of_a_pipeline_holds_the_activations_of_torchs_warm_up_and_of_one_more_forward(
    num_ranks, of_rank
):
    config = of_layout(pipeline_parallel=num_ranks)
    if of_rank > 1:
        config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
        # 14 blocks, and the embedding and the head count as one block each.
        config.parallelism.pipeline_parallel_layers_per_stage = -(-16 // (num_ranks * of_rank))
    started = _get_warmup_ops(0, of_rank, num_ranks, num_ranks, 8 * num_ranks) if of_rank > 1 else num_ranks - 1
    assert _microbatches_held(config) == pytest.approx((started + 1) / (num_ranks * of_rank))
    if of_rank == 1:
        assert memory(config).activations == memory(of_layout()).activations


def test_context_parallelism_holds_the_keys_and_values_of_whole_rows():
    one, two = of_layout(), of_layout(context_parallel=2)
    model = one.model
    # Bytes of the other rank's keys and values, for its 128 positions, in 14 blocks and in the block that is recomputed.
    others = 128 * 15 * 4 * 2 * model.num_key_value_heads * model.head_dim
    assert memory(two).activations - memory(one).activations == int(_gathered(two, 4)) + others


def test_a_pipeline_keeps_gathered_weights_and_unsharded_gradients_until_the_call_ends():
    config = of_layout(pipeline_parallel=2, data_parallel_shard=2)
    held = sum(weight.count * math.prod(weight.shape) for _, part in _held_parts(config) for weight in part)
    assert _gathered(config, 4) == 8 * held
    config.parallelism.fsdp_reshard_after_forward = "always"
    assert 4 * held < _gathered(config, 4) < 6 * held
    config.parallelism.pipeline_parallel_degree = 1
    assert _gathered(config, 4) < 4 * held


def peak_of(call) -> int:
    """The most bytes that the call holds at once, beyond the bytes that were allocated before the call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("recomputed", ["none", "products", "selective", "full"])
@pytest.mark.parametrize("name", ["tied", "experts"])
def test_activations_are_estimated_within_a_factor_of_1_5(make_engine, name, recomputed):
    """For the models "tied" and "experts" the estimate was 1.01 and 1.02 times the measured peak with "none", 1.05 and 1.09 times with
    "selective", 1.02 and 1.14 times with "products", and 0.77 and 0.84 times with "full".
    """
    engine = make_engine("", model=MODELS[name], rows_per_microbatch=32, activation_checkpointing=recomputed)
    samples = ppo_samples([64] * 32)
    train(engine, [64] * 32)  # so that gradients exist before the measured call
    measured, estimated = peak_of(lambda: engine.forward_backward(samples, PPO())), memory(engine.config).activations
    print(f"{name}, {recomputed}: measured {measured:,}, estimated {estimated:,}, ratio {estimated / measured:.2f}")
    assert 1 / 1.5 < estimated / measured < 1.5


def test_expert_parallelism_reduces_only_what_fsdp_gathers():
    held = []
    for expert in (1, 2, 4):
        config = TrainerConfig(model=replace(MODELS["experts"], num_experts=8))
        config.parallelism.data_parallel_shard_degree, config.parallelism.expert_parallel_degree = 4, expert
        held.append(memory(config))
    assert held[0].parameters == held[1].parameters == held[2].parameters
    # Without expert parallelism FSDP gathers all experts of a block. With expert parallelism FSDP gathers only the rank's own experts.
    assert held[0].activations > held[1].activations > held[2].activations
