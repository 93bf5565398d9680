"""Loss values and gradients against closed forms in float64 plain Python."""

import math

import pytest
import torch

from rl_actors.losses import LOSSES, PPO, CrossEntropy, ImportanceSampling, columns_of, resolve

SHAPE = (3, 17)


def data(seed=0):
    """Logprobs and columns in float32; a third of the weights is 0, the others are not all 1; ratios reach beyond both bounds."""
    generator = torch.Generator().manual_seed(seed)
    logprobs_BL = -3 * torch.rand(SHAPE, generator=generator)
    weights_BL = torch.rand(SHAPE, generator=generator) * (torch.rand(SHAPE, generator=generator) > 1 / 3)
    columns = {
        "old_logprobs": logprobs_BL + 0.4 * torch.randn(SHAPE, generator=generator),
        "advantages": torch.randn(SHAPE, generator=generator),
        "loss_weights": weights_BL,
    }
    return logprobs_BL, columns


def run(loss, logprobs_BL, columns):
    """-> (value, gradient [B, L], finished metrics)"""
    logprobs_BL = logprobs_BL.clone().requires_grad_()
    required, _ = columns_of(loss)
    value, metrics = loss(logprobs_BL, **{name: columns[name] for name in required})
    value.backward()
    numbers = {n: float(v[0] / v[1]) if isinstance(v, tuple) else float(v) for n, v in metrics.items()}
    return value.item(), logprobs_BL.grad, numbers


def expect(loss, value_of, gradient_of):
    """Compare with sums over positions of value_of(logprob, old, advantage, weight) and its derivative by logprob."""
    logprobs_BL, columns = data()
    flat = [x.double().flatten().tolist() for x in (logprobs_BL, *columns.values())]
    value, gradient_BL, metrics = run(loss, logprobs_BL, columns)
    expected = math.fsum(value_of(*position) for position in zip(*flat, strict=True))
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    gradient = [gradient_of(*position) for position in zip(*flat, strict=True)]
    torch.testing.assert_close(gradient_BL.double().flatten(), torch.tensor(gradient).double(), rtol=1e-6, atol=1e-6)
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_cross_entropy_is_the_weighted_sum_of_negative_logprobs():
    expect(CrossEntropy(), lambda p, o, a, w: -w * p, lambda p, o, a, w: -w)


def test_importance_sampling_is_the_weighted_sum_of_ratio_times_advantage():
    expect(
        ImportanceSampling(), lambda p, o, a, w: -w * math.exp(p - o) * a, lambda p, o, a, w: -w * math.exp(p - o) * a
    )


@pytest.mark.parametrize("low, high", [(0.8, 1.2), (0.8, 1.28), (0.0, 1.0), (1.0, 1.0)])
def test_ppo_is_the_pessimistic_minimum_of_ratio_and_clipped_ratio(low, high):
    def value(p, o, a, w):
        ratio = math.exp(p - o)
        if a >= 0:
            return -w * a * min(ratio, high)
        return -w * a * max(ratio, low)

    def gradient(p, o, a, w):
        ratio = math.exp(p - o)
        clipped = ratio > high if a >= 0 else ratio < low
        return 0.0 if clipped else -w * a * ratio

    expect(PPO(ratio_low=low, ratio_high=high), value, gradient)


def test_ppo_reports_the_fraction_of_trained_positions_whose_gradient_is_clipped():
    logprobs_BL, columns = data()
    _, gradient_BL, metrics = run(PPO(), logprobs_BL, columns)
    trained_BL = columns["loss_weights"] != 0
    clipped_BL = (gradient_BL == 0) & trained_BL
    assert 0 < clipped_BL.sum() < trained_BL.sum()
    assert metrics["clip_fraction:mean"] == pytest.approx(float(clipped_BL.sum() / trained_BL.sum()))


