"""Before any process starts, a config refuses the layouts that torch, torchtitan or our pipeline cannot run.

Some tests check that torch or torchtitan still cannot run a refused layout.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from layout_work import EXPERTS, FOUR_BLOCKS, INTERLEAVED, MODELS, NO_SP, TIED, layout
from references import ppo_samples
from test_hf import MOE

from rl_actors import layouts
from rl_actors.config import LoRAConfig, TrainerConfig

REFUSED = [
    (layout(shard=2, expert=2), "tied", "expert_parallel_degree=2 with model.num_experts=0"),
    (layout(shard=3, expert=3), "experts", "num_experts=4 is not divisible by parallelism.expert_parallel_degree=3"),
    (
        layout(shard=2, replicate=2, expert=4),
        "experts",
        "expert_parallel_degree=4 does not divide .* tensor_parallel=2",
    ),
    (
        layout(tensor=2, expert=2, **NO_SP),
        "experts",
        "enable_sequence_parallel=False: torchtitan cannot put the experts'",
    ),
    (layout(shard=2, expert=0), "experts", "expert_parallel_degree=0; it must be at least 1"),
    (layout(tensor=3), "experts", "moe_intermediate_size=32 is not divisible by parallelism.tensor_parallel_degree=3"),
    (layout(context=2, context_parallel_load_balancer="tail"), "tied", "load_balancer='tail'; it must be 'headtail'"),
    (layout(context=3), "tied", "tokens_per_row=256, rounded down to a multiple of 384, is 0: less than"),
]


@pytest.mark.parametrize("parallelism, model, message", REFUSED)
def test_an_impossible_layout_is_refused_before_any_process_starts(parallelism, model, message):
    config = TrainerConfig(model=MODELS[model][0], max_sequence_length=256, tokens_per_row=256)
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    with pytest.raises(ValueError, match=message):
        config.validate()


class Unchecked(TrainerConfig):
    """A config that refuses nothing, so that torch and torchtitan get the layouts that TrainerConfig refuses."""

    def validate(self) -> None:
        pass


def upstream_rows(row_length: int) -> None:
    """Run context parallelism with a row that does not give every rank the same number of whole attention blocks."""
    from rl_actors.engine.train_engine import TrainEngine

    layouts.row_multiple = lambda config: row_length  # changes only this process, which ends after this function
    config = Unchecked(model=TIED, max_sequence_length=row_length, tokens_per_row=row_length)
    config.parallelism.context_parallel_degree = 2
    TrainEngine(config).forward(ppo_samples([row_length]))


def upstream_experts(num_experts: int, parallelism: dict[str, Any]) -> None:
    """Run torchtitan with experts that cannot be divided evenly among the ranks, or with a layout in which torchtitan
    cannot redistribute the outputs of the experts.
    """
    from rl_actors.engine.train_engine import TrainEngine

    model = replace(EXPERTS, num_experts=num_experts)
    config = Unchecked(model=model, max_sequence_length=64, tokens_per_row=64)
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    TrainEngine(config).forward(ppo_samples([20, 30]))


def upstream_local_map() -> bool:
    """Call local_map while the all-gather of its input still runs. Returns whether the output requires a gradient.

    The output should require a gradient, because the input requires one. But local_map drops the gradient while the
    all-gather runs. So our hook (rl_actors.engine.moe.wait_for_input) makes the experts wait for the all-gather.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    gathered = x.redistribute(placements=[Replicate()], async_op=True)
    double = local_map(
        lambda local: 2 * local, out_placements=[Replicate()], in_placements=([Replicate()],), device_mesh=mesh
    )
    return double(gathered).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize(
    "work, arguments, message",
    [
        (upstream_rows, (192,), "Q_LEN 192 is not divisible by CP mesh world size 2 [*] BLOCK_SIZE 128"),
        (upstream_experts, (5, layout(shard=2, expert=2)), r"shape '\[2, -1\]' is invalid for input of size 5"),
        (upstream_experts, (4, layout(tensor=2, expert=2, **NO_SP)), r"Can not redistribute from S\(1\) to P\(sum\)"),
    ],
)
def test_a_layout_that_we_refuse_fails_upstream(run, work, arguments, message):
    with pytest.raises(mp.ProcessRaisedException, match=message):
        run(2, work, *arguments)


@pytest.mark.slow
def test_local_map_still_drops_the_gradient_that_our_hook_keeps(run):
    assert run(2, upstream_local_map) == [False, False]


def pipelined(**layout) -> TrainerConfig:
    config = TrainerConfig(model=FOUR_BLOCKS, max_sequence_length=64, tokens_per_row=64)
    for name, value in {"pipeline_parallel_degree": 2, **layout}.items():
        setattr(config.parallelism, name, value)
    return config


def test_tied_heads_are_refused_because_torchtitan_does_not_tie_across_stages():
    config = pipelined()
    config.model = replace(FOUR_BLOCKS, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="pipeline_parallel_degree=2 with model.tie_word_embeddings=True: .* stages"):
        config.validate()
    from rl_actors.engine.build import qwen3_config

    with pytest.raises(NotImplementedError, match="Weight tying is not supported with Pipeline Parallel"):
        qwen3_config(config.model).update_from_config(config=SimpleNamespace(parallelism=config.parallelism))


def test_more_stages_than_layers_are_refused_by_us_and_by_torchtitan():
    config = pipelined(pipeline_parallel_degree=4, **INTERLEAVED)
    with pytest.raises(ValueError, match="num_hidden_layers=4 into 8 stages, .* 1 and 1 layers: too few layers"):
        config.validate()
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    with pytest.raises(ValueError, match=r"Number of stages \(8\) cannot be greater than effective layers \(6\)"):
        _generate_llm_fqn_per_model_part(8, 4)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pipeline_parallel_schedule": "GPipe"}, "schedule='GPipe'; it must be one of 1F1B, Interleaved1F1B"),
        ({"pipeline_parallel_schedule_csv": "a.csv"}, "csv='a.csv': a CSV file has the schedule for one number"),
        ({"pipeline_parallel_microbatch_size": 2}, "microbatch_size=2; it must be 1, because rows_per_microbatch sets"),
        (
            {"pipeline_parallel_layers_per_stage": 2},
            "1F1B and pipeline_parallel_layers_per_stage=2 gives 3 stages; every rank must have one stage",
        ),
        ({"pipeline_parallel_layers_per_stage": 0}, "layers_per_stage=0; it must be at least 1"),
        (
            {"pipeline_parallel_layers_per_stage": 3, **INTERLEAVED},
            "gives 2 stages; every rank must have the same number of stages, at least two",
        ),
        ({"module_fqns_per_model_part": [["layers.0"]]}, "module_fqns_per_model_part"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        pipelined(**layout).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"lora": LoRAConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=True)},
            "an adapter only on the output projection: only the last stage would train",
        ),
        (
            {"model": MOE, "load_balance_coeff": 1e-3, "activation_checkpointing": "full"},
            "load_balance_coeff=0.001 and activation_checkpointing='full': the counts of tokens per expert",
        ),
    ],
)
def test_a_config_that_cannot_train_in_a_pipeline_is_refused(tmp_path, fields, message):
    config = replace(pipelined(), **{"hf_path": str(tmp_path), **fields})
    config.model.save(tmp_path)
    with pytest.raises(ValueError, match=message):
        config.validate()
