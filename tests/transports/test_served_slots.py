"""A reader with the secret gets whole versions of the weights from the servers of the ranks, over the paths `tcp` and `point_to_point`.

A reader is a process that loads the weights. A slot is the memory in which a rank of the trainer holds its tensors of one version. A path is
a way to get the bytes of a slot. The path `point_to_point` uses gloo in these tests. test_communicators.py tests the communicators of this path.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_slots import manifest_of, read, start, tensors_of, versions_in
from waiting import GUARD, wait_until

from rl_actors import WeightsConfig
from rl_actors.transports import communicator, control, cuda_ipc, point_to_point, tcp
from rl_actors.transports.base import Manifest, publish
from rl_actors.transports.indexed import IndexedTransport
from rl_actors.transports.placement import Place
from rl_actors.transports.point_to_point import PAIRS
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.received import BUFFERS
from rl_actors.transports.server import SlotServer
from rl_actors.transports.slots import VersionGoneError
from rl_actors.transports.snapshot import DoubleBuffer

SECRET = b"s" * 32
REASONS = {"tcp": "the config says so", "point_to_point": "the config says so, by gloo"}
both_paths = pytest.mark.parametrize("path", REASONS)


class Served:
    """The ranks of a trainer in this process, each with a server."""

    def __init__(self, num_ranks: int = 1, timeout: float = GUARD) -> None:
        """timeout: seconds that a request to a server may take."""
        self.snapshots = [DoubleBuffer(rank=rank, timeout=GUARD) for rank in range(num_ranks)]
        self.servers = []
        for snapshot in self.snapshots:
            self.servers.append(SlotServer(snapshot.find, host="127.0.0.1", secret=SECRET, timeout=timeout))

    def write(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> Manifest:
        """Write a version into a slot of every rank. Every rank holds all tensors."""
        tensors = tensors or tensors_of(version)
        for snapshot in self.snapshots:
            snapshot.write(f"s/{version}", tensors, None)
        manifest = manifest_of(*self.snapshots, key=f"s/{version}", tensors=tensors)
        pairs = zip(manifest.parts, self.servers, strict=True)
        return replace(manifest, parts=tuple(replace(part, address=server.address) for part, server in pairs))


def receive(manifest: Manifest, path: str, *, secret: bytes = SECRET, timeout: float = GUARD):
    """Read a version. Returns (copies of its tensors, the opened version)."""
    with SlotSource(manifest=manifest, path=path, timeout=timeout, secret=secret).open() as version:
        return {name: tensor.clone() for name, tensor in version.tensors()}, version


@both_paths
def test_the_bytes_from_a_server_are_those_in_shared_memory(path, monkeypatch):
    monkeypatch.setattr(tcp, "MIN_STREAM_BYTES", 1 << 16)  # so that a slot comes over several connections
    monkeypatch.setattr(communicator, "PIECE_BYTES", 100_001)  # so that every tensor is larger than a piece
    served = Served(num_ranks=2)
    draw = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(300 + i, 257, generator=draw) for i in range(3)}
    assert len(tcp._ranges(sum(tensor.nbytes for tensor in tensors.values()))) == tcp.NUM_STREAMS
    for version in range(4):
        manifest = served.write(version, {name: tensor + version for name, tensor in tensors.items()})
        received, opened = receive(manifest, path)
        assert (opened.path, opened.reason) == (path, REASONS[path])
        mapped = read(manifest)
        assert received.keys() == mapped.keys() == tensors.keys()
        assert all(torch.equal(received[name], tensors[name] + version) for name in tensors)
        assert all(torch.equal(received[name], mapped[name]) for name in tensors)
    assert len(BUFFERS.free) == 2  # one for each rank: all versions used the same buffers


def test_with_path_auto_a_reader_on_another_host_takes_tcp_and_says_why():
    served = Served()
    manifest = served.write(1)
    elsewhere = replace(manifest, parts=(replace(manifest.parts[0], host_id="another"),))
    received, opened = receive(elsewhere, "auto")
    assert versions_in(received) == {1.0} and opened.path == "tcp"
    assert opened.reason.startswith(
        f"slot 0 of trainer rank 0 (pid {os.getpid()}) is on another host or in another container"
    )
    assert receive(manifest, "auto")[1].path == "shared_memory"


@pytest.mark.parametrize("backend, path", [("nccl", "point_to_point"), ("gloo", "tcp")])
def test_a_reader_on_another_host_takes_point_to_point_only_if_both_sides_have_gpus(backend, path, monkeypatch):
    monkeypatch.setattr(point_to_point, "backend_for", lambda addresses: backend)
    served = Served(num_ranks=2)
    manifest = served.write(1)
    here, elsewhere = manifest.parts[0], replace(manifest.parts[1], host_id="another")
    source = SlotSource(manifest=replace(manifest, parts=(here, elsewhere)), path="auto", timeout=GUARD)
    _, reason = source._map()
    taken, why = source._served_path(reason)
    assert taken == path and "slot 0 of trainer rank 1" in why and "is on another host" in why
    assert why.endswith(", and both have GPUs") == (backend == "nccl")
    assert SlotSource(manifest=manifest, path="auto", timeout=GUARD)._served_path("it may not")[0] == "tcp"


@pytest.mark.parametrize("path", ["auto", "tcp", "point_to_point", "shared_memory"])
def test_a_path_that_cannot_reach_the_slot_is_an_error_that_says_what_to_set(path):
    served = Served()
    manifest = served.write(1)
    elsewhere = replace(manifest, parts=(replace(manifest.parts[0], host_id="another", address=None),))
    message = (
        "another host" if path == "shared_memory" else "no server of the trainer sends slot 0 .*: set weights.address"
    )
    with pytest.raises(ValueError, match=message):
        receive(elsewhere, path)


@both_paths
def test_a_reader_without_the_secret_gets_nothing(path):
    served = Served()
    manifest = served.write(1)
    with pytest.raises(ConnectionError, match="read of slot 0 of trainer rank 0 .* it may have another secret"):
        receive(manifest, path, secret=b"x" * 32)
    assert versions_in(receive(manifest, path)[0]) == {1.0}


@both_paths
def test_bytes_whose_receipt_the_server_does_not_accept_are_not_used(path, monkeypatch):
    """The reader sends a receipt when all bytes have arrived. The server accepts the receipt only while the server holds the slot's lock. Without
    the lock the trainer could replace the bytes while the server sends them.
    """

    def fail(connection):
        raise ConnectionError

    served = Served()
    manifest = served.write(1)
    with monkeypatch.context() as patch:
        patch.setattr(control, "await_receipt", fail)
        with pytest.raises(ConnectionError, match=f"read of slot 0 of trainer rank 0 .* over {path} from"):
            receive(manifest, path)
    assert versions_in(receive(manifest, path)[0]) == {1.0}


@both_paths
def test_a_replaced_or_dropped_version_is_gone_for_the_readers_of_a_server(path):
    served = Served()
    manifests = [served.write(version) for version in (1, 2, 3)]
    with pytest.raises(VersionGoneError, match="s/1 is gone: slot 0 of trainer rank 0 .* holds s/3"):
        receive(manifests[0], path)
    served.write(4, {"other": torch.zeros(3)})
    served.write(5, {"other": torch.zeros(3)})
    with pytest.raises(VersionGoneError, match="s/3 is gone: the trainer has dropped its slot"):
        receive(manifests[2], path)


@both_paths
def test_the_timeout_for_a_server_that_does_not_answer_names_the_rank_and_the_address(path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        served = Served()
        manifest = served.write(1)
        address = silent.getsockname()[:2]
        waiting = replace(manifest, parts=(replace(manifest.parts[0], address=address),))
        message = rf"pull of s/1: .*read of slot 0 of trainer rank 0 .* over {path} from .*{address[1]}.* was not done in time"
        with pytest.raises(TimeoutError, match=message):
            receive(waiting, path, timeout=0.2)


NUM_PIECES = 8
DYING_SERVER = """
import os, pickle, signal, sys, time
from pathlib import Path
import torch
from test_served_slots import NUM_PIECES, Served
from rl_actors.transports import communicator, control, tcp

