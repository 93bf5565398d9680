"""A trainer of LoRA adapters can have several tenants. A tenant is a run that has its own adapters, and shares the base weights with other runs.

Each tenant gets, bit for bit, the numbers that it would get in a trainer of its own.
"""

from dataclasses import replace

import pytest
import torch
from layout_work import MODELS, TRAINED, layout, samples_with
from layout_work import make_engine as engine_of_layout
from references import ppo_samples, random_samples, save_random
from test_hf import BASE, MOE
from torch.distributed.tensor import DTensor

from rl_actors.config import LoRAConfig
from rl_actors.losses import PPO
from rl_actors.types import OptimParams

LORA = LoRAConfig(rank=4, train_unembed=True, seed=7)
LENGTHS = [31, 7, 13]
PARAMS = {
    "": OptimParams(learning_rate=1e-2, grad_divisor=20.0),
    "a": OptimParams(
        learning_rate=3e-2, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.2, grad_clip_norm=0.1, grad_divisor=30.0
    ),
    "b": OptimParams(learning_rate=1e-3, beta1=0.8, grad_divisor=10.0, grad_clip_norm=1e9),
}
SEEDS = {"": 7, "a": 1, "b": 2}
SCHEDULE = ["a", "", "a", "b", "a", "b", "", "a", "a", "b"]
"""The tenant of each call; "" is the first tenant. Each tenant repeats this cycle: forward_backward, forward_backward, forward, optim_step."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_random(tmp_path_factory.mktemp("base"), BASE)


def nth_call(engine, tenant: str, number: int, samples=lambda seed: ppo_samples(LENGTHS, seed=seed)):
    """Make call `number` of the tenant. Returns the answer of the call as values that can be compared."""
    kind, seed = number % 4, 100 * sorted(SEEDS).index(tenant) + number
    if kind == 3:
        result = engine.optim_step(PARAMS[tenant])
        return result.grad_norm, result.policy_version
    output = engine.forward(samples(seed)) if kind == 2 else engine.forward_backward(samples(seed), PPO())
    return output.metrics, output.logprobs.tolist(), output.policy_version


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(engine) -> dict[str, torch.Tensor]:
    """Copies of the trained weights, gradients and optimizer state of the tenant in use. A copy has only this rank's shard."""
    found = {}
    for name, parameter in engine.built.model.named_parameters():
        if parameter.requires_grad:
            found[name] = local(parameter.detach()).clone()
            if parameter.grad is not None:
                found[f"{name} gradient"] = local(parameter.grad).clone()
            for key, value in engine.built.optimizers.optimizers[0].state.get(parameter, {}).items():
                found[f"{name} {key}"] = local(value).clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_turn(engine, **calls) -> tuple[dict[str, list], dict[str, dict[str, torch.Tensor]]]:
    """Make the calls of SCHEDULE three times. Returns for each tenant the answers and the state at the end."""
    for name in ("a", "b"):
        engine.new_tenant(name, seed=SEEDS[name])
    answers: dict[str, list] = {name: [] for name in SEEDS}
    for tenant in 3 * SCHEDULE:
        engine.use(tenant)
        answers[tenant].append(nth_call(engine, tenant, len(answers[tenant]), **calls))
    states = {}
    for name in SEEDS:
        engine.use(name)
        states[name] = state_of(engine)
    return answers, states


def alone(engine, tenant: str, **calls) -> tuple[list, dict[str, torch.Tensor]]:
    """Make only the calls of `tenant`, in a trainer of its own. Returns the answers and the state at the end."""
    answers = [nth_call(engine, tenant, number, **calls) for number in range(3 * SCHEDULE.count(tenant))]
    return answers, state_of(engine)


def test_tenants_that_take_turns_get_the_same_bits_as_each_in_its_own_trainer(make_engine, base):
    engine = make_engine(base, lora=LORA)
    answers, states = in_turn(engine)
    for name, seed in SEEDS.items():
        expected, state = alone(make_engine(base, lora=replace(LORA, seed=seed)), name)
        assert answers[name] == expected
        # Every tenant has taken a step and then begun another one. So optimizer state and gradients are compared, too.
        assert {key.rpartition(" ")[2] for key in state} >= {"gradient", "exp_avg", "exp_avg_sq", "step"}
        assert same(states[name], state)
    assert [engine.info(name).policy_version for name in SEEDS] == [1, 3, 2]
    assert engine.info().tenants == ("a", "b") and engine.info().lora_rank == 4


