"""Checkpoints of a run are written while training continues. state.json makes a checkpoint complete, and old checkpoints are removed."""

import asyncio
import errno
import json
import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.tiny import tiny
from controllers.observe.run_folder import RunFolder
from controllers.run import checkpoints
from controllers.run.checkpoints import Checkpoints, removable
from controllers.run.run import Run, Supervision


@dataclass
class FakeTrainer:
    """A trainer with only save_checkpoint, which returns at once. Its write ends when a test sets `durable`, and raises `error` if there is one."""

    durable: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def save_checkpoint(self, path: str):
        async def wait() -> None:
            await self.durable.wait()
            if self.error:
                raise self.error
            Path(path).mkdir(parents=True)

        return SimpleNamespace(wait=wait)


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints.complete(folder)]


def test_a_checkpoint_has_the_state_of_its_step_and_is_complete_only_when_the_trainers_part_is_on_disk(tmp_path):
    async def run():
        trainer, saver = FakeTrainer(), Checkpoints(tmp_path, keep=2)
        state = {"step": 3, "cursor": 12, "config": {"path": Path("x")}}
        await saver.save({"trainer": trainer}, state)
        state["cursor"] = 16  # training continues
        await asyncio.sleep(0.05)
        assert names(tmp_path) == []
        trainer.durable.set()
        await saver.finish()
        assert names(tmp_path) == ["step-3"]

    asyncio.run(run())
    state = checkpoints.read(tmp_path / "step-3")
    assert (state["step"], state["cursor"], state["config"]) == (3, 12, {"path": "x"})


def test_a_second_save_waits_for_the_first(tmp_path):
    async def run():
        trainer, saver = FakeTrainer(), Checkpoints(tmp_path, keep=2)
        await saver.save({"trainer": trainer}, {"step": 1})
        second = asyncio.create_task(saver.save({"trainer": trainer}, {"step": 2}))
        await asyncio.sleep(0.05)
        assert not second.done()
        trainer.durable.set()
        await second
        assert "step-1" in names(tmp_path)
        await saver.finish()
        assert names(tmp_path) == ["step-1", "step-2"]

    asyncio.run(run())


@pytest.mark.parametrize("next_call", ["save", "finish"])
def test_a_failed_write_leaves_no_checkpoint_and_the_next_call_raises_its_error(tmp_path, next_call):
    async def run():
        trainer, saver = FakeTrainer(error=RuntimeError("saving x failed on rank 0")), Checkpoints(tmp_path, keep=2)
        trainer.durable.set()
        await saver.save({"trainer": trainer}, {"step": 1})
        with pytest.raises(RuntimeError, match="saving x failed on rank 0"):
            await (saver.save({"trainer": trainer}, {"step": 2}) if next_call == "save" else saver.finish())

    asyncio.run(run())
    assert names(tmp_path) == []


def test_a_caller_that_stops_waiting_does_not_cancel_the_checkpoint(tmp_path):
    async def run():
        trainer, saver = FakeTrainer(), Checkpoints(tmp_path, keep=2)
        await saver.save({"trainer": trainer}, {"step": 1})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(saver.finish(), 0.05)
        trainer.durable.set()
        await saver.finish()

    asyncio.run(run())
    assert names(tmp_path) == ["step-1"]