@pytest.mark.parametrize("loss", [PPO(), ImportanceSampling()])
def test_policy_metrics_are_over_trained_positions(loss):
    logprobs_BL, columns = data()
    _, _, metrics = run(loss, logprobs_BL, columns)
    flat = [x.double().flatten().tolist() for x in (logprobs_BL, *columns.values())]
    trained = [(p - o, a, p) for p, o, a, w in zip(*flat, strict=True) if w != 0]
    mean = lambda values: math.fsum(values) / len(trained)  # noqa: E731
    expected = {
        "logprob_diff:mean": mean(abs(d) for d, _, _ in trained),
        "logprob_diff:max": max(abs(d) for d, _, _ in trained),
        "kl_policy_generator:mean": mean(math.exp(d) - 1 - d for d, _, _ in trained),
        "ratio:mean": mean(math.exp(d) for d, _, _ in trained),
        "ratio:max": max(math.exp(d) for d, _, _ in trained),
        "advantage:mean": mean(a for _, a, _ in trained),
        "advantage_abs:mean": mean(abs(a) for _, a, _ in trained),
        "entropy_estimate:mean": mean(-p for _, _, p in trained),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_cross_entropy_reports_the_mean_logprob_over_trained_positions():
    logprobs_BL, columns = data()
    trained = logprobs_BL[columns["loss_weights"] != 0]
    assert run(CrossEntropy(), logprobs_BL, columns)[2]["logprob:mean"] == pytest.approx(float(trained.mean()))


@pytest.mark.parametrize("loss", [resolve(name) for name in sorted(LOSSES)])
def test_positions_without_weight_add_nothing_whatever_their_columns_hold(loss):
    logprobs_BL, columns = data()
    value, gradient_BL, metrics = run(loss, logprobs_BL, columns)
    untrained_BL = columns["loss_weights"] == 0
    # a ratio of e^1000 is infinite in float32
    wild = {"old_logprobs": torch.where(untrained_BL, -1000.0, columns["old_logprobs"])}
    wild["advantages"] = torch.where(untrained_BL, -1e30, columns["advantages"])
    wild_value, wild_gradient_BL, wild_metrics = run(loss, logprobs_BL, {**columns, **wild})
    assert wild_value == value and wild_metrics == metrics
    assert torch.equal(wild_gradient_BL, gradient_BL)
    assert (gradient_BL[untrained_BL] == 0).all()


@pytest.mark.parametrize("loss", [resolve(name) for name in sorted(LOSSES)])
def test_a_loss_over_padding_alone_is_0_with_metrics_that_are_finite(loss):
    zeros_BL = torch.zeros(SHAPE)
    required, _ = columns_of(loss)
    value, metrics = loss(zeros_BL, **dict.fromkeys(required, zeros_BL))
    assert value == 0
    assert all(math.isfinite(x) for v in metrics.values() for x in (v if isinstance(v, tuple) else (v,)))


@pytest.mark.parametrize("low, high", [(-0.1, 1.2), (1.1, 1.2), (0.8, 0.9), (float("nan"), 1.2)])
def test_ppo_refuses_bounds_that_do_not_hold_1(low, high):
    with pytest.raises(ValueError, match=f"ratio_low={low}, ratio_high={high}; it must hold that 0 <= low <= 1 <= hi"):
        PPO(ratio_low=low, ratio_high=high)


def test_resolve_gives_a_loss_by_name_with_default_options_and_an_instance_as_it_is():
    assert {name: resolve(name) for name in LOSSES} == {
        "cross_entropy": CrossEntropy(),
        "importance_sampling": ImportanceSampling(),
        "ppo": PPO(),
    }
    loss = PPO(ratio_high=1.28)
    assert resolve(loss) is loss


@pytest.mark.parametrize("loss", ["pppo", None, 3, PPO], ids=repr)
def test_resolve_refuses_anything_else_and_names_what_there_is(loss):
    with pytest.raises(ValueError, match="unknown loss .*cross_entropy, importance_sampling, ppo"):
        resolve(loss)


def test_columns_of_are_the_keyword_only_arguments():
    class Mine:
        def __call__(self, logprobs_BL, *, loss_weights, ref_logprobs=None):
            return logprobs_BL.sum(), {}

    def function(logprobs_BL, *, values):
        return (logprobs_BL * values).sum(), {}

    assert columns_of(function) == ({"values"}, set())
    assert columns_of(CrossEntropy()) == ({"loss_weights"}, set())
    assert columns_of(PPO()) == ({"loss_weights", "advantages", "old_logprobs"}, set())
    assert columns_of(Mine()) == ({"loss_weights"}, {"ref_logprobs"})
