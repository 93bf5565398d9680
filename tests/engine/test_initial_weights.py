"""Random weights of a seed: the same in every layout, drawn as torchtitan draws them in one process, and no part repeats another."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from layout_work import (
    ADAPTERS,
    EXPERTS,
    FOUR_BLOCKS,
    INTERLEAVED,
    NO_SP,
    TIED,
    UNTIED,
    layout,
    make_engine,
    run_processes,
    whole,
)
from references import save_random
from test_memory_estimate import peak_of
from torch import Tensor

from rl_actors.engine.build import qwen3_config
from rl_actors.engine.initial_weights import draw, take_initialisers
from rl_actors.engine.optimizer import named_parameters

SEED = 3
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model": TIED},
    "untied": {"model": UNTIED},
    "four blocks": {"model": FOUR_BLOCKS},
    "experts": {"model": EXPERTS},
    "recomputed": {"model": UNTIED, "activation_checkpointing": "full"},
    "adapters": {"lora": ADAPTERS},  # on weights from a directory; the adapters are drawn
}
TABLE = [  # parallelism, processes, model
    ("FSDP2", layout(shard=2), 2, "tied"),
    ("FSDP2", layout(shard=2), 2, "recomputed"),
    ("HSDP2x2", layout(replicate=2, shard=2), 4, "tied"),
    ("TP2", layout(tensor=2), 2, "tied"),
    ("TP2", layout(tensor=2), 2, "untied"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "untied"),
    ("CP2", layout(context=2), 2, "tied"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "untied"),
    ("PP2", layout(pipeline=2), 2, "four blocks"),
    ("PP2 of two stages a rank", layout(pipeline=2, **INTERLEAVED), 2, "four blocks"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "four blocks"),
    ("FSDP2", layout(shard=2), 2, "experts"),
    ("TP2", layout(tensor=2), 2, "experts"),
    ("FSDP2, EP2", layout(shard=2, expert=2), 2, "experts"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "experts"),
    ("FSDP2xTP2, EP4", layout(shard=2, tensor=2, expert=4), 4, "experts"),
    ("TP2", layout(tensor=2), 2, "adapters"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "adapters"),
]
QUICK = {
    ("FSDP2", "tied"),
    ("TP2", "untied"),
    ("CP2", "tied"),
    ("FSDP2xTP2", "untied"),
    ("PP2", "four blocks"),
    ("FSDP2, EP2", "experts"),
}


def weights(path: str, parallelism: dict[str, Any], fields: dict[str, Any], seed: int = SEED) -> dict[str, Tensor]:
    """The parameters that this rank's part of the model holds, whole."""
    engine = make_engine(path, parallelism, {**fields, "seed": seed})
    return {name: whole(parameter) for name, parameter in named_parameters(engine.built.model)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return partial(run_processes, tmp_path_factory)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """directory_of(model) -> the weights under adapters; "" for a model that is drawn from its seed."""

    @cache
    def path(model: str) -> str:
        return save_random(tmp_path_factory.mktemp("model"), UNTIED) if model == "adapters" else ""

    return path


@pytest.fixture(scope="module")
def one_process(run, directory_of):
    """one_process(model) -> its parameters."""
    return cache(lambda model: run(1, weights, directory_of(model), layout(), MODELS[model])[0])


@pytest.mark.parametrize(
    "parallelism, num_processes, model",
    [
        pytest.param(*row, id=f"{name} {row[-1]}", marks=[] if (name, row[-1]) in QUICK else [pytest.mark.slow])
        for name, *row in TABLE
    ],
)
def test_a_layout_starts_with_the_weights_of_one_process(
    run, one_process, directory_of, parallelism, num_processes, model
):
    expected = one_process(model)
    held: set[str] = set()
    different: set[str] = set()
    for rank in run(num_processes, weights, directory_of(model), parallelism, MODELS[model]):
        held |= rank.keys()
        different |= {name for name in rank if not torch.equal(rank[name], expected[name])}
    assert different == set()
    assert held == expected.keys()


@pytest.mark.parametrize("model", ["tied", "experts"])
def test_no_part_of_a_weight_repeats_another(one_process, model):
    rows = [row for parameter in one_process(model).values() if parameter.ndim > 1 for row in parameter.flatten(0, -2)]
    beginnings = {tuple(row[:16].tolist()) for row in rows}
    assert len(beginnings) == len(rows)


@pytest.mark.parametrize("model", [TIED, UNTIED, EXPERTS], ids=["tied", "untied", "experts"])
def test_one_process_draws_what_torchtitan_draws(make_engine, model):
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


def test_drawing_holds_few_parameters_at_a_time(make_engine):
    model = replace(UNTIED, num_hidden_layers=8)
    built = make_engine("", model=model).built
    with torch.device("meta"):
        initialisers = take_initialisers(qwen3_config(model).build())
    sizes = [4 * initialiser.shape.numel() for initialiser in initialisers]
    peak = peak_of(lambda: draw(initialisers, built.model, SEED))
    print(f"peak {peak:,}, largest parameter {max(sizes):,}, all {sum(sizes):,} bytes")
    # The fused query, key and value are drawn apart, joined, and copied.
    assert peak <= 4 * max(sizes) < sum(sizes) / 4


def test_a_parameter_without_an_initialiser_is_named(make_engine):
    built = make_engine("", model=UNTIED).built
    with torch.device("meta"):
        initialisers = take_initialisers(qwen3_config(UNTIED).build())
    known = [initialiser for initialiser in initialisers if initialiser.name != "layers.1.attention.wo.weight"]
    with pytest.raises(RuntimeError, match="no initialiser for layers.1.attention.wo.weight"):
        draw(known, built.model, SEED)
