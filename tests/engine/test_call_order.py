"""The legal order of a trainer's calls, and the trainer's state after each call."""

import json

import pytest
import torch
from references import ppo_samples, random_samples

from rl_actors.engine.call_order import BROKEN, IDLE, INCONSISTENT, LEGAL, OPEN, StepState
from rl_actors.losses import GSPO, PPO
from rl_actors.transports.base import LoadedTensors
from rl_actors.types import OptimParams

LENGTHS = [7, 31, 1, 13]
PARAMS = OptimParams(learning_rate=1e-3, grad_divisor=10.0)
CALLS = sorted(set().union(*LEGAL.values()))


def parameters(engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.built.model.named_parameters()}


def gradients(engine) -> dict[str, torch.Tensor]:
    named = engine.built.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def in_state(state: str) -> StepState:
    step = StepState()
    if state == OPEN:
        step.open()
    elif state == BROKEN:
        step.mark_broken(weights=False)
    elif state == INCONSISTENT:
        step.mark_broken(weights=True)
    return step


@pytest.mark.parametrize("state", [IDLE, OPEN, BROKEN, INCONSISTENT])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_legal_or_its_error_names_the_call_the_state_and_the_remedy(call, state):
    step = in_state(state)
    if call in LEGAL[state]:
        step.require(call)
    else:
        with pytest.raises(
            RuntimeError, match=f"{call} is not possible while the trainer is {state}: .* call .* first"
        ):
            step.require(call)
    assert step.state == state


def test_each_state_refuses_the_listed_calls_and_no_others():
    refused = {state: sorted(set(CALLS) - LEGAL[state]) for state in LEGAL}
    assert refused == {
        IDLE: ["optim_step"],
        OPEN: ["load_checkpoint", "profile", "pull_model_state_dict", "save_checkpoint"],
        BROKEN: [call for call in CALLS if call != "discard_gradients"],
        INCONSISTENT: [call for call in CALLS if call not in ("load_checkpoint", "pull_model_state_dict")],
    }


def test_forward_backward_opens_a_step_and_optim_step_or_discard_gradients_closes_it(make_engine):
    engine = make_engine()
    states = [engine.step.state]
    for call in (
        lambda: engine.forward(ppo_samples(LENGTHS)),
        lambda: engine.forward_backward(ppo_samples(LENGTHS), PPO()),
        lambda: engine.forward_backward(ppo_samples(LENGTHS), PPO()),
        lambda: engine.optim_step(PARAMS),
        lambda: engine.forward_backward(ppo_samples(LENGTHS), PPO()),
        lambda: engine.discard_gradients(),
        lambda: engine.discard_gradients(),
    ):
        call()
        states.append(engine.step.state)
    assert states == ["idle", "idle", "open", "open", "idle", "open", "idle", "idle"]
    assert engine.policy_version == 1
    assert engine.info().state == "idle" and engine.info().policy_version == 1


def test_optim_step_without_accumulated_gradients_fails_and_changes_nothing(make_engine):
    engine = make_engine()
    before = parameters(engine)
    with pytest.raises(RuntimeError, match="optim_step .* idle: no gradients are accumulated: call forward_backward"):
        engine.optim_step(PARAMS)
    assert engine.policy_version == 0 and engine.step.state == IDLE
    assert_bit_equal(parameters(engine), before)


def test_an_open_step_refuses_checkpoints_and_pulls(make_engine, tmp_path):
    engine = make_engine()
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(RuntimeError, match=f"{call.__name__} .* open: gradients are accumulated"):
            call(str(tmp_path / "checkpoint"))
    with pytest.raises(RuntimeError, match="pull_model_state_dict .* open: gradients are accumulated"):
        engine.load_published(None, 1)
    assert engine.step.state == OPEN and not (tmp_path / "checkpoint").exists()


class LostTensors(LoadedTensors):
    """A version whose reader loses the connection after three tensors."""

    def tensors(self):
        yield from list(self.loaded.items())[:3]
        raise ConnectionError


def test_a_pull_after_a_pull_that_failed_makes_the_model_usable_again(make_engine):
    tensors = make_engine(seed=1).hf_state_dict()
    published = LoadedTensors({name: tensor.full_tensor() for name, tensor in tensors.items()})
    engine = make_engine(optimizer=None)
    with pytest.raises(ConnectionError):
        engine.load_published(LostTensors(published.loaded), 1)
    assert engine.step.state == INCONSISTENT
    assert engine.load_published(published, 2) == 2
    assert engine.step.state == IDLE
    assert len(engine.forward(random_samples([40, 3])).logprobs) == 43


def test_discarded_gradients_do_not_change_the_next_step(make_engine):
    clean, discarded = make_engine(), make_engine()
    discarded.forward_backward(ppo_samples(LENGTHS, seed=5), PPO())
    discarded.discard_gradients()
    assert gradients(discarded) == {}
    for engine in (clean, discarded):
        engine.forward_backward(ppo_samples(LENGTHS), PPO())
        engine.optim_step(PARAMS)
    assert_bit_equal(parameters(discarded), parameters(clean))


