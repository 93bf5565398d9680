"""What a checkpoint brings back, and what is refused in its place."""

from dataclasses import replace

import pytest
import torch
from references import ppo_samples

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
    return [p.detach().clone() for p in engine.parts.model.parameters()]


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
    # Saving is reading: it does not disturb the run.
    assert train(uninterrupted, (5, 6)) == first
    assert_bit_equal(state(uninterrupted), state(other))


def test_a_saved_checkpoint_replaces_the_one_before_and_leaves_nothing_else(make_engine, tmp_path):
    engine = make_engine()
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    train(engine, [1])
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert make_engine().load_checkpoint(str(tmp_path / "checkpoint")) == 1


@pytest.mark.parametrize("kind", ["nothing", "empty", "file", "unfinished"])
def test_a_path_that_is_no_checkpoint_is_refused_and_nothing_changed(make_engine, tmp_path, kind):
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


def test_a_checkpoint_of_another_model_is_refused_with_what_differs_and_nothing_changed(make_engine, tmp_path):
    path = str(tmp_path / "checkpoint")
    engine = make_engine()
    other = replace(engine.config.model, intermediate_size=32, tie_word_embeddings=False)
    make_engine("", model=other).save_checkpoint(path)
    before = state(engine)
    with pytest.raises(ValueError, match=r"holds another model: .*w1.weight is \(32, 64\) and \(96, 64\) here"):
        engine.load_checkpoint(path)
    assert engine.info().state == "idle"
    assert_bit_equal(state(engine), before)


def test_a_damaged_checkpoint_leaves_weights_that_only_a_whole_one_mends(make_engine, tmp_path):
    path, whole = tmp_path / "checkpoint", tmp_path / "whole"
    engine = make_engine()
    engine.save_checkpoint(str(path))
    engine.save_checkpoint(str(whole))
    for file in path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(RuntimeError, match="loading .* failed on 1 ranks; on rank 0: FileNotFoundError"):
        engine.load_checkpoint(str(path))
    assert engine.info().state == "mixed"
    with pytest.raises(RuntimeError, match="discard_gradients is not possible while the trainer is mixed"):
        engine.discard_gradients()
    engine.load_checkpoint(str(whole))
    assert engine.info().state == "idle"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_saving_never_deletes_what_is_no_checkpoint(make_engine, tmp_path, kind):
    path = tmp_path / "notes"
    precious = path if kind == "file" else path / "thesis.txt"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    engine = make_engine()
    with pytest.raises(ValueError, match="notes exists and is not a checkpoint: it holds no .metadata"):
        engine.save_checkpoint(str(path))
    assert precious.read_text() == "precious" and engine.info().state == "idle"


def test_hugging_face_names_and_values_are_those_that_were_loaded(make_engine, untied_qwen3):
    from safetensors.torch import load_file

    expected = load_file(f"{untied_qwen3}/model.safetensors")
    actual = {name: x.full_tensor() for name, x in make_engine(untied_qwen3).hf_state_dict().items()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_tied_heads_appear_once(make_engine, tied_qwen3):
    assert "lm_head.weight" not in make_engine(tied_qwen3).hf_state_dict()
