"""Tests that a trainer on a GPU starts with the random weights that torchtitan draws on a CPU from the same seed."""

import pytest
import torch

from rl_actors import ModelConfig, TrainerConfig

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64)


def test_a_trainer_on_a_gpu_starts_with_the_weights_that_torchtitan_draws_on_a_cpu(monkeypatch):
    from rl_actors.engine.build import qwen3_config
    from rl_actors.engine.train_engine import TrainEngine

    process = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in process.items():
        monkeypatch.setenv(name, str(value))
    engine = TrainEngine(TrainerConfig(model=MODEL, max_sequence_length=64, tokens_per_row=64, seed=3))
    with torch.device("meta"):
        expected = qwen3_config(MODEL).build()
    expected.to_empty(device="cpu")
    torch.default_generator.manual_seed(3)
    with torch.no_grad():
        expected.init_weights()
    drawn = {name: parameter.full_tensor() for name, parameter in engine.built.model.named_parameters()}
    assert {parameter.device.type for parameter in drawn.values()} == {"cuda"}
    assert drawn.keys() == dict(expected.named_parameters()).keys()
    assert all(torch.equal(drawn[name].cpu(), parameter) for name, parameter in expected.named_parameters())
    torch.distributed.destroy_process_group()
