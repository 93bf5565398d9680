"""In every parallel layout a value model gives the same values, losses and gradients as one process.

One process gives the same values as transformers. The processes are real and use gloo and float32. layout_work.py has
the layouts and samples.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_work import LENGTHS, MODELS, gradients, layout, layout_cases, make_engine, samples_with
from test_parallel_layouts import TABLE as LAYOUTS
from torch import Tensor
from transformers import AutoModel

from rl_actors.clients.conversion import merge_outputs
from rl_actors.losses import PPO, ValueLoss, explained_variance
from rl_actors.types import IGNORE_TARGET, OptimParams, Sample

TOLERANCE = 1e-5
COLUMNS = ("loss_weights", "returns", "old_values")
LOSS = ValueLoss(clip=0.2)
STEP = OptimParams(learning_rate=1e-2, eps=1e-2, grad_divisor=100.0, grad_clip_norm=1.0)
WITH_VALUES = {"tied", "experts", "balanced experts", "four blocks", "Llama"}
"""Names of the models that these tests take from the layout table.

Models with adapters are left out, because they cannot have values. A value head is never tied, so with a value head
"tied" and "untied" are the same model, and "untied" is left out.
"""
TABLE = [row for row in LAYOUTS if row[-1] in WITH_VALUES]
QUICK: set[tuple[str, str]] = set()


def value_samples() -> list[Sample]:
    """Samples with returns. At positions with loss weight 0 the returns are huge, so that a wrong mask is noticed."""
    draw = torch.Generator().manual_seed(11)
    samples = []
    for sample in samples_with("loss_weights"):
        length = len(sample)
        returns, old_values = torch.randn(length, generator=draw), torch.randn(length, generator=draw) / 4
        returns[sample.columns["loss_weights"] == 0] = 1e30
        columns = {**sample.columns, "returns": returns, "old_values": old_values}
        samples.append(Sample(tokens=sample.tokens, targets=sample.targets, columns=columns))
    return samples


def train(path: str, parallelism: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Take two steps, and return their numbers.

    The trunk is the model without its head. The head is zero before the first step, so only the second step has
    gradients in the trunk.
    """
    engine = make_engine(path, parallelism, {**fields, "head": "values"})
    samples = value_samples()
    numbers: dict[str, Any] = {"first": engine.forward(samples, LOSS)}
    halves = (samples[:9], samples[9:])
    for half in halves:
        engine.forward_backward(half, LOSS)
    engine.optim_step(STEP)
    numbers["forward"] = engine.forward(samples, LOSS)
    numbers["halves"] = [engine.forward_backward(half, LOSS) for half in halves]
    numbers["gradients"] = gradients(engine)
    numbers["step"] = engine.optim_step(STEP)
    return numbers


@pytest.fixture(scope="module")
def one_process(run, directory_of):
    return cache(lambda model: run(1, train, directory_of(model), layout(), MODELS[model][1])[0])


@pytest.mark.parametrize("parallelism, num_processes, model", layout_cases(TABLE, QUICK))
def test_a_value_model_in_a_layout_gives_the_numbers_of_one_process(
    run, one_process, directory_of, parallelism, num_processes, model
):
    tolerance = 1e-4 if MODELS[model][0].num_experts else TOLERANCE
    expected = one_process(model)
    answers = run(num_processes, train, directory_of(model), parallelism, MODELS[model][1])
    first = merge_outputs(len(LENGTHS), [answer["first"] for answer in answers])
    assert first.values is not None and not torch.cat(first.values).any()  # the head starts at zero
    actual = merge_outputs(len(LENGTHS), [answer["forward"] for answer in answers])
    known = merge_outputs(len(LENGTHS), [expected["forward"]])
    assert actual.values is not None and known.values is not None
    torch.testing.assert_close(torch.cat(actual.values), torch.cat(known.values), rtol=tolerance, atol=tolerance)
    assert torch.cat(known.values).abs().max() > 0.1
    assert actual.metrics == pytest.approx(known.metrics, rel=tolerance, abs=tolerance)
    found: dict[str, Tensor] = {}
    for answer in answers:
        found.update(answer["gradients"])
    assert found.keys() == expected["gradients"].keys()
    errors = {}
    for name, gradient in expected["gradients"].items():
        errors[name] = float((found[name] - gradient).norm() / gradient.norm())
    worst = max(errors, key=errors.__getitem__)
    print(f"largest difference of a gradient: {errors[worst]:.1e}, {worst}")
    assert errors[worst] <= tolerance, worst
    assert all(
        answer["step"].grad_norm == pytest.approx(expected["step"].grad_norm, rel=tolerance) for answer in answers
    )


