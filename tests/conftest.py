"""Fixtures for all tests.

Because this file exists, pytest puts this folder on the import path, so tests can import references.py.
"""

import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from references import save_qwen3
from xdist.scheduler import LoadScopeScheduling

from controllers.program import launch
from rl_actors import ModelConfig, TrainerConfig
from rl_actors.processes import threads

ROOT = Path(__file__).parents[1]
threads.choose_kernels()  # must run before references.py computes anything in this process
# A background job of a shell ignores SIGINT, and the programs that it starts inherit this. Tests start programs
# and interrupt them with SIGINT. So this process, which may be a background job, stops ignoring SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFile(LoadScopeScheduling):
    """Gives all tests of a file to the same worker of pytest-xdist.

    All tests of the folder monarch/ go to one worker, because they share actors, and so do all of layouts, because
    layout_work.py starts their ranks from one process that has imported the engine.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.split("::")[0])


@functools.cache
def scope_of(file: str) -> str:
    if file.startswith("tests/monarch/"):
        return "tests/monarch"
    return "layouts" if "from layout_work import" in (ROOT / file).read_text() else file


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


@pytest.fixture
def command_line(monkeypatch, tmp_path, capsys):
    """command_line("--dry-run") runs `python -m controllers.grpo --dry-run` in this process, and returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["controllers.grpo", *map(str, arguments)])
        try:
            launch.start_loop("controllers.grpo")
            status = 0
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def dry_run(command_line):
    """dry_run(*arguments of controllers.grpo) -> the JSON that `--dry-run` prints."""

    def run(*arguments: object) -> dict:
        status, out, err = command_line(*arguments, "--dry-run")
        assert status == 0, err
        return json.loads(out)

    return run


@pytest.fixture(scope="session")
def tied_qwen3(tmp_path_factory) -> str:
    """A Hugging Face directory of transformers' Qwen3 with random weights and a tied head."""
    return save_qwen3(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_qwen3(tmp_path_factory) -> str:
    """A Hugging Face directory like `tied_qwen3`, but the head of the model is not tied."""
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
    """A function: make_engine(hf_path=..., any other field of TrainerConfig) makes a TrainEngine with the weights of
    hf_path.

    Unless a field says otherwise, the engine packs samples into rows of at most 64 tokens.
    """

    from rl_actors.engine.train_engine import TrainEngine

    def make(hf_path: str = tied_qwen3, **fields):
        model = fields.pop("model", None) or ModelConfig.from_hf(hf_path)
        limits = {"max_sequence_length": 64, "tokens_per_row": 64, "rows_per_microbatch": 2}
        return TrainEngine(TrainerConfig(model=model, hf_path=hf_path, **{**limits, **fields}))

    return make
