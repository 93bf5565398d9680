"""FSDP's CPU offload: the steps are equal to those of a trainer that keeps weights, gradients and optimizer state on its device.

Without a GPU the device's memory is the host's memory, so the trainer refuses fsdp_cpu_offload. Without a GPU torch also
cannot pin memory. The tests that compare steps remove the refusal and the pinning, so that FSDP runs its offload on a CPU.
tests/gpu tests the offload on a GPU.
"""

import pytest
import torch
from layout_work import MODELS, STEP, TRAINED, layout, samples_with
from layout_work import make_engine as engine_of_layout
from references import ppo_samples
from torch.distributed.fsdp import CPUOffloadPolicy

from rl_actors import ModelConfig, TrainerConfig, memory_estimate
from rl_actors.config import LoRAConfig
from rl_actors.engine.cpu import Machine
from rl_actors.losses import PPO


def steps(engine, samples) -> list:
    found = []
    for _ in range(2):
        found.append(engine.forward_backward(samples, PPO()).metrics)
        found.append(engine.optim_step(STEP).grad_norm)
    return found


def without_pinning(patch) -> list[CPUOffloadPolicy]:
    """Remove the refusal and the pinning of memory. Returns a list, to which each offload policy is added when it is made."""
    made = []

    def unpinned() -> CPUOffloadPolicy:
        made.append(CPUOffloadPolicy(pin_memory=False))
        return made[-1]

    patch.setattr(Machine, "require_cpu_offload", lambda self: None)
    patch.setattr("torchtitan.distributed.fsdp.CPUOffloadPolicy", unpinned)
    return made


@pytest.mark.parametrize("fields", [{}, {"compute_dtype": "bfloat16"}], ids=str)
def test_steps_equal_those_of_a_trainer_without_the_offload(make_engine, monkeypatch, fields):
    samples = ppo_samples([31, 7])
    expected = steps(make_engine(**fields), samples)
    made = without_pinning(monkeypatch)
    assert steps(make_engine(fsdp_cpu_offload=True, **fields), samples) == expected and made


def in_two_ranks(path, parallelism, fields):
    """(steps without the offload, steps with the offload) of this rank."""
    samples = samples_with(*TRAINED)
    expected = steps(engine_of_layout(path, parallelism, fields), samples)
    with pytest.MonkeyPatch.context() as patch:
        without_pinning(patch)
        return expected, steps(engine_of_layout(path, parallelism, {**fields, "fsdp_cpu_offload": True}), samples)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tied", "untied, drawn", "adapters"])
def test_steps_of_two_ranks_equal_those_without_the_offload(run, directory_of, model):
    for expected, actual in run(2, in_two_ranks, directory_of(model), layout(shard=2), MODELS[model][1]):
        assert actual == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the offload is possible")
def test_a_machine_without_a_gpu_refuses_the_offload(make_engine):
    with pytest.raises(ValueError, match="trainer.fsdp_cpu_offload=True on a machine without a GPU"):
        make_engine(fsdp_cpu_offload=True)


@pytest.mark.parametrize(
    ("degrees", "fields", "message"),
    [
        (
            {"tensor_parallel": 2},
            {},
            "fsdp_cpu_offload=True with parallelism.tensor_parallel_degree=2: refused, because no test",
        ),
        ({}, {"float8": True}, "fsdp_cpu_offload=True with float8=True: refused"),
        (
            {},
            {"model": ModelConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)},
            "fsdp_cpu_offload=True with model.num_experts=4: refused",
        ),
    ],
    ids=["tensor parallel", "float8", "experts"],
)
def test_an_untested_combination_with_the_offload_is_refused(degrees, fields, message):
    config = TrainerConfig(fsdp_cpu_offload=True, **fields)
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_the_memory_estimate_of_the_device_leaves_out_what_the_offload_keeps_on_the_host():
    usual = memory_estimate.memory(TrainerConfig(compute_dtype="bfloat16"))
    held = memory_estimate.memory(TrainerConfig(compute_dtype="bfloat16", fsdp_cpu_offload=True))
    assert held.parameters == usual.parameters and held.optimizer == usual.optimizer
    on_host = held.parameters + held.gradients + held.optimizer
    assert held.total == held.buffers + held.activations == usual.total - on_host


def test_steps_that_train_adapters_equal_those_without_the_offload(make_engine, monkeypatch):
    samples, lora = ppo_samples([31, 7]), LoRAConfig(rank=2)
    expected = steps(make_engine(lora=lora), samples)
    without_pinning(monkeypatch)
    assert steps(make_engine(lora=lora, fsdp_cpu_offload=True), samples) == expected