def test_an_offload_before_a_switch_of_tenants_changes_no_state(make_engine, base):
    engine, other = make_engine(base, lora=LORA), make_engine(base, lora=LORA)
    for each in (engine, other):
        each.new_tenant("a")
        nth_call(each, "a", 0)
    engine.offload()
    for each in (engine, other):
        each.use("")
        nth_call(each, "", 0)
    assert same(state_of(engine), state_of(other))
    engine.offload()
    for each in (engine, other):
        each.use("a")
    assert same(state_of(engine), state_of(other))


def test_each_tenant_has_its_own_step_state(make_engine, base, tmp_path):
    engine = make_engine(base, lora=LORA)
    engine.new_tenant("a")
    nth_call(engine, "a", 0)
    engine.use("")
    with pytest.raises(RuntimeError, match="optim_step is not possible while the trainer is idle"):
        engine.optim_step(PARAMS[""])
    engine.save_checkpoint(str(tmp_path / "first")).result()
    assert [engine.info(name).state for name in ("", "a")] == ["idle", "open"]
    with pytest.raises(ArithmeticError, match="it is broken"):
        engine.forward_backward(random_samples(LENGTHS), broken_loss)
    assert [engine.info(name).state for name in ("", "a")] == ["broken", "open"]
    engine.use("a")
    assert engine.optim_step(PARAMS["a"]).policy_version == 1
    engine.use("")
    with pytest.raises(RuntimeError, match="forward is not possible while the trainer is broken"):
        engine.forward(ppo_samples(LENGTHS))
    engine.discard_gradients()
    engine.forward(ppo_samples(LENGTHS))


def broken_loss(logprobs_BL, *, loss_weights):
    raise ArithmeticError("it is broken")


def test_only_the_tenant_with_a_gradient_that_is_not_finite_skips_its_step(make_engine, base):
    engine, clean = make_engine(base, lora=LORA), make_engine(base, lora=LORA)
    engine.new_tenant("a")
    huge = random_samples(LENGTHS, advantages=lambda *_: 3e38, old_logprobs=lambda *_: -60.0)
    engine.forward_backward(huge, "importance_sampling")
    for each in (engine, clean):
        each.use("")
        nth_call(each, "", 0)
    engine.use("a")
    assert engine.optim_step(PARAMS["a"]).skipped
    engine.use("")
    assert nth_call(engine, "", 3) == nth_call(clean, "", 3)
    assert same(state_of(engine), state_of(clean))
    assert [engine.info(name).steps_skipped for name in ("", "a")] == [0, 1]


def test_a_tenant_goes_on_from_its_checkpoint_in_another_trainer_bit_for_bit(make_engine, base, tmp_path):
    engine = make_engine(base, lora=LORA)
    engine.new_tenant("a", seed=1)
    engine.save_checkpoint(str(tmp_path / "0")).result()  # before its first step
    for number in range(4):
        nth_call(engine, "a", number)
    engine.save_checkpoint(str(tmp_path / "1")).result()
    engine.use("")
    for number in range(4):
        nth_call(engine, "", number)
    engine.use("a")
    other, fresh = make_engine(base, lora=LORA), make_engine(base, lora=replace(LORA, seed=1))
    other.new_tenant("b", seed=5)
    assert other.load_checkpoint(str(tmp_path / "0")) == 0 and fresh.policy_version == 0
    assert [nth_call(other, "a", number) for number in range(4)] == [
        nth_call(fresh, "a", number) for number in range(4)
    ]
    assert other.load_checkpoint(str(tmp_path / "1")) == 1
    assert [nth_call(other, "a", number) for number in range(8)] == [
        nth_call(engine, "a", number) for number in range(8)
    ]
    assert same(state_of(other), state_of(engine))
    other.use("")
    assert same(state_of(other), state_of(make_engine(base, lora=LORA)))


