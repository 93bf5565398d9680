"""Tests of a TrainerClient: the order, timeouts, failures and message numbers of its calls, and `close`."""

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import support
import torch
from support import FailingLoss, Gate, random_samples
from waiting import GUARD

from rl_actors import CrossEntropy, OptimParams, Sample, TrainerClient
from rl_actors.config import DEGREES
from rl_actors.policy_trainer import CallHeader
from rl_actors.transports.base import wait_for_manifest

STEP = OptimParams(learning_rate=0.01)


def test_await_and_result_give_the_same_answer(trainer):
    async def awaited():
        return await trainer.forward(random_samples())

    ours, theirs = trainer.forward(random_samples()).result(), asyncio.run(awaited())
    assert all(map(torch.equal, ours.logprobs, theirs.logprobs))
    assert ours.policy_version == theirs.policy_version


def test_info_has_the_rank_layout_dtype_device_and_optimizer_of_a_trainer(trainer, trainer_mesh):
    [info] = trainer.info().result()
    assert trainer_mesh.shown.call_one().get(timeout=GUARD) == "PolicyTrainer(0)"
    assert (info.rank, info.world_size, info.optimizer) == (0, 1, "AdamW")
    assert info.layout == {**dict.fromkeys(DEGREES, 1), "expert_parallel": 1}
    assert (info.dtype, info.device.partition(":")[0]) == ("float32", "cuda" if torch.cuda.is_available() else "cpu")
    assert info.optimizer_fields == ("beta1", "beta2", "eps", "weight_decay")
    assert info.memory_bytes > info.num_parameters * 4


def test_in_a_spawned_process_the_garbage_collector_ignores_objects_that_the_setup_made(trainer, trainer_mesh):
    trainer.info().result()
    assert trainer_mesh.num_frozen.call_one().get(timeout=60) > 100_000


def test_result_works_inside_a_running_event_loop_such_as_jupyters(trainer):
    async def cell():
        return trainer.forward(random_samples()).result()

    assert len(asyncio.run(cell()).logprobs) == 8


def test_a_client_works_in_several_event_loops_one_after_another(trainer):
    async def run():
        return (await trainer.info())[0].policy_version

    assert len({asyncio.run(run()) for _ in range(3)}) == 1


