"""Tests that the trainer's engine gives the float32 numbers of transformers and of a plain PyTorch loop, however samples are packed."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from references import VOCAB_SIZE, load_qwen3, ppo_samples, random_samples, reference_logprobs, reference_training

from rl_actors.config import ModelConfig, TrainerConfig
from rl_actors.engine.train_engine import TrainEngine
from rl_actors.losses import GSPO, KL, PPO
from rl_actors.metrics import HostCopy, finish
from rl_actors.types import OptimParams, num_loss_tokens

ODD_LENGTHS = [7, 31, 1, 64, 13, 3, 22, 45, 9]
PPO_CLIPPED = PPO(ratio_low=0.8, ratio_high=1.28)


def in_order(output) -> list[torch.Tensor]:
    """The logprobs of each sample in a RankOutput, in the order in which the samples were given to the engine."""
    pieces = dict(zip(output.indices, output.logprobs.split(output.lengths), strict=True))
    return [pieces[index] for index in range(len(pieces))]


def gradients(engine) -> dict[str, torch.Tensor]:
    named = engine.built.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def worst(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest absolute difference over all positions of all samples."""
    assert [len(x) for x in actual] == [len(x) for x in expected]
    return max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("heads", ["tied", "untied"])
def test_forward_gives_the_logprobs_of_transformers(make_engine, request, heads, temperature):
    path = request.getfixturevalue(f"{heads}_qwen3")
    samples = random_samples(ODD_LENGTHS, temperature=temperature)
    actual = in_order(make_engine(path).forward(samples))
    with torch.no_grad():
        reference = load_qwen3(path)
        expected = [reference_logprobs(reference, sample) for sample in samples]
    print(f"largest difference {worst(actual, expected):.1e}")
    assert worst(actual, expected) < 1e-4
    # If the model's distribution were nearly uniform, a wrong implementation could give nearly the same logprobs.
    assert torch.cat(expected).std() > 0.2 * math.log(VOCAB_SIZE)


def test_samples_of_one_call_may_have_different_temperatures(make_engine, tied_qwen3):
    samples = [random_samples([length], seed=i, temperature=0.5 + i / 4)[0] for i, length in enumerate(ODD_LENGTHS)]
    with torch.no_grad():
        reference = load_qwen3(tied_qwen3)
        expected = [reference_logprobs(reference, sample) for sample in samples]
    assert worst(in_order(make_engine().forward(samples)), expected) < 1e-4


@pytest.mark.parametrize("heads", ["tied", "untied"])
def test_ten_adamw_steps_follow_a_plain_pytorch_loop(make_engine, request, heads):
    path = request.getfixturevalue(f"{heads}_qwen3")
    batches = [random_samples([31, 7, 64, 13], seed=seed) for seed in (1, 2, 3) * 3 + (1,)]
    params = OptimParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0, grad_divisor=100.0)
    expected = reference_training(load_qwen3(path), batches, params)
    engine = make_engine(path)
    actual = []
    for batch in batches:
        loss = engine.forward_backward(batch, "cross_entropy").metrics["loss:sum"]
        actual.append((loss, engine.optim_step(params).grad_norm))
    losses = [relative(a, e) for (a, _), (e, _) in zip(actual, expected, strict=True)]
    norms = [relative(a, e) for (_, a), (_, e) in zip(actual, expected, strict=True)]
    print(f"largest relative difference: loss {max(losses):.1e}, grad_norm {max(norms):.1e}")
    assert max(losses) < 1e-5 and max(norms) < 1e-5
    assert expected[9][0] < 0.8 * expected[0][0]  # the model learns
    assert expected[0][1] > 1.0  # the first gradient was clipped


