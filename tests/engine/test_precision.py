"""Tests that float8 and bfloat16 give nearly the same numbers as float32, and compiled blocks nearly the same as uncompiled blocks.

Also tests that two deterministic runs are bit-equal, and that unsupported combinations are refused with a reason.
"""

from dataclasses import replace

import pytest
import torch
from references import random_samples, save_random
from test_hf import BASE, MOE
from torchtitan.config import CompileConfig

from rl_actors.config import LoRAConfig, TrainerConfig
from rl_actors.types import OptimParams

SAMPLES = random_samples([31, 7, 13, 40], seed=1)


def two_steps(engine) -> list[float]:
    """[loss, grad_norm, loss, grad_norm] of two training steps."""
    numbers = []
    for _ in range(2):
        numbers.append(engine.forward_backward(SAMPLES, "cross_entropy").metrics["loss:sum"])
        numbers.append(engine.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=50.0)).grad_norm)
    return numbers


def test_float8_trains_near_float32_and_its_parameters_stay_float32(make_engine):
    expected, found = two_steps(make_engine()), []
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        engine = make_engine(float8=True, float8_recipe=recipe)
        kinds = [type(module).__name__ for module in engine.built.model.modules()]
        assert kinds.count("Float8Linear") == 3 * 5  # fused qkv, wo, w1, w2, w3 in 3 blocks
        found.append(two_steps(engine))
        assert found[-1] == pytest.approx(expected, rel=0.05)
        assert found[-1] != pytest.approx(expected, rel=1e-4)  # the engine did compute in float8
        assert {p.dtype for p in engine.built.model.parameters()} == {torch.float32}
    # The last two recipes differ only in the gradients of the weights, so their first losses are equal.
    assert found[0][0] != found[1][0] and found[1][0] == found[2][0] and found[1][2:] != found[2][2:]


def test_bfloat16_trains_near_float32_and_its_parameters_stay_float32(make_engine):
    expected = two_steps(make_engine())
    engine = make_engine(compute_dtype="bfloat16")
    actual = two_steps(engine)
    assert actual == pytest.approx(expected, rel=0.1)
    assert actual != pytest.approx(expected, rel=1e-4)  # the engine did compute in bfloat16
    assert {p.dtype for p in engine.built.model.parameters()} == {torch.float32}


def test_two_deterministic_runs_are_bit_equal(make_engine):
    try:
        engines = [make_engine(deterministic=True) for _ in range(2)]
        assert torch.are_deterministic_algorithms_enabled()
        assert two_steps(engines[0]) == two_steps(engines[1])
        parameters = zip(*(engine.built.model.parameters() for engine in engines), strict=True)
        assert all(torch.equal(a, b) for a, b in parameters)
    finally:
        torch.use_deterministic_algorithms(False)


COMPILE = CompileConfig(enable=True, components=["model"])
COMPILED = {  # model, fields of TrainerConfig, relative tolerance
    "dense": (BASE, {}, 1e-5),
    "adapters": (BASE, {"lora": LoRAConfig(rank=4, train_unembed=True)}, 1e-5),
    # The tolerance is larger, because compiled kernels round to bfloat16 at other points of the computation.
    "experts": (MOE, {"compute_dtype": "bfloat16", "load_balance_coeff": 0.01}, 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_blocks_give_the_numbers_of_uncompiled_blocks(make_engine, tmp_path, case):
    model, fields, tolerance = COMPILED[case]
    path = save_random(tmp_path / "model", model)
    engine, compiled = (make_engine(path, **fields, **options) for options in ({}, {"compile": COMPILE}))
    assert two_steps(compiled) == pytest.approx(two_steps(engine), rel=tolerance)
    # Compiling does not change the names of the parameters.
    assert compiled.built.model.state_dict().keys() == engine.built.model.state_dict().keys()
    names = [[name for name, _ in made.built.model.named_parameters()] for made in (engine, compiled)]
    assert names[0] == names[1]


def test_compiled_experts_are_refused_in_float32():
    config = TrainerConfig(model=MOE, max_sequence_length=64, tokens_per_row=64, compile=COMPILE)
    with pytest.raises(ValueError, match="compile.enable=True with model.num_experts=4 and compute_dtype='float32'"):
        config.validate()
    replace(config, compute_dtype="bfloat16").validate()


def test_compiling_emulated_float8_is_refused(make_engine):
    with pytest.raises(ValueError, match="this machine has no float8, and emulated float8 does not compile"):
        make_engine(float8=True, compile=COMPILE)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lora": LoRAConfig(rank=4), "hf_path": "tied"}, "float8=True with lora.rank=4; only one of them"),
        ({"model": MOE}, "float8=True with model.num_experts=4; only dense models"),
    ],
    ids=["adapters", "experts"],
)
def test_float8_is_refused_with_adapters_and_with_experts(tied_qwen3, fields, message):
    fields = {"max_sequence_length": 64, "tokens_per_row": 64, **fields}
    if "hf_path" in fields:
        fields["hf_path"] = tied_qwen3
    with pytest.raises(ValueError, match=message):
        replace(TrainerConfig(**fields), float8=True).validate()
