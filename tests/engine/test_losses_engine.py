"""Every loss that reads logprobs, computed by the whole engine.

The tests compare the loss and its gradients with a closed form. The closed form is computed from the logprobs of a
transformers model in float64.

A closed form has the arguments p, c, h and all_TV of one sample with T positions. p [T] are the logprobs of the
targets, c the sample's columns by name, h [T] the entropies of the model's distributions, and all_TV the logprobs of
the whole vocabulary. In shapes, V is the size of the vocabulary, K the number of target ids of a position, and N the
number of positions of a chunk.
"""

from dataclasses import replace

import pytest
import torch
from references import VOCAB_SIZE, load_qwen3, ppo_samples, random_samples
from torch import Tensor

from rl_actors.engine.batch import make_batch
from rl_actors.engine.packing import Microbatch
from rl_actors.engine.vocab_parallel import Logits, TargetLogprobs, entropy, top_k_logprobs
from rl_actors.losses import (
    CISPO,
    DRO,
    GSPO,
    KL,
    PPO,
    CrossEntropy,
    IcePop,
    ImportanceSampling,
    LogprobGradient,
    Reinforce,
    TruncatedImportanceSampling,
    columns_of,
)
from rl_actors.losses.custom import output_gradients
from rl_actors.metrics import finish, merge
from rl_actors.types import IGNORE_TARGET, Sample

LENGTHS = [7, 31, 1, 64, 13, 3]


@pytest.fixture(scope="module")
def model(tied_qwen3):
    return load_qwen3(tied_qwen3).double()