def evaluate(path: str, samples: list[Sample], head: Tensor) -> list[Tensor]:
    """The values of an engine whose value head is `head`. Its other weights are those of the model in `path`."""
    from rl_actors.engine.initial_weights import assign

    engine = make_engine(path, layout(), {"head": "values"})
    with torch.no_grad():
        assign(engine.built.model.lm_head.weight, head)
    output = merge_outputs(len(samples), [engine.forward(samples)])
    assert output.values is not None and output.logprobs == []
    return output.values


def test_values_are_those_of_transformers_with_the_same_head(run, directory_of):
    path, samples = directory_of("tied"), value_samples()
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    head = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(3)) / 4
    (values,) = run(1, evaluate, path, samples, head)
    for sample, found in zip(samples, values, strict=True):
        with torch.no_grad():
            expected = model(sample.tokens[None]).last_hidden_state[0] @ head[0]
        expected = torch.where(sample.targets == IGNORE_TARGET, 0.0, expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def from_policy(path: str, folder: str) -> dict[str, Any]:
    """The results of a value model that starts from a policy's checkpoint, and the error texts of refused calls."""
    policy = make_engine(path, layout(), {})
    policy.forward_backward(samples_with("loss_weights"), "cross_entropy")
    policy.optim_step(STEP)
    policy.save_checkpoint(f"{folder}/policy").result()
    values = make_engine(path, layout(), {"head": "values"})
    errors = []
    for call in (
        lambda: values.load_checkpoint(f"{folder}/policy"),
        lambda: values.forward(samples_with("loss_weights", "advantages", "old_logprobs"), PPO()),
        lambda: policy.forward(value_samples(), LOSS),
        lambda: values.forward(value_samples(), entropy=True),
        lambda: values.hf_state_dict(),
        lambda: values.export_hf(f"{folder}/exported"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        errors.append(str(error.value))
    version = values.load_checkpoint(f"{folder}/policy", optimizer=False)
    trunk = {name: p.detach() for name, p in values.built.model.named_parameters() if name != "lm_head.weight"}
    trained = dict(policy.built.model.named_parameters())
    values.forward_backward(value_samples(), LOSS)
    values.optim_step(STEP)
    values.save_checkpoint(f"{folder}/values").result()
    again = make_engine(path, layout(), {"head": "values"})
    again.load_checkpoint(f"{folder}/values")
    return {
        "errors": errors,
        "version": version,
        "same trunk": all(
            torch.equal(tensor, trained[name]) for name, tensor in trunk.items() if name != "tok_embeddings.weight"
        ),
        "same values": torch.equal(
            values.forward(value_samples()).values["values"], again.forward(value_samples()).values["values"]
        ),
        "head": bool(again.built.model.lm_head.weight.any()),
    }


@pytest.mark.slow
def test_a_value_model_starts_from_a_policys_checkpoint_and_refuses_what_needs_logprobs(
    run, directory_of, tmp_path: Path
):
    (found,) = run(1, from_policy, directory_of("untied"), str(tmp_path))
    with_optimizer, policy_loss, value_loss, entropy, push, export = found.pop("errors")
    assert "lm_head.weight" in with_optimizer
    assert "PPO reads logprobs" in policy_loss and "head='values'" in policy_loss
    assert "ValueLoss reads values" in value_loss
    assert "entropy" in entropy
    assert "push_model_state_dict is not possible with head='values'" in push
    assert "export_hf is not possible with head='values'" in export
    assert found == {"version": 1, "same trunk": True, "same values": True, "head": True}


def test_explained_variance_is_that_of_the_closed_form():
    draw = torch.Generator().manual_seed(5)
    values, returns = torch.randn(64, generator=draw).double(), torch.randn(64, generator=draw).double()
    weights = (torch.arange(64) % 3 > 0).double()
    _, partials = ValueLoss()(values[None], loss_weights=weights[None], returns=returns[None])
    numbers = {name: float(x[0] / x[1]) for name, x in partials.items() if isinstance(x, tuple)}
    trained = weights != 0
    expected = 1 - (returns - values)[trained].var(correction=0) / returns[trained].var(correction=0)
    assert explained_variance(numbers) == pytest.approx(float(expected), abs=1e-12)
