"""Weights, gradients and optimizer state go to the host and come back unchanged. The number of moved bytes equals the
estimate of memory_estimate.py."""

import pytest
import torch
from layout_work import MODELS, STEP, TRAINED, layout, samples_with
from layout_work import make_engine as engine_of_layout
from references import ppo_samples

from rl_actors import memory_estimate
from rl_actors.engine import offload
from rl_actors.losses import PPO
from rl_actors.parts import PARTS, HostMove


def states(engine) -> dict[str, torch.Tensor]:
    """Copies of the weights, the gradients and the optimizer's state."""
    found = {}
    for name, parameter in engine.built.model.named_parameters():
        found[name] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"{name} gradient"] = parameter.grad.detach().clone()
        for optimizer in engine.built.optimizers.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name} {key}"] = value.detach().clone()
    return found


def assert_equal(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def steps(engine, *, before=lambda engine: None) -> list[tuple[float, float]]:
    """Train two steps, each with two calls of forward_backward. Returns (loss, gradient norm) of each step. `before` runs
    before every forward_backward and every optim_step.
    """
    found = []
    for seed in range(2):
        losses = []
        for part in range(2):
            before(engine)
            output = engine.forward_backward(ppo_samples([31, 7], seed=2 * seed + part), PPO())
            losses.append(output.metrics["loss:sum"])
        before(engine)
        found.append((sum(losses), engine.optim_step(STEP).grad_norm))
    return found


@pytest.mark.parametrize("parts", [["weights"], ["gradients"], ["optimizer"], PARTS], ids=" ".join)
def test_offloads_before_each_call_change_no_bit_of_the_steps(make_engine, parts):
    resident, moved = make_engine(), make_engine()
    expected = steps(resident)
    assert steps(moved, before=lambda engine: engine.offload(parts)) == expected
    moved.onload()
    assert_equal(states(moved), states(resident))
    output = resident.forward(ppo_samples([31, 7])).logprobs
    assert torch.equal(moved.forward(ppo_samples([31, 7])).logprobs, output)


def test_an_offload_and_an_onload_give_every_bit_back(make_engine):
    engine = make_engine()
    steps(engine)
    engine.forward_backward(ppo_samples([31, 7]), PPO())
    before = states(engine)
    engine.offload()
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in map(_local, engine.built.model.parameters()))
    engine.onload()
    assert_equal(states(engine), before)


def _local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def test_the_number_of_moved_bytes_equals_the_memory_estimate(make_engine, untied_qwen3):
    engine = make_engine(untied_qwen3)
    steps(engine)
    engine.forward_backward(ppo_samples([31, 7]), PPO())
    estimate = memory_estimate.memory(engine.config)
    expected = {
        "weights": estimate.parameters + estimate.buffers,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
    }
    moves = {part: engine.offload([part]).num_bytes for part in PARTS}
    assert moves == expected == engine.info().on_host
    assert engine.info().offloaded.num_bytes == sum(expected.values())
    back = engine.onload()
    assert back.num_bytes == sum(expected.values()) == engine.info().onloaded.num_bytes
    assert engine.info().on_host == {}
    assert back.seconds > 0 and back.gb_per_second > 0 and back.buffer_seconds == 0


def test_a_part_that_has_been_moved_is_not_moved_again(make_engine):
    engine = make_engine()
    assert engine.offload(["optimizer", "gradients"]).num_bytes == 0  # both are still empty in a new engine
    assert engine.offload(["weights"]).num_bytes and not engine.offload(["weights"]).num_bytes
    assert engine.onload(["weights"]).num_bytes and engine.onload(["weights"]) == HostMove()


def test_after_an_onload_ran_out_of_memory_another_onload_brings_back_the_rest(make_engine, monkeypatch):
    engine = make_engine()
    steps(engine)
    before = states(engine)
    num_bytes = engine.offload().num_bytes
    move, room = offload._to_device, iter(range(5))

    def move_while_there_is_room(place):
        if next(room, None) is None:
            raise torch.OutOfMemoryError("no room")
        return move(place)

    monkeypatch.setattr(offload, "_to_device", move_while_there_is_room)
    with pytest.raises(torch.OutOfMemoryError):
        engine.onload()
    on_host = sum(engine.info().on_host.values())
    assert 0 < on_host < num_bytes and engine.step.state == "idle"
    monkeypatch.setattr(offload, "_to_device", move)
    assert engine.onload().num_bytes == on_host
    assert_equal(states(engine), before)


def test_later_offloads_reuse_the_host_memory_of_the_first_offload(make_engine):
    engine = make_engine()
    steps(engine)
    engine.offload()
    buffers = {part: buffer.data_ptr() for part, buffer in engine.memory.buffers.items()}
    steps(engine, before=lambda engine: engine.offload())
    assert {part: engine.memory.buffers[part].data_ptr() for part in buffers} == buffers