def test_abandon_waits_until_no_trainer_writes_its_part_of_the_checkpoint(tmp_path):
    """`abandon` waits for the trainer even if the task that called `save` was cancelled.

    If `abandon` did not wait, the run could remove a file that the trainer is still writing.
    """

    async def run():
        trainer, saver = FakeTrainer(), Checkpoints(tmp_path, keep=2)
        saving = asyncio.create_task(saver.save({"trainer": trainer}, {"step": 1}))
        await asyncio.sleep(0)  # now `save` has created the task that lets the trainer copy its state
        saving.cancel()
        abandoning = asyncio.create_task(saver.abandon())
        await asyncio.sleep(0.05)
        assert saving.cancelled() and not abandoning.done()
        trainer.durable.set()
        await abandoning

    asyncio.run(run())
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (1, 0, [7]),
        (2, 0, [6, 7]),
        (9, 0, [1, 2, 3, 4, 5, 6, 7]),
        (1, 3, [3, 6, 7]),
        (2, 5, [5, 6, 7]),
    ],
)
def test_the_newest_checkpoints_and_those_kept_for_good_stay(tmp_path, keep, keep_every, left):
    async def run():
        trainer, saver = FakeTrainer(), Checkpoints(tmp_path, keep=keep, keep_every=keep_every)
        trainer.durable.set()
        for step in range(1, 8):
            await saver.save({"trainer": trainer}, {"step": step})
        await saver.finish()

    asyncio.run(run())
    assert names(tmp_path) == [f"step-{step}" for step in left]
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)


def test_the_checkpoints_kept_for_good_do_not_depend_on_when_the_others_were_removed():
    steps, there = range(7, 300, 25), []
    for step in steps:
        there.append(step)
        for gone in removable(there, keep=2, keep_every=100):
            there.remove(gone)
    assert there == [107, 207, 257, 282]
    assert [step for step in steps if step not in removable(list(steps), keep=2, keep_every=100)] == there


@pytest.mark.parametrize("name", ["checkpoint_every", "keep_checkpoint_every"])
def test_a_negative_distance_between_checkpoints_is_refused(name):
    config = tiny()
    setattr(config, name, -1)
    with pytest.raises(ValueError, match=f"^{name}=-1; it must be at least 0"):
        config.validate()


@pytest.mark.parametrize(("every", "written"), [(3, [3, 6, 7]), (100, [7]), (0, [])])
def test_checkpoints_are_written_every_n_steps_and_after_the_last_step_but_never_if_n_is_0(tmp_path, every, written):
    config = tiny()
    config.checkpoint_every = every
    config.validate()
    trainer = FakeTrainer()
    trainer.durable.set()
    kept = Checkpoints(tmp_path, keep=100, keep_every=0)
    unused = dict.fromkeys(("environment", "tokenizer", "generator", "log"))
    supervision = Supervision(folder=RunFolder(tmp_path), checkpoints=kept)
    run = Run(config=config, trainer=trainer, supervision=supervision, **unused)

    async def seven_steps() -> None:
        for step in range(1, 8):
            await run.end_step({"step": step}, phase_step=step, is_last=step == 7)
        await kept.finish()

    asyncio.run(seven_steps())
    assert names(tmp_path) == [f"step-{step}" for step in written]


def test_incomplete_checkpoints_are_removed_and_complete_ones_stay(tmp_path):
    for name in ("step-1", "step-2", "step-3"):
        (tmp_path / name / "trainer.partial").mkdir(parents=True)
    (tmp_path / "step-2/state.json").write_text(json.dumps({"step": 2}))
    (tmp_path / "step-3/state.json.tmp").write_text('{"st')
    checkpoints.remove_incomplete(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_random_states_survive_a_round_trip_through_json():
    def draw():
        return [random.gauss(0, 1), random.random(), *np.random.randn(3).tolist(), torch.rand(()).item()]

    checkpoints.seed_random(3)
    # Python and NumPy draw Gaussian numbers in pairs. After an odd number of draws, the state also holds the second
    # number of the last pair. `draw` draws one Gaussian number from Python and three from NumPy. So both states hold
    # such a number, and the JSON must keep both numbers.
    first = draw()
    text = json.dumps(checkpoints.random_states())
    after = draw()
    checkpoints.restore_random_states(json.loads(text))
    assert draw() == after != first
    checkpoints.seed_random(3)
    assert draw() == first


def write_checkpoint(folder: Path, step: int) -> Path:
    """Write a complete checkpoint whose trainer part is one file, `weights`. Returns the checkpoint's folder."""

    class WritingTrainer:
        async def save_checkpoint(self, path: str):
            async def wait() -> None:
                Path(path).mkdir(parents=True)
                (Path(path) / "weights").write_bytes(bytes(range(200)) * 100)

            return SimpleNamespace(wait=wait)

    async def save() -> None:
        saver = Checkpoints(folder, keep=9)
        await saver.save({"trainer": WritingTrainer()}, {"step": step})
        await saver.finish()

    asyncio.run(save())
    return folder / f"step-{step}"


def flip_a_bit(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "trainer/weights").read_bytes())
    content[5000] ^= 1
    (checkpoint / "trainer/weights").write_bytes(content)


