"""Checkpoints: training that continues from a checkpoint, writing in the background, and directories that are refused."""

import pickle
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from references import ppo_samples
from waiting import GUARD

from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from rl_actors.engine.checkpoint import _WholeDirectoryWriter, is_checkpoint
from rl_actors.engine.export import export_checkpoint
from rl_actors.losses import PPO
from rl_actors.types import OptimParams

PARAMS = OptimParams(learning_rate=1e-2, weight_decay=0.1, grad_divisor=10.0)
LENGTHS = [7, 31, 1, 13]


def train(engine, seeds) -> list[tuple[float, float]]:
    numbers = []
    for seed in seeds:
        loss = engine.forward_backward(ppo_samples(LENGTHS, seed=seed), PPO()).metrics["loss:sum"]
        numbers.append((loss, engine.optim_step(PARAMS).grad_norm))
    return numbers


def state(engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.built.model.parameters()]


def assert_bit_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_after_load_is_bit_equal_to_training_after_save(make_engine, tmp_path, steps_before):
    path = str(tmp_path / "checkpoint")
    engine, uninterrupted = make_engine(), make_engine()
    train(engine, range(steps_before))
    train(uninterrupted, range(steps_before))
    engine.save_checkpoint(path)
    first = train(engine, (5, 6))
    assert engine.load_checkpoint(path) == engine.policy_version == steps_before
    assert train(engine, (5, 6)) == first
    other = make_engine()
    train(other, [9])
    assert other.load_checkpoint(path) == steps_before
    assert train(other, (5, 6)) == first
    # Saving does not change the run.
    assert train(uninterrupted, (5, 6)) == first
    assert_bit_equal(state(uninterrupted), state(other))


@pytest.mark.parametrize("place", ["hf_path", "tokenizer_path"])
def test_checkpoints_and_exports_hold_the_tokenizer(make_engine, tied_qwen3, tmp_path, place):
    there = tmp_path / "there"
    shutil.copytree(tied_qwen3, there)
    build_character_tokenizer(there, "01+")
    engine = make_engine(**{place: str(there)})
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    engine.export_hf(str(tmp_path / "exported"))
    for path in (tmp_path / "checkpoint", tmp_path / "exported"):
        assert load_tokenizer(path).encode("1+0") == [3, 4, 2]
    assert make_engine().load_checkpoint(str(tmp_path / "checkpoint")) == 0


def test_a_tokenizer_path_without_a_tokenizer_is_refused(make_engine):
    with pytest.raises(ValueError, match="tokenizer_path='nowhere' holds no tokenizer_config.json"):
        make_engine(tokenizer_path="nowhere")


def test_a_second_save_replaces_the_checkpoint_and_leaves_no_other_directory(make_engine, tmp_path):
    engine = make_engine()
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    train(engine, [1])
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert make_engine().load_checkpoint(str(tmp_path / "checkpoint")) == 1


@pytest.mark.parametrize("kind", ["nothing", "empty", "file", "unfinished"])
def test_loading_a_path_that_is_no_checkpoint_is_refused_and_changes_nothing(make_engine, tmp_path, kind):
    path = tmp_path / "checkpoint"
    if kind == "file":
        path.write_text("weights")
    elif kind != "nothing":
        path.mkdir()
    if kind == "unfinished":
        (path / "__0_0.distcp").write_bytes(b"0" * 100)
    engine = make_engine()
    train(engine, [1])
    before = state(engine)
    with pytest.raises(ValueError) as caught:
        engine.load_checkpoint(str(path))
    assert str(caught.value) == f"{path} is not a checkpoint: it holds no .metadata"
    assert engine.info().state == "idle" and engine.policy_version == 1
    assert_bit_equal(state(engine), before)


