"""A trainer with FSDP's CPU offload computes on the GPU, and keeps its weights and its optimizer state on the host.

In every step its loss and its grad_norm are nearly equal to those of a trainer without the offload.
"""

import math
from dataclasses import replace

import pytest
import torch

from rl_actors import (
    CrossEntropy,
    GeneratorClient,
    GeneratorConfig,
    IndexTransport,
    ModelConfig,
    OptimParams,
    Sample,
    TrainerClient,
    TrainerConfig,
    WeightsConfig,
    memory_estimate,
)
from rl_actors.clients.call import in_background

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=64)


def steps(engine) -> list[tuple[float, float]]:
    """(loss, grad_norm) of three training steps."""
    found = []
    for seed in range(3):
        rows = torch.randint(0, MODEL.vocab_size, (4, 257), generator=torch.Generator().manual_seed(seed)).tolist()
        output = engine.forward_backward([Sample.from_tokens(row[:1], row[1:]) for row in rows], CrossEntropy())
        result = engine.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=1024.0))
        found.append((output.metrics["loss:sum"], result.grad_norm))
    return found


def test_steps_with_the_offload_nearly_equal_those_without_it_and_the_state_is_on_the_host(monkeypatch):
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
        print(
            f"without offload, with offload: loss {loss:.6f}, {other_loss:.6f}; grad_norm {norm:.6f}, {other_norm:.6f}"
        )
        assert math.isclose(loss, other_loss, rel_tol=1e-3) and math.isclose(norm, other_norm, rel_tol=1e-2)
    assert {parameter.device.type for parameter in engine.built.model.parameters()} == {"cpu"}
    [optimizer] = engine.built.optimizers.optimizers
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments and {tensor.device.type for tensor in moments} == {"cpu"}
    assert all(tensor.device.type == "cpu" for tensor in engine.hf_state_dict().values())
    held = torch.cuda.memory_allocated() - before
    print(
        f"the trainer with offload takes {held:,} bytes of the GPU; the weights take {memory_estimate.memory(usual).parameters:,}"
    )
    assert held < memory_estimate.memory(usual).parameters
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_of_two_ranks_reach_a_generator_and_a_directory_that_a_trainer_can_load(tmp_path):
    transport = IndexTransport(WeightsConfig(path="tcp"))
    in_background(transport.open(), "transport").result()
    config = TrainerConfig(
        model=MODEL, compute_dtype="bfloat16", max_sequence_length=256, tokens_per_row=512, fsdp_cpu_offload=True
    )
    config.parallelism.data_parallel_shard_degree = 2
    generator_config = GeneratorConfig(model=MODEL, max_model_len=128, max_num_seqs=8, kv_cache_bytes=64 << 20)
    sequence = list(range(5, 60))
    sample = Sample.from_tokens(sequence[:1], sequence[1:])
    directory = str(tmp_path / "exported")
    try:
        with TrainerClient.spawn(config, transport=transport) as trainer:
            trainer.forward_backward([sample], loss="cross_entropy").result()
            trainer.optim_step(OptimParams(learning_rate=1e-2, grad_divisor=len(sample))).result()
            version = trainer.push_model_state_dict().result()
            [expected] = trainer.forward([sample]).result().logprobs
            trainer.export_hf(directory).result()
            with GeneratorClient.spawn(generator_config, transport=transport) as generator:
                generator.pull_model_state_dict(version).result()
                [served] = generator.compute_logprobs([sequence]).result()
        with TrainerClient.spawn(replace(config, hf_path=directory)) as trainer:
            [loaded] = trainer.forward([sample]).result().logprobs
    finally:
        in_background(transport.close(), "transport").result()
    assert (loaded == expected).all()
    assert (served - expected).abs().max() < 2e-2
