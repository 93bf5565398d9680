"""Every parallel layout gives the same numbers as one process, up to rounding.

The ranks are real processes that use gloo and float32. A few of the packed samples are so long that context parallelism
must split them between ranks. Each row of TABLE is one test of a layout with a model. layout_work.py has the models and
the work that the processes do.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from layout_work import INTERLEAVED, LENGTHS, MODELS, NO_SP, layout, layout_cases, load, save, train
from safetensors.torch import load_file
from torch import Tensor

from rl_actors.clients.conversion import merge_outputs
from rl_actors.config import DEGREES
from rl_actors.types import ForwardBackwardOutput

QUICK = {("CP2", "tied"), ("TP2", "tied, drawn"), ("FSDP2, EP2", "experts")}
# In a name the digit is a degree: FSDP2 is FSDP over two ranks. SP is sequence parallelism.
TABLE = [  # name, parallelism, number of processes, name of the model
    ("FSDP2", layout(shard=2), 2, "tied"),
    ("DDP2", layout(replicate=2), 2, "tied"),
    ("HSDP2x2", layout(replicate=2, shard=2), 4, "tied"),
    ("TP2", layout(tensor=2), 2, "tied"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "tied"),
    ("CP2", layout(context=2), 2, "tied"),
    ("CP2 with load balancer ptrr", layout(context=2, context_parallel_load_balancer="ptrr"), 2, "tied"),
    ("CP2 without a load balancer", layout(context=2, context_parallel_load_balancer=None), 2, "tied"),
    ("CP4", layout(context=4), 4, "tied"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "tied"),
    ("FSDP2xCP2", layout(shard=2, context=2), 4, "tied"),
    ("DDP2xCP2", layout(replicate=2, context=2), 4, "tied"),
    ("CP2xTP2", layout(context=2, tensor=2), 4, "tied"),
    ("CP2xTP2 without SP", layout(context=2, tensor=2, **NO_SP), 4, "tied"),
    ("TP2", layout(tensor=2), 2, "untied"),
    ("CP2", layout(context=2), 2, "untied"),
    ("FSDP2", layout(shard=2), 2, "experts"),
    ("DDP2", layout(replicate=2), 2, "experts"),
    ("TP2", layout(tensor=2), 2, "experts"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "experts"),
    ("CP2", layout(context=2), 2, "experts"),
    ("FSDP2, EP2", layout(shard=2, expert=2), 2, "experts"),
    ("CP2, EP2", layout(context=2, expert=2), 2, "experts"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "experts"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "experts"),
    ("FSDP4, EP2", layout(shard=4, expert=2), 4, "experts"),
    ("HSDP2x2, EP2", layout(replicate=2, shard=2, expert=2), 4, "experts"),
    ("FSDP2xTP2, EP2", layout(shard=2, tensor=2, expert=2), 4, "experts"),
    ("FSDP2xTP2, EP4", layout(shard=2, tensor=2, expert=4), 4, "experts"),
    ("CP2xTP2, EP4", layout(context=2, tensor=2, expert=4), 4, "experts"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "balanced experts"),
    ("CP2, EP2", layout(context=2, expert=2), 2, "balanced experts"),
    ("FSDP2", layout(shard=2), 2, "adapters"),
    ("TP2", layout(tensor=2), 2, "adapters"),
    ("TP2 without SP", layout(tensor=2, **NO_SP), 2, "adapters"),
    ("CP2", layout(context=2), 2, "adapters"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "adapters"),
    ("TP2, EP2", layout(tensor=2, expert=2), 2, "adapters beside experts"),
    ("PP2", layout(pipeline=2), 2, "four blocks"),
    ("PP2, two stages on each rank", layout(pipeline=2, **INTERLEAVED), 2, "four blocks"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "four blocks"),
    ("PP2xTP2", layout(pipeline=2, tensor=2), 4, "four blocks"),
    ("PP2xCP2", layout(pipeline=2, context=2), 4, "four blocks"),
    ("PP2xDDP2", layout(pipeline=2, replicate=2), 4, "four blocks"),
    ("PP4", layout(pipeline=4), 4, "four blocks"),  # two of its ranks have neither the first nor the last stage
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "experts"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "adapters"),
    ("PP2xCP2", layout(pipeline=2, context=2), 4, "adapters"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "Llama"),
    ("CP2xTP2", layout(context=2, tensor=2), 4, "Llama"),
    ("PP2xFSDP2", layout(pipeline=2, shard=2), 4, "Llama"),
    ("TP2", layout(tensor=2), 2, "Llama with adapters"),
    ("FSDP2", layout(shard=2), 2, "tied, drawn"),
    ("TP2", layout(tensor=2), 2, "tied, drawn"),
    ("FSDP2xTP2", layout(shard=2, tensor=2), 4, "tied, drawn"),
    ("PP2", layout(pipeline=2), 2, "four blocks, drawn"),
    ("FSDP2, EP2", layout(shard=2, expert=2), 2, "experts, drawn"),
]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The results of all ranks, merged.

    A kind of call is "forward", "policy", "policy evaluated", "sequence" or
    "sequence evaluated". See layout_work.train.
    """

    outputs: dict[str, list[ForwardBackwardOutput]]  # kind of call -> the output of each call of this kind
    gradients: dict[str, dict[str, Tensor]]  # kind of call -> name of a parameter -> gradient
    grad_norms: dict[str, float]  # kind of call -> norm of the gradient
    pushed: dict[str, Tensor]  # the weights that a push publishes before the first step, by name
    # The weights that a push publishes after the first step, by name. The adapters are no longer zero then.
    pushed_later: dict[str, Tensor]