@pytest.mark.parametrize(
    ("call", "back"),
    [
        (lambda engine: engine.forward(ppo_samples([7])), {"weights"}),
        (lambda engine: engine.forward_backward(ppo_samples([7]), PPO()), {"weights", "gradients"}),
        (lambda engine: engine.optim_step(STEP), set(PARTS)),
        (lambda engine: engine.hf_state_dict(), {"weights"}),
        # discard_gradients brings nothing back. It drops the gradients, so the host does not hold them any more.
        (lambda engine: engine.discard_gradients(), {"gradients"}),
        (lambda engine: engine.info(), set()),
    ],
    ids=["forward", "forward_backward", "optim_step", "push", "discard_gradients", "info"],
)
def test_a_call_brings_back_only_the_parts_that_it_needs(make_engine, call, back):
    engine = make_engine()
    steps(engine)
    engine.forward_backward(ppo_samples([31]), PPO())
    engine.offload()
    call(engine)
    assert set(engine.info().on_host) == set(PARTS) - back


def test_discarded_gradients_do_not_come_back(make_engine):
    engine, fresh = make_engine(), make_engine()
    engine.forward_backward(ppo_samples([31]), PPO())
    engine.offload()
    engine.discard_gradients()
    assert steps(engine) == steps(fresh)


def test_checkpoints_and_exports_of_an_offloaded_trainer_are_whole(make_engine, tmp_path):
    engine, fresh = make_engine(), make_engine()
    steps(engine)
    engine.offload()
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    fresh.offload()
    fresh.load_checkpoint(str(tmp_path / "checkpoint"))
    assert_equal(states(fresh), states(engine))
    engine.offload()
    engine.export_hf(str(tmp_path / "export"))
    assert_equal(states(make_engine(str(tmp_path / "export"))), states(make_engine(_exported(fresh, tmp_path))))


def _exported(engine, tmp_path) -> str:
    engine.export_hf(str(tmp_path / "expected"))
    return str(tmp_path / "expected")


def test_unknown_parts_and_offloads_of_a_broken_trainer_are_refused(make_engine):
    engine = make_engine()
    with pytest.raises(
        ValueError, match=r"offload: 'cache' is not a part; the parts are weights, gradients, optimizer"
    ):
        engine.offload(["weights", "cache"])
    with pytest.raises(TypeError, match=r"onload: parts is 'weights'; it must be a list of names"):
        engine.onload("weights")
    engine.step.mark_broken(weights=False)
    with pytest.raises(RuntimeError, match=r"offload is not possible while the trainer is broken"):
        engine.offload()


def moved_and_resident(path, parallelism, fields):
    """Train without offloads, and train again with an offload before each call. Returns this rank's results:

    (metrics and gradient norms without offloads, metrics and gradient norms with offloads, True if both trainers end
    with equal states, {part: bytes on the host}).
    """
    resident, moved = (engine_of_layout(path, parallelism, fields) for _ in range(2))
    samples = samples_with(*TRAINED)
    results = []
    for engine, moves in ((resident, False), (moved, True)):
        found = []
        for _ in range(2):
            for half in (samples[:9], samples[9:]):
                if moves:
                    engine.offload()
                found.append(engine.forward_backward(half, PPO()).metrics)
            if moves:
                engine.offload()
            found.append(engine.optim_step(STEP).grad_norm)
        results.append(found)
    moved.offload()
    num_bytes = moved.info().on_host
    moved.onload()
    actual, expected = states(moved), states(resident)
    are_equal = all(torch.equal(_local(actual[name]), _local(expected[name])) for name in expected)
    return results[0], results[1], are_equal and actual.keys() == expected.keys(), num_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "num_processes", "model", "fields"),
    [
        (layout(shard=2), 2, "tied", {}),
        (layout(shard=2), 2, "untied", {"compute_dtype": "bfloat16"}),
        (layout(replicate=2, shard=2), 4, "tied", {}),
        (layout(tensor=2), 2, "untied", {}),
        (layout(shard=2, tensor=2), 4, "tied", {}),
        (layout(context=2), 2, "tied", {}),
        (layout(shard=2, expert=2), 2, "experts", {}),
        (layout(tensor=2, expert=2), 2, "balanced experts", {}),
        (layout(pipeline=2), 2, "four blocks", {}),
        (layout(pipeline=2, shard=2), 4, "four blocks", {}),
        (layout(shard=2), 2, "adapters", {}),
        (layout(shard=2, fsdp_reshard_after_forward="never"), 2, "untied", {"compute_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_offloads_in_a_parallel_layout_change_no_bit_of_the_steps(
    run, directory_of, parallelism, num_processes, model, fields
):
    fields = {**MODELS[model][1], **fields}
    for expected, actual, are_equal, num_bytes in run(
        num_processes, moved_and_resident, directory_of(model), parallelism, fields
    ):
        assert actual == expected and are_equal
        assert num_bytes["optimizer"] > 0 and num_bytes["weights"] > 0
