"""The engine compiles the transformer blocks with torch.compile only if compile.enable is set and compile.components has "model"."""

import pytest
import torch
from references import random_samples
from torchtitan.config import CompileConfig

from rl_actors.types import OptimParams

STEP = OptimParams(learning_rate=1e-3, grad_divisor=50.0)
# This backend traces like the default backend, but then runs the traced operators without generating code. Generating
# code would take minutes.
TRACED = CompileConfig(enable=True, components=["model"], backend="aot_eager")


@pytest.fixture
def num_graphs():
    """A function that returns the number of graphs that torch.compile has traced since the test began."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    yield lambda: counters["unique_graphs"] - before
    torch._dynamo.reset()


def two_steps(engine) -> list[float]:
    numbers = []
    for _ in range(2):
        numbers.append(engine.forward_backward(random_samples([31, 7, 13, 40]), "cross_entropy").metrics["loss:sum"])
        numbers.append(engine.optim_step(STEP).grad_norm)
    return numbers


def test_enabled_compile_compiles_the_blocks_and_does_not_change_the_numbers(make_engine, num_graphs):
    expected = two_steps(make_engine())
    assert num_graphs() == 0
    assert two_steps(make_engine(compile=TRACED)) == pytest.approx(expected, rel=1e-6)
    assert num_graphs() == 1  # all blocks have the same structure, so they share one graph


def test_the_blocks_are_not_compiled_if_compile_components_lacks_model(make_engine, num_graphs):
    make_engine(compile=CompileConfig(enable=True, components=["loss"])).forward(random_samples([7]))
    assert num_graphs() == 0