def test_a_timeout_of_asyncio_wait_for_does_not_end_the_call(trainer, tmp_path):
    gate = Gate(folder=tmp_path)
    call = trainer.forward_backward(random_samples(), loss=gate)

    async def wait():
        await asyncio.wait_for(call, 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    gate.open()
    assert len(call.result().logprobs) == 8


def test_a_timeout_of_result_names_the_call_and_does_not_end_it(trainer, tmp_path):
    gate = Gate(folder=tmp_path)
    call = trainer.forward_backward(random_samples(), loss=gate)
    with pytest.raises(
        TimeoutError, match=r"trainer: forward_backward has not answered within 0\.1 s; it is still running"
    ):
        call.result(timeout=0.1)
    gate.open()
    assert call.result().metrics["loss:sum"] > 0
    assert trainer.optim_step(STEP).result().grad_norm > 0


def test_calls_made_before_the_first_answer_run_in_the_order_in_which_they_were_made(trainer, tmp_path):
    gate, done = Gate(folder=tmp_path), []
    calls = {
        "forward_backward": trainer.forward_backward(random_samples(), loss=gate),
        "optim_step": trainer.optim_step(STEP),
        "forward": trainer.forward(random_samples()),
        "forward_backward again": trainer.forward_backward(random_samples(), loss="cross_entropy"),
        "optim_step again": trainer.optim_step(STEP),
    }
    for name, call in calls.items():
        call._future.add_done_callback(lambda _, name=name: done.append(name))
    gate.wait_begun()
    assert done == []
    gate.open()
    version = calls["forward_backward"].result().policy_version
    assert calls["optim_step again"].result().policy_version == version + 2
    assert done == list(calls)
    assert calls["forward"].result().policy_version == version + 1


def test_calls_from_many_threads_are_all_answered(trainer):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(trainer.forward(random_samples(2)).result())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(torch.equal(answer.logprobs[1], answers[0].logprobs[1]) for answer in answers)


def test_an_exception_of_an_actor_keeps_its_type_and_gets_a_note_with_actor_rank_and_call(trainer, tmp_path):
    with pytest.raises(ArithmeticError, match="the loss is broken") as raised:
        trainer.forward_backward(random_samples(), loss=FailingLoss(rank=0)).result()
    [note] = raised.value.__notes__
    assert note.startswith("raised in trainer, rank 0, forward_backward: ")
    assert "support.py" in note and "in __call__" in note  # the remote traceback
    with pytest.raises(RuntimeError, match="forward is not possible while the trainer is broken"):
        trainer.forward(random_samples()).result()
    trainer.discard_gradients().result()
    assert len(trainer.forward(random_samples()).result().logprobs) == 8


def test_an_exception_that_cannot_be_pickled_still_arrives_with_its_message(trainer):
    with pytest.raises(Exception, match="it holds a lock") as raised:
        trainer.forward_backward(random_samples(), loss=support.UnpicklableLoss()).result()
    assert any("forward_backward" in note for note in raised.value.__notes__)


def test_the_actor_refuses_a_bad_call_with_the_same_error_as_the_client_and_changes_nothing(trainer, trainer_mesh):
    bad = [*random_samples(), Sample.from_tokens([1, 2], [3, support.VOCAB_SIZE])]
    before = trainer.forward(random_samples()).result()
    with pytest.raises(ValueError, match="sample 8: targets") as ours:
        trainer.forward_backward(bad, loss="cross_entropy").result()
    with pytest.raises(Exception, match="sample 8: targets") as theirs:
        trainer_mesh.forward_backward.call_one(bad, CrossEntropy()).get(timeout=GUARD)
    assert type(theirs.value.exception) is ValueError
    assert str(theirs.value.exception) == str(ours.value)
    after = trainer.forward(random_samples()).result()
    assert all(map(torch.equal, before.logprobs, after.logprobs))
    assert trainer.info().result()[0].state == "idle"


def test_a_call_with_bad_arguments_raises_at_the_line_that_makes_it(trainer):
    trainer.ready().result()
    with pytest.raises(ValueError, match="sample 0: tokens") as raised:
        trainer.forward_backward([Sample.from_tokens([support.VOCAB_SIZE], [1])], loss="cross_entropy")
    assert raised.traceback[0].path == Path(__file__)  # the caller's line is in the traceback
    with pytest.raises(ValueError, match="learning_rate=-1"):
        trainer.optim_step(OptimParams(learning_rate=-1.0))
    with pytest.raises(TypeError, match="loss is 3"):
        trainer.forward_backward_custom(random_samples(), 3)


def test_optim_step_does_not_step_and_raises_the_error_of_a_call_whose_answer_nobody_asked_for(trainer):
    version = support.step(trainer)
    trainer.forward_backward(random_samples(), loss="cross_entropy")
    trainer.forward_backward(random_samples(), loss=FailingLoss(rank=0))
    with pytest.raises(ArithmeticError, match="the loss is broken") as raised:
        trainer.optim_step(STEP).result()
    note = "nobody asked for the answer of this call, so optim_step raises its error; the optimizer has not stepped"
    assert note in raised.value.__notes__[-1]
    trainer.discard_gradients().result()
    assert trainer.info().result()[0].policy_version == version
    failed = trainer.forward_backward(random_samples(), loss=FailingLoss(rank=0))
    with pytest.raises(ArithmeticError):
        failed.result()
    trainer.discard_gradients()
    trainer.forward_backward(random_samples(), loss="cross_entropy")
    # failed.result() has raised the failure, so optim_step does not raise it again.
    assert trainer.optim_step(STEP).result().policy_version == version + 1


def test_if_a_call_is_refused_only_after_the_client_knows_the_limits_the_next_optim_step_raises_the_error(
    trainer, trainer_mesh, tmp_path
):
    gate = Gate(folder=tmp_path)
    trainer.forward(random_samples(), loss=gate)
    gate.wait_begun()
    # The new client gets the limits of the trainer, such as the vocabulary size, from its setup call. This call waits
    # for the end of the call that the gate blocks. So the client can check the two calls below only after gate.open().
    trainer = TrainerClient(trainer_mesh)
    bad = [Sample.from_tokens([1], [support.VOCAB_SIZE])]
    trainer.forward_backward(random_samples(), loss="cross_entropy")
    trainer.forward_backward(bad, loss="cross_entropy")
    gate.open()
    with pytest.raises(ValueError, match=f"sample 0: targets.*{support.VOCAB_SIZE}"):
        trainer.optim_step(STEP).result()
    # The error is raised only once, and the trainer still has the gradients of the good call.
    assert trainer.optim_step(STEP).result().grad_norm > 0


def test_a_failed_call_whose_answer_nobody_asked_for_warns_when_it_is_garbage_collected(trainer):
    with pytest.warns(
        RuntimeWarning, match="trainer: load_checkpoint failed and nobody asked for its answer: .*nowhere"
    ):
        trainer.load_checkpoint("nowhere")
        trainer.ready().result()
        trainer.info().result()  # runs after the failed call; afterwards no object refers to the failed call
        gc.collect()


def test_repr_shows_name_state_and_version_of_a_client_and_name_and_state_of_a_call(trainer_mesh, tmp_path):
    trainer = TrainerClient(trainer_mesh)
    version = support.step(trainer)
    assert repr(trainer) == f"<TrainerClient trainer: ready, policy_version {version}>"
    gate = Gate(folder=tmp_path)
    call = trainer.forward(random_samples(), loss=gate)
    gate.wait_begun()
    assert repr(call) == "<Call trainer: forward: running>"
    gate.open()
    call.result()
    assert repr(call) == "<Call trainer: forward: done>"
    trainer.close().result()
    assert repr(trainer) == f"<TrainerClient trainer: closed, policy_version {version}>"


@pytest.fixture
def numbered(trainer, trainer_mesh):
    """A function: numbered(3, "forward", samples) calls the endpoint `forward` with the message number 3.

    If a network delivers a message twice, both copies have the same number.
    """
    trainer_mesh.setup.call_one("numbered").get(timeout=GUARD)

    def call(number: int, endpoint: str, *args):
        header = CallHeader(session="numbered", number=number)
        return getattr(trainer_mesh, endpoint).call_one(*args, header=header).get(timeout=GUARD)

    return call


def test_a_call_with_a_repeated_number_gets_the_first_answer_and_is_not_run_again(numbered):
    numbered(1, "forward_backward", random_samples(), "cross_entropy")
    first = numbered(2, "optim_step", STEP)
    assert numbered(2, "optim_step", STEP) == first
    numbered(3, "forward_backward", random_samples(), "cross_entropy")
    assert numbered(4, "optim_step", STEP).policy_version == first.policy_version + 1


def test_a_call_that_repeats_the_number_of_a_failed_call_gets_the_error_of_that_call(numbered):
    for _ in range(2):
        with pytest.raises(Exception, match="no gradients are accumulated"):
            numbered(1, "optim_step", STEP)
    numbered(2, "forward", random_samples())


@pytest.mark.parametrize("number", [1, 4])
def test_a_call_whose_number_does_not_follow_the_last_number_is_refused_and_not_run(numbered, number):
    numbered(1, "forward", random_samples())
    numbered(2, "forward_backward", random_samples(), "cross_entropy")
    with pytest.raises(Exception, match=f"call number {number} does not follow 2; it was not run"):
        numbered(number, "discard_gradients")
    assert numbered(3, "optim_step", STEP).grad_norm > 0


def test_after_a_second_client_has_called_the_trainer_the_calls_of_the_first_client_fail(trainer, trainer_mesh):
    trainer.forward(random_samples()).result()
    second = TrainerClient(trainer_mesh)
    assert len(second.forward(random_samples()).result().logprobs) == 8
    with pytest.raises(RuntimeError, match=r"session \w+ was replaced by \w+: two clients drive this trainer"):
        trainer.forward(random_samples()).result()
    assert len(second.forward(random_samples()).result().logprobs) == 8


def test_a_call_that_outlasts_call_timeout_breaks_the_client_until_gradients_are_discarded(trainer_mesh, tmp_path):
    gate = Gate(folder=tmp_path)
    trainer = TrainerClient(trainer_mesh, call_timeout=1.0)  # short, because two calls below must time out
    with pytest.raises(TimeoutError, match="trainer: forward_backward did not answer within 1 s; its ranks may still"):
        trainer.forward_backward(random_samples(), loss=gate).result()
    with pytest.raises(RuntimeError, match="trainer is broken: forward_backward did not .*call discard_gradients"):
        trainer.forward(random_samples()).result()
    with pytest.raises(TimeoutError, match="discard_gradients did not answer"):
        trainer.discard_gradients().result()
    trainer.ranks.call_timeout = GUARD
    gate.open()
    trainer.discard_gradients().result()
    assert len(trainer.forward(random_samples()).result().logprobs) == 8
    assert trainer.info().result()[0].state == "idle"


def test_a_second_close_does_nothing_and_a_call_after_close_is_refused(trainer_mesh):
    trainer = TrainerClient(trainer_mesh)
    trainer.ready().result()
    trainer.close().result()
    trainer.close().result()
    with pytest.raises(RuntimeError, match="trainer: forward is not possible after close"):
        trainer.forward(random_samples())
    with TrainerClient(trainer_mesh) as other:  # `close` has not stopped the mesh, because the client did not spawn it
        assert other.info().result()[0].state == "idle"


def test_after_close_of_a_client_that_is_still_starting_no_process_is_left():
    before = support.descendants(os.getpid())
    trainer = TrainerClient.spawn(support.trainer_config())
    trainer.close().result()
    support.wait_until(lambda: support.descendants(os.getpid()) <= before)


@pytest.mark.slow
def test_two_trainers_in_one_program_do_not_disturb_each_other(trainer, transport):
    with TrainerClient.spawn(support.trainer_config(seed=1), name="other") as other:
        version = support.step(trainer)
        weights = support.published_weights(transport, trainer.push_model_state_dict().result())
        ours = trainer.forward(random_samples()).result().logprobs
        assert [support.step(other) for _ in range(2)] == [1, 2]
        assert other.is_alive(GUARD).result() and trainer.is_alive(GUARD).result()
        assert other.push_model_state_dict().result() == 2
        theirs = support.published_weights(other.ranks.transport, 2)
        again = support.published_weights(transport, version)
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        assert not any(torch.equal(theirs[name], weights[name]) for name in weights)
        assert trainer.info().result()[0].policy_version == version
        assert all(map(torch.equal, trainer.forward(random_samples()).result().logprobs, ours))
        with pytest.raises(TimeoutError, match="version 1 was not published"):
            asyncio.run(wait_for_manifest(other.ranks.transport, 1, 0.0))


@pytest.mark.slow
def test_the_caller_gets_an_error_if_a_rank_fails_and_if_a_rank_dies_during_a_call(tmp_path, capfd):
    """The loss fails on rank 1 of 2, and rank 0 does not wait for rank 1.

    Then SIGABRT ends rank 1 during a call, and the log of rank 1 has the traceback.
    """
    before = support.descendants(os.getpid())
    trainer = TrainerClient.spawn(support.trainer_config(shard=2), name="pair")
    info = trainer.info().result()[1]
    with pytest.raises(ArithmeticError) as raised:
        trainer.forward_backward(random_samples(), loss=FailingLoss(rank=1)).result(GUARD)
    assert raised.value.__notes__[-1].startswith("raised in pair, rank 1, forward_backward: ")
    trainer.discard_gradients().result()

    gate = Gate(folder=tmp_path)
    pending = trainer.forward_backward(random_samples(), loss=gate)
    gate.wait_begun()
    assert trainer.is_alive(GUARD).result()  # is_alive works even while a call runs
    os.kill(info.pid, signal.SIGABRT)
    for call, phase in ((pending, "forward_backward"), (trainer.forward(random_samples()), "forward")):
        with pytest.raises(RuntimeError, match=rf"pair: the process of rank 1 \(pid {info.pid}\) ended during {phase}"):
            call.result(GUARD)
    assert not trainer.is_alive().result()
    trainer.close().result(GUARD)
    support.wait_until(lambda: support.descendants(os.getpid()) <= before)
    last_words = Path(info.logs).read_text()
    assert "Fatal Python error: Aborted" in last_words and "in forward_backward" in last_words
    assert "Fatal" not in capfd.readouterr().err  # the traceback is only in the log


@pytest.mark.slow
def test_a_client_without_a_given_transport_publishes_every_version_in_the_dtype_of_its_generator():
    config = support.generator_config(dtype="bfloat16")
    with TrainerClient.spawn(support.trainer_config()) as trainer, trainer.spawn_generator(config) as generator:
        generator.ready().result()
        for version in (0, 1):
            weights = support.published_weights(trainer.ranks.transport, version)
            assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
            assert generator.pull_model_state_dict(version).result() == version
            support.step(trainer)
            trainer.push_model_state_dict().result()