@pytest.fixture(scope="module")
def everything(model) -> list[Sample]:
    """Samples with every column that a loss may read.

    The columns of logprobs are near the model's own logprobs, so that ratios of probabilities are on both sides of 1.
    """
    samples = ppo_samples(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    made = []
    for index, sample in enumerate(samples):
        own = reference(model, sample)[0].detach().float()
        near = {}
        for name in ("old_logprobs", "ref_logprobs", "generator_logprobs"):
            near[name] = own + 0.3 * torch.randn(len(sample), generator=generator)
        top_k = {
            "target_ids": torch.randint(VOCAB_SIZE, (len(sample), 5), generator=generator),
            "target_weights": torch.randn(len(sample), 5, generator=generator),
        }
        columns = {**sample.columns, **near, **top_k}
        made.append(replace(sample, columns=columns, temperature=1.0 + index / 10))
    return made


def reference(model, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs of the targets [T], entropy [T], logprobs of all tokens [T, V])"""
    all_TV = (model(input_ids=sample.tokens[None]).logits[0].double() / sample.temperature).log_softmax(-1)
    return all_TV.gather(-1, sample.targets[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(-1), all_TV


def clipped(p, c, low=0.8, high=1.28):
    """PPO's objective at every position."""
    r = (p - c["old_logprobs"]).exp()
    return torch.minimum(r * c["advantages"], r.clamp(low, high) * c["advantages"])


def mean_of(x, c):
    """The mean over the positions whose loss weight is not 0."""
    return x[c["loss_weights"] != 0].mean()


def cross_entropy(p, c, h, all_TV):
    return -(c["loss_weights"] * p).sum()


def cross_entropy_of_top_k(p, c, h, all_TV):
    logprobs_TK = all_TV.gather(-1, c["target_ids"].long())
    return -(c["loss_weights"][:, None] * c["target_weights"] * logprobs_TK).sum()


def importance_sampling(p, c, h, all_TV):
    return -(c["loss_weights"] * (p - c["old_logprobs"]).exp() * c["advantages"]).sum()


def reinforce_with_entropy(p, c, h, all_TV):
    return -(c["loss_weights"] * (c["advantages"] * p + 0.5 * h)).sum()


def ppo(p, c, h, all_TV):
    return -(c["loss_weights"] * clipped(p, c)).sum()


def gspo(p, c, h, all_TV):
    s = mean_of(p - c["old_logprobs"], c).exp()
    j = torch.minimum(s * c["advantages"], s.clamp(0.9, 1.1) * c["advantages"])
    return -(c["loss_weights"] / c["loss_weights"].sum() * j).sum()


def everything_at_once(p, c, h, all_TV):
    w = c["loss_weights"] / c["loss_weights"].sum()
    q = mean_of(c["old_logprobs"] - c["generator_logprobs"], c).exp().clamp(max=1.05)
    d = p - c["ref_logprobs"]
    return (-w * q * clipped(p, c) + 0.3 * w * ((-d).exp() - 1 + d) - 0.1 * w * h).sum()


def icepop(p, c, h, all_TV):
    q = (c["old_logprobs"] - c["generator_logprobs"]).exp()
    return (-c["loss_weights"] * q * ((q >= 0.8) & (q <= 1.2)) * clipped(p, c)).sum()


def cispo(p, c, h, all_TV):
    ratio = (p - c["old_logprobs"]).exp().clamp(0.9, 1.1).detach()
    return -(c["loss_weights"] * ratio * c["advantages"] * p).sum()


def dro(p, c, h, all_TV):
    return -(c["loss_weights"] * (p * c["advantages"] - 0.1 * (p - c["old_logprobs"]) ** 2)).sum()


LOSSES = {
    "cross_entropy": (CrossEntropy(), cross_entropy),
    "cross_entropy top-K": (CrossEntropy(), cross_entropy_of_top_k),
    "importance_sampling": (ImportanceSampling(), importance_sampling),
    "reinforce with entropy": (Reinforce(entropy_coefficient=0.5), reinforce_with_entropy),
    "ppo": (PPO(), ppo),
    "ppo with IcePop": (PPO(correction=IcePop(low=0.8, high=1.2, reweights=True)), icepop),
    "cispo": (CISPO(ratio_low=0.9, ratio_high=1.1), cispo),
    "dro": (DRO(beta=0.2), dro),
    "gspo": (GSPO(ratio_low=0.9, ratio_high=1.1, sequence_mean=True), gspo),
    "ppo with everything": (
        PPO(
            kl=KL(coefficient=0.3),
            entropy_coefficient=0.1,
            correction=TruncatedImportanceSampling(cap=1.05, level="sequence"),
            sequence_mean=True,
        ),
        everything_at_once,
    ),
}


def with_columns_of(loss, samples, *, top_k: bool) -> list[Sample]:
    """The samples with only the columns that the loss reads. If top_k is False, target_ids and target_weights are left out,
    although CrossEntropy may read them.
    """
    names = frozenset().union(*columns_of(loss))
    if not top_k:
        names -= {"target_ids", "target_weights"}
    return [replace(sample, columns={name: sample.columns[name] for name in names}) for sample in samples]


def in_order(output, pieces) -> list[Tensor]:
    """The values of each sample, in the order of the samples.

    pieces: the values of all samples in one tensor, in the engine's order.
    """
    found = dict(zip(output.indices, pieces.split(output.lengths), strict=True))
    return [found[index] for index in range(len(found))]


def gradients(engine) -> dict[str, Tensor]:
    """The engine's gradients by Hugging Face name, whole and in float64."""
    named = engine.built.model.named_parameters()
    found = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    return {name: grad.full_tensor().double() for name, grad in engine.built.hf_adapter.to_hf(found).items()}


def relative_error(engine, expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, divided by the norm of all expected gradients."""
    actual = gradients(engine)
    assert set(actual) <= set(expected)
    difference = sum((actual[name] - expected[name]).square().sum() for name in actual)
    return float((difference / sum(expected[name].square().sum() for name in actual)).sqrt())


def reference_loss(model, samples: list[Sample], closed_form) -> tuple[float, dict[str, Tensor]]:
    """(sum of a closed form over all samples, gradients of the sum). Positions whose target is IGNORE_TARGET are dropped."""
    model.zero_grad()
    total = 0.0
    for sample in samples:
        kept = sample.targets != IGNORE_TARGET
        p, h, all_TV = reference(model, replace(sample, targets=sample.targets.clamp(min=0)))
        columns = {name: column[kept].double() for name, column in sample.columns.items()}
        value = closed_form(p[kept], columns, h[kept], all_TV[kept])
        value.backward()
        total += value.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_a_closed_form_on_transformers_in_float64(make_engine, model, everything, name):
    loss, closed_form = LOSSES[name]
    total, expected = reference_loss(model, everything, closed_form)
    engine = make_engine(logprob_chunk_tokens=40)
    output = engine.forward_backward(with_columns_of(loss, everything, top_k="top-K" in name), loss)
    error = relative_error(engine, expected)
    print(f"{name}: loss {abs(output.metrics['loss:sum'] - total) / abs(total):.1e}, gradient {error:.1e}")
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    # The limit is above the rounding errors of the engine, which computes in float32. test_losses.py, which needs no
    # engine, checks most gradients within 1e-6.
    assert error < 5e-6


def without_some_targets(samples: list[Sample], *, weight: float) -> list[Sample]:
    """The samples with IGNORE_TARGET as every third target. At these positions the loss weights are `weight`, and all
    other columns except target_ids have extreme values.
    """
    extreme = {
        "loss_weights": weight,
        "advantages": 50.0,
        "old_logprobs": -9.0,
        "ref_logprobs": -12.0,
        "generator_logprobs": -1.0,
        "target_weights": 7.0,
    }
    made = []
    for sample in samples:
        targets = sample.targets.clone()
        targets[1:-1:3] = IGNORE_TARGET
        is_padded = targets == IGNORE_TARGET
        columns = {name: column.clone() for name, column in sample.columns.items()}
        for name, value in extreme.items():
            columns[name][is_padded] = value
        made.append(replace(sample, targets=targets, columns=columns))
    return made


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_targets_count_in_no_loss_and_no_metric_whatever_their_weights(make_engine, model, everything, name):
    loss, closed_form = LOSSES[name]
    top_k = "top-K" in name
    weighted = with_columns_of(loss, without_some_targets(everything, weight=1.0), top_k=top_k)
    unweighted = with_columns_of(loss, without_some_targets(everything, weight=0.0), top_k=top_k)
    total, expected = reference_loss(model, without_some_targets(everything, weight=1.0), closed_form)
    engine = make_engine(logprob_chunk_tokens=40)
    output = engine.forward_backward(weighted, loss)
    without_weights = finish(engine.forward(unweighted, loss).metrics)
    for metric, value in finish(output.metrics).items():
        print(f"{name}: {metric} {value:.4g}, without weights there {without_weights[metric]:.4g}")
    assert finish(output.metrics) == pytest.approx(without_weights, rel=1e-6, abs=1e-6)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert relative_error(engine, expected) < 5e-6


@pytest.mark.parametrize("name", ["gspo", "ppo with everything", "reinforce with entropy", "cross_entropy top-K"])
def test_a_loss_depends_neither_on_packing_nor_on_the_chunk_size_nor_on_the_number_of_calls(
    make_engine, everything, name
):
    loss = LOSSES[name][0]
    samples = with_columns_of(loss, everything, top_k="top-K" in name)
    packed = make_engine(tokens_per_row=128, rows_per_microbatch=2, logprob_chunk_tokens=24)
    unpacked = make_engine(rows_per_microbatch=1, logprob_chunk_tokens=1000)
    whole = packed.forward_backward(samples, loss)
    outputs = [unpacked.forward_backward([sample], loss) for sample in samples]
    assert relative_error(packed, gradients(unpacked)) < 2e-6
    merged = finish(merge(output.metrics for output in outputs))
    assert finish(whole.metrics) == pytest.approx(merged, rel=1e-4, abs=1e-5)
    packed_logprobs = torch.cat(in_order(whole, whole.logprobs))
    unpacked_logprobs = torch.cat([output.logprobs for output in outputs])
    torch.testing.assert_close(packed_logprobs, unpacked_logprobs, rtol=1e-5, atol=1e-5)


def test_entropy_and_the_logprobs_of_k_ids_are_returned_only_if_asked_for(make_engine, model, everything):
    engine = make_engine(logprob_chunk_tokens=24)
    samples = [replace(s, columns={"target_ids": s.columns["target_ids"]}) for s in everything]
    samples[1].targets[3] = -100
    output = engine.forward(samples, entropy=True)
    entropies = in_order(output, output.values["entropy"])
    chosen = in_order(output, output.values["target_logprobs"])
    with torch.no_grad():
        for index, sample in enumerate(samples):
            kept = sample.targets != -100
            _, h, all_TV = reference(model, replace(sample, targets=sample.targets.clamp(min=0)))
            expected = all_TV.gather(-1, sample.columns["target_ids"])
            torch.testing.assert_close(entropies[index].double(), torch.where(kept, h, 0.0), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(chosen[index].double(), expected * kept[:, None], rtol=1e-5, atol=1e-5)
    samples[1].targets[3] = 0
    assert engine.forward([replace(s, columns={}) for s in samples]).values.keys() == {"logprobs"}
    asked = engine.forward_backward(with_columns_of(PPO(), everything, top_k=False), PPO(), entropy=True)
    assert set(asked.values) == {"logprobs", "entropy"}


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_loss_computed_by_the_caller_has_the_gradients_of_the_built_in_loss(make_engine, everything, name):
    loss, closed_form = LOSSES[name]
    built_in, custom = make_engine(), make_engine()
    value = built_in.forward_backward(with_columns_of(loss, everything, top_k=False), loss).metrics["loss:sum"]

    def mine(samples, logprobs):
        pairs = zip(samples, logprobs, strict=True)
        return sum(closed_form(p, s.columns, None, None) for s, p in pairs), {"mine:max": torch.tensor(2.0)}

    bare = [replace(sample, columns={}) for sample in everything]
    output = custom.forward(bare)
    grads, partials = output_gradients(mine, everything, in_order(output, output.logprobs))
    assert custom.step.state == "idle" and gradients(custom) == {}
    carriers = [replace(s, columns={"logprob_grads": g}) for s, g in zip(bare, grads, strict=True)]
    custom.forward_backward(carriers, LogprobGradient())
    assert partials["loss:sum"] == pytest.approx(value, rel=1e-6) and partials["mine:max"] == 2.0
    assert relative_error(custom, gradients(built_in)) < 1e-6


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_ignored_targets_count_in_no_loss_that_the_caller_computes(make_engine, model, everything, name):
    closed_form = LOSSES[name][1]
    samples = without_some_targets(everything, weight=1.0)
    total, expected = reference_loss(model, samples, closed_form)
    engine = make_engine()

    def mine(given, logprobs):
        return sum(closed_form(p, s.columns, None, None) for s, p in zip(given, logprobs, strict=True)), {}

    bare = [replace(sample, columns={}) for sample in samples]
    output = engine.forward(bare)
    grads, partials = output_gradients(mine, samples, in_order(output, output.logprobs))
    carriers = [replace(s, columns={"logprob_grads": g}) for s, g in zip(bare, grads, strict=True)]
    engine.forward_backward(carriers, LogprobGradient())
    assert partials["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert relative_error(engine, expected) < 5e-6


def logprobs_and_entropy(logprobs_BL, *, loss_weights, entropy):
    return -(loss_weights * (logprobs_BL + entropy)).sum(), {}


def test_a_loss_given_by_module_and_name_may_read_the_entropy_and_the_engine_reports_the_loss_sum(make_engine, model):
    samples = random_samples(LENGTHS)
    output = make_engine().forward_backward(samples, f"{__name__}:logprobs_and_entropy")
    expected = 0.0
    with torch.no_grad():
        for sample in samples:
            logprobs, entropies, _ = reference(model, sample)
            expected -= (sample.columns["loss_weights"] * (logprobs + entropies)).sum().item()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert "entropy" in output.values


def test_a_whole_sequence_loss_gets_one_sample_in_each_row_and_zeros_after_the_sample():
    samples = [Sample.from_tokens([1] * 2, [2] * n, advantages=[float(i + 1) for i in range(n)]) for n in (2, 1, 3)]
    microbatch = Microbatch(rows=((2, 1), (0,)), row_length=7)
    batch = make_batch(samples, microbatch, ["advantages"])
    rows = batch.row_per_sample()
    unpacked = rows.unpack(batch.columns["advantages"])
    assert unpacked.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0], [0, 1, 2, 0]]
    assert torch.equal(rows.pack(unpacked), batch.columns["advantages"])
    empty = make_batch(samples, Microbatch(rows=((),), row_length=7), ["advantages"]).row_per_sample()
    assert empty.unpack(torch.ones(1, 7)).tolist() == [[0] * 7] and empty.pack(torch.ones(1, 7)).sum() == 0


@pytest.mark.parametrize("function", ["entropy", "target_logprobs", "top_k_logprobs"])
def test_gradients_of_a_chunk_are_those_of_autograd_in_float64(function):
    generator = torch.Generator().manual_seed(0)
    raw_NV = 3 * torch.randn(6, 11, generator=generator, dtype=torch.float64)
    targets_N = torch.tensor([1, -100, 10, 0, 5, 5])
    ids_NK = torch.tensor([[1, 1, 3], [0, 2, 4], [10, 0, 10], [5, 5, 5], [1, 2, 3], [9, 8, 7]])
    kept_N = targets_N != -100
    actual, plain = raw_NV.clone().requires_grad_(), raw_NV.clone().requires_grad_()
    temperatures_N = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.3, 1.0], dtype=torch.float64)
    logits = Logits(raw_NV=actual, temperatures_N=temperatures_N, vocab_size=11)
    all_NV = (plain / temperatures_N[:, None]).log_softmax(-1)
    if function == "entropy":
        result = entropy(logits, targets_N)
        expected = -(all_NV.exp() * all_NV).sum(-1) * kept_N
    elif function == "target_logprobs":
        result = TargetLogprobs(lambda function: function)(logits, targets_N)  # uncompiled
        expected = all_NV.gather(-1, targets_N.clamp(min=0)[:, None])[:, 0] * kept_N
    else:
        result = top_k_logprobs(logits, targets_N, ids_NK)
        expected = all_NV.gather(-1, ids_NK) * kept_N[:, None]
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (result * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.grad, plain.grad, rtol=1e-12, atol=1e-12)