@pytest.mark.parametrize(
    "fields",
    [
        {"rows_per_microbatch": 1},
        {"rows_per_microbatch": 16},
        {"tokens_per_row": 100},
        {"tokens_per_row": 1024},
        {"tokens_per_row": 300, "rows_per_microbatch": 3, "logprob_chunk_tokens": 50},
        {"logprob_chunk_tokens": 1},
    ],
    ids=str,
)
def test_packed_samples_give_the_numbers_of_one_sample_at_a_time(make_engine, fields):
    samples = ppo_samples(ODD_LENGTHS)
    unpacked, packed = make_engine(rows_per_microbatch=1), make_engine(**fields)
    outputs = [unpacked.forward_backward([sample], PPO_CLIPPED) for sample in samples]
    output = packed.forward_backward(samples, PPO_CLIPPED)
    loss = sum(output.metrics["loss:sum"] for output in outputs)
    assert relative(output.metrics["loss:sum"], loss) < 1e-5
    assert worst(in_order(output), [output.logprobs for output in outputs]) < 1e-5
    params = OptimParams(learning_rate=1e-3, grad_divisor=num_loss_tokens(samples))
    assert relative(packed.optim_step(params).grad_norm, unpacked.optim_step(params).grad_norm) < 1e-5


def test_rows_may_be_longer_than_the_models_context(make_engine):
    engine = make_engine(tokens_per_row=1024, rows_per_microbatch=4)
    assert engine.config.model.max_position_embeddings == 128
    short, long = random_samples([5]), random_samples([64] * 16 + [5])
    assert worst(in_order(engine.forward([*long, *short]))[-1:], in_order(engine.forward(short))) < 1e-5


@pytest.mark.parametrize("loss", [PPO_CLIPPED, GSPO(ratio_low=0.5, ratio_high=2.0), "dro"], ids=str)
def test_forward_with_a_loss_reports_the_same_numbers_as_forward_backward(make_engine, loss):
    engine, samples = make_engine(logprob_chunk_tokens=50), ppo_samples(ODD_LENGTHS)
    evaluated, trained = engine.forward(samples, loss), engine.forward_backward(samples, loss)
    assert finish(evaluated.metrics) == pytest.approx(finish(trained.metrics), rel=1e-6, abs=1e-6)
    assert worst(in_order(evaluated), in_order(trained)) < 1e-6
    with pytest.raises(ValueError, match="sample 0 has no column 'ref_logprobs', which PPO reads"):
        engine.forward(samples, PPO(kl=KL(coefficient=0.1)))
    assert engine.step.state == "open"


@pytest.mark.parametrize("checkpointing", ["products", "selective", "full"])
def test_activation_checkpointing_changes_no_number(make_engine, checkpointing):
    samples, params = ppo_samples(ODD_LENGTHS), OptimParams(learning_rate=1e-3, grad_divisor=10.0)

    def two_steps(engine) -> list[float]:
        numbers = []
        for _ in range(2):
            numbers.append(engine.forward_backward(samples, PPO_CLIPPED).metrics["loss:sum"])
            numbers.append(engine.optim_step(params).grad_norm)
        return numbers

    expected = two_steps(make_engine())
    assert two_steps(make_engine(activation_checkpointing=checkpointing)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [2, 3, 4], [8, 1]], ids=str)
def test_any_split_into_calls_gives_the_gradient_of_one_call(make_engine, sizes):
    samples = ppo_samples(ODD_LENGTHS)
    whole, split = make_engine(), make_engine()
    whole.forward_backward(samples, PPO_CLIPPED)
    for start, end in pairwise([0, *accumulate(sizes)]):
        split.forward_backward(samples[start:end], PPO_CLIPPED)
    expected, actual = gradients(whole), gradients(split)
    assert actual.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert max(float((actual[name] - expected[name]).abs().max()) for name in expected) < 1e-5 * scale
    params = OptimParams(learning_rate=1e-3, grad_divisor=10.0)
    assert relative(split.optim_step(params).grad_norm, whole.optim_step(params).grad_norm) < 1e-5


def test_grad_divisor_divides_before_clipping(make_engine):
    samples = ppo_samples(ODD_LENGTHS)
    norms = []
    for divisor in (1.0, 8.0):
        engine = make_engine()
        engine.forward_backward(samples, PPO_CLIPPED)
        params = OptimParams(learning_rate=0.0, grad_divisor=divisor, grad_clip_norm=1e-3)
        norms.append(engine.optim_step(params).grad_norm)
    assert relative(norms[0], 8 * norms[1]) < 1e-6