def merged(answers: list[dict[str, Any]]) -> Numbers:
    """Merge the answers of all ranks. The outputs are merged as the client merges them.

    Each rank of a pipeline has only the gradients and weights of its stages. The result has those of all stages.
    """
    first = answers[0]
    gradients: dict[str, dict[str, Tensor]] = {"policy": {}, "sequence": {}}
    pushed: dict[str, Tensor] = {}
    pushed_later: dict[str, Tensor] = {}
    for answer in answers:
        for kind, known in gradients.items():
            known.update(answer[f"{kind} gradients"])
        pushed.update(answer["pushed"])
        assert all(answer[f"{kind} step"] == first[f"{kind} step"] for kind in gradients)
        pushed_later.update(answer["pushed later"])
    # Kind of call -> the number of samples in each call of this kind.
    counts = {"forward": [len(LENGTHS)], "policy": [9, len(LENGTHS) - 9], "sequence": [len(LENGTHS)]}
    counts |= {f"{kind} evaluated": counts[kind] for kind in gradients}
    outputs: dict[str, list[ForwardBackwardOutput]] = {}
    for kind, sizes in counts.items():
        outputs[kind] = []
        for call, count in enumerate(sizes):
            of_ranks = [answer[kind][call] for answer in answers]
            reported = itertools.chain.from_iterable(output.indices for output in of_ranks)
            assert sorted(reported) == list(range(count))  # each sample is reported by exactly one rank
            outputs[kind].append(merge_outputs(count, of_ranks))
    return Numbers(
        outputs=outputs,
        gradients=gradients,
        grad_norms={kind: first[f"{kind} step"].grad_norm for kind in gradients},
        pushed=pushed,
        pushed_later=pushed_later,
    )


@pytest.fixture(scope="module")
def one_process(run, directory_of):
    """one_process(model) returns the Numbers of this model when it runs in one process."""

    @cache
    def numbers(model: str) -> Numbers:
        return merged(run(1, train, directory_of(model), layout(), MODELS[model][1]))

    return numbers


