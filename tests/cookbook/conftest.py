"""A Tinker server for the recipes in this folder."""

from collections.abc import Iterator

import pytest
from recipes import PYTHON, Cookbook, serving


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory) -> Iterator[Cookbook]:
    """A Cookbook whose recipes use a server of the tiny model with random weights."""
    if not PYTHON.is_file():
        pytest.skip("there is no .venv-cookbook; `make cookbook` makes it")
    with serving(tmp_path_factory.mktemp("cookbook")) as made:
        yield made
