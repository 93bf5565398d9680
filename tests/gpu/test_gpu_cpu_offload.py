"""FSDP's CPU offload on a GPU. The steps are nearly equal to those of a trainer without the offload, and the weights are on the host."""

import math
from dataclasses import replace

import pytest
import torch

from rl_actors import CrossEntropy, ModelConfig, OptimParams, Sample, TrainerConfig, memory_estimate

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=64)


def steps(engine) -> list[tuple[float, float]]:
    found = []
    for seed in range(3):
        rows = torch.randint(0, MODEL.vocab_size, (4, 257), generator=torch.Generator().manual_seed(seed)).tolist()
        output = engine.forward_backward([Sample.from_tokens(row[:1], row[1:]) for row in rows], CrossEntropy())
        result = engine.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=1024.0))
        found.append((output.metrics["loss:sum"], result.grad_norm))
    return found


def test_steps_are_those_of_a_trainer_on_the_gpu_and_the_state_is_on_the_host(monkeypatch):
    from rl_actors.engine.train_engine import TrainEngine

    process = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in process.items():
        monkeypatch.setenv(name, str(value))
    usual = TrainerConfig(model=MODEL, compute_dtype="bfloat16", max_sequence_length=256, tokens_per_row=512)
    expected = steps(TrainEngine(usual))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = TrainEngine(replace(usual, fsdp_cpu_offload=True))
    for (loss, norm), (other_loss, other_norm) in zip(expected, steps(engine), strict=True):
        print(f"loss {loss:.6f} and {other_loss:.6f}, gradient norm {norm:.6f} and {other_norm:.6f}")
        assert math.isclose(loss, other_loss, rel_tol=1e-3) and math.isclose(norm, other_norm, rel_tol=1e-2)
    assert {parameter.device.type for parameter in engine.built.model.parameters()} == {"cpu"}
    [optimizer] = engine.built.optimizers.optimizers
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments and {tensor.device.type for tensor in moments} == {"cpu"}
    assert all(tensor.device.type == "cpu" for tensor in engine.hf_state_dict().values())
    held = torch.cuda.memory_allocated() - before
    print(f"{held:,} bytes of the GPU; the weights take {memory_estimate.memory(usual).parameters:,}")
    assert held < memory_estimate.memory(usual).parameters
    torch.distributed.destroy_process_group()