def test_without_clipping_a_step_uses_the_gradient_as_it_is(make_engine):
    samples = ppo_samples(ODD_LENGTHS)
    results = []
    for clip in (None, 1e9):
        engine = make_engine()
        engine.forward_backward(samples, PPO_CLIPPED)
        engine.optim_step(OptimParams(learning_rate=1e-3, grad_clip_norm=clip))
        results.append([p.detach().clone() for p in engine.built.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_warm_up_computes_full_rows_and_changes_no_number(make_engine, monkeypatch):
    samples = random_samples(ODD_LENGTHS)
    limits = {"tokens_per_row": 128, "rows_per_microbatch": 2}
    ends = []
    for engine in (make_engine(**limits), warm := make_engine(**limits)):
        shapes = []
        take = engine.runner.forward_backward
        monkeypatch.setattr(
            engine.runner,
            "forward_backward",
            lambda batches, *rest, take=take, shapes=shapes, **named: take(noted(batches, shapes), *rest, **named),
        )
        if engine is warm:
            engine.warm_up()
            assert shapes == [(2, 128), (1, 64)]
            assert engine.policy_version == 0 and not gradients(engine)
        engine.forward_backward(samples, "cross_entropy")
        engine.optim_step(OptimParams(learning_rate=0.01))
        ends.append(engine.forward(samples).logprobs)
    assert torch.equal(*ends)


def noted(batches, shapes):
    """The batches, whose shapes are appended to the list."""
    for batch in batches:
        shapes.append(tuple(batch.tokens_BL.shape))
        yield batch


@pytest.mark.parametrize("fields", [{"optimizer": None}, {"head": "values"}])
def test_a_model_without_an_optimizer_or_with_another_head_warms_up_with_a_forward_pass(make_engine, fields):
    engine = make_engine(**fields)
    engine.warm_up()
    assert engine.policy_version == 0 and not gradients(engine)


def test_padding_targets_have_logprob_0(make_engine):
    sample = random_samples([20])[0]
    sample.targets[5:9] = -100
    engine = make_engine()
    logprobs = engine.forward_backward([sample], "cross_entropy").logprobs
    assert (logprobs[5:9] == 0).all() and (logprobs[:5] != 0).all() and (logprobs[9:] != 0).all()


def test_the_error_for_weights_of_another_model_lists_every_differing_dimension(make_engine, tied_qwen3):
    other = replace(ModelConfig.from_hf(tied_qwen3), hidden_size=128, num_hidden_layers=4)
    with pytest.raises(ValueError) as caught:
        make_engine(model=other)
    differing = "hidden_size=64 instead of 128; num_hidden_layers=3 instead of 4"
    assert str(caught.value) == f"{tied_qwen3} holds another model: its config.json has {differing}"


@pytest.mark.parametrize("heads", ["tied", "untied"])
def test_from_hf_reads_from_config_json_whether_the_head_is_tied(request, heads):
    config = ModelConfig.from_hf(request.getfixturevalue(f"{heads}_qwen3"))
    assert config.tie_word_embeddings == (heads == "tied") and config.rope_theta == 10_000.0


def test_a_layout_for_more_processes_than_there_are_is_refused(make_engine, tied_qwen3):
    config = TrainerConfig(model=ModelConfig.from_hf(tied_qwen3), max_sequence_length=64, tokens_per_row=64)
    config.parallelism.tensor_parallel_degree = 2
    with pytest.raises(ValueError, match="tensor_parallel=2.* needs 2 processes but there are 1"):
        TrainEngine(config)


def test_the_peak_of_memory_counts_memory_that_was_freed(make_engine):
    engine = make_engine()
    before = engine.info()
    num_bytes = torch.ones(64 << 20).nbytes
    after = engine.info()
    assert after.peak_memory_bytes >= before.memory_bytes + num_bytes // 2
    assert after.peak_memory_bytes >= max(after.memory_bytes, before.peak_memory_bytes)


def test_results_are_copied_to_the_host_before_the_backward_pass(make_engine):
    engine, gradients = make_engine(), []
    block = next(p for n, p in engine.built.model.named_parameters() if n.endswith("layers.0.feed_forward.w1.weight"))

    class Recording(HostCopy):
        def __init__(self, tensor):
            gradients.append(block.grad)
            super().__init__(tensor)

    engine.runner.built = replace(engine.runner.built, to_host=Recording)
    output = engine.forward_backward(random_samples([31, 7]), "cross_entropy")
    assert gradients and gradients == [None] * len(gradients) and block.grad is not None
    assert output.logprobs.numel() == 38 and output.metrics["loss:sum"] > 0
