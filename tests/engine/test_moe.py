"""Training of a mixture of experts. The trainer counts the tokens of each expert, and computes the load-balancing bias
from the counts. Counts and bias do not depend on recomputation, on packing, or on how the samples are split over calls.
"""

from dataclasses import replace

import pytest
import torch
from references import ppo_samples, reference_training, save_random
from test_hf import MOE

from rl_actors.losses import PPO
from rl_actors.types import OptimParams

LENGTHS = [7, 31, 1, 64, 13, 3]
STEP = OptimParams(learning_rate=1e-3, grad_divisor=10.0)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> str:
    return save_random(tmp_path_factory.mktemp("experts"), MOE)


def counters(engine) -> list[list[float]]:
    return [moe.tokens_per_expert_E.tolist() for moe in engine.built.routers.moes]


def biases(engine) -> list[torch.Tensor]:
    return [moe.expert_bias_E.clone() for moe in engine.built.routers.moes]


def gradients(engine) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor().clone() for n, p in engine.built.model.named_parameters()}


# Maps the name of a split to (number of samples in each call, fields of TrainerConfig).
SPLITS = {
    "one call": ([6], {}),
    "one call for each sample": ([1] * 6, {}),
    "long rows, padded": ([4, 2], {"tokens_per_row": 256}),
    "one row a microbatch": ([2, 2, 2], {"rows_per_microbatch": 1}),
}


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_of_the_samples_gives_the_same_counters_gradients_and_bias(make_engine, experts, split):
    sizes, fields = SPLITS[split]
    samples = ppo_samples(LENGTHS)
    whole = make_engine(experts, load_balance_coeff=0.01)
    whole.forward_backward(samples, PPO())
    engine = make_engine(experts, load_balance_coeff=0.01, **fields)
    rest = list(samples)
    for size in sizes:
        engine.forward_backward(rest[:size], PPO())
        rest = rest[size:]
    # Every position of a sample chose 2 experts in each of 2 layers; padding is not counted.
    assert [sum(layer) for layer in counters(engine)] == [2 * sum(LENGTHS)] * 2
    assert counters(engine) == counters(whole)
    expected, actual = gradients(whole), gradients(engine)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert max(float((actual[name] - expected[name]).abs().max()) for name in expected) < 1e-5 * scale
    before = torch.tensor(counters(whole))
    for trainer in (whole, engine):
        trainer.optim_step(STEP)
        assert counters(trainer) == [[0.0] * 4] * 2
    for layer, (a, b) in enumerate(zip(biases(engine), biases(whole), strict=True)):
        signs = torch.sign(before[layer].mean() - before[layer])
        assert torch.equal(a, b) and torch.allclose(a, 0.01 * (signs - signs.mean()))
        assert a.abs().max() > 0


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputation_does_not_change_the_bias(make_engine, experts, checkpointing):
    found = []
    for policy in ("none", checkpointing):
        engine = make_engine(experts, load_balance_coeff=0.01, activation_checkpointing=policy)
        engine.forward_backward(ppo_samples(LENGTHS), PPO())
        engine.optim_step(STEP)
        found.append(biases(engine))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_forward_counts_no_tokens(make_engine, experts):
    engine = make_engine(experts)
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    before = counters(engine)
    engine.forward(ppo_samples([20, 4]))
    engine.forward(ppo_samples([20, 4]), PPO())
    assert counters(engine) == before


def test_discard_gradients_and_a_skipped_step_reset_the_counters_and_keep_the_bias(make_engine, experts):
    engine = make_engine(experts, load_balance_coeff=0.01)
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    engine.discard_gradients()
    assert counters(engine) == [[0.0] * 4] * 2
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    next(engine.built.model.parameters()).grad.fill_(float("nan"))
    assert engine.optim_step(STEP).skipped
    assert counters(engine) == [[0.0] * 4] * 2
    assert all(not bias.any() for bias in biases(engine))


def test_ten_adamw_steps_of_experts_follow_a_plain_pytorch_loop(make_engine, experts):
    from references import random_samples
    from transformers import AutoModelForCausalLM

    batches = [random_samples([31, 7, 64, 13], seed=seed) for seed in (1, 2, 3) * 3 + (1,)]
    params = OptimParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0, grad_divisor=100.0)
    model = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32, attn_implementation="eager").eval()
    expected = reference_training(model, batches, params)
    engine = make_engine(experts)
    for batch, (loss, grad_norm) in zip(batches, expected, strict=True):
        assert engine.forward_backward(batch, "cross_entropy").metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
        assert engine.optim_step(params).grad_norm == pytest.approx(grad_norm, rel=1e-4)


def test_a_model_with_a_load_balancing_bias_can_neither_be_exported_nor_pushed(make_engine, experts, tmp_path):
    engine = make_engine(experts, load_balance_coeff=0.01)
    with pytest.raises(ValueError, match="export_hf is not possible with load_balance_coeff=0.01"):
        engine.export_hf(str(tmp_path / "export"))
    with pytest.raises(ValueError, match="push_model_state_dict is not possible with load_balance_coeff=0.01"):
        engine.hf_state_dict()
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_brings_back_the_bias(make_engine, experts, tmp_path):
    engine = make_engine(experts, load_balance_coeff=0.01)
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    engine.optim_step(STEP)
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    other = make_engine(experts, load_balance_coeff=0.01)
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(biases(engine), biases(other), strict=True))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts": 1}, "num_experts=1; it must be 0 or at least model.num_experts_per_tok=2"),
        ({"num_experts": -1}, "num_experts=-1; it must be 0 or at least"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0; it must be positive"),
        ({"moe_intermediate_size": -4}, "moe_intermediate_size=-4; it must be positive"),
    ],
    ids=str,
)
def test_impossible_fields_of_a_mixture_of_experts_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(MOE, **fields).validate()