folder, sent = Path(sys.argv[1]), int(sys.argv[2])
send_whole, whole_piece = tcp._send_file, communicator.HostPieces.outgoing


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def send_part_and_die(connection, fd, offset, num_bytes):
    if sent:
        send_whole(connection, fd, offset, num_bytes * sent // NUM_PIECES)
    if sent < NUM_PIECES:
        die()


def piece_or_death(pieces, piece, number):
    return whole_piece(pieces, piece, number) if number < sent else die()


tcp._send_file, communicator.HostPieces.outgoing, control.await_receipt = send_part_and_die, piece_or_death, die
communicator.PIECE_BYTES = (4 << 20) // NUM_PIECES
served = Served()
manifest = served.write(2, {"w": torch.full((1 << 20,), 2.0)})
(folder / "partial").write_bytes(pickle.dumps(manifest))
(folder / "partial").rename(folder / "manifest")
while True:
    time.sleep(1)
"""


def between_any_two_pieces(*quick: str):
    """Parametrize by path and by the number of pieces that are sent before the kill. Each case has the mark `slow`,
    except the middle case of each path in `quick`.
    """
    cases = []
    for path in REASONS:
        for pieces in range(NUM_PIECES + 1):
            is_quick = path in quick and pieces == NUM_PIECES // 2
            cases.append(pytest.param(path, pieces, marks=[] if is_quick else pytest.mark.slow))
    return pytest.mark.parametrize("path, pieces", cases)


@between_any_two_pieces("tcp", "point_to_point")
def test_a_reader_gets_no_version_from_a_trainer_that_is_killed_between_any_two_pieces(
    tmp_path, path, pieces, monkeypatch
):
    monkeypatch.setattr(communicator, "PIECE_BYTES", (4 << 20) // NUM_PIECES)
    server = start(DYING_SERVER, tmp_path, pieces)
    wait_until((tmp_path / "manifest").exists)
    manifest = pickle.loads((tmp_path / "manifest").read_bytes())
    with pytest.raises(ConnectionError, match="read of slot 0 of trainer rank 0"):
        receive(manifest, path)
    assert server.wait(GUARD) == -signal.SIGKILL
    served = Served()  # the trainer after its restart
    assert versions_in(receive(served.write(3), path)[0]) == {3.0}


DYING_READER = """
import os, pickle, signal, sys
from pathlib import Path
from test_served_slots import NUM_PIECES, receive
from rl_actors.transports import communicator, control, tcp

folder, path, pieces = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
num_pieces, left = 0, tcp.left


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def count(*_):
    global num_pieces
    if num_pieces == pieces:
        die()
    num_pieces += 1


def left_or_death(deadline):  # `tcp` calls `left` before it connects and before it receives each part
    count()
    return left(deadline)


communicator.HostPieces.arrived, tcp.left, control.send_receipt = count, left_or_death, die
communicator.PIECE_BYTES = (4 << 20) // NUM_PIECES
receive(pickle.loads((folder / "manifest").read_bytes()), path)
"""


@between_any_two_pieces("point_to_point")
def test_a_reader_that_is_killed_between_any_two_pieces_leaves_nothing_behind(tmp_path, path, pieces, monkeypatch):
    monkeypatch.setattr(communicator, "PIECE_BYTES", (4 << 20) // NUM_PIECES)
    served = Served()
    manifest = served.write(1, {"w": torch.full((1 << 20,), 1.0)})
    (tmp_path / "manifest").write_bytes(pickle.dumps(manifest))
    left = Left()
    assert start(DYING_READER, tmp_path, path, pieces).wait(GUARD) == -signal.SIGKILL
    for version in (2, 3):  # version 3 goes into the slot that the reader was reading
        manifest = served.write(version, {"w": torch.full((1 << 20,), float(version))})
    assert versions_in(receive(manifest, "shared_memory")[0]) == {3.0}
    left.wait_for_none()
    assert versions_in(receive(manifest, path)[0]) == {3.0}


class Left:
    """The threads and sockets that this process has gained since this object was made."""

    def __init__(self) -> None:
        PAIRS.end()  # ends the point-to-point connections that other tests have left
        self.before = self.now()

    def now(self) -> set[object]:
        found: set[object] = {thread for thread in threading.enumerate() if thread.name.startswith("weights_")}
        for fd in Path("/proc/self/fd").glob("*"):
            with contextlib.suppress(OSError):  # the descriptor that glob itself opened is closed already
                name = os.readlink(fd)
                found |= {name} if name.startswith("socket:") else set()
        return found

    def wait_for_none(self) -> None:
        PAIRS.end()
        wait_until(lambda: not self.now() - self.before, "end of the threads and connections of this test")


class IndexHere(IndexedTransport):
    """A transport whose index of the versions is in this process."""

    def __init__(self, weights: WeightsConfig) -> None:
        super().__init__(weights)
        self.objects: dict[str, object] = {}

    async def put_object(self, key, value):
        self.objects[key] = value

    async def get_object(self, key):
        return self.objects.get(key)

    async def delete_object(self, key):
        self.objects.pop(key, None)


@pytest.mark.parametrize(
    "path, address, host",
    [
        ("auto", "", None),
        ("tcp", "", "127.0.0.1"),
        ("point_to_point", "", "127.0.0.1"),
        ("auto", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_ranks_serve_their_slots_only_if_the_config_asks_for_it(path, address, host):
    transport = IndexHere(WeightsConfig(path=path, address=address))
    slot = asyncio.run(transport.put_tensors("s/1", tensors_of(1), 0))
    assert slot.address == host or slot.address[0] == host
    copy = pickle.loads(pickle.dumps(transport))
    assert copy.secret == transport.secret and len(copy.secret) == 32 and not copy._servers


class GPUMemory:
    """A fake of the memory of a GPU that this process does not see. The bytes are in the host's memory."""

    handle = b"h" * cuda_ipc.HANDLE_BYTES

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data = torch.zeros(num_bytes, dtype=torch.uint8)


def test_a_reader_that_cannot_open_the_trainers_gpu_takes_tcp_and_says_what_is_faster(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "DeviceMemory", GPUMemory)
    monkeypatch.setattr(cuda_ipc, "gpu_id", lambda device: "GPU-7")
    transport = IndexHere(WeightsConfig())
    transport._choose_place = lambda num_bytes, device: Place(on_gpu=True)
    tensors = tensors_of(1)
    manifest = asyncio.run(publish(transport, tensors, stream="s", version=1, rank=0, gather=lambda value: [value]))
    source = asyncio.run(transport.source(manifest))
    with source.open() as version:
        assert version.path == "tcp"
        assert "this process does not see the GPU GPU-7" in version.reason
        assert 'weights.path="shared_memory" would be faster than tcp' in version.reason
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in version.tensors())
    with pytest.raises(ValueError, match='weights.path="cuda_ipc": .* this process does not see the GPU GPU-7'):
        receive(manifest, "cuda_ipc")


@both_paths
def test_a_deleted_server_ends_its_threads_and_its_connections(path):
    left = Left()
    served = Served()
    address = served.servers[0].address
    receive(served.write(1), path)
    with socket.create_connection(address, timeout=GUARD) as waiting:
        waiting.recv(control.NONCE_BYTES)
        del served
        assert waiting.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=GUARD)
    left.wait_for_none()
