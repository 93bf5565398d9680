"""If a rank hangs, the other ranks wait for it in a collective. They get an error at the deadline of the trainer's process groups. The tests
cover the groups of FSDP, HSDP, tensor and pipeline parallelism.
"""

import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_work import STEP, TRAINED, UNTIED, layout, make_engine, samples_with
from torchtitan.models.common import TransformerBlock
from waiting import GUARD

from rl_actors.engine import deadlines

DEADLINE = 2.0  # seconds


def hang(engine, folder: Path) -> None:
    """Make this rank hang in its first transformer block until all other ranks have reported their errors."""

    def wait(module, inputs) -> None:
        wait_for_reports(folder)
        raise InterruptedError("the other ranks have reported")

    block = next(module for module in engine.built.model.modules() if isinstance(module, TransformerBlock))
    block.attention.inner_attention.register_forward_pre_hook(wait)


def wait_for_reports(folder: Path) -> None:
    """Wait until all ranks but the last have reported their errors. A rank reports by creating a file in `folder`."""
    deadline = time.monotonic() + GUARD
    while len(list(folder.iterdir())) < dist.get_world_size() - 1 and time.monotonic() < deadline:
        time.sleep(0.1)


def hang_in_a_step(parallelism: dict[str, Any], folder: Path) -> tuple[dict[str, float], str, float]:
    """Take two steps. The last rank hangs in the second step.

    Returns (deadline of each group, traceback of the error, seconds until the error came).
    """
    engine = make_engine("", parallelism, {"model": UNTIED, "collective_timeout": DEADLINE})
    of_groups = deadlines_of_groups(engine)
    engine.forward_backward(samples_with(*TRAINED), "ppo")
    engine.optim_step(STEP)
    if dist.get_rank() == dist.get_world_size() - 1:
        hang(engine, folder)
    began = time.monotonic()
    with pytest.raises(Exception) as failure:
        engine.forward_backward(samples_with(*TRAINED), "ppo")
    seconds = time.monotonic() - began
    if dist.get_rank() < dist.get_world_size() - 1:
        assert deadlines.late(failure.value)
        (folder / str(dist.get_rank())).touch()
    # If this process ended now, ranks that still wait for this rank would get the error of a closed connection before their deadline.
    wait_for_reports(folder)
    return of_groups, "".join(traceback.format_exception(failure.value)), seconds


def deadlines_of_groups(engine) -> dict[str, float]:
    """The deadline of each group in seconds, by the name of its mesh. "default" is the group of all ranks."""
    groups = {
        name: mesh.get_group() for name, mesh in engine.built.parallel_dims.get_all_one_dimensional_meshes().items()
    }
    groups["default"] = dist.group.WORLD
    found = {}
    for name, group in groups.items():
        found[name] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return found


@pytest.mark.parametrize(
    "parallelism, names",
    [
        pytest.param(layout(shard=2), {"fsdp"}, id="FSDP"),
        pytest.param(layout(tensor=2), {"tp"}, id="tensor", marks=pytest.mark.slow),
        pytest.param(layout(shard=2, tensor=2), {"fsdp", "tp"}, id="FSDP and tensor", marks=pytest.mark.slow),
        pytest.param(layout(shard=2, pipeline=2), {"fsdp", "pp"}, id="FSDP and pipeline", marks=pytest.mark.slow),
        pytest.param(layout(replicate=2, shard=2), {"dp_replicate", "fsdp"}, id="HSDP", marks=pytest.mark.slow),
    ],
)
def test_if_a_rank_hangs_every_other_rank_gets_an_error_at_the_deadline_of_the_groups(
    run, tmp_path, parallelism, names
):
    num_ranks = 2 ** len(names)
    *waited, hung = run(num_ranks, hang_in_a_step, parallelism, tmp_path)
    assert "the other ranks have reported" in hung[1]
    for of_groups, error, seconds in waited:
        assert names | {"default"} <= of_groups.keys() and set(of_groups.values()) == {DEADLINE}
        assert f"Timed out waiting {DEADLINE * 1e3:.0f}ms" in error
        assert seconds >= DEADLINE


def test_only_errors_of_gloo_about_a_missed_deadline_count_as_late():
    timed_out = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete")
    assert deadlines.late(timed_out) and deadlines.late(RuntimeError("Application timeout caused pair closure"))
    wrapped = ValueError("the checkpoint was not written")
    wrapped.__cause__ = timed_out
    assert deadlines.late(wrapped)
    assert not deadlines.late(RuntimeError("Connection closed by peer"))
    assert not deadlines.late(TimeoutError("the reward did not answer within 3 s"))