def errors_of(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """The largest error of each quantity, such as "logprobs", "loss" or "gradients".

    - An error of a logprob or an entropy is divided by 1 + the absolute expected value.
    - An error of a loss or a grad_norm is divided by the expected value.
    - The error of a pushed weight is the norm of its difference from the expected weight, divided by the norm of the
      expected weight. The error of a parameter's gradient is computed in the same way. But first 1e-7 of the norm
      of all expected gradients together is subtracted from the norm of the difference, because rounding errors can be
      this large.
    """
    errors: dict[str, float] = {}

    def note(name: str, error: float) -> None:
        assert math.isfinite(error), f"{name}: {error}"
        errors[name] = max(errors.get(name, 0.0), float(error))

    for kind, calls in expected.outputs.items():
        for output, reference in zip(actual.outputs[kind], calls, strict=True):
            for name in ("logprobs", "entropy", "target_logprobs"):
                values, references = getattr(output, name), getattr(reference, name)
                assert (values is None) == (references is None)
                for value, known in zip(values or (), references or (), strict=True):
                    note(name, ((value - known).abs() / (1 + known.abs())).max())
            if kind != "forward":
                known = reference.metrics["loss:sum"]
                note("loss", abs(output.metrics["loss:sum"] - known) / abs(known))
    for kind, gradients in expected.gradients.items():
        note("grad_norm", abs(actual.grad_norms[kind] / expected.grad_norms[kind] - 1))
        assert actual.gradients[kind].keys() == gradients.keys()
        noise = 1e-7 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, gradient in gradients.items():
            difference = ((actual.gradients[kind][name] - gradient).norm() - noise).clamp(min=0)
            note("gradients", difference / gradient.norm() if difference else 0.0)
    assert actual.pushed_later.keys() == expected.pushed_later.keys()
    for name, weight in expected.pushed_later.items():
        note("pushed", (actual.pushed_later[name] - weight).norm() / weight.norm())
    return errors


@pytest.mark.parametrize("parallelism, num_processes, model", layout_cases(TABLE, QUICK))
def test_a_layout_gives_the_numbers_of_one_process(run, one_process, directory_of, parallelism, num_processes, model):
    config, fields = MODELS[model]
    expected = one_process(model)
    answers = run(num_processes, train, directory_of(model), parallelism, fields)
    actual = merged(answers)
    errors = errors_of(actual, expected)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    tolerance = 1e-4 if config.num_experts else 1e-5
    assert all(error <= tolerance for error in errors.values()), errors
    for kind, calls in expected.outputs.items():
        for output, reference in zip(actual.outputs[kind], calls, strict=True):
            assert [len(logprobs) for logprobs in output.logprobs] == [len(logprobs) for logprobs in reference.logprobs]
            assert output.metrics == pytest.approx(reference.metrics, rel=tolerance, abs=tolerance)
    for kind in expected.gradients:
        pairs = zip(actual.outputs[f"{kind} evaluated"], actual.outputs[kind], strict=True)
        for evaluated, trained in pairs:
            assert evaluated.metrics == pytest.approx(trained.metrics, rel=1e-6, abs=1e-6)
    if not config.num_experts or "load_balance_coeff" not in fields:
        path = directory_of(model)
        weights = load_file(f"{path}/model.safetensors") if path else expected.pushed
        assert actual.pushed.keys() == weights.keys()
        if parallelism["pipeline_parallel_degree"] == 1:  # a rank of a pipeline has only the weights of its stages
            assert all(answer["pushed"].keys() == weights.keys() for answer in answers)
        assert all(torch.equal(actual.pushed[name], weight) for name, weight in weights.items())
    degrees = {name.removesuffix("_degree"): n for name, n in parallelism.items() if name.endswith("_degree")}
    assert all(answer["layout"] == degrees for answer in answers)
    failed = ("the loss is broken", num_processes - 1, "broken")
    assert all(answer["refused"] == [failed] * 2 for answer in answers)


MOVES = [  # saved under, loaded under, model
    (layout(shard=2), layout(context=2), "tied"),
    (layout(context=2), layout(tensor=2), "tied"),
    (layout(context=2), layout(), "tied"),
    (layout(shard=2, expert=2), layout(), "experts"),
    (layout(), layout(shard=2, expert=2), "balanced experts"),
    (layout(shard=2, expert=2), layout(tensor=2, expert=2), "balanced experts"),
    (layout(tensor=2), layout(context=2, expert=2), "experts"),
    (layout(tensor=2), layout(shard=2), "adapters"),
    (layout(pipeline=2), layout(context=2), "four blocks"),
    (layout(tensor=2), layout(pipeline=2, **INTERLEAVED), "four blocks"),
]


def num_processes_of(parallelism: dict[str, Any]) -> int:
    return math.prod(parallelism[f"{name}_degree"] for name in DEGREES)


@pytest.mark.slow
@pytest.mark.parametrize("saved_under, loaded_under, model", MOVES)
def test_a_layout_continues_from_a_checkpoint_of_another_layout(
    run, directory_of, tmp_path, saved_under, loaded_under, model
):
    config, fields = MODELS[model]
    path, checkpoint = directory_of(model), str(tmp_path / "checkpoint")
    saved = run(num_processes_of(saved_under), save, path, saved_under, fields, checkpoint)
    loaded = run(num_processes_of(loaded_under), load, path, loaded_under, fields, checkpoint)

    def loss(answers: list[Any], step: int) -> float:
        return merge_outputs(len(LENGTHS), [rank[step][0] for rank in answers]).metrics["loss:sum"]

    for step in range(2):
        assert loss(loaded, step) == pytest.approx(loss(saved, step), rel=1e-6)
        # The relative difference between the gradient norms of two layouts was up to 2e-6.
        assert loaded[0][step][1] == pytest.approx(saved[0][step][1], rel=5e-6)
