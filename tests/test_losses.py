"""Compares loss values and gradients with closed forms in plain Python and float64.

In shapes, B is the number of rows (samples) and L their length.
"""

import math

import pytest
import torch

from rl_actors.losses import (
    CISPO,
    DRO,
    GSPO,
    KL,
    LOSSES,
    PPO,
    CrossEntropy,
    IcePop,
    ImportanceSampling,
    LogprobGradient,
    Reinforce,
    TruncatedImportanceSampling,
    columns_of,
    computed_for,
    resolve,
)
from rl_actors.losses.custom import output_gradients
from rl_actors.metrics import PartialsCopy, finish, merge
from rl_actors.types import Sample

SHAPE = (3, 17)


def data(seed=0):
    """Logprobs and columns in float32. A third of the weights is 0, and the other weights lie between 0 and 1.

    Some ratios exp(logprob - old_logprob) are outside the default clip bounds of PPO.
    """
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
    """(value, gradient [B, L], finished metrics) of a loss."""
    logprobs_BL = logprobs_BL.clone().requires_grad_()
    required, _ = columns_of(loss)
    value, metrics = loss(logprobs_BL, **{name: columns[name] for name in required})
    value.backward()
    return value.item(), logprobs_BL.grad, finish(PartialsCopy(metrics).wait())


def expect(loss, value_of, gradient_of):
    """Compare the loss with the sum of value_of(logprob, old logprob, advantage, weight) over all positions. Compare
    the gradient at each position with gradient_of of the same four numbers.
    """
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
def test_the_ppo_objective_is_the_minimum_of_ratio_times_advantage_and_clipped_ratio_times_advantage(low, high):
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
    is_trained_BL = columns["loss_weights"] != 0
    clipped_BL = (gradient_BL == 0) & is_trained_BL
    assert 0 < clipped_BL.sum() < is_trained_BL.sum()
    assert metrics["clip_fraction:mean"] == pytest.approx(float(clipped_BL.sum() / is_trained_BL.sum()))


@pytest.mark.parametrize("loss", [PPO(), PPO(dual_clip=1.5), CISPO(ratio_low=0.7, ratio_high=1.3)])
def test_the_clip_fraction_is_also_reported_for_low_and_for_high_ratios_separately(loss):
    logprobs_BL, columns = data()
    ratio_BL = (logprobs_BL - columns["old_logprobs"]).exp()
    is_trained_BL, advantages_BL = columns["loss_weights"] != 0, columns["advantages"]
    low_BL, high_BL = ratio_BL < loss.ratio_low, ratio_BL > loss.ratio_high
    if isinstance(loss, PPO):
        low_BL, high_BL = low_BL & (advantages_BL < 0), high_BL & (advantages_BL > 0)
        if loss.dual_clip is not None:
            high_BL = high_BL | ((advantages_BL < 0) & (ratio_BL > loss.dual_clip))
    _, _, metrics = run(loss, logprobs_BL, columns)
    for name, clipped_BL in (("low", low_BL), ("high", high_BL)):
        share = float((clipped_BL & is_trained_BL).sum() / is_trained_BL.sum())
        assert 0 < share == pytest.approx(metrics[f"clip_fraction_{name}:mean"])
    whole = metrics["clip_fraction_low:mean"] + metrics["clip_fraction_high:mean"]
    assert metrics["clip_fraction:mean"] == pytest.approx(whole)


