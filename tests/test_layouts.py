"""Which layouts are refused, with which numbers and suggestions; nothing is started here."""

import pytest

from rl_actors import ModelConfig, TrainerConfig
from rl_actors.layouts import is_possible, nearest, row_multiple

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}


def config(*, heads: int = 8, kv_heads: int = 4, experts: int = 0, **degrees: int) -> TrainerConfig:
    made = TrainerConfig(
        model=ModelConfig(**SMALL, num_attention_heads=heads, num_key_value_heads=kv_heads, num_experts=experts)
    )
    for name, degree in degrees.items():
        setattr(made.parallelism, f"{name}_degree", degree)
    return made


def test_a_layout_that_can_be_is_not_refused():
    assert is_possible(config(data_parallel_shard=2, tensor_parallel=4))
    config(data_parallel_shard=2, tensor_parallel=4).validate()


def test_too_many_ways_of_tensor_parallelism_name_the_numbers_and_the_nearest():
    made = config(data_parallel_shard=2, tensor_parallel=8)
    assert [{n: d for n, d in layout.items() if d > 1} for layout in nearest(made)] == [
        {"data_parallel_shard": 4, "tensor_parallel": 4},
        {"data_parallel_shard": 2, "context_parallel": 2, "tensor_parallel": 4},
        {"data_parallel_replicate": 2, "data_parallel_shard": 2, "tensor_parallel": 4},
    ]
    with pytest.raises(ValueError) as refusal:
        made.validate()
    assert str(refusal.value) == (
        "model.num_key_value_heads=4 is not divisible by parallelism.tensor_parallel_degree=8; nearest on 16 processes: "
        "data_parallel_shard=4 x tensor_parallel=4, or data_parallel_shard=2 x context_parallel=2 x tensor_parallel=4, "
        "or data_parallel_replicate=2 x data_parallel_shard=2 x tensor_parallel=4"
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            config(tensor_parallel=3),
            "num_attention_heads=8 is not divisible by .*tensor_parallel_degree=3; nearest on 3 ",
        ),
        (config(data_parallel_shard=0), "data_parallel_shard_degree=0; it must be at least 1"),
        (
            config(experts=12, data_parallel_shard=8, expert_parallel=8),
            "num_experts=12 is not divisible by .*expert_parallel_degree=8; nearest on 8 processes: data_parallel_shard=8,",
        ),
    ],
    ids=str,
)
def test_a_refusal_names_the_numbers(made, message):
    with pytest.raises(ValueError, match=message):
        made.validate()


def test_rows_must_hold_the_longest_sample_in_whole_multiples():
    made = TrainerConfig(model=ModelConfig(**SMALL), max_sequence_length=300, tokens_per_row=300)
    with pytest.raises(ValueError, match="tokens_per_row=300, of which 256 are a multiple of 64, is below .*=300$"):
        made.validate()
    made.tokens_per_row = 320
    made.validate()


def test_context_parallelism_asks_for_longer_multiples():
    assert row_multiple(config()) == 64
    assert row_multiple(config(context_parallel=2)) == 256
    assert row_multiple(config(context_parallel=3, tensor_parallel=5, expert_parallel=3)) == 1920