def cut_off(checkpoint: Path) -> None:
    content = (checkpoint / "trainer/weights").read_bytes()
    (checkpoint / "trainer/weights").write_bytes(content[:-1])


def remove(checkpoint: Path) -> None:
    (checkpoint / "trainer/weights").unlink()


def change_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text('{"step": 4}\n')


def break_checksums(checkpoint: Path) -> None:
    (checkpoint / "checksums.json").write_text("[1, 2")


DAMAGES = [
    (flip_a_bit, "weights has another checksum than when it was written"),
    (cut_off, "weights has 19999 bytes instead of 20000"),
    (remove, "weights is missing"),
    (change_state, "state.json has .* bytes instead of"),
    (break_checksums, "checksums.json or a file that it lists cannot be read"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_newest_whole_one_is_taken(tmp_path, damage, reason):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    assert checkpoints.set_aside_damaged(tmp_path) == []
    damage(tmp_path / "step-3")
    with pytest.raises(ValueError, match=f"step-3 is damaged: .*{reason}"):
        checkpoints.find(tmp_path / "step-3")
    [line] = checkpoints.set_aside_damaged(tmp_path)
    assert re.search(rf"step-3 is damaged and was renamed to damaged-step-3: .*{reason}", line)
    assert names(tmp_path) == ["step-1", "step-2"] and (tmp_path / "damaged-step-3").is_dir()
    assert checkpoints.newest(tmp_path).name == "step-2"


def test_if_every_checkpoint_is_damaged_an_error_names_them_and_none_is_renamed(tmp_path):
    for step in (1, 2):
        flip_a_bit(write_checkpoint(tmp_path, step))
    with pytest.raises(ValueError, match=f"every complete checkpoint in {tmp_path} is damaged: .*step-2.*; .*step-1"):
        checkpoints.set_aside_damaged(tmp_path)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_checkpoint_without_checksums_is_taken_as_it_is(tmp_path):
    (write_checkpoint(tmp_path, 1) / "checksums.json").unlink()
    assert checkpoints.set_aside_damaged(tmp_path) == []
    assert checkpoints.find(tmp_path / "step-1") == tmp_path / "step-1"


def test_write_durably_syncs_the_file_and_then_its_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    checkpoints.write_durably(tmp_path / "file", "text")
    assert synced == [f"{tmp_path}/file.tmp", str(tmp_path)] and (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("name", ["state.json", "checksums.json"])
def test_the_error_of_a_full_disk_names_the_file_and_the_last_checkpoint_stays(tmp_path, monkeypatch, name):
    write_checkpoint(tmp_path, 1)

    def fsync(fd: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/step-2/{name}.tmp'"):
        write_checkpoint(tmp_path, 2)
    assert names(tmp_path) == ["step-1"] and checkpoints.find(tmp_path / "step-1").is_dir()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 1, "baseline": torch.tensor(0.5)}, r"state\['baseline'\] has tensor"),
        ({"step": 1, "per_task": {1: 0.5}}, r"state\['per_task'\] has 1; it must be JSON"),
        ({"step": 1, "seen": {3}}, r"state\['seen'\] has \{3\}"),
        ({"step": 1, "random": 3}, 'not "config" or "random"'),
        ({"cursor": 1}, 'state has cursor; it needs "step"'),
    ],
)
def test_a_state_that_a_checkpoint_would_change_is_refused(state, message):
    checkpoints.require_state({"step": 1, "cursor": 2, "pending": [3], "ema": {"a": 0.5}, "name": None})
    with pytest.raises(ValueError, match=message):
        checkpoints.require_state(state)
