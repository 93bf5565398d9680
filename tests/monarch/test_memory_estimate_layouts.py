"""The estimate of memory under sharded layouts, compared with the shards of real ranks. Some dimensions are not multiples of the number of ranks."""

from dataclasses import replace

import pytest
import support
from references import ppo_samples
from waiting import GUARD

from rl_actors import PPO, MemoryTransport, ModelConfig, OptimParams, TrainerClient, TrainerConfig
from rl_actors.layouts import row_multiple
from rl_actors.memory_estimate import memory

MODEL = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
DENSE = ModelConfig(**MODEL, **HEADS, tie_word_embeddings=False)
TIED = replace(DENSE, tie_word_embeddings=True)
EXPERTS = ModelConfig(**MODEL, **HEADS, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40)
SIX_EXPERTS = replace(EXPERTS, num_experts=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        pytest.param(TIED, {"data_parallel_shard": 2}, id="tied, FSDP2"),
        pytest.param(DENSE, {"data_parallel_shard": 2}, id="FSDP2"),
        pytest.param(EXPERTS, {"data_parallel_shard": 2}, id="experts, FSDP2"),
        pytest.param(DENSE, {"context_parallel": 2}, id="CP2"),
        pytest.param(DENSE, {"pipeline_parallel": 2}, id="PP2"),
        pytest.param(EXPERTS, {"tensor_parallel": 2}, id="experts, TP2"),
        pytest.param(
            SIX_EXPERTS,
            {"data_parallel_shard": 2, "expert_parallel": 2},
            id="experts, FSDP2, EP2",
        ),
        pytest.param(DENSE, {"data_parallel_shard": 2, "tensor_parallel": 2}, id="FSDP2 x TP2"),
    ],
)
def test_every_estimate_but_that_of_activations_is_the_exact_maximum_over_the_ranks(ranks, model, degrees):
    config = TrainerConfig(model=model, max_sequence_length=64)
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    config.tokens_per_row = row_multiple(config)
    mesh = ranks(config.num_processes()).spawn("memory", support.TestTrainer, config, MemoryTransport())
    trainer = TrainerClient(mesh, name="memory")
    samples = ppo_samples([40, 7, 30])
    trainer.forward_backward(samples, loss=PPO()).result()
    trainer.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=9)).result()
    trainer.forward_backward(samples, loss=PPO()).result()
    held = [values for _, values in mesh.held_bytes.call().get(timeout=GUARD).items()]
    trainer.close().result()
    fullest = tuple(max(of_ranks) for of_ranks in zip(*held, strict=True))
    expected = memory(config)
    assert fullest == (expected.parameters, expected.gradients, expected.optimizer, expected.buffers)
