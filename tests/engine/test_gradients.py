"""Tests the norm and the scaling of a step's gradients with plain tensors.

test_parallel_layouts.py tests sharded gradients.
"""

import math

import pytest
import torch

from rl_actors.engine.cpu import Machine
from rl_actors.engine.gradients import Gradients, by_layout


def parameters_with(gradients: dict[str, torch.Tensor | None]):
    named = []
    for name, gradient in gradients.items():
        parameter = torch.nn.Parameter(torch.zeros(() if gradient is None else gradient.shape))
        parameter.grad = gradient
        named.append((name, parameter))
    return named


def make(gradients: dict[str, torch.Tensor | None]) -> Gradients:
    return Gradients(by_layout(parameters_with(gradients)), None, torch.device("cpu"), Machine().norms)


def test_the_norm_equals_torchs_norm_and_scaling_multiplies_every_gradient():
    draw = torch.Generator().manual_seed(0)
    named = {str(n): torch.randn(n, 7, generator=draw) for n in (3, 50, 400)}
    gradients = make({**named, "frozen": None})
    expected = float(torch.nn.utils.get_total_norm(list(named.values())))
    assert gradients.norm() == pytest.approx(expected, rel=1e-6)
    before = [tensor.clone() for tensor in named.values()]
    gradients.scale(torch.tensor(0.125))
    assert all(torch.equal(a, 0.125 * b) for a, b in zip(named.values(), before, strict=True))


@pytest.mark.parametrize("sizes", [[1000], [640_000], [16_000_000], [7, 640_000, 16_000_000]], ids=str)
@pytest.mark.parametrize("kind", ["random", "equal"])
def test_the_norm_equals_a_norm_in_float64_at_every_size(sizes, kind):
    draw = torch.Generator().manual_seed(0)
    named, squares = {"an empty shard": torch.zeros(0)}, 0.0
    for size in sizes:
        tensor = torch.randn(size, generator=draw) if kind == "random" else torch.full((size,), 0.3)
        named[str(size)] = tensor
        squares += sum(float(block.double().square().sum()) for block in tensor.split(1_000_000))
    assert make(named).norm().item() == pytest.approx(math.sqrt(squares), rel=1e-6)


def test_without_gradients_the_norm_is_0():
    assert make({"frozen": None}).norm() == 0.0


def test_large_gradients_that_are_finite_have_a_finite_norm():
    # The norm of each gradient is 1e19. The sum of the squared norms is 1e40, which is beyond the range of float32.
    assert make({str(i): torch.full((1,), 1e19) for i in range(100)}).norm() == pytest.approx(1e20, rel=1e-6)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_norm_is_not_finite_if_a_gradient_is_not_finite(value):
    assert not make({"a": torch.ones(3), "b": torch.tensor([0.0, value])}).norm() < float("inf")
