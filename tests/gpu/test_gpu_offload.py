"""Tests of offload, which moves a trainer's tensors from the GPU to host memory. The model has the shape of Qwen3-0.6B.

The tests check the freed memory, the speed compared with a plain copy to pinned memory, and that the next step has the
same bits as without an offload.
"""

import time

import pytest
import torch

from rl_actors import CrossEntropy, ModelConfig, OptimParams, Sample, TrainerConfig, memory_estimate

pytestmark = pytest.mark.gpu

GIB = 1 << 30
PARAMS = OptimParams(learning_rate=1e-3, grad_divisor=2048.0)


@pytest.fixture
def engine(monkeypatch, tiny_run):
    from rl_actors.engine.train_engine import TrainEngine

    # `tiny_run` trains on the same GPU. The tests measure free memory and the speed of copies, so this run must have ended.
    tiny_run[0].wait()
    process = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in process.items():
        monkeypatch.setenv(name, str(value))
    config = TrainerConfig(
        model=ModelConfig(),
        compute_dtype="bfloat16",
        activation_checkpointing="selective",
        max_sequence_length=1024,
        tokens_per_row=1024,
        deterministic=True,
    )
    yield TrainEngine(config)
    torch.distributed.destroy_process_group()


def samples(seed: int) -> list[Sample]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, ModelConfig().vocab_size, (2, 1025), generator=draw).tolist()
    return [Sample.from_tokens(row[:1], row[1:]) for row in rows]


def step(engine, seed: int = 0) -> tuple[dict[str, float], float]:
    metrics = engine.forward_backward(samples(seed), CrossEntropy()).metrics
    return metrics, engine.optim_step(PARAMS).grad_norm


def tensors(engine) -> dict[str, torch.Tensor]:
    model = engine.built.model
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    [optimizer] = engine.built.optimizers.optimizers
    for index, state in enumerate(optimizer.state.values()):
        found |= {f"{index} {name}": value for name, value in state.items()}
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in found.items()}


def copies(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors(engine).items()}


def test_offload_frees_the_estimated_bytes_and_the_next_step_has_the_same_bits(engine):
    step(engine)
    before = copies(engine)
    results = []
    for moves in (False, False, True):
        with torch.no_grad():
            for name, tensor in tensors(engine).items():
                tensor.copy_(before[name])
        if moves:
            engine.forward_backward(samples(1), CrossEntropy())
            assert_memory_is_freed(engine)
            engine.discard_gradients()
            engine.offload()
            engine.onload()
        results.append((step(engine, seed=1), copies(engine)))
    (first, weights), (again, weights_again), (moved, weights_moved) = results
    assert again == first and all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert moved == first and all(torch.equal(weights[name], weights_moved[name]) for name in weights)


def assert_memory_is_freed(engine) -> None:
    estimate = memory_estimate.memory(engine.config)
    expected = estimate.parameters + estimate.buffers + estimate.gradients + estimate.optimizer
    torch.cuda.empty_cache()
    allocated, (free, _) = engine.info().memory_bytes, torch.cuda.mem_get_info()
    moved = engine.offload().num_bytes
    freed, freed_of_device = allocated - engine.info().memory_bytes, torch.cuda.mem_get_info()[0] - free
    print(
        f"bytes: estimated {expected:,}, moved {moved:,}, freed by torch {freed:,}, newly free on the device {freed_of_device:,}"
    )
    for number in (moved, freed, freed_of_device):
        assert abs(number - expected) < 0.05 * expected
    assert engine.info().memory_bytes < 0.05 * expected


def test_offload_and_onload_reach_six_tenths_of_the_speed_of_a_pinned_copy(engine):
    step(engine)
    engine.offload()  # allocates the buffers on the host
    engine.onload()
    bounds = pinned_copies()
    for call, bound in zip((engine.offload, engine.onload), bounds, strict=True):
        move = call()
        print(f"{move.gb_per_second:.1f} GB/s in {move.seconds:.3f} s; pinned copy {bound:.1f} GB/s")
        assert move.gb_per_second > 0.6 * bound and move.buffer_seconds < 0.1 * move.seconds


def pinned_copies() -> tuple[float, float]:
    """(GB/s of a copy of 1 GiB from the device to pinned memory, GB/s of a copy back). Each is the best of five copies."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    best = []
    for target, source in ((host, device), (device, host)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        best.append(GIB / 1e9 / min(seconds))
    return best[0], best[1]
