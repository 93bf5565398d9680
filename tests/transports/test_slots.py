"""Tests of slots, the shared memory in which a rank of a trainer publishes its weights.

Some tests kill the process of a writer or of a reader. Afterwards a read gives a whole version or raises an error, and no memory is left behind.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import GUARD, wait_until

from rl_actors.transports import cuda_ipc
from rl_actors.transports import snapshot as snapshot_module
from rl_actors.transports.base import Manifest, Piece, assemble
from rl_actors.transports.placement import Place
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.slots import Mappings, Shard, Slot, SlotLayout, VersionGoneError
from rl_actors.transports.snapshot import DoubleBuffer

NUM_TENSORS = 5


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Tensors in which every value is the number of the version."""
    return {f"w{index}": torch.full((3 + index, 7), float(version)) for index in range(NUM_TENSORS)}


def manifest_of(*snapshots: DoubleBuffer, key: str, tensors: dict[str, torch.Tensor]) -> Manifest:
    stream, version = key.split("/")
    parts = tuple(snapshot.newest.address(None) for snapshot in snapshots)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return Manifest(stream=stream, version=int(version), tensors=shapes, parts=parts)


def source_of(manifest: Manifest, timeout: float = GUARD) -> SlotSource:
    return SlotSource(manifest=manifest, path="auto", timeout=timeout)


def read(manifest: Manifest) -> dict[str, torch.Tensor]:
    with source_of(manifest).open() as version:
        return {name: tensor.clone() for name, tensor in version.tensors()}


def write(snapshot: DoubleBuffer, version: int) -> Manifest:
    tensors = tensors_of(version)
    snapshot.write(f"s/{version}", tensors, None)
    return manifest_of(snapshot, key=f"s/{version}", tensors=tensors)


def versions_in(tensors: dict[str, torch.Tensor]) -> set[float]:
    return set(torch.cat([tensor.flatten() for tensor in tensors.values()]).tolist())


# A program that writes versions 1 and 2. When the file `go` exists, it begins to write version 3, and kills itself after `dies_at` tensors.
WRITER = """
import os, pickle, signal, sys, time
from pathlib import Path
from test_slots import NUM_TENSORS, manifest_of, tensors_of, write
from rl_actors.transports.snapshot import DoubleBuffer

folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])


class Dying(dict):
    num_walks = 0

    def items(self):
        self.num_walks += 1
        for number, item in enumerate([*super().items(), None]):
            # DoubleBuffer.write calls items() twice: first to find the layout of the slot, then to copy the tensors into the slot.
            if self.num_walks == 2 and number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if item:
                yield item


snapshot = DoubleBuffer(rank=0, timeout=60.0)
manifests = [write(snapshot, version) for version in (1, 2)]
(folder / "partial").write_bytes(pickle.dumps(manifests))
(folder / "partial").rename(folder / "manifests")
while not (folder / "go").exists():
    time.sleep(0.01)
snapshot.write("s/3", Dying(tensors_of(3)), None)
"""

