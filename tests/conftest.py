"""Fixtures for all tests; being here also puts this folder, with references.py, on the import path."""

import signal

import pytest
from references import save_qwen3

from rl_actors.processes import threads

threads.choose_kernels()  # the references compute here
# A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tied_qwen3(tmp_path_factory) -> str:
    """A Hugging Face directory of transformers' Qwen3 with random weights and tied heads."""
    return save_qwen3(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_qwen3(tmp_path_factory) -> str:
    """The same without tied heads."""
    return save_qwen3(tmp_path_factory.mktemp("untied"), tied=False)