@pytest.mark.parametrize("loss", [PPO(), ImportanceSampling(), CISPO(), DRO(), GSPO()])
def test_policy_metrics_count_only_trained_positions(loss):
    logprobs_BL, columns = data()
    _, _, metrics = run(loss, logprobs_BL, columns)
    flat = [x.double().flatten().tolist() for x in (logprobs_BL, *columns.values())]
    trained = [(p - o, a, p) for p, o, a, w in zip(*flat, strict=True) if w != 0]

    def mean(values) -> float:
        return math.fsum(values) / len(trained)

    expected = {
        "logprob_diff:mean": mean(abs(d) for d, _, _ in trained),
        "logprob_diff:max": max(abs(d) for d, _, _ in trained),
        "kl_policy_generator:mean": mean(math.exp(d) - 1 - d for d, _, _ in trained),
        "ratio:mean": mean(math.exp(d) for d, _, _ in trained),
        "ratio:max": max(math.exp(d) for d, _, _ in trained),
        "advantage:mean": mean(a for _, a, _ in trained),
        "advantage_abs:mean": mean(abs(a) for _, a, _ in trained),
        "advantage:min": min(a for _, a, _ in trained),
        "advantage:max": max(a for _, a, _ in trained),
        "effective_sample_fraction:mean": 1 / mean(math.exp(2 * d) for d, _, _ in trained),
        "entropy_estimate:mean": mean(-p for _, _, p in trained),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_cross_entropy_reports_the_mean_logprob_over_trained_positions():
    logprobs_BL, columns = data()
    trained = logprobs_BL[columns["loss_weights"] != 0]
    assert run(CrossEntropy(), logprobs_BL, columns)[2]["logprob:mean"] == pytest.approx(float(trained.mean()))


@pytest.mark.parametrize("loss", [resolve(name) for name in sorted(LOSSES)])
def test_column_values_at_positions_of_weight_0_change_nothing(loss):
    logprobs_BL, columns = data()
    value, gradient_BL, metrics = run(loss, logprobs_BL, columns)
    untrained_BL = columns["loss_weights"] == 0
    # These columns make the ratio at positions without weight about e^1000, which is infinite in float32. A loss that
    # multiplied this ratio by the weight 0 would be nan.
    wild = {"old_logprobs": torch.where(untrained_BL, -1000.0, columns["old_logprobs"])}
    wild["advantages"] = torch.where(untrained_BL, -1e30, columns["advantages"])
    wild_value, wild_gradient_BL, wild_metrics = run(loss, logprobs_BL, {**columns, **wild})
    assert wild_value == value and wild_metrics == metrics
    assert torch.equal(wild_gradient_BL, gradient_BL)
    assert (gradient_BL[untrained_BL] == 0).all()


@pytest.mark.parametrize("loss", [resolve(name) for name in sorted(LOSSES)])
def test_a_loss_over_only_padding_is_0_and_its_metrics_are_finite(loss):
    zeros_BL = torch.zeros(SHAPE)
    required, _ = columns_of(loss)
    value, metrics = loss(zeros_BL, **dict.fromkeys(required, zeros_BL))
    assert value == 0
    assert all(math.isfinite(x) for x in finish(PartialsCopy(metrics).wait()).values())


@pytest.mark.parametrize("low, high", [(-0.1, 1.2), (1.1, 1.2), (0.8, 0.9), (float("nan"), 1.2)])
def test_ppo_refuses_a_negative_or_nan_low_bound_and_bounds_without_1_between_them(low, high):
    with pytest.raises(ValueError, match=f"ratio_low={low}, ratio_high={high}; it must hold that 0 <= low <= 1 <= hi"):
        PPO(ratio_low=low, ratio_high=high)


def test_resolve_makes_a_named_loss_with_default_options_and_returns_a_loss_instance_unchanged():
    assert {name: resolve(name) for name in LOSSES} == {
        "cispo": CISPO(ratio_low=0.0, ratio_high=4.0),
        "cross_entropy": CrossEntropy(),
        "dro": DRO(beta=0.05),
        "gspo": GSPO(ratio_low=1 - 3e-4, ratio_high=1 + 4e-4),
        "importance_sampling": ImportanceSampling(),
        "ppo": PPO(ratio_low=0.8, ratio_high=1.28),
        "reinforce": Reinforce(),
    }
    loss = PPO(ratio_high=1.28)
    assert resolve(loss) is loss


@pytest.mark.parametrize("loss", ["pppo", None, 3, PPO], ids=repr)
def test_resolve_refuses_an_unknown_loss_and_names_the_known_losses(loss):
    with pytest.raises(
        ValueError, match="unknown loss .*cispo, cross_entropy, dro, gspo, importance_sampling, ppo, reinforce"
    ):
        resolve(loss)


def test_columns_of_returns_the_required_and_the_optional_keyword_only_arguments():
    class Mine:
        def __call__(self, logprobs_BL, *, loss_weights, ref_logprobs=None):
            return logprobs_BL.sum(), {}

    def function(logprobs_BL, *, values):
        return (logprobs_BL * values).sum(), {}

    assert columns_of(function) == ({"values"}, set())
    assert columns_of(CrossEntropy()) == ({"loss_weights"}, {"target_ids", "target_weights"})
    assert columns_of(PPO()) == ({"loss_weights", "advantages", "old_logprobs"}, {"generator_logprobs"})
    assert columns_of(Mine()) == ({"loss_weights"}, {"ref_logprobs"})


def test_cross_entropy_takes_negative_weights():
    logprobs_BL, columns = data()
    columns["loss_weights"] = -columns["loss_weights"]
    value, gradient_BL, _ = run(CrossEntropy(), logprobs_BL, columns)
    assert value == pytest.approx(run(CrossEntropy(), logprobs_BL, data()[1])[0] * -1) and value < 0
    assert torch.equal(gradient_BL, -columns["loss_weights"])


def test_cross_entropy_with_k_targets_weighs_each_target_by_loss_weight_times_target_weight():
    logprobs_BL, columns = data()
    generator = torch.Generator().manual_seed(1)
    target_logprobs = (-3 * torch.rand(*SHAPE, 4, generator=generator)).requires_grad_()
    weights = torch.randn(*SHAPE, 4, generator=generator)
    value, _ = CrossEntropy()(
        logprobs_BL,
        loss_weights=columns["loss_weights"],
        target_ids=torch.zeros(*SHAPE, 4, dtype=torch.int64),
        target_weights=weights,
        target_logprobs=target_logprobs,
    )
    value.backward()
    w = columns["loss_weights"].double()[..., None]
    assert value.item() == pytest.approx(-(w * weights * target_logprobs).sum().item(), rel=1e-6)
    torch.testing.assert_close(target_logprobs.grad.double(), -w * weights, rtol=1e-6, atol=1e-6)


def test_reinforce_is_the_weighted_sum_of_logprob_times_advantage():
    expect(Reinforce(), lambda p, o, a, w: -w * a * p, lambda p, o, a, w: -w * a)


def test_dro_is_logprob_times_advantage_with_a_quadratic_penalty():
    expect(
        DRO(beta=0.3),
        lambda p, o, a, w: -w * (p * a - 0.15 * (p - o) ** 2),
        lambda p, o, a, w: -w * (a - 0.3 * (p - o)),
    )


@pytest.mark.parametrize("low, high", [(0.0, 4.0), (0.8, 1.2)])
def test_cispo_weighs_the_logprob_by_a_clipped_ratio_without_a_gradient(low, high):
    def clip(p, o):
        return min(max(math.exp(p - o), low), high)

    expect(
        CISPO(ratio_low=low, ratio_high=high),
        lambda p, o, a, w: -w * clip(p, o) * a * p,
        lambda p, o, a, w: -w * clip(p, o) * a,
    )


def test_dual_clip_bounds_the_objective_of_negative_advantages():
    def value(p, o, a, w):
        ratio = math.exp(p - o)
        return -w * a * (min(ratio, 1.28) if a >= 0 else min(max(ratio, 0.8), 1.5))

    def gradient(p, o, a, w):
        ratio = math.exp(p - o)
        kept = ratio <= 1.28 if a >= 0 else 0.8 <= ratio <= 1.5
        return -w * a * ratio if kept else 0.0

    expect(PPO(dual_clip=1.5), value, gradient)


def rows_of(logprobs_BL, columns, *names):
    """For each row a list of tuples (logprob, value of each named column), one tuple for each position."""
    tensors = [logprobs_BL, *(columns[name] for name in names)]
    return [list(zip(*row, strict=True)) for row in zip(*(x.double().tolist() for x in tensors), strict=True)]


@pytest.mark.parametrize("sequence_mean", [False, True])
@pytest.mark.parametrize("low, high", [(0.9997, 1.0004), (0.8, 1.2)])
def test_gspo_clips_one_ratio_per_sample(low, high, sequence_mean):
    logprobs_BL, columns = data()
    actual, gradient_BL, metrics = run(
        GSPO(ratio_low=low, ratio_high=high, sequence_mean=sequence_mean), logprobs_BL, columns
    )
    value, gradient = 0.0, []
    for row in rows_of(logprobs_BL, columns, "old_logprobs", "advantages", "loss_weights"):
        trained = [(p - o) for p, o, _, w in row if w]
        ratio = math.exp(sum(trained) / len(trained))
        scale = sum(w for *_, w in row) if sequence_mean else 1.0
        value += sum(-w / scale * (a * min(ratio, high) if a >= 0 else a * max(ratio, low)) for _, _, a, w in row)
        kept = sum(-w / scale * a for _, _, a, w in row if (ratio <= high if a >= 0 else ratio >= low))
        gradient.append([kept * ratio / len(trained) if w else 0.0 for *_, w in row])
    assert actual == pytest.approx(value, rel=1e-6, abs=1e-6) and metrics["loss:sum"] == pytest.approx(actual)
    torch.testing.assert_close(gradient_BL.double(), torch.tensor(gradient).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name, loss", [(n, c) for n, c in LOSSES.items() if n != "cross_entropy"])
def test_sequence_mean_gives_every_sample_a_total_weight_of_1(name, loss):
    logprobs_BL, columns = data()
    total_B1 = columns["loss_weights"].sum(1, keepdim=True)
    expected = run(loss(), logprobs_BL, {**columns, "loss_weights": columns["loss_weights"] / total_B1})
    actual = run(loss(sequence_mean=True), logprobs_BL, columns)
    assert actual[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)
    assert loss(sequence_mean=True).whole_sequence and loss().whole_sequence == (name == "gspo")


ESTIMATORS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
}


def with_options(seed=3):
    """data() with two more columns: logprobs of a reference, and logprobs of a generator that differ from old_logprobs."""
    logprobs_BL, columns = data()
    generator = torch.Generator().manual_seed(seed)

    def near():
        return logprobs_BL + 0.5 * torch.randn(SHAPE, generator=generator)

    return logprobs_BL, {**columns, "ref_logprobs": near(), "generator_logprobs": near()}


def option_adds(base, optioned, value_of, gradient_of):
    """Assert that an option adds the sum of w * value_of(d) over positions to the loss, and w * gradient_of(d) to the
    gradient.

    w is the loss weight, and d = logprob - ref_logprob. `optioned` is the loss `base` with the option. Returns the
    metrics of `optioned`, and (logprob, ref_logprob, loss weight) of every position.
    """
    logprobs_BL, columns = with_options()
    without, with_it = run(base, logprobs_BL, columns), run(optioned, logprobs_BL, columns)
    pairs = [x for row in rows_of(logprobs_BL, columns, "ref_logprobs", "loss_weights") for x in row]
    added = math.fsum(w * value_of(p - r) for p, r, w in pairs)
    gradient = torch.tensor([w * gradient_of(p - r) for p, r, w in pairs]).double().view(SHAPE)
    assert with_it[0] - without[0] == pytest.approx(added, rel=1e-5, abs=1e-5)  # a difference of float32 sums
    torch.testing.assert_close(with_it[1].double() - without[1].double(), gradient, rtol=1e-6, atol=1e-6)
    return with_it[2], pairs


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_kl_to_the_reference_is_added_to_every_policy_loss(name, estimator):
    value, gradient = ESTIMATORS[estimator]
    base, optioned = LOSSES[name](), LOSSES[name](kl=KL(coefficient=0.7, estimator=estimator))
    metrics, pairs = option_adds(base, optioned, lambda d: 0.7 * value(d), lambda d: 0.7 * gradient(d))
    trained = [value(p - r) for p, r, w in pairs if w]
    assert metrics["kl_reference:mean"] == pytest.approx(sum(trained) / len(trained), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_every_policy_loss_can_subtract_the_entropy_times_a_coefficient(name):
    logprobs_BL, columns = data()
    entropy = torch.rand(SHAPE, generator=torch.Generator().manual_seed(5)).requires_grad_()
    loss = LOSSES[name](entropy_coefficient=0.2)
    assert computed_for(loss) == {"entropy"} and computed_for(LOSSES[name]()) == set()
    read = {n: columns[n] for n in columns_of(loss)[0]}
    value, metrics = loss(logprobs_BL, entropy=entropy, **read)
    value.backward()
    base = LOSSES[name]()(logprobs_BL, **read)[0]
    w = columns["loss_weights"].double()
    assert (value - base).item() == pytest.approx(-0.2 * (w * entropy).sum().item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(entropy.grad.double(), -0.2 * w, rtol=1e-6, atol=1e-6)
    trained = entropy.detach()[columns["loss_weights"] != 0]
    assert finish(PartialsCopy(metrics).wait())["entropy:mean"] == pytest.approx(float(trained.mean()))


CORRECTIONS = {
    TruncatedImportanceSampling(cap=1.3): lambda q: min(q, 1.3),
    IcePop(low=0.7, high=1.4): lambda q: 1.0 if 0.7 <= q <= 1.4 else 0.0,
    IcePop(low=0.7, high=1.4, reweights=True): lambda q: q if 0.7 <= q <= 1.4 else 0.0,
    TruncatedImportanceSampling(cap=1.05, level="sequence"): lambda q: min(q, 1.05),
    IcePop(low=0.95, high=1.1, level="sequence"): lambda q: 1.0 if 0.95 <= q <= 1.1 else 0.0,
}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_a_correction_multiplies_the_weights_by_a_function_of_the_trainer_to_generator_ratio(name, correction):
    logprobs_BL, columns = with_options()
    factor = CORRECTIONS[correction]
    factors = []
    for row in rows_of(columns["old_logprobs"], columns, "generator_logprobs", "loss_weights"):
        trained = [o - g for o, g, w in row if w]
        mean = math.exp(sum(trained) / len(trained))
        factors.append([factor(mean if correction.level == "sequence" else math.exp(o - g)) for o, g, _ in row])
    factor_BL = torch.tensor(factors)
    is_trained_BL = columns["loss_weights"] != 0
    expected = LOSSES[name]().objective(
        leaf := logprobs_BL.clone().requires_grad_(), columns["old_logprobs"], columns["advantages"], is_trained_BL
    )[0]
    expected = -(columns["loss_weights"] * factor_BL * expected).sum()
    expected.backward()
    loss = LOSSES[name](correction=correction)
    actual_leaf = logprobs_BL.clone().requires_grad_()
    read = {n: columns[n] for n in frozenset().union(*columns_of(loss))}
    value, metrics = loss(actual_leaf, **read)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(actual_leaf.grad, leaf.grad, rtol=1e-5, atol=1e-6)
    assert finish(PartialsCopy(metrics).wait())["correction:mean"] == pytest.approx(
        float(factor_BL[is_trained_BL].mean()), rel=1e-5
    )
    assert (factor_BL != 1).sum() > 0 and loss.whole_sequence == (correction.level == "sequence" or name == "gspo")


def test_without_generator_logprobs_a_correction_compares_the_current_logprobs_with_old_logprobs():
    expect(
        PPO(correction=IcePop(low=0.7, high=1.4), ratio_low=0.0, ratio_high=100.0),
        lambda p, o, a, w: -w * math.exp(p - o) * a * (0.7 <= math.exp(p - o) <= 1.4),
        lambda p, o, a, w: -w * math.exp(p - o) * a * (0.7 <= math.exp(p - o) <= 1.4),
    )
    expect(
        Reinforce(correction=TruncatedImportanceSampling(cap=1.2)),
        lambda p, o, a, w: -w * min(math.exp(p - o), 1.2) * a * p,
        lambda p, o, a, w: -w * min(math.exp(p - o), 1.2) * a,
    )


def test_a_correction_that_reweights_requires_generator_logprobs_in_a_loss_that_contains_a_ratio():
    policy_losses = {name: loss for name, loss in LOSSES.items() if name != "cross_entropy"}
    for correction in (TruncatedImportanceSampling(), IcePop(reweights=True)):
        required = {name: columns_of(loss(correction=correction))[0] for name, loss in policy_losses.items()}
        needing = {name for name in required if "generator_logprobs" in required[name]}
        # Without generator_logprobs the correction would multiply these losses by the ratio that they already contain.
        assert needing == {"cispo", "gspo", "importance_sampling", "ppo"}
    assert "generator_logprobs" not in columns_of(PPO(correction=IcePop()))[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_the_merged_metrics_of_the_rows_of_a_batch_are_the_metrics_of_the_whole_batch(name, seed):
    loss = LOSSES[name]()
    logprobs_BL, columns = data(seed)
    columns = {n: columns[n] for n in columns_of(loss)[0]}
    parts = [loss(logprobs_BL[i : i + 1], **{n: c[i : i + 1] for n, c in columns.items()})[1] for i in range(SHAPE[0])]
    zeros = {n: torch.zeros(1, 5) for n in columns}
    parts.insert(seed, loss(torch.zeros(1, 5), **zeros)[1])  # a row of padding changes nothing
    whole = finish(PartialsCopy(loss(logprobs_BL, **columns)[1]).wait())
    assert finish(merge(PartialsCopy(part).wait() for part in parts)) == pytest.approx(whole, rel=1e-5, abs=1e-6)


BAD_OPTIONS = {
    "KL.coefficient=-1; .* at least 0": lambda: KL(coefficient=-1),
    "KL.estimator='k4'; .* k1, k2, k3": lambda: KL(coefficient=1.0, estimator="k4"),
    "TruncatedImportanceSampling.cap=0; .* above 0": lambda: TruncatedImportanceSampling(cap=0),
    "level='row'; .* token, sequence": lambda: TruncatedImportanceSampling(level="row"),
    "IcePop.low=2, high=5": lambda: IcePop(low=2, high=5),
    "IcePop.level='row'": lambda: IcePop(level="row"),
    "entropy_coefficient=nan": lambda: Reinforce(entropy_coefficient=math.nan),
    "dual_clip=1.0; it must be above 1": lambda: PPO(dual_clip=1.0),
    "beta=-0.1; .* at least 0": lambda: DRO(beta=-0.1),
    "ratio_low=1.5, ratio_high=4.0": lambda: CISPO(ratio_low=1.5),
    "ratio_low=1.5, ratio_high": lambda: GSPO(ratio_low=1.5),
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_the_error_for_an_option_outside_its_limits_names_the_option_and_its_value(message):
    with pytest.raises(ValueError, match=message):
        BAD_OPTIONS[message]()


def own_loss(logprobs_BL, *, loss_weights):
    return -(logprobs_BL * loss_weights).sum(), {}


def test_resolve_imports_a_loss_that_is_named_module_colon_name():
    assert resolve(f"{__name__}:own_loss") is own_loss
    assert resolve("rl_actors.losses.policy:GSPO") == GSPO()
    for name in ("no_such_module:loss", f"{__name__}:no_such_loss", "rl_actors.losses:KL", f"{__name__}:SHAPE"):
        with pytest.raises(ValueError, match="cannot be used|unknown loss"):
            resolve(name)


def test_ppo_written_by_the_caller_has_the_gradients_of_the_built_in_ppo():
    logprobs_BL, columns = data()
    samples = [Sample.from_tokens([1], [2] * SHAPE[1]) for _ in range(SHAPE[0])]

    def ppo(given, logprobs):
        assert given == samples
        ratio = (torch.stack(logprobs) - columns["old_logprobs"]).exp()
        better = torch.minimum(ratio * columns["advantages"], ratio.clamp(0.8, 1.28) * columns["advantages"])
        return -(columns["loss_weights"] * better).sum(), {"ratio:max": ratio.max(), "ratio:mean": (ratio.sum(), 3)}

    gradients, partials = output_gradients(ppo, samples, list(logprobs_BL))
    value, gradient_BL, _ = run(PPO(), logprobs_BL, columns)
    torch.testing.assert_close(torch.stack(gradients), gradient_BL, rtol=1e-6, atol=1e-6)
    assert partials["loss:sum"] == pytest.approx(value, rel=1e-6) and set(partials) == {
        "loss:sum",
        "ratio:max",
        "ratio:mean",
    }
    carried = run(LogprobGradient(), logprobs_BL, {"logprob_grads": gradient_BL})
    assert torch.equal(carried[1], gradient_BL)


@pytest.mark.parametrize(
    "loss, error, words",
    [
        (lambda s, p: p[0].sum(), TypeError, "it must return"),
        (lambda s, p: (p[0].sum(), None), TypeError, "metrics of type NoneType"),
        (lambda s, p: (p[0], {}), ValueError, r"shape \(3,\).* must be a scalar"),
        (lambda s, p: (p[0].detach().sum(), {}), ValueError, "requires_grad=False"),
        (lambda s, p: (p[0].sum(), {"mine": 1.0}), ValueError, "metric 'mine': the name must end in"),
    ],
)
def test_a_loss_of_the_caller_must_return_a_scalar_and_named_metrics(loss, error, words):
    with pytest.raises(error, match=words):
        output_gradients(loss, [], [torch.zeros(3), torch.zeros(2)])


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_a_kl_that_is_only_reported_leaves_the_gradient_alone_where_its_estimate_overflows(name):
    logprobs_BL, columns = with_options()
    base = run(LOSSES[name](), logprobs_BL, columns)
    far = columns | {"ref_logprobs": columns["ref_logprobs"] + 95.0}  # exp(95) overflows float32
    value, gradient_BL, metrics = run(LOSSES[name](kl=KL(coefficient=0.0)), logprobs_BL, far)
    assert value == base[0]
    torch.testing.assert_close(gradient_BL, base[1], rtol=0, atol=0)
    assert metrics["kl_reference:mean"] == math.inf