# A program that kills itself when it has read `dies_at` tensors. With the argument "wait" it stops there instead, with the slot open.
READER = """
import os, pickle, signal, sys
from pathlib import Path
from test_slots import source_of

folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])
manifest = pickle.loads((folder / "manifest").read_bytes())
with source_of(manifest).open() as version:
    for number, (name, tensor) in enumerate(version.tensors()):
        if number == dies_at:
            (folder / "reading").touch()
            if "wait" in sys.argv:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def start(program: str, *arguments: object) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=environment)


@pytest.mark.parametrize(
    "dies_at",
    [pytest.param(at, marks=[] if at == 2 else pytest.mark.slow) for at in range(NUM_TENSORS + 1)],
)
def test_a_writer_that_is_killed_between_any_two_tensors_leaves_the_newest_version_whole(tmp_path, dies_at):
    writer = start(WRITER, tmp_path, dies_at)
    wait_until((tmp_path / "manifests").exists)
    older, newest = pickle.loads((tmp_path / "manifests").read_bytes())
    assert versions_in(read(older)) == {1.0}
    with source_of(newest).open() as version:
        (tmp_path / "go").touch()
        assert writer.wait(GUARD) == -signal.SIGKILL
        assert versions_in(dict(version.tensors())) == {2.0}
    # The writer has ended. This process keeps its mapping of the slot, so it can still read the slot.
    assert versions_in(read(newest)) == {2.0}
    with pytest.raises(
        VersionGoneError, match=r"s/1 is gone: slot 0 of trainer rank 0 \(pid \d+\) holds no complete version"
    ):
        read(older)
    with pytest.raises(VersionGoneError, match="the trainer's process has ended"):  # a new mapping is refused
        Mappings().of(newest.parts)


@pytest.mark.parametrize(
    "dies_at", [pytest.param(at, marks=[] if at == 2 else pytest.mark.slow) for at in range(NUM_TENSORS)]
)
def test_a_reader_that_is_killed_between_any_two_tensors_leaves_no_slot_locked(tmp_path, dies_at):
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    (tmp_path / "manifest").write_bytes(pickle.dumps(write(snapshot, 1)))
    assert start(READER, tmp_path, dies_at).wait(GUARD) == -signal.SIGKILL
    write(snapshot, 2)
    assert versions_in(read(write(snapshot, 3))) == {3.0}  # version 3 is in the slot that the reader had locked


def test_a_slot_is_not_rewritten_while_it_is_read_and_the_error_names_the_reader(tmp_path):
    snapshot = DoubleBuffer(rank=3, timeout=0.2)
    (tmp_path / "manifest").write_bytes(pickle.dumps(write(snapshot, 1)))
    reader = start(READER, tmp_path, 1, "wait")
    wait_until((tmp_path / "reading").exists)
    newest = write(snapshot, 2)
    message = rf"push of s/3: .*rank 3: lock of slot 0 was not free within 0\.2 s; it is held by pid {reader.pid}$"
    with pytest.raises(TimeoutError, match=message):
        write(snapshot, 3)
    assert versions_in(read(newest)) == {2.0}
    reader.kill()
    reader.wait(GUARD)
    assert versions_in(read(write(snapshot, 3))) == {3.0}


def test_a_reader_that_waits_too_long_for_a_writer_raises_timeout_error():
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    manifest = write(snapshot, 1)
    with (
        snapshot.newest.writing("s/5", GUARD),
        pytest.raises(TimeoutError, match="pull of s/1: .*: lock of slot 0 of trainer rank 0"),
        source_of(manifest, timeout=0.1).open(),
    ):
        pass


def test_a_write_that_takes_too_long_fails_and_the_newest_version_stays_readable():
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    write(snapshot, 1)
    newest = write(snapshot, 2)
    snapshot.timeout = 0.0
    with pytest.raises(TimeoutError, match="push of s/3: .*rank 0: write took longer than 0 s"):
        write(snapshot, 3)
    assert versions_in(read(newest)) == {2.0}


def test_the_third_version_overwrites_the_first_and_the_second_stays():
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    manifests = [write(snapshot, version) for version in (1, 2, 3)]
    assert [versions_in(read(manifest)) for manifest in manifests[1:]] == [{2.0}, {3.0}]
    with pytest.raises(VersionGoneError, match="s/1 is gone: slot 0 .* holds s/3"):
        read(manifests[0])


def test_new_slots_are_made_only_when_the_tensors_change():
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    manifests = [write(snapshot, version) for version in range(6)]
    former = {manifest.parts[0].token for manifest in manifests}
    assert len(former) == 2
    other = {"w0": torch.zeros(4)}
    for version in (6, 7, 8):
        snapshot.write(f"s/{version}", other, None)
        assert versions_in(read(manifest_of(snapshot, key=f"s/{version}", tensors=other))) == {0.0}
        # The former layout's newest version keeps its slot until the second write of the new layout replaces the slot.
        assert len(former & {slot.token for slot in snapshot.slots}) == (version == 6)
    assert len(snapshot.slots) == 2


def test_tensors_are_copied_by_one_thread_and_the_number_of_threads_is_restored(monkeypatch):
    before = torch.get_num_threads()
    during = []

    def local_part(tensor: torch.Tensor) -> torch.Tensor:
        during.append(torch.get_num_threads())
        return tensor

    monkeypatch.setattr(snapshot_module, "local_part", local_part)
    torch.set_num_threads(3)
    try:
        write(DoubleBuffer(rank=0, timeout=GUARD), 1)
        assert during[-NUM_TENSORS:] == [1] * NUM_TENSORS
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_slot_of_the_former_layout_is_freed_only_when_its_readers_have_ended():
    snapshot = DoubleBuffer(rank=0, timeout=0.1)
    manifest = write(snapshot, 1)
    other = {"w0": torch.zeros(4)}
    with source_of(manifest).open() as version:
        snapshot.write("s/2", other, None)
        with pytest.raises(TimeoutError, match="push of s/3: .*rank 0: lock of slot 0 was not free within 0.1 s"):
            snapshot.write("s/3", other, None)
        assert versions_in(dict(version.tensors())) == {1.0}
    snapshot.write("s/3", other, None)
    with pytest.raises(VersionGoneError, match="s/1 is gone: slot 0 .* holds no complete version"):
        read(manifest)


def test_a_reader_on_a_gpu_maps_the_slot_writable_if_cuda_cannot_pin_read_only_memory(monkeypatch):
    """The test needs no GPU: its function `pin` answers like a driver that cannot pin read-only memory."""
    asked, unpinned = [], []

    def pin(data: torch.Tensor, *, read_only: bool) -> bool:
        asked.append(read_only)
        return not read_only

    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    manifest = write(snapshot, 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda_ipc, "pin", pin)
    monkeypatch.setattr(cuda_ipc, "unpin", unpinned.append)
    [slot] = Mappings().of(manifest.parts)
    assert asked == [True, False]
    assert versions_in(slot.views) == {1.0}
    address = slot.data.data_ptr()
    del slot
    assert unpinned == [address]


def test_the_newest_published_version_survives_an_unpublished_write_of_other_tensors():
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    published = [write(snapshot, version) for version in (1, 2)]
    for _ in range(3):
        snapshot.write("s/3", {"w0": torch.zeros(3, 7)}, None)
        snapshot.forget("s/3")
        assert versions_in(read(published[1])) == {2.0}
    assert versions_in(read(write(snapshot, 3))) == {3.0}
    assert versions_in(read(published[1])) == {2.0}


def test_the_next_write_takes_the_slot_of_a_version_that_was_not_published():
    snapshot = DoubleBuffer(rank=0, timeout=GUARD)
    published = [write(snapshot, version) for version in (1, 2)]
    write(snapshot, 3)
    snapshot.forget("s/3")  # as after a failure of another rank
    assert versions_in(read(write(snapshot, 4))) == {4.0}
    assert versions_in(read(published[1])) == {2.0}


def test_parts_of_several_ranks_form_the_whole_tensor_in_the_published_dtype():
    values = torch.arange(30.0).view(5, 6)
    pieces = []
    for start, size in (((3, 2), (2, 4)), ((0, 0), (3, 2)), ((3, 0), (2, 2)), ((0, 2), (3, 4))):
        shard = Shard((5, 6), start, size, torch.bfloat16, 0)
        slot = Slot(
            SlotLayout({"w": shard}, shard.num_bytes), rank=0, number=0, place=Place(), device=torch.device("cpu")
        )
        rows, columns = slice(start[0], start[0] + size[0]), slice(start[1], start[1] + size[1])
        slot.views["w"].copy_(values[rows, columns])
        pieces.append(Piece(shard.start, slot.views["w"]))
    assert torch.equal(assemble("w", (5, 6), torch.bfloat16, pieces), values.bfloat16())
    with pytest.raises(RuntimeError, match="w: the shards hold 24 of 30 values"):
        assemble("w", (5, 6), torch.bfloat16, pieces[:1] + pieces[2:])


def test_no_memory_is_left_behind_when_a_writer_is_killed(tmp_path):
    writer = start(WRITER, tmp_path, 0)
    wait_until((tmp_path / "manifests").exists)
    slots = files_of(writer.pid) - files_of(os.getpid())
    assert len([name for name, _ in slots if name.startswith("/memfd:rl_actors_weights_0_")]) == 2
    writer.kill()
    writer.wait(GUARD)
    inodes = {inode for _, inode in slots}
    for process in Path("/proc").glob("[0-9]*"):
        assert not inodes & {inode for name, inode in files_of(int(process.name)) if "rl_actors_weights" in name}


def files_of(pid: int) -> set[tuple[str, int]]:
    """(name, inode) of every memfd that a process has open. A memfd is a file in memory."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # the file was closed meanwhile, or the process belongs to another user
            if os.readlink(fd).startswith("/memfd:"):
                found.add((os.readlink(fd), fd.stat().st_ino))
    return found
