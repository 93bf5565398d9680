"""Parallel layouts that are refused, and the numbers and suggestions in the error texts. No test here starts a process."""

import pytest

from rl_actors import LoRAConfig, ModelConfig, TrainerConfig
from rl_actors.layouts import is_possible, nearest, row_multiple

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}


@pytest.fixture(autouse=True)
def any_base(monkeypatch):
    """Remove the check that reads the directory of weights, so that a config with adapters can have any path."""
    monkeypatch.setattr(ModelConfig, "require_same", lambda _, path: None)


def config(*, heads: int = 8, kv_heads: int = 4, experts: int = 0, tied: bool = True, **degrees: int) -> TrainerConfig:
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    made = TrainerConfig(model=ModelConfig(**SMALL, **attention, num_experts=experts, tie_word_embeddings=tied))
    for name, degree in degrees.items():
        setattr(made.parallelism, f"{name}_degree", degree)
    return made


def test_a_possible_layout_is_not_refused():
    assert is_possible(config(data_parallel_shard=2, tensor_parallel=4))
    config(data_parallel_shard=2, tensor_parallel=4).validate()
    config(data_parallel_shard=2, context_parallel=2, tensor_parallel=2).validate()
    config(data_parallel_shard=2, pipeline_parallel=2, tied=False).validate()
    config(experts=8, data_parallel_shard=2, context_parallel=2, tensor_parallel=2, expert_parallel=8).validate()


def test_the_error_about_a_too_large_tensor_parallel_degree_suggests_the_nearest_layouts():
    made = config(data_parallel_shard=2, tensor_parallel=8)
    assert [{n: d for n, d in layout.items() if d > 1} for layout in nearest(made)] == [
        {"data_parallel_shard": 4, "tensor_parallel": 4},
        {"data_parallel_shard": 2, "context_parallel": 2, "tensor_parallel": 4},
        {"data_parallel_replicate": 2, "data_parallel_shard": 2, "tensor_parallel": 4},
    ]
    with pytest.raises(ValueError) as refusal:
        made.validate()
    assert str(refusal.value) == (
        "model.num_key_value_heads=4 is not divisible by parallelism.tensor_parallel_degree=8; nearest possible on 16 processes: "
        "data_parallel_shard=4 x tensor_parallel=4, or data_parallel_shard=2 x context_parallel=2 x tensor_parallel=4, "
        "or data_parallel_replicate=2 x data_parallel_shard=2 x tensor_parallel=4"
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            config(tensor_parallel=3),
            "num_attention_heads=8 is not divisible by .*tensor_parallel_degree=3; nearest possible on 3 ",
        ),
        (config(data_parallel_shard=0), "data_parallel_shard_degree=0; it must be at least 1"),
        (
            config(experts=12, data_parallel_shard=8, expert_parallel=8),
            "num_experts=12 is not divisible by .*expert_parallel_degree=8; nearest possible on 8 processes: data_parallel_shard=8,",
        ),
    ],
    ids=str,
)
def test_the_error_about_a_refused_layout_names_the_fields_and_their_values(made, message):
    with pytest.raises(ValueError, match=message):
        made.validate()


def test_tokens_per_row_is_rounded_down_before_it_is_compared_with_the_longest_sample():
    made = TrainerConfig(model=ModelConfig(**SMALL), max_sequence_length=300, tokens_per_row=300)
    with pytest.raises(
        ValueError, match="tokens_per_row=300, rounded down to a multiple of 64, is 256: less than .*=300$"
    ):
        made.validate()
    made.tokens_per_row = 320
    made.validate()


def test_context_and_expert_parallelism_make_the_row_multiple_larger():
    assert row_multiple(config()) == 64
    assert row_multiple(config(context_parallel=2)) == 256
    assert row_multiple(config(context_parallel=3, tensor_parallel=5, expert_parallel=3)) == 1920


def with_adapters(made: TrainerConfig) -> TrainerConfig:
    made.lora, made.hf_path = LoRAConfig(rank=4), "somewhere"
    return made


PP2 = {"pipeline_parallel": 2, "tied": False}


def interleaved(made: TrainerConfig) -> TrainerConfig:
    made.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    return made


def compiled(made: TrainerConfig) -> TrainerConfig:
    made.compile.enable, made.compute_dtype = True, "bfloat16"  # a config refuses to compile experts in float32
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            config(**PP2, experts=8, tensor_parallel=2),
            "pipeline_parallel_degree=2, tensor_parallel_degree=2 with model.num_experts=8",
        ),
        (config(**PP2, experts=8, context_parallel=2), "context_parallel_degree=2 with model.num_experts=8"),
        (
            config(**PP2, experts=8, data_parallel_replicate=2),
            "data_parallel_replicate_degree=2 with model.num_experts=8",
        ),
        (with_adapters(config(**PP2, tensor_parallel=2)), "tensor_parallel_degree=2 with lora.rank=4"),
        (with_adapters(config(**PP2, data_parallel_replicate=2)), "data_parallel_replicate_degree=2 with lora.rank=4"),
        (
            config(**PP2, experts=8, data_parallel_shard=2, expert_parallel=2),
            "data_parallel_shard_degree=2, expert_parallel_degree=2",
        ),
        (config(**PP2, tensor_parallel=2, context_parallel=2), "context_parallel_degree=2, tensor_parallel_degree=2"),
        (
            config(**PP2, tensor_parallel=2, data_parallel_shard=2),
            "data_parallel_shard_degree=2, tensor_parallel_degree=2",
        ),
        (interleaved(config(**PP2, experts=8)), "schedule='Interleaved1F1B' with model.num_experts=8"),
        (interleaved(config(**PP2, context_parallel=2)), "schedule='Interleaved1F1B' with context_parallel_degree=2"),
        (
            config(context_parallel=2, tensor_parallel=2, experts=8),
            "context_parallel_degree=2, tensor_parallel_degree=2 with model.num_experts=8",
        ),
        (with_adapters(config(context_parallel=2, tensor_parallel=2)), "tensor_parallel_degree=2 with lora.rank=4"),
        (compiled(config(context_parallel=2)), "context_parallel_degree=2 with compile.enable=True"),
        (
            compiled(config(data_parallel_shard=2, expert_parallel=2, experts=8)),
            "expert_parallel_degree=2 with compile.enable=True",
        ),
    ],
    ids=str,
)
def test_a_layout_that_no_test_compares_with_one_process_is_refused(made, message):
    made.tokens_per_row = 4096
    with pytest.raises(
        ValueError,
        match=f"{message}: refused, because no test compares this combination with training in one process; nearest possible on",
    ):
        made.validate()
    for layout in nearest(made):
        for name, degree in layout.items():
            setattr(made.parallelism, f"{name}_degree", degree)
        made.validate()


@pytest.mark.parametrize(
    ("less", "train_unembed", "without"),
    [
        ((1, 1), False, "first"),
        ((1, 1), True, "first"),
        ((0, 1), False, "last"),
        ((0, 1), True, None),
        ((0, 0), False, None),
    ],
)
def test_with_adapters_the_first_and_last_stage_of_a_pipeline_need_something_to_train(less, train_unembed, without):
    made = with_adapters(config(pipeline_parallel=4, tied=False))
    made.lora.train_unembed, made.model.num_hidden_layers = train_unembed, 4 - sum(less)
    made.parallelism.pipeline_parallel_first_stage_less_layers = less[0]
    made.parallelism.pipeline_parallel_last_stage_less_layers = less[1]
    if without is None:
        return made.validate()
    with pytest.raises(ValueError, match=f"lora.rank=4 splits .* into 4 stages; the {without} stage has no block"):
        made.validate()