@pytest.mark.parametrize("damage", ["cut off", "empty", "another object", "noise"])
def test_loading_a_checkpoint_whose_metadata_is_damaged_names_the_file_and_changes_nothing(
    make_engine, tmp_path, damage
):
    path = tmp_path / "checkpoint"
    engine = make_engine()
    engine.save_checkpoint(str(path)).result()
    whole = (path / ".metadata").read_bytes()
    contents = {"cut off": whole[:-50], "empty": b"", "another object": pickle.dumps({"a": 1}), "noise": b"\x00" * 99}
    (path / ".metadata").write_bytes(contents[damage])
    before = state(engine)
    for call in (engine.load_checkpoint, lambda path: export_checkpoint(path, engine.config, str(tmp_path / "out"))):
        with pytest.raises(ValueError, match=f"{path}/.metadata is cut off or corrupt: "):
            call(str(path))
    assert engine.info().state == "idle" and not (tmp_path / "out").exists()
    assert_bit_equal(state(engine), before)


def test_loading_a_checkpoint_of_another_model_names_the_difference_and_changes_nothing(make_engine, tmp_path):
    path = str(tmp_path / "checkpoint")
    engine = make_engine()
    other = replace(engine.config.model, intermediate_size=32, tie_word_embeddings=False)
    make_engine("", model=other).save_checkpoint(path).result()
    before = state(engine)
    with pytest.raises(
        ValueError,
        match=r"holds another model: .*w1.weight is \(32, 64\) in the checkpoint but \(96, 64\) in the model",
    ):
        engine.load_checkpoint(path)
    deeper = make_engine("", model=replace(other, num_hidden_layers=5))
    with pytest.raises(ValueError, match=r"holds another model: model.layers.\d.* is not in the checkpoint"):
        deeper.load_checkpoint(path)
    assert engine.info().state == "idle"
    assert_bit_equal(state(engine), before)


def test_a_trainer_that_failed_to_load_a_damaged_checkpoint_must_load_a_whole_one(make_engine, tmp_path):
    path, whole = tmp_path / "checkpoint", tmp_path / "whole"
    engine = make_engine()
    engine.save_checkpoint(str(path))
    engine.save_checkpoint(str(whole)).result()
    for file in path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(RuntimeError, match="loading .* failed on 1 ranks; on rank 0: FileNotFoundError"):
        engine.load_checkpoint(str(path))
    assert engine.info().state == "inconsistent"
    with pytest.raises(RuntimeError, match="discard_gradients is not possible while the trainer is inconsistent"):
        engine.discard_gradients()
    engine.load_checkpoint(str(whole))
    assert engine.info().state == "idle"


@pytest.fixture
def held(monkeypatch) -> threading.Event:
    """An event for which every save waits, after its tensors are on disk and before its checkpoint is complete."""
    event, finish = threading.Event(), _WholeDirectoryWriter.finish

    def wait_and_finish(*args, **kwargs):
        assert event.wait(GUARD)
        finish(*args, **kwargs)

    monkeypatch.setattr(_WholeDirectoryWriter, "finish", wait_and_finish)
    yield event
    event.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(make_engine, tmp_path, held):
    path = tmp_path / "checkpoint"
    engine, uninterrupted = make_engine(), make_engine()
    train(engine, range(3))
    train(uninterrupted, range(3))
    saved = engine.save_checkpoint(str(path))
    later = train(engine, (5, 6, 7))
    assert not saved.done() and not path.exists()
    held.set()
    saved.result(GUARD)
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint"]
    # The saving has not changed the run, and the run has not changed the checkpoint.
    assert train(uninterrupted, (5, 6, 7)) == later
    loaded = make_engine()
    assert loaded.load_checkpoint(str(path)) == 3
    assert train(loaded, (5, 6, 7)) == later
    assert_bit_equal(state(loaded), state(engine))


def test_a_second_save_and_a_load_wait_for_the_save_that_is_under_way(make_engine, tmp_path, held):
    engine = make_engine()
    train(engine, [1])
    first = engine.save_checkpoint(str(tmp_path / "first"))
    threading.Timer(0.3, held.set).start()
    second = engine.save_checkpoint(str(tmp_path / "second"))
    assert first.done()
    assert engine.load_checkpoint(str(tmp_path / "second")) == 1
    assert second.done()


