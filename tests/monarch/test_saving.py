"""Tests of save_checkpoint through a client.

The call returns when the state is copied. The caller later learns whether the writing failed.
"""

import pytest
import support
from waiting import GUARD

from rl_actors import OptimParams, TrainerClient
from rl_actors.clients import training
from rl_actors.clients.call import in_background

STEP = OptimParams(learning_rate=0.01)


@pytest.fixture
def hold(trainer_mesh, tmp_path):
    """A function: hold(error) stops the next save before its end, and hold.open() lets the save go on.

    If `error` is not empty, the save then fails with this text.
    """

    def hold(error: str = "") -> None:
        trainer_mesh.hold_saves.call(tmp_path, error).get()

    hold.open = (tmp_path / "open").touch
    yield hold
    hold.open()


def test_training_goes_on_while_a_checkpoint_is_written(trainer, hold, tmp_path):
    hold()
    version = support.step(trainer)
    saved = trainer.save_checkpoint(str(tmp_path / "checkpoint")).result()
    assert (saved.path, saved.policy_version) == (str(tmp_path / "checkpoint"), version)
    durable = saved.wait()
    assert [support.step(trainer, seed=seed) for seed in (1, 2)] == [version + 1, version + 2]
    assert not durable.done() and not (tmp_path / "checkpoint").exists()
    hold.open()
    durable.result(GUARD)
    assert (tmp_path / "checkpoint/.metadata").exists()
    assert trainer.load_checkpoint(saved.path).result() == version


def test_a_client_that_is_closed_at_once_has_begun_to_wait_for_the_checkpoint(trainer, tmp_path, monkeypatch):
    def close_before(coroutine, what):
        trainer._actors.is_closed = True
        return in_background(coroutine, what)

    monkeypatch.setattr(training, "in_background", close_before)
    saved = trainer.save_checkpoint(str(tmp_path / "checkpoint")).result()
    saved.wait().result()
    assert (tmp_path / "checkpoint/.metadata").exists()


def test_a_second_save_waits_for_the_first(trainer, hold, tmp_path):
    hold()
    first = trainer.save_checkpoint(str(tmp_path / "first")).result()
    second = trainer.save_checkpoint(str(tmp_path / "second"), optimizer=False)
    with pytest.raises(TimeoutError):
        second.result(0.3)
    hold.open()
    second.result().wait().result()
    assert first.wait().done()
    assert trainer.load_checkpoint(str(tmp_path / "second"), optimizer=False).result() == second.result().policy_version
    with pytest.raises(ValueError, match="second holds no optimizer state"):
        trainer.load_checkpoint(str(tmp_path / "second")).result()


@pytest.mark.parametrize("call", ["wait", "save_checkpoint", "optim_step"])
def test_a_failed_write_is_raised_once_with_path_and_rank(trainer, hold, tmp_path, call):
    hold("no space left on device")
    saved = trainer.save_checkpoint(str(tmp_path / "checkpoint")).result()
    trainer.forward_backward(support.random_samples(), loss="cross_entropy").result()
    hold.open()
    support.wait_until(trainer.ranks.writing.done)
    if call == "save_checkpoint":
        trainer.discard_gradients().result()
    report = {
        "wait": saved.wait,
        "save_checkpoint": lambda: trainer.save_checkpoint(str(tmp_path / "other")),
        "optim_step": lambda: trainer.optim_step(STEP),
    }[call]
    with pytest.raises(RuntimeError, match=r"saving .*/checkpoint failed on 1 ranks; on rank 0: OSError\('no space"):
        report().result()
    assert not (tmp_path / "other").exists()
    # The error is raised only once. The trainer has lost only the checkpoint.
    if call == "save_checkpoint":
        trainer.forward_backward(support.random_samples(), loss="cross_entropy").result()
    assert trainer.optim_step(STEP).result().policy_version == saved.policy_version + 1
    trainer.save_checkpoint(str(tmp_path / "other")).result().wait().result()


@pytest.mark.slow
def test_the_error_names_the_one_of_two_ranks_that_cannot_write_and_both_ranks_go_on(ranks, tmp_path):
    mesh = ranks(2).spawn("saving", support.TestTrainer, support.trainer_config(shard=2), None)
    trainer = TrainerClient(mesh)
    version = support.step(trainer)
    mesh.fail_next_write.call(1, "no space left on device").get()
    failed = trainer.save_checkpoint(str(tmp_path / "checkpoint")).result()
    with pytest.raises(RuntimeError, match=r"checkpoint failed on 1 ranks; on rank 1: OSError\('no space"):
        failed.wait().result()
    assert not (tmp_path / "checkpoint").exists()
    saved = trainer.save_checkpoint(str(tmp_path / "checkpoint")).result()
    # This step may run during the save. Its collectives do not mix with the collectives of the save.
    assert support.step(trainer) == version + 1
    saved.wait().result()
    assert trainer.load_checkpoint(saved.path).result() == version
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    trainer.close().result()
