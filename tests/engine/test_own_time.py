"""Tests of own_seconds_per_token: the mean seconds that one measured module of a rank takes for one token.

These seconds must not contain waits for other ranks. So the engine measures only modules without a collective, because
a rank waits for other ranks in a collective.
"""

import time
from typing import Any

import pytest
import torch.distributed as dist
from layout_work import EXPERTS, STEP, TRAINED, UNTIED, layout, make_engine, samples_with
from torchtitan.models.common import TransformerBlock

from controllers.run.slow_rank import STEPS, SlowRank
from rl_actors.engine.collectives import by_rank
from rl_actors.engine.own_time import local_modules

NUM_TOKENS = 2 * 256  # positions of a microbatch: two rows of 256
SHORTEST_DELAY = 0.05  # seconds; a slowed module waits at least this long


def slow_down(engine, seconds: float) -> None:
    """Make every attention module of this rank take this number of seconds longer."""

    def wait(module, inputs) -> None:
        time.sleep(seconds)

    for module in engine.built.model.modules():
        if isinstance(module, TransformerBlock):
            module.attention.inner_attention.register_forward_pre_hook(wait)


def own_times(parallelism: dict[str, Any], fields: dict[str, Any]) -> list[list[float | None]]:
    """own_seconds_per_token of all ranks at several times.

    The times are: before the first step, after a step at full speed, and after each of STEPS steps in which the last
    rank is slow.
    """
    engine = make_engine("", parallelism, fields)
    times = [by_rank(engine.info().own_seconds_per_token)]
    for number in range(1 + STEPS):
        if number == 1 and dist.get_rank() == dist.get_world_size() - 1:
            slow_down(engine, max(SHORTEST_DELAY, 10 * NUM_TOKENS * max(times[-1])))
        engine.forward(samples_with(*TRAINED))
        engine.forward_backward(samples_with(*TRAINED), "ppo")
        engine.optim_step(STEP)
        times.append(by_rank(engine.info().own_seconds_per_token))
    return times


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallelism, fields",
    [
        pytest.param(layout(shard=2), {"model": UNTIED}, id="FSDP"),
        pytest.param(layout(shard=2), {"model": UNTIED, "activation_checkpointing": "full"}, id="recomputed"),
        pytest.param(layout(tensor=2), {"model": UNTIED}, id="tensor"),
        pytest.param(layout(pipeline=2), {"model": UNTIED}, id="pipeline"),
        pytest.param(layout(shard=2, expert=2), {"model": EXPERTS}, id="experts"),
    ],
)
def test_a_slow_rank_takes_longer_and_the_rank_that_waits_for_it_does_not(run, parallelism, fields):
    [times, of_other] = run(2, own_times, parallelism, fields)
    assert times == of_other and times[0] == [None, None]
    comparison, lines = SlowRank(), []
    for seconds in times[2:]:
        metrics, line = comparison.step(seconds)
        lines.append(line)
        assert metrics["ranks/slowest"] == 1 and metrics["ranks/slowest_ratio"] > 2
    assert lines[:-1] == [""] * (STEPS - 1)
    assert lines[-1].startswith("rank 1 of the trainer is slow: ")


def modules_of(parallelism: dict[str, Any], fields: dict[str, Any]) -> list[str]:
    engine = make_engine("", parallelism, fields)
    names = {module: name for name, module in engine.built.model.named_modules()}
    return [names[module] for module in local_modules(engine.built.model, engine.config)]


@pytest.mark.slow
def test_no_module_with_a_collective_is_measured(run):
    whole = ["layers.0", "layers.1"]
    attention = [f"{name}.attention.inner_attention" for name in whole]
    cases = [
        (layout(shard=2), {"model": UNTIED}, whole),
        (layout(tensor=2), {"model": UNTIED}, attention),
        (layout(shard=2), {"model": EXPERTS}, attention),
        (layout(context=2), {"model": UNTIED}, []),
    ]
    for parallelism, fields, expected in cases:
        assert run(2, modules_of, parallelism, fields) == [expected, expected]