def test_a_dropped_tenant_is_gone_and_its_name_is_free(make_engine, base):
    engine = make_engine(base, lora=LORA)
    engine.new_tenant("a", seed=1)
    first = state_of(engine)
    for number in range(4):
        nth_call(engine, "a", number)
    nth_call(engine, "a", 0)
    engine.drop_tenant("a")
    assert (engine.tenants.name_in_use, engine.step.state) == ("", "idle")
    with pytest.raises(ValueError, match=r"there is no tenant 'a'; this trainer has \[''\]"):
        engine.use("a")
    engine.new_tenant("a", seed=1)
    assert same(state_of(engine), first) and engine.policy_version == 0
    assert nth_call(engine, "a", 0) and nth_call(engine, "a", 3)[1] == 1


def test_impossible_calls_about_tenants_are_refused_and_change_nothing(make_engine, base, tmp_path):
    with pytest.raises(ValueError, match=r"new_tenant\('a'\) is not possible with lora.rank=0"):
        make_engine(base).new_tenant("a")
    experts = save_random(tmp_path / "experts", MOE)
    balanced = make_engine(experts, lora=LoRAConfig(rank=2, train_mlp=False), load_balance_coeff=0.01)
    with pytest.raises(ValueError, match="new_tenant is not possible with load_balance_coeff=0.01"):
        balanced.new_tenant("a")
    engine = make_engine(base, lora=LORA)
    engine.new_tenant("a", seed=1)
    nth_call(engine, "a", 0)
    before = state_of(engine)
    for error, message, call in [
        (ValueError, r"there is a tenant 'a' already; this trainer has \['', 'a'\]", lambda: engine.new_tenant("a")),
        (ValueError, "the tenant that every trainer has", lambda: engine.new_tenant("")),
        (TypeError, "name must be a str, seed an integer", lambda: engine.new_tenant("b", seed=1.5)),
        (ValueError, "there is no tenant 'c'", lambda: engine.use("c")),
        (ValueError, "there is no tenant 'c'", lambda: engine.drop_tenant("c")),
        (ValueError, "the first tenant of a trainer cannot be dropped", lambda: engine.drop_tenant("")),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert same(state_of(engine), before) and engine.tenants.name_in_use == "a"


def in_turn_and_alone(path, parallelism, fields):
    """Make the calls of all tenants in one trainer, and the calls of each tenant in a trainer of its own.

    Returns for each tenant three values of this rank: whether its answers in the two trainers are equal, whether its
    states at the end are equal, and its first gradient norm.
    """
    samples = samples_with(*TRAINED)
    calls = {"samples": lambda seed: samples[seed % 7 : 9]}
    made = []
    for seed in SEEDS.values():
        lora = replace(fields["lora"], seed=seed)
        made.append(engine_of_layout(path, parallelism, {**fields, "lora": lora}))
    shared = engine_of_layout(path, parallelism, {**fields, "lora": replace(fields["lora"], seed=SEEDS[""])})
    of_tenants, states = in_turn(shared, **calls)
    found = {}
    for name, engine in zip(SEEDS, made, strict=True):
        answers, state = alone(engine, name, **calls)
        found[name] = (answers == of_tenants[name], same(state, states[name]), answers[3][0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_processes"),
    [
        (layout(shard=2), 2),
        (layout(shard=2, fsdp_reshard_after_forward="never"), 2),
        (layout(replicate=2), 2),
        (layout(tensor=2), 2),
        (layout(context=2), 2),
        (layout(shard=2, tensor=2), 4),
        (layout(pipeline=2, shard=2), 4),
    ],
    ids=str,
)
def test_tenants_of_a_layout_get_the_same_bits_as_each_in_its_own_trainer(
    run, directory_of, parallelism, num_processes
):
    for rank in run(num_processes, in_turn_and_alone, directory_of("adapters"), parallelism, MODELS["adapters"][1]):
        assert all(answers and states for answers, states, _ in rank.values()), rank
        assert len({norm for _, _, norm in rank.values()}) == 3  # the tenants have different gradients
