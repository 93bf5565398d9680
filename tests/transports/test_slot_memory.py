"""Tests of the memory that a push and a pull of weights need.

A slot is the memory of one rank for its shards of one version of the weights. The slots of a rank hold two versions.
The writer, which pushes, needs memory only for its slots. A reader, which pulls, joins the shards of one tensor at a
time, so it needs memory for one whole tensor. A reader on the same host maps the slots. The mapped slots count as its
memory, but it makes no copy of them. A reader that receives a version from a server also needs memory for one copy of
this version.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from waiting import GUARD

from rl_actors.transports.base import Manifest
from rl_actors.transports.placement import Place
from rl_actors.transports.server import SlotServer
from rl_actors.transports.slots import Shard, Slot, SlotLayout

NUM_TENSORS, ROWS, COLUMNS = 6, 2048, 1024  # a tensor has 4 MiB in bfloat16
TENSOR = ROWS * COLUMNS * 2
VERSION = NUM_TENSORS * TENSOR
SLACK = TENSOR // 2  # allowance for Python and the allocator

PEAK = """
import os, pickle, sys
from pathlib import Path
import torch
torch.set_num_threads(1)


def peak() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()
"""

WRITER = (
    PEAK
    + """
from rl_actors.transports.snapshot import DoubleBuffer
from test_slot_memory import COLUMNS, NUM_TENSORS, ROWS
weights = {f"w{i}": torch.ones(ROWS, COLUMNS) for i in range(NUM_TENSORS)}
snapshot = DoubleBuffer(rank=0, timeout=60.0)
snapshot.write("s/0", {"w": torch.ones(8)}, torch.bfloat16)  # the warm-up: loads what a write needs
before = reset_peak()
for version in range(1, 5):
    snapshot.write(f"s/{version}", weights, torch.bfloat16)
print(peak() - before)
"""
)

READER = (
    PEAK
    + """
from rl_actors.transports.reader import SlotSource


def tensors(manifest):
    with SlotSource(manifest=manifest, path=sys.argv[2], timeout=60.0, secret=b"memory").open() as version:
        for _, tensor in version.tensors():
            assert float(tensor[0, 0]) == float(tensor[-1, -1]) == manifest.version
            del tensor


warm_up, *manifests = pickle.loads(Path(sys.argv[1]).read_bytes())
tensors(warm_up)  # loads what a read needs
before = reset_peak()
for manifest in manifests * 2:
    tensors(manifest)
print(peak() - before)
"""
)


def growth(program: str, *arguments: object) -> int:
    """Run a program, and return the number that it prints: the growth of its peak resident memory after its warm-up, in
    bytes.
    """
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    # With this setting malloc returns the memory of a freed tensor to the system at once. So the peak counts only
    # tensors that existed at the same time.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    environment = {**os.environ, **allocator, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=GUARD)
    return int(done.stdout)


def halves(version: int, num_tensors: int) -> tuple[Manifest, list[Slot]]:
    """Make a version on two ranks. One rank has the upper rows of every tensor, and the other rank the lower rows.

    Returns the manifest and the slots of both ranks.
    """
    slots = []
    for rank in range(2):
        half = (ROWS // 2, COLUMNS)
        shards = {}
        for index in range(num_tensors):
            shards[f"w{index}"] = Shard((ROWS, COLUMNS), (rank * half[0], 0), half, torch.bfloat16, index * TENSOR // 2)
        layout = SlotLayout(shards, num_tensors * TENSOR // 2)
        slot = Slot(layout, rank=rank, number=version, place=Place(), device=torch.device("cpu"))
        with slot.writing(f"s/{version}", GUARD):
            for view in slot.views.values():
                view.fill_(version)
        slots.append(slot)
    shapes = {name: ((ROWS, COLUMNS), torch.bfloat16) for name in shards}
    parts = tuple(slot.address(None) for slot in slots)
    return Manifest(stream="s", version=version, tensors=shapes, parts=parts), slots


@pytest.mark.slow
def test_pushes_take_the_memory_of_two_versions():
    taken = growth(WRITER)
    assert 2 * VERSION - SLACK <= taken <= 2 * VERSION + SLACK


def test_pulls_through_shared_memory_take_the_memory_of_the_slots_and_of_one_tensor(tmp_path):
    warm_up, two_versions = halves(0, 1), [halves(version, NUM_TENSORS) for version in (1, 2)]
    manifests = [manifest for manifest, _ in (warm_up, *two_versions)]
    (tmp_path / "manifests").write_bytes(pickle.dumps(manifests))
    taken = growth(READER, tmp_path / "manifests", "shared_memory")
    assert 2 * VERSION - SLACK <= taken <= 2 * VERSION + TENSOR + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("path", ["tcp", "point_to_point"])
def test_pulls_from_a_server_take_the_memory_of_one_version_and_one_tensor(tmp_path, path):
    versions = [halves(0, 1), *(halves(version, NUM_TENSORS) for version in (1, 2))]
    by_token = {slot.token: slot for _, slots in versions for slot in slots}
    server = SlotServer(by_token.get, host="127.0.0.1", secret=b"memory", timeout=GUARD)
    manifests = []
    for manifest, _ in versions:
        manifests.append(
            replace(manifest, parts=tuple(replace(part, address=server.address) for part in manifest.parts))
        )
    (tmp_path / "manifests").write_bytes(pickle.dumps(manifests))
    taken = growth(READER, tmp_path / "manifests", path)
    assert VERSION - SLACK <= taken <= VERSION + TENSOR + SLACK
