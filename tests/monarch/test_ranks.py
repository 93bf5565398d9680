"""A trainer of two ranks, with SGD: info, signals, traces, is_alive, and refusals by the client.

TrainerClient does not spawn the ranks here. The fixture `mesh` spawns their processes and actors.
"""

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest
import support
import torch
from support import Gate, random_samples
from waiting import GUARD

from rl_actors import MemoryTransport, OptimizerConfig, OptimParams, TrainerClient
from rl_actors.processes.spawn import spawn_processes

PARAMS = OptimParams(learning_rate=1e-2, grad_divisor=96.0)


@pytest.fixture(scope="module")
def mesh():
    config = support.trainer_config(shard=2, optimizer=OptimizerConfig(name="torch.optim:SGD"))
    processes = asyncio.run(spawn_processes("ranks", 2))
    yield processes.mesh.spawn("ranks", support.TestTrainer, config, MemoryTransport())
    asyncio.run(processes.stop())


@pytest.fixture
def trainer(mesh):
    client = TrainerClient(mesh, name="ranks")
    client.discard_gradients().result()
    yield client
    client.close().result()


def test_every_rank_reports_its_number_its_device_and_its_optimizer(trainer, mesh):
    on_gpu = torch.cuda.is_available()
    infos = trainer.info().result()
    assert [info.rank for info in infos] == [0, 1]
    assert {info.device_name for info in infos} == {torch.cuda.get_device_name() if on_gpu else "CPU"}
    assert all(info.peak_memory_bytes >= info.memory_bytes > 0 for info in infos)
    assert {info.optimizer_fields for info in infos} == {("weight_decay",)}
    shown = [mesh.slice(gpus=rank).shown.call_one().get(timeout=GUARD) for rank in (0, 1)]
    assert shown == ["PolicyTrainer(0)", "PolicyTrainer(1)"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_still_work_after_a_signal_to_all_processes_of_a_program(trainer, number):
    """At Ctrl-C a terminal sends SIGINT to all processes of a program. A scheduler that ends a program sends SIGTERM to
    all of them. The ranks must survive both signals, because the program may still save a checkpoint.
    """
    pids = [info.pid for info in trainer.info().result()]
    for pid in pids:
        os.kill(pid, number)
    trainer.forward_backward(random_samples(), loss="cross_entropy").result()
    assert [info.pid for info in trainer.info().result()] == pids


def test_every_rank_traces_the_steps(trainer, tmp_path):
    trainer.profile(str(tmp_path), steps=2).result()
    for _ in range(2):
        assert not list(tmp_path.iterdir())
        trainer.forward_backward(random_samples(), loss="cross_entropy").result()
        trainer.optim_step(PARAMS).result()
    for rank in (0, 1):
        events = json.loads((tmp_path / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert names.count("Optimizer.step#SGD.step") == 2
        # Each of the two steps reduces the gradients of both blocks.
        assert sum(name.startswith("FSDP::post_backward_reduce (layers.") for name in names) == 4


@pytest.mark.parametrize("field, value, key", [("beta1", 0.5, "betas"), ("beta2", 0.5, "betas"), ("eps", 1e-3, "eps")])
def test_a_field_that_the_optimizer_lacks_is_refused_before_any_rank_works(trainer, tmp_path, field, value, key):
    start = str(tmp_path / "start")
    trainer.save_checkpoint(start).result().wait().result()

    def step(params: OptimParams | None):
        trainer.load_checkpoint(start).result()
        trainer.forward_backward(random_samples(), loss="cross_entropy").result()
        if params is not None:
            sent = trainer.ranks.number
            with pytest.raises(
                ValueError, match=f"{field}={value}, but torch.optim:SGD has no {key}; leave {field} at"
            ):
                trainer.optim_step(params).result()
            assert trainer.ranks.number == sent
            assert [info.state for info in trainer.info().result()] == ["open", "open"]
        result = trainer.optim_step(replace(PARAMS, weight_decay=0.1)).result()
        return result, trainer.forward(random_samples()).result().logprobs

    (ours, logprobs), (theirs, same) = step(replace(PARAMS, **{field: value})), step(None)
    assert ours == theirs and all(map(torch.equal, logprobs, same))


def test_is_alive_is_true_while_a_call_runs_and_false_after_a_rank_is_killed(mesh, tmp_path):
    trainer = TrainerClient(mesh, name="ranks")
    pids = [info.pid for info in trainer.info().result()]
    trainer.discard_gradients().result()
    gate = Gate(folder=tmp_path)
    pending = trainer.forward_backward(random_samples(), loss=gate)
    gate.wait_begun()
    assert trainer.is_alive(GUARD).result()
    gate.open()
    pending.result()
    trainer.discard_gradients().result()
    other = TrainerClient(mesh, name="other")
    other.ready().result()
    other.close().result()
    assert not other.is_alive().result()  # closed
    os.kill(pids[1], signal.SIGKILL)
    assert not trainer.is_alive(timeout=5).result()
    trainer.close().result()
