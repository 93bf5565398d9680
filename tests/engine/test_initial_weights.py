"""Tests of random initial weights. In every parallel layout a model has the same initial weights as in one process. In a model without
adapters these are the weights that torchtitan draws from the seed. No two rows of the weights are equal.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from layout_work import EXPERTS, INTERLEAVED, MODELS, NO_SP, TIED, UNTIED, layout, layout_cases, make_engine, whole
from test_memory_estimate import peak_of
from torch import Tensor

from rl_actors.engine.build import qwen3_config
from rl_actors.engine.initial_weights import draw, take_initialisers
from rl_actors.engine.optimizer import named_parameters

SEED = 3
TABLE = [  # name, parallelism, number of processes, name of the model
    ("FSDP2", layout(shard=2), 2, "tied, drawn"),
    ("FSDP2", layout(shard=2), 2, "recomputed, drawn"),
    ("HSDP2x2", layout(replicate=2, shard=2), 4, "tied, drawn"),
    ("TP2", layout(tensor=2), 2, "tied, drawn"),
    ("TP2", layout(tensor=2), 2, "untied, drawn"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "untied, drawn"),
    ("CP2", layout(context=2), 2, "tied, drawn"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "untied, drawn"),
    ("PP2", layout(pipeline=2), 2, "four blocks, drawn"),
    ("PP2, two stages on each rank", layout(pipeline=2, **INTERLEAVED), 2, "four blocks, drawn"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "four blocks, drawn"),
    ("FSDP2", layout(shard=2), 2, "experts, drawn"),
    ("TP2", layout(tensor=2), 2, "experts, drawn"),
    ("FSDP2, EP2", layout(shard=2, expert=2), 2, "experts, drawn"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "experts, drawn"),
    ("FSDP2xTP2, EP4", layout(shard=2, tensor=2, expert=4), 4, "experts, drawn"),
    # The weights are read from a directory, and the adapters are drawn.
    ("TP2", layout(tensor=2), 2, "adapters"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "adapters"),
]
QUICK = {("TP2", "untied, drawn")}


def weights(path: str, parallelism: dict[str, Any], fields: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters of this rank's part of the model. Each parameter is gathered from the ranks that hold its shards."""
    engine = make_engine(path, parallelism, fields)
    return {name: whole(parameter) for name, parameter in named_parameters(engine.built.model)}


@pytest.fixture(scope="module")
def one_process(run, directory_of):
    """one_process(model) returns the parameters of the model in one process."""

    @cache
    def parameters(model: str) -> dict[str, Tensor]:
        [answer] = run(1, weights, directory_of(model), layout(), MODELS[model][1])
        return answer

    return parameters


@pytest.mark.parametrize("parallelism, num_processes, model", layout_cases(TABLE, QUICK))
def test_a_layout_gives_the_same_initial_weights_as_one_process(
    run, one_process, directory_of, parallelism, num_processes, model
):
    expected = one_process(model)
    held: set[str] = set()
    different: set[str] = set()
    for rank in run(num_processes, weights, directory_of(model), parallelism, MODELS[model][1]):
        held |= rank.keys()
        different |= {name for name in rank if not torch.equal(rank[name], expected[name])}
    assert different == set()
    assert held == expected.keys()


@pytest.mark.parametrize("model", ["tied, drawn", "experts, drawn"])
def test_no_two_rows_of_the_weights_are_equal(one_process, model):
    rows: list[Tensor] = []
    for parameter in one_process(model).values():
        if parameter.ndim > 1:
            rows += parameter.flatten(0, -2)
    beginnings = {tuple(row[:16].tolist()) for row in rows}
    assert len(beginnings) == len(rows)


@pytest.mark.parametrize("model", [TIED, UNTIED, EXPERTS], ids=["tied", "untied", "experts"])
def test_one_process_draws_the_weights_that_torchtitan_draws(make_engine, model):
    engine = make_engine("", model=model, seed=SEED)
    with torch.device("meta"):
        expected = qwen3_config(model).build()
    expected.to_empty(device="cpu")
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected.init_weights()
    drawn = {name: whole(parameter) for name, parameter in named_parameters(engine.built.model)}
    assert drawn.keys() == dict(expected.named_parameters()).keys()
    assert all(torch.equal(drawn[name], parameter) for name, parameter in expected.named_parameters())


def test_another_seed_gives_other_weights(make_engine):
    one, same, other = (make_engine("", model=TIED, seed=seed).built.model for seed in (1, 1, 2))
    matrices = [name for name, parameter in one.named_parameters() if parameter.ndim > 1]
    for name in matrices:
        first = whole(one.get_parameter(name))
        assert torch.equal(first, whole(same.get_parameter(name)))
        assert not torch.equal(first, whole(other.get_parameter(name)))


def test_drawing_keeps_only_a_few_parameters_in_memory_at_a_time(make_engine):
    model = replace(UNTIED, num_hidden_layers=8)
    built = make_engine("", model=model).built
    with torch.device("meta"):
        initialisers = take_initialisers(qwen3_config(model).build())
    sizes = [4 * initialiser.shape.numel() for initialiser in initialisers]
    peak = peak_of(lambda: draw(initialisers, built.model, SEED))
    print(f"peak {peak:,}, largest parameter {max(sizes):,}, all {sum(sizes):,} bytes")
    # torchtitan draws query, key and value as separate tensors, joins them, and copies the result into the fused parameter. So several copies of
    # this parameter are in memory at the same time.
    assert peak <= 4 * max(sizes) < sum(sizes) / 4


def test_the_error_names_a_parameter_without_an_initialiser(make_engine):
    built = make_engine("", model=UNTIED).built
    with torch.device("meta"):
        initialisers = take_initialisers(qwen3_config(UNTIED).build())
    known = [initialiser for initialiser in initialisers if initialiser.name != "layers.1.attention.wo.weight"]
    with pytest.raises(RuntimeError, match="no initialiser for layers.1.attention.wo.weight"):
        draw(known, built.model, SEED)
