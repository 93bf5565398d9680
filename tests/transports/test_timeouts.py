"""Every phase of a push or a pull of weights has a time limit. A phase that takes longer raises an error that names the phase.

test_slots.py tests the phases lock and write.
"""

import asyncio
import os

import pytest
import torch
from test_served_slots import IndexHere

from rl_actors import WeightsConfig
from rl_actors.transports import base
from rl_actors.transports.base import LoadedTensors, publish, wait_for_manifest
from rl_actors.transports.slots import VersionGoneError
from rl_actors.vllm import pull, weights


class NoPickleError(Exception):
    """An error that cannot be unpickled, because its `args` lack the second argument of the constructor."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second

    def __repr__(self) -> str:
        return f"NoPickleError({self.args[0]}, {self.second})"


ONE_RANK = {"stream": "run", "version": 3, "rank": 0, "gather": lambda value: [value]}


class SilentIndex(IndexHere):
    async def put_object(self, key, value):
        await asyncio.Event().wait()

    get_object = put_object


def test_if_the_index_does_not_answer_the_error_names_the_phase(monkeypatch):
    monkeypatch.setattr(base, "INDEX_TIMEOUT", 0.05)
    silent = SilentIndex(WeightsConfig())
    with pytest.raises(TimeoutError, match=r"push of version 3: commit by rank 0 was not done within 0\.05 s"):
        asyncio.run(publish(silent, {"w": torch.ones(3)}, **ONE_RANK))
    silent.get_object = lambda key: silent.put_object(key, None)
    with pytest.raises(TimeoutError, match=r"pull of version 3: question to the index was not done within 0\.05 s"):
        asyncio.run(wait_for_manifest(silent, 3, 10.0))


class Workers:
    """A fake of a vLLM engine with two workers. Worker 0 raises `error` in the call that `failing` names.

    If the error's text contains TIMED_OUT, worker 0 raises nothing. Instead collective_rpc raises the error, as vLLM does if a
    worker does not answer.
    """

    def __init__(self, failing: str, error: Exception) -> None:
        self.failing, self.error = failing, error
        self.workers = [weights.WeightsExtension(), weights.WeightsExtension()]
        for worker in self.workers:
            worker.load_version = lambda: 0.5
        self.calls: list[str] = []

    def collective_rpc(self, method, timeout=None, args=()):
        assert method == "answer" and timeout == 5.0 + pull.ANSWER_SECONDS  # longer than a worker's own timeout of 5 s
        self.calls.append(args[0])
        if args[0] == self.failing:
            if pull.TIMED_OUT in str(self.error):
                raise self.error
            setattr(self.workers[0], args[0], self.fail)
        return [worker.answer(*args) for worker in self.workers]

    def fail(self, *_):
        raise self.error


SOURCE = LoadedTensors({"w": torch.ones(3)}, stream="run", version=3, timeout=5.0)


@pytest.mark.parametrize(
    "failing, phase", [("open_version", "read"), ("load_version", "load"), ("close_version", "close")]
)
# vLLM raises TimeoutError if its engine core is in the caller's process. An engine core in its own process sends only the text of the error,
# and vLLM raises an Exception with this text.
@pytest.mark.parametrize("error", [TimeoutError, Exception])
def test_after_a_silent_worker_the_engine_gets_no_further_call_and_the_error_names_the_phase(failing, phase, error):
    engine = Workers(failing, error(f"Call to collective_rpc method failed: {pull.TIMED_OUT}"))
    message = rf"pull of run/3: .*pid {os.getpid()}\)?: {phase} was not done by every worker within 15 s"
    with pytest.raises(pull.SilentWorkerError, match=message), pull.opened(engine, SOURCE):
        pull.WholeWeights().load(engine, SOURCE)
    assert engine.calls[-1] == failing


@pytest.mark.parametrize("failing", ["open_version", "load_version"])
@pytest.mark.parametrize("error", [VersionGoneError("slot 0 is gone"), NoPickleError(1, 2)])
def test_when_all_workers_have_answered_the_error_of_one_is_raised_and_the_version_is_closed(failing, error):
    engine = Workers(failing, error)
    expected = VersionGoneError if isinstance(error, VersionGoneError) else RuntimeError
    with pytest.raises(expected, match=r"slot 0 is gone|NoPickleError\(1, 2\)") as raised, pull.opened(engine, SOURCE):
        pull.WholeWeights().load(engine, SOURCE)
    assert raised.value.__notes__ == ["in vLLM's worker of rank 0"]
    assert engine.calls[-1] == "close_version"
    assert [worker.version for worker in engine.workers] == [None, None]
