"""Fixtures for tests of parallel layouts. Each rank of a layout is a process of its own."""

from functools import cache, partial

import pytest
from layout_work import MODELS, run_processes
from references import save_random


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(num_processes, work, *args) returns the result of work(*args) on each rank. See run_processes."""
    return partial(run_processes, tmp_path_factory)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """directory_of(name) returns the path of a directory with random weights of the model MODELS[name].

    The first call for a name makes the directory, and later calls return the same path.
    If MODELS[name] has a seed, the trainer draws the weights from the seed. directory_of then makes no directory and
    returns "".
    """

    @cache
    def path(model: str) -> str:
        config, fields = MODELS[model]
        return "" if "seed" in fields else save_random(tmp_path_factory.mktemp("model"), config)

    return path
