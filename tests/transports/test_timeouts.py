"""Every phase of a push and a pull ends in time, with an error that names the phase and who waited. test_slots.py has lock and write."""

import asyncio
import os
import re

import pytest
import torch
from test_tcp import IndexHere

from rl_actors import WeightsConfig
from rl_actors.transports import base
from rl_actors.transports.base import LoadedTensors, find, publish
from rl_actors.vllm import pull

ONE_RANK = {"stream": "run", "version": 3, "rank": 0, "gather": lambda value: [value]}


class SilentIndex(IndexHere):
    async def put_object(self, key, value):
        await asyncio.Event().wait()

    get_object = put_object


def test_an_index_that_does_not_answer_is_named_with_the_phase(monkeypatch):
    monkeypatch.setattr(base, "INDEX_TIMEOUT", 0.05)
    silent = SilentIndex(WeightsConfig())
    with pytest.raises(TimeoutError, match=r"push of version 3: commit by rank 0 was not done within 0\.05 s"):
        asyncio.run(publish(silent, {"w": torch.ones(3)}, **ONE_RANK))
    silent.get_object = lambda key: silent.put_object(key, None)
    with pytest.raises(TimeoutError, match=r"pull of version 3: question to the index was not done within 0\.05 s"):
        asyncio.run(find(silent, 3, 10.0))


class SlowEngine:
    """A vLLM engine whose workers do not answer one call."""

    def __init__(self, silent: str) -> None:
        self.silent = silent
        self.calls: list[str] = []

    def collective_rpc(self, method, timeout=None, args=()):
        self.calls.append(method)
        if method == self.silent:
            raise TimeoutError(f"RPC call to {method} timed out.")
        return [("memory", "", 12, 0.0)] if method == "open_version" else [0.0]


@pytest.mark.parametrize("silent, phase", [("open_version", "read"), ("load_version", "load")])
def test_a_worker_that_does_not_answer_is_a_timeout_that_names_the_phase_and_closes_the_version(silent, phase):
    engine = SlowEngine(silent)
    source = LoadedTensors({"w": torch.ones(3)}, key="run/3", timeout=5.0)
    message = rf"pull of run/3: .*pid {os.getpid()}\)?: {phase} was not done within 5 s \({re.escape('RPC call to ' + silent)}"
    with pytest.raises(TimeoutError, match=message), pull.opened(engine, source):
        pull.WholeWeights().load(engine, source)
    assert engine.calls[-1] == "close_version"
