"""Engines in this process. A process has one process group, so all engines of the session are built over the same."""

import os

import pytest
import torch
import torch.distributed as dist

from rl_actors.config import ModelConfig, TrainerConfig
from rl_actors.engine.train_engine import TrainEngine


@pytest.fixture(scope="session")
def process_group():
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    former = {name: os.environ.get(name) for name in rank}
    os.environ.update(rank)
    num_threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(num_threads)
    for name, value in former.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture
def make_engine(process_group, tied_qwen3):
    """make_engine(hf_path=..., any other field of TrainerConfig) -> TrainEngine with those weights; packs rows of 64."""

    def make(hf_path: str = tied_qwen3, **fields):
        model = fields.pop("model", None) or ModelConfig.from_hf(hf_path)
        limits = {"max_sequence_length": 64, "tokens_per_row": 64, "rows_per_microbatch": 2}
        return TrainEngine(TrainerConfig(model=model, hf_path=hf_path, **{**limits, **fields}))

    return make