@pytest.mark.parametrize("step", ["write_data", "finish"])
def test_a_save_that_fails_half_way_raises_and_does_not_change_the_former_checkpoint(
    make_engine, tmp_path, monkeypatch, step
):
    path = tmp_path / "checkpoint"
    engine = make_engine()
    train(engine, range(3))
    engine.save_checkpoint(str(path)).result()
    expected = train(engine, (5, 6))

    def fail(self, *_, **__):
        Path(self.path, "__0_0.distcp").write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(_WholeDirectoryWriter, step, fail)
        failed = engine.save_checkpoint(str(path))
        other = engine.save_checkpoint(str(tmp_path / "other"))
        for answer, name in ((failed, "checkpoint"), (other, "other")):
            message = rf"saving {tmp_path}/{name} failed on 1 ranks; on rank 0: OSError\('no space left on device'\)"
            with pytest.raises(RuntimeError, match=message):
                answer.result()
    assert engine.info().state == "idle" and not is_checkpoint(tmp_path / "other")
    assert engine.load_checkpoint(str(path)) == 3
    assert train(engine, (5, 6)) == expected
    # The next save finds the remains of the failed save, and succeeds.
    engine.save_checkpoint(str(tmp_path / "other")).result()
    assert engine.load_checkpoint(str(tmp_path / "other")) == 5
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.parametrize("saved_with_optimizer", [True, False])
def test_loading_without_the_optimizer_resets_the_optimizer(make_engine, tmp_path, saved_with_optimizer):
    path = str(tmp_path / "checkpoint")
    engine = make_engine()
    train(engine, range(3))
    engine.save_checkpoint(path, optimizer=saved_with_optimizer).result()
    weights = state(engine)
    new, used = make_engine(), make_engine()
    train(used, [8, 9])
    for other in (new, used):
        assert other.load_checkpoint(path, optimizer=False) == other.policy_version == 3
        assert_bit_equal(state(other), weights)
    assert train(new, (5, 6)) == train(used, (5, 6)) != train(engine, (5, 6))
    assert_bit_equal(state(new), state(used))


def test_loading_an_optimizer_that_was_not_saved_is_refused_and_changes_nothing(make_engine, tmp_path):
    path = str(tmp_path / "checkpoint")
    engine, untouched = make_engine(), make_engine()
    engine.save_checkpoint(path, optimizer=False).result()
    for other in (engine, untouched):
        train(other, [1])
    with pytest.raises(ValueError) as caught:
        engine.load_checkpoint(path)
    assert str(caught.value) == f"{path} holds no optimizer state; optimizer=False loads only its weights"
    assert engine.info().state == "idle" and engine.policy_version == 1
    assert train(engine, (5, 6)) == train(untouched, (5, 6))


def test_a_checkpoint_without_optimizer_is_a_third_as_large_as_with_adam(make_engine, tmp_path):
    engine = make_engine()
    train(engine, [1])
    sizes = []
    for optimizer in (True, False):
        path = tmp_path / f"checkpoint-{optimizer}"
        engine.save_checkpoint(str(path), optimizer=optimizer).result()
        sizes.append(sum(file.stat().st_size for file in path.glob("*.distcp")))
    assert sizes[1] < 0.4 * sizes[0]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_saving_never_deletes_files_that_are_no_checkpoint(make_engine, tmp_path, kind):
    path = tmp_path / "notes"
    precious = path if kind == "file" else path / "thesis.txt"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    engine = make_engine()
    with pytest.raises(ValueError, match="notes exists and is not a checkpoint: it holds no .metadata"):
        engine.save_checkpoint(str(path))
    assert precious.read_text() == "precious" and engine.info().state == "idle"


def test_pushed_names_and_values_are_those_that_were_loaded(make_engine, untied_qwen3):
    from safetensors.torch import load_file

    expected = load_file(f"{untied_qwen3}/model.safetensors")
    actual = {name: x.full_tensor() for name, x in make_engine(untied_qwen3).hf_state_dict().items()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_tied_lm_head_is_not_pushed_separately(make_engine, tied_qwen3):
    assert "lm_head.weight" not in make_engine(tied_qwen3).hf_state_dict()
