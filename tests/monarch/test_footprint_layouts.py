"""The memory arithmetic of sharded layouts against the shards of real ranks, with dimensions that do not divide evenly."""

import asyncio

import pytest
import support
from references import ppo_samples

from rl_actors import PPO, MemoryTransport, ModelConfig, OptimParams, TrainerClient, TrainerConfig
from rl_actors.footprint import memory
from rl_actors.meshes import spawn_processes

MODEL = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
DENSE = ModelConfig(**MODEL, **HEADS, tie_word_embeddings=False)
EXPERTS = ModelConfig(**MODEL, **HEADS, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40)


@pytest.mark.parametrize(
    ("model", "shard", "tensor"),
    [
        pytest.param(DENSE, 2, 1, id="FSDP2"),
        pytest.param(EXPERTS, 2, 1, id="experts, FSDP2"),
        pytest.param(DENSE, 2, 2, id="FSDP2 x TP2", marks=pytest.mark.slow),
    ],
)
def test_parameters_gradients_and_optimizer_of_the_fullest_rank_are_exact(model, shard, tensor):
    config = TrainerConfig(model=model, max_sequence_length=64, tokens_per_row=64)
    config.parallelism.data_parallel_shard_degree = shard
    config.parallelism.tensor_parallel_degree = tensor
    processes = asyncio.run(spawn_processes("footprint", shard * tensor))
    mesh = processes.mesh.spawn("footprint", support.TestTrainer, config, MemoryTransport())
    try:
        trainer = TrainerClient(mesh, name="footprint")
        samples = ppo_samples([40, 7, 30])
        trainer.forward_backward(samples, loss=PPO()).result()
        trainer.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=9)).result()
        trainer.forward_backward(samples, loss=PPO()).result()
        held = [values for _, values in mesh.held_bytes.call().get(timeout=60).items()]
        trainer.close().result()
    finally:
        asyncio.run(processes.stop())
    expected = memory(config)
    assert tuple(map(max, zip(*held, strict=True))) == (
        expected.parameters,
        expected.gradients,
        expected.optimizer,
        expected.buffers,
    )
