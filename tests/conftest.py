"""Fixtures for all tests. Because of this file pytest puts the folder on the import path, so tests can import references.py."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from references import save_qwen3
from xdist.scheduler import LoadScopeScheduling

from rl_actors import ModelConfig, TrainerConfig
from rl_actors.processes import threads

threads.choose_kernels()  # references.py computes in this process
# As a background job of a shell this process would ignore SIGINT, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFile(LoadScopeScheduling):
    """Gives whole files to a worker of pytest-xdist, and the folder monarch/ as one, because its tests share actors."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "tests/monarch" if file.startswith("tests/monarch/") else file


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


@pytest.fixture(scope="session")
def tied_qwen3(tmp_path_factory) -> str:
    """A Hugging Face directory of transformers' Qwen3 with random weights and tied heads."""
    return save_qwen3(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_qwen3(tmp_path_factory) -> str:
    """The same without tied heads."""
    return save_qwen3(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def process_group():
    """A process group of one rank. All engines in this process use it."""
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
    """make_engine(hf_path=..., any other field of TrainerConfig) -> TrainEngine with those weights. It packs samples into rows of 64 tokens."""

    from rl_actors.engine.train_engine import TrainEngine

    def make(hf_path: str = tied_qwen3, **fields):
        model = fields.pop("model", None) or ModelConfig.from_hf(hf_path)
        limits = {"max_sequence_length": 64, "tokens_per_row": 64, "rows_per_microbatch": 2}
        return TrainEngine(TrainerConfig(model=model, hf_path=hf_path, **{**limits, **fields}))

    return make
