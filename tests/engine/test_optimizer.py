"""The optimizer compared with plain PyTorch: its class, its parameter groups, and the OptimParams of each step.

The last tests of this file cover configs that are refused, and gradients that are not finite.
"""

from dataclasses import replace

import pytest
import torch
from references import random_samples

from rl_actors.config import OptimizerConfig, TrainerConfig
from rl_actors.types import OptimParams

SAMPLES = random_samples([31, 7, 13], seed=1)
PARAMS = OptimParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0, grad_divisor=20.0)
VARIED = {
    "learning_rate": 3e-3,
    "beta1": 0.5,
    "beta2": 0.7,
    "eps": 1e-2,
    "weight_decay": 0.5,
    "grad_clip_norm": 0.1,
    "grad_divisor": 80.0,
}


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: x.detach().full_tensor().clone() for name, x in engine.built.model.named_parameters()}


def step_by_step(engine, make_optimizer, steps: list[OptimParams]) -> None:
    """Take these steps with the engine and with plain PyTorch, and compare the weights after each step.

    PyTorch's optimizer gets the engine's gradient at every step, so that only the optimizers are compared.
    """
    mirror = {name: x.requires_grad_() for name, x in weights(engine).items()}
    optimizer = make_optimizer(mirror)
    for params in steps:
        engine.forward_backward(SAMPLES, "cross_entropy")
        for name, parameter in engine.built.model.named_parameters():
            mirror[name].grad = parameter.grad.full_tensor().clone() / params.grad_divisor
        norm = torch.linalg.vector_norm(torch.stack([x.grad.norm() for x in mirror.values()]))
        result = engine.optim_step(params)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)  # the norm before clipping
        if params.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(mirror.values(), params.grad_clip_norm)
        for group in optimizer.param_groups:
            factors = group.get("factors", (1.0, 1.0))
            group["lr"] = params.learning_rate * factors[0]
            group["weight_decay"] = params.weight_decay * factors[1]
            if "betas" in group:
                group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
        optimizer.step()
        for name, actual in weights(engine).items():
            assert torch.allclose(actual, mirror[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("field", VARIED)
def test_each_step_uses_every_field_of_its_own_optim_params(make_engine, field):
    varied = replace(PARAMS, **{field: VARIED[field]})
    step_by_step(make_engine(), lambda mirror: torch.optim.AdamW(mirror.values()), [PARAMS, varied, PARAMS])
    one, other = make_engine(), make_engine()
    # In the second step only `other` gets the varied field. The weights then differ, so the field has an effect.
    for params in (PARAMS, varied):
        for engine, given in ((one, PARAMS), (other, params)):
            engine.forward_backward(SAMPLES, "cross_entropy")
            engine.optim_step(given)
    assert any(not torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_every_implementation_of_adam_and_adamw_takes_the_same_steps_as_pytorch(make_engine, name, implementation):
    engine = make_engine(optimizer=OptimizerConfig(name=name, implementation=implementation))
    step_by_step(engine, lambda mirror: getattr(torch.optim, name)(mirror.values()), [PARAMS] * 3)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("torch.optim:SGD", {}),
        ("torch.optim:SGD", {"momentum": 0.9, "nesterov": True}),
        ("torch.optim:Adamax", {}),
        ("torch.optim:AdamW", {"amsgrad": True}),
    ],
    ids=str,
)
def test_an_optimizer_named_by_import_path_gets_its_arguments_and_continues_from_a_checkpoint(
    make_engine, tmp_path, name, arguments
):
    make = getattr(torch.optim, name.partition(":")[2])
    config = OptimizerConfig(name=name, arguments=arguments)
    engine = make_engine(optimizer=config)
    assert type(engine.built.hyperparameters.optimizer) is make
    step_by_step(engine, lambda mirror: make(mirror.values(), **arguments), [PARAMS] * 3)

    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    other = make_engine(optimizer=config)
    other.load_checkpoint(str(tmp_path / "checkpoint"))
    for trainer in (engine, other):
        trainer.forward_backward(SAMPLES, "cross_entropy")
        trainer.optim_step(PARAMS)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine).values(), weights(other).values(), strict=True))


def test_an_optim_params_field_that_the_optimizer_lacks_is_refused_and_changes_nothing(make_engine):
    engine = make_engine(optimizer=OptimizerConfig(name="torch.optim:SGD"))
    engine.forward_backward(SAMPLES, "cross_entropy")
    before = weights(engine)
    with pytest.raises(ValueError, match="beta1=0.5, but torch.optim:SGD has no betas; leave beta1 at 0.9"):
        engine.optim_step(replace(PARAMS, beta1=0.5))
    assert engine.info().state == "open" and engine.policy_version == 0
    assert all(torch.equal(x, before[name]) for name, x in weights(engine).items())
    engine.optim_step(PARAMS)


