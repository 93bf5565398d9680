"""Tests of tenants. A tenant is one of several runs that share a trainer. Each tenant trains adapters of its own on the
trainer's base weights, which are frozen.

A tenant gets the same numbers as it would get alone. A failed call of one tenant does not disturb the other tenants,
but a timeout does: the trainer's client then refuses all calls until any tenant discards its gradients. The tenant
whose call timed out must discard its own gradients: until then, its calls stay refused.
"""

from dataclasses import replace

import pytest
import support
from references import save_random
from support import FailingLoss, Gate, random_samples, worst
from waiting import GUARD

from rl_actors import LoRAConfig, OptimParams, TrainerClient
from rl_actors.policy_trainer import PolicyTrainer

LORA = LoRAConfig(rank=4, seed=3)
PARAMS = [
    OptimParams(learning_rate=0.02, grad_divisor=96),
    OptimParams(learning_rate=0.1, beta1=0.5, eps=1e-3, weight_decay=0.3, grad_clip_norm=0.2, grad_divisor=48),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    base = save_random(tmp_path_factory.mktemp("base"), support.model_config())
    return support.trainer_config(hf_path=base, lora=LORA)


@pytest.fixture(scope="module")
def landlord(config, ranks, transport):
    """The client of a trainer with adapters. The tests add tenants to this trainer."""
    with TrainerClient.spawn(config, transport=transport, processes=ranks(1), name="landlord") as client:
        yield client


@pytest.fixture
def pair(landlord):
    """Two tenants with adapters of different seeds."""
    tenants = [landlord.new_tenant(name, seed=seed) for seed, name in enumerate("ab", start=1)]
    yield tenants
    for tenant in tenants:
        tenant.close().result()


def queue_steps(client, number: int, params: OptimParams) -> list:
    """Send two forward_backward calls and an optim_step, and do not wait for their answers. Returns the three calls."""
    samples = random_samples(seed=number)
    halves = [client.forward_backward(half, loss="cross_entropy") for half in (samples[:3], samples[3:])]
    return [*halves, client.optim_step(params)]


def test_tenants_whose_calls_interleave_get_the_numbers_that_each_gets_alone(landlord, pair, config):
    sent = [[], []]
    for number in range(3):
        for answers, tenant, params in zip(sent, pair, PARAMS, strict=True):
            answers += queue_steps(tenant, number, params)
    results = [[call.result() for call in calls] for calls in sent]
    assert landlord.info().result()[0].tenants == ("a", "b")
    for seed, (tenant, params, answers) in enumerate(zip(pair, PARAMS, results, strict=True), start=1):
        with TrainerClient.spawn(
            replace(config, lora=replace(LORA, seed=seed)), processes=landlord, name="alone"
        ) as alone:
            expected = []
            for number in range(3):
                expected += [call.result() for call in queue_steps(alone, number, params)]
            assert answers[2::3] == expected[2::3]  # the answers of optim_step: gradient norms and versions
            assert [answer.metrics for answer in answers[::3]] == [answer.metrics for answer in expected[::3]]
            ours, theirs = (each.forward(random_samples(seed=9)).result().logprobs for each in (tenant, alone))
            assert worst(ours, theirs) == 0 and tenant.policy_version == 3
    assert [each.info().result()[0].policy_version for each in (landlord, *pair)] == [0, 3, 3]


def test_a_tenant_saves_loads_and_exports_its_own_state(landlord, pair, tmp_path):
    one, other = pair
    for call in queue_steps(one, 0, PARAMS[0]):
        call.result()
    one.save_checkpoint(str(tmp_path / "a")).result().wait().result()
    assert other.load_checkpoint(str(tmp_path / "a")).result() == 1
    ours, theirs = ([call.result() for call in queue_steps(each, 1, PARAMS[0])][2] for each in pair)
    assert ours == theirs and ours.policy_version == 2
    other.export_lora(str(tmp_path / "adapter")).result()
    other.export_hf(str(tmp_path / "merged")).result()
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file() and (tmp_path / "merged/config.json").is_file()
    with pytest.raises(ValueError, match="push_model_state_dict is not possible for tenant 'a'.*export_lora"):
        replace(landlord.session, tenant="a").call(PolicyTrainer.push_model_state_dict).result()
    assert landlord.push_model_state_dict().result() == 0


def test_the_failure_of_a_tenants_call_is_raised_by_the_next_step_of_this_tenant_only(pair):
    one, other = pair
    one.forward_backward(random_samples(), loss=FailingLoss(rank=0))
    steps = queue_steps(other, 0, PARAMS[0])
    with pytest.raises(ArithmeticError, match="the loss is broken") as failure:
        one.optim_step(PARAMS[0]).result()
    assert "landlord, tenant a: forward_backward" in failure.value.__notes__[-1]
    assert [call.result() for call in steps][2].policy_version == 1
    with pytest.raises(RuntimeError, match="forward is not possible while the trainer is broken"):
        one.forward(random_samples()).result()
    one.discard_gradients().result()
    assert [call.result() for call in queue_steps(one, 0, PARAMS[0])][2].policy_version == 1


def test_after_a_timeout_any_discard_frees_all_tenants_except_the_one_whose_call_timed_out(landlord, pair, tmp_path):
    one, other = pair
    one.ready().result()
    landlord.discard_gradients().result()
    gate = Gate(folder=tmp_path)
    usual = landlord.ranks.call_timeout
    landlord.ranks.call_timeout = 1.0  # no call has to succeed within this short limit
    try:
        with pytest.raises(TimeoutError, match="landlord: forward_backward did not answer within 1 s"):
            one.forward_backward(random_samples(), loss=gate).result()
        for each in (landlord, one, other):
            with pytest.raises(RuntimeError, match="landlord is broken: forward_backward did not"):
                each.forward(random_samples()).result()
    finally:
        landlord.ranks.call_timeout = usual
        gate.open()
    other.discard_gradients().result()
    assert len(landlord.forward(random_samples()).result().logprobs) == 8
    with pytest.raises(RuntimeError, match="landlord is broken: forward_backward did not .*call discard_gradients"):
        one.optim_step(PARAMS[0]).result()
    assert one.discard_gradients().result() is None
    assert [call.result() for call in queue_steps(one, 0, PARAMS[0])][2].policy_version == 1


def test_impossible_tenants_and_wrong_arguments_are_refused(landlord, pair, trainer):
    trainer.ready().result()
    with pytest.raises(ValueError, match=r"new_tenant\('a'\) is not possible with lora.rank=0"):
        trainer.new_tenant("a")
    with pytest.raises(ValueError, match="landlord has a tenant 'a' already"):
        landlord.new_tenant("a")
    with pytest.raises(ValueError, match="the tenant that every trainer has"):
        landlord.new_tenant("")
    with pytest.raises(TypeError, match="seed an integer"):
        landlord.new_tenant("c", seed="x")
    with pytest.raises(ValueError, match="there is no tenant 'c'"):
        landlord.drop_tenant("c").result()
    with pytest.raises(ValueError, match="learning_rate=-1"):
        pair[0].optim_step(OptimParams(learning_rate=-1.0))


def test_a_closed_tenant_is_forgotten_and_its_name_is_free(landlord, pair):
    one, other = pair
    one.forward_backward(random_samples(), loss="cross_entropy").result()
    assert repr(one) == "<TenantClient landlord, tenant a: ready, policy_version 0>"
    one.close().result(GUARD)
    one.close().result()
    assert landlord.info().result()[0].tenants == ("b",)
    with pytest.raises(RuntimeError, match="landlord, tenant a: forward is not possible after close"):
        one.forward(random_samples())
    again = landlord.new_tenant("a", seed=2)
    assert again.info().result()[0].state == "idle"
    ours, theirs = (each.forward(random_samples()).result().logprobs for each in (again, other))
    assert worst(ours, theirs) == 0
    again.close().result()