def test_a_forward_inside_an_open_step_leaves_gradients_and_weights_bit_identical(make_engine):
    engine = make_engine(activation_checkpointing="full")
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    weights, grads = parameters(engine), gradients(engine)
    engine.forward(random_samples([40, 3], seed=9))
    for loss in (PPO(), GSPO()):
        assert engine.forward(ppo_samples([40, 3]), loss).metrics["loss:sum"] != 0
    assert engine.step.state == OPEN and engine.built.model.training
    assert_bit_equal(gradients(engine), grads)
    assert_bit_equal(parameters(engine), weights)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_nonfinite_gradient_skips_the_step_and_the_result_names_the_parameter(make_engine, value, clip):
    engine = make_engine()
    before = parameters(engine)
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    dict(engine.built.model.named_parameters())["layers.1.feed_forward.w2.weight"].grad.view(-1)[3] = value
    result = engine.optim_step(OptimParams(learning_rate=1e-3, grad_clip_norm=clip))
    assert result.skipped and result.policy_version == 0 and not result.grad_norm < float("inf")
    assert result.nonfinite_parameters == ("layers.1.feed_forward.w2.weight",)
    assert engine.step.state == IDLE and gradients(engine) == {}
    assert_bit_equal(parameters(engine), before)


def test_a_loss_that_overflows_skips_the_step_and_does_not_change_the_next_step(make_engine):
    clean, skipping = make_engine(), make_engine()
    huge = random_samples(LENGTHS, advantages=lambda *_: 3e38, old_logprobs=lambda *_: -60.0)
    skipping.forward_backward(huge, "importance_sampling")
    result = skipping.optim_step(PARAMS)
    assert result.skipped and len(result.nonfinite_parameters) == 10
    for engine in (clean, skipping):
        engine.forward_backward(ppo_samples(LENGTHS), PPO())
        assert engine.optim_step(PARAMS).policy_version == 1
    assert_bit_equal(parameters(skipping), parameters(clean))


def broken_loss(logprobs_BL, *, loss_weights):
    raise ArithmeticError("in the middle of a backward pass")


def test_a_forward_backward_that_fails_halfway_breaks_the_step_until_discard_gradients(make_engine):
    clean, broken = make_engine(), make_engine()
    samples = random_samples(LENGTHS)
    broken.forward_backward(samples, "cross_entropy")
    with pytest.raises(ArithmeticError):
        broken.forward_backward(samples, broken_loss)
    assert broken.info().state == "broken"
    for call in (lambda: broken.forward(samples), lambda: broken.optim_step(PARAMS)):
        with pytest.raises(
            RuntimeError, match="broken: the last call failed before it was done: call discard_gradients first"
        ):
            call()
    broken.discard_gradients()
    for engine in (clean, broken):
        engine.forward_backward(samples, "cross_entropy")
        engine.optim_step(PARAMS)
    assert_bit_equal(parameters(broken), parameters(clean))


def test_refused_calls_do_not_change_the_open_step(make_engine, tmp_path):
    clean, pestered = make_engine(), make_engine()
    good = ppo_samples(LENGTHS)
    long, no_old_logprobs = ppo_samples([65]), random_samples([4], advantages=lambda *_: 1.0)
    nan, outside = ppo_samples([4]), ppo_samples([4])
    nan[0].columns["advantages"][-1] = float("nan")
    outside[0].tokens[2] = 64
    refused = [
        (ValueError, lambda: pestered.forward_backward([], PPO())),
        (ValueError, lambda: pestered.forward_backward(good + long, PPO())),
        (ValueError, lambda: pestered.forward_backward(good + no_old_logprobs, PPO())),
        (ValueError, lambda: pestered.forward_backward(good + nan, PPO())),
        (ValueError, lambda: pestered.forward_backward(good + outside, PPO())),
        (ValueError, lambda: pestered.forward(good + outside)),
        (ValueError, lambda: pestered.forward_backward(good, "pppo")),
        (ValueError, lambda: pestered.forward_backward(good, "cross_entropy")),
        (ValueError, lambda: pestered.optim_step(OptimParams(learning_rate=-1.0))),
        (ValueError, lambda: pestered.optim_step(OptimParams(learning_rate=1e-3, grad_divisor=0.0))),
        (RuntimeError, lambda: pestered.load_checkpoint(str(tmp_path))),
    ]
    for engine in (clean, pestered):
        engine.forward_backward(good, PPO())
    for error, call in refused:
        with pytest.raises(error):
            call()
        assert pestered.step.state == OPEN
    assert_bit_equal(gradients(pestered), gradients(clean))
    assert clean.optim_step(PARAMS) == pestered.optim_step(PARAMS)
    assert_bit_equal(parameters(pestered), parameters(clean))


def test_a_trace_holds_whole_steps_and_is_written_after_the_last_step(make_engine, tmp_path):
    engine, file = make_engine(), tmp_path / "trace" / "rank-0.json"
    engine.profile(str(file.parent), steps=2)
    for steps_done in (1, 2):
        engine.forward_backward(ppo_samples(LENGTHS), PPO())
        with pytest.raises(RuntimeError, match="profile is not possible while the trainer is open"):
            engine.profile(str(tmp_path), steps=1)
        engine.optim_step(PARAMS)
        assert file.exists() == (steps_done == 2)
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names


def test_profile_refuses_zero_steps_and_a_second_trace_before_the_first_is_done(make_engine, tmp_path):
    engine = make_engine()
    with pytest.raises(ValueError, match="steps=0; it must be an integer of at least 1"):
        engine.profile(str(tmp_path), steps=0)
    engine.profile(str(tmp_path), steps=1)
    with pytest.raises(RuntimeError, match="rank-0.json is not done; steps left: 1"):
        engine.profile(str(tmp_path), steps=1)
    engine.forward_backward(ppo_samples(LENGTHS), PPO())
    engine.optim_step(PARAMS)