def test_parameter_groups_multiply_the_learning_rate_and_weight_decay_of_each_call(make_engine):
    groups = {"norm": (1.0, 0.0), "attention|tok_embeddings": (0.1, 2.0)}
    engine = make_engine(optimizer=OptimizerConfig(groups=groups))

    def make(mirror):
        norms = [x for name, x in mirror.items() if "norm" in name]
        attention = [x for n, x in mirror.items() if "norm" not in n and ("attention" in n or "tok_embeddings" in n)]
        rest = [x for name, x in mirror.items() if all(x is not y for y in norms + attention)]
        assert norms and attention and rest
        return torch.optim.AdamW(
            [
                {"params": norms, "factors": (1.0, 0.0)},
                {"params": attention, "factors": (0.1, 2.0)},
                {"params": rest, "factors": (1.0, 1.0)},
            ]
        )

    step_by_step(engine, make, [PARAMS, replace(PARAMS, learning_rate=3e-3, weight_decay=0.5)])


def test_one_group_may_hold_every_parameter(make_engine):
    groups = {".": (0.5, 1.0)}
    engine = make_engine(optimizer=OptimizerConfig(groups=groups))

    def half(mirror):
        return torch.optim.AdamW([{"params": list(mirror.values()), "factors": (0.5, 1.0)}])

    step_by_step(engine, half, [PARAMS])


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_activation_checkpointing_changes_no_parameter_name_in_groups_and_results(make_engine, checkpointing):
    config = OptimizerConfig(groups={r"^layers\.0\.attention": (0.1, 0.0), r"^layers\.[12]\.": (2.0, 1.0)})
    engines = [make_engine(optimizer=config, activation_checkpointing=kind) for kind in ("none", checkpointing)]
    groups = [[g["param_names"] for g in engine.built.hyperparameters.optimizer.param_groups] for engine in engines]
    assert groups[0] == groups[1] and len(groups[0]) == 3
    losses, broken = [], []
    for engine in engines:
        for _ in range(3):
            losses.append(engine.forward_backward(SAMPLES, "cross_entropy").metrics["loss:sum"])
            engine.optim_step(PARAMS)
        engine.forward_backward(SAMPLES, "cross_entropy")
        next(p for n, p in engine.built.model.named_parameters() if "w1" in n).grad.fill_(float("inf"))
        broken.append(engine.optim_step(PARAMS).nonfinite_parameters)
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-6) and losses[2] < 0.9 * losses[0]
    assert broken == [("layers.0.feed_forward.w1.weight",)] * 2


def test_a_pattern_that_matches_only_parameters_of_earlier_patterns_is_refused(make_engine):
    groups = {"norm": (1.0, 0.0), "attention_norm": (2.0, 0.0)}
    with pytest.raises(
        ValueError,
        match="the pattern 'attention_norm' matches none of the parameters that remain after the earlier patterns",
    ):
        make_engine(optimizer=OptimizerConfig(groups=groups))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "Muon"}, "optimizer.name='Muon'; it must be AdamW, Adam or an import path"),
        ({"name": "torch.optim:Nothing"}, "optimizer.name='torch.optim:Nothing' cannot be imported"),
        ({"name": "no_such_module:SGD"}, "optimizer.name='no_such_module:SGD' cannot be imported"),
        ({"name": "math:pi"}, "optimizer.name='math:pi'; it must be"),
        ({"arguments": {"lr": 1.0}}, "optimizer.arguments has 'lr', which comes with each optim_step"),
        ({"arguments": {"momentum": 0.9}}, r"optimizer.arguments=\{'momentum': 0.9\} does not fit AdamW: .*'momentum'"),
        ({"arguments": {"fused": True}}, "optimizer.arguments has 'fused', which optimizer.implementation sets"),
        (
            {"name": "torch.optim:SGD", "arguments": {"nesterov": True}},
            r"optimizer.arguments=\{'nesterov': True\} does not fit torch.optim:SGD: Nesterov momentum requires",
        ),
        ({"name": "builtins:print"}, r"optimizer.arguments=\{\} does not fit builtins:print"),
        (
            {"name": "collections:Counter"},
            "optimizer.name='collections:Counter' makes a Counter, which is not a torch.optim.Optimizer",
        ),
        ({"groups": {"(": (1.0, 1.0)}}, r"optimizer.groups has the pattern '\('"),
        ({"groups": {"": (1.0, 1.0)}}, "optimizer.groups has an empty pattern"),
        (
            {"groups": {"a": (-1.0, 1.0)}},
            r"optimizer.groups\['a'\]=\(-1.0, 1.0\); it must be two finite numbers of at least 0",
        ),
    ],
    ids=str,
)
def test_a_wrong_optimizer_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(optimizer=OptimizerConfig(**fields)).validate()


def test_a_nonfinite_gradient_skips_the_step_counts_the_skip_and_names_the_parameter(make_engine):
    engine = make_engine()
    for skipped in (1, 2):
        engine.forward_backward(SAMPLES, "cross_entropy")
        before = weights(engine)
        name, parameter = next((n, p) for n, p in engine.built.model.named_parameters() if "w1" in n)
        parameter.grad.fill_(float("inf"))
        result = engine.optim_step(PARAMS)
        assert result.skipped and result.policy_version == 0 and result.nonfinite_parameters == (name,)
        assert engine.info().steps_skipped == skipped and engine.info().state == "idle"
        assert all(torch.equal(x, before[n]) for n, x in weights(engine).items())
    step_by_step(engine, lambda mirror: torch.optim.AdamW(mirror.values()), [PARAMS])  # the skipped steps left no trace
    assert engine.policy_version == 1 and engine.info().steps_skipped == 2
