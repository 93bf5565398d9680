"""The fixture of a Tinker server on which the tests of this folder run recipes of tinker-cookbook."""

from collections.abc import Iterator

import pytest
from recipes import PYTHON, Cookbook, serving


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory) -> Iterator[Cookbook]:
    """A Cookbook whose recipes use a Tinker server. The server has the tiny model with random weights."""
    if not PYTHON.is_file():
        pytest.skip("there is no .venv-cookbook; `make cookbook` makes it")
    with serving(tmp_path_factory.mktemp("cookbook")) as made:
        yield made
