"""Loading, training, push and export give the same numbers in two processes as in one process.

The models have experts, adapters, or a vocabulary whose size is odd.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_work import fork_processes
from references import random_samples, save_random
from safetensors.torch import load_file
from test_hf import BASE, MOE, SHAPES

from rl_actors.config import LoRAConfig, TrainerConfig
from rl_actors.types import OptimParams

SAMPLES = random_samples([31, 7, 13, 40], seed=1)
LORA = LoRAConfig(rank=4, train_unembed=True)
CASES = {
    "experts": (MOE, LoRAConfig(), "data_parallel_shard"),
    "adapters": (BASE, LORA, "data_parallel_shard"),
    "only adapters pushed": (BASE, replace(LORA, sync="adapter"), "data_parallel_shard"),
    "only adapters pushed, over tensor parallelism": (BASE, replace(LORA, sync="adapter"), "tensor_parallel"),
    "a vocabulary of odd size, over tensor parallelism": (SHAPES["odd vocabulary"], LoRAConfig(), "tensor_parallel"),
}


def numbers(engine, directory: Path) -> dict:
    """Train two steps and export. Returns the grad_norm of each step, and the tensors that a push publishes.

    Each tensor is whole: it is gathered from the shards of all ranks.
    """
    history = []
    for _ in range(2):
        engine.forward_backward(SAMPLES, "cross_entropy")
        history.append(engine.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=50.0)).grad_norm)
    export = engine.export_lora if engine.config.lora.syncs_adapter else engine.export_hf
    export(str(directory / "export"))
    pushed = engine.hf_state_dict()
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in pushed.items()}
    return {"grad_norms": history, "pushed": {name: x.clone() for name, x in whole.items()}}


def child(rank: int, directory: str, path: str, lora: LoRAConfig, layout: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    from rl_actors.engine.train_engine import TrainEngine

    config = TrainerConfig(hf_path=path, lora=lora, max_sequence_length=64, tokens_per_row=64)
    setattr(config.parallelism, f"{layout}_degree", 2)
    torch.save(numbers(TrainEngine(config), Path(directory)), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_load_train_push_and_export_like_one_process(make_engine, tmp_path, case):
    model, lora, layout = CASES[case]
    path = save_random(tmp_path / "base", model)
    expected = numbers(make_engine(path, lora=lora), tmp_path)
    (tmp_path / "export").rename(tmp_path / "expected")
    fork_processes(child, (str(tmp_path), path, lora, layout), 2)
    file = "adapter_model.safetensors" if lora.syncs_adapter else "model.safetensors"
    exported, reference = (load_file(tmp_path / name / file) for name in ("export", "expected"))
    assert exported.keys() == reference.keys()
    for rank in (0, 1):
        actual = torch.load(tmp_path / f"{rank}.pt")
        assert actual["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
        assert actual["pushed"].keys() == reference.keys()  # every rank has all tensors
        assert all(torch.equal(actual["pushed"][name], exported[name]) for name in exported)
    assert all(torch.allclose(exported[name], reference[name], rtol=1e-4, atol=1e-4) for name in reference)
