"""Slots over TCP: the same bytes as through shared memory, for readers that know the secret, and never half a version."""

import asyncio
import os
import pickle
import signal
import socket
import threading
from dataclasses import replace

import pytest
import torch
from test_slots import manifest_of, read, start, tensors_of, versions_in
from waiting import GUARD, wait_until

from rl_actors import WeightsConfig
from rl_actors.transports import cuda_ipc, tcp
from rl_actors.transports.base import Manifest, publish
from rl_actors.transports.indexed import IndexedTransport
from rl_actors.transports.placement import Place
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.slots import VersionGoneError
from rl_actors.transports.snapshot import Snapshot

SECRET = b"s" * 32


class Served:
    """The ranks of a trainer in this process, each with a server."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.snapshots = [Snapshot(rank=rank, timeout=GUARD) for rank in range(num_ranks)]
        self.servers = []
        for snapshot in self.snapshots:
            self.servers.append(tcp.SlotServer(snapshot.find, host="127.0.0.1", secret=SECRET, timeout=GUARD))

    def write(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> Manifest:
        """Every rank holds all tensors."""
        tensors = tensors or tensors_of(version)
        for snapshot in self.snapshots:
            snapshot.write(f"s/{version}", tensors, None)
        manifest = manifest_of(*self.snapshots, key=f"s/{version}", tensors=tensors)
        pairs = zip(manifest.parts, self.servers, strict=True)
        return replace(manifest, parts=tuple(replace(part, address=server.address) for part, server in pairs))


def over_tcp(manifest: Manifest, *, path: str = "tcp", secret: bytes = SECRET, timeout: float = GUARD):
    with SlotSource(manifest=manifest, path=path, timeout=timeout, secret=secret).open() as version:
        return {name: tensor.clone() for name, tensor in version.tensors()}, version


def test_the_bytes_over_tcp_are_those_in_shared_memory(monkeypatch):
    monkeypatch.setattr(tcp, "MIN_STREAM_BYTES", 1 << 16)  # so that a slot comes in several streams
    served = Served(num_ranks=2)
    draw = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(300 + i, 257, generator=draw) for i in range(3)}
    assert len(tcp._ranges(sum(tensor.nbytes for tensor in tensors.values()))) == tcp.NUM_STREAMS
    for version in range(4):
        manifest = served.write(version, {name: tensor + version for name, tensor in tensors.items()})
        received, opened = over_tcp(manifest)
        assert opened.path == "tcp" and opened.reason == "the config says so"
        mapped = read(manifest)
        assert received.keys() == mapped.keys() == tensors.keys()
        assert all(torch.equal(received[name], tensors[name] + version) for name in tensors)
        assert all(torch.equal(received[name], mapped[name]) for name in tensors)
    assert len(tcp.BUFFERS.free) == 2  # the memory of each rank is used again


def test_a_reader_on_another_host_takes_tcp_by_itself_and_says_why():
    served = Served()
    manifest = served.write(1)
    elsewhere = replace(manifest, parts=(replace(manifest.parts[0], machine="another"),))
    received, opened = over_tcp(elsewhere, path="auto")
    assert versions_in(received) == {1.0} and opened.path == "tcp"
    assert opened.reason.startswith(
        f"slot 0 of trainer rank 0 (pid {os.getpid()}) is on another host or in another container"
    )
    assert over_tcp(manifest, path="auto")[1].path == "shared_memory"


@pytest.mark.parametrize("path", ["auto", "tcp", "shared_memory"])
def test_a_path_that_the_two_do_not_share_is_an_error_that_says_what_to_set(path):
    served = Served()
    manifest = served.write(1)
    elsewhere = replace(manifest, parts=(replace(manifest.parts[0], machine="another", address=None),))
    message = "another host" if path == "shared_memory" else "serves no weights over TCP: set weights.address"
    with pytest.raises(ValueError, match=message):
        over_tcp(elsewhere, path=path)


def test_a_reader_without_the_secret_gets_nothing():
    served = Served()
    manifest = served.write(1)
    with pytest.raises(ConnectionError, match="read of slot 0 of trainer rank 0 .* it may have another secret"):
        over_tcp(manifest, secret=b"x" * 32)
    assert versions_in(over_tcp(manifest)[0]) == {1.0}


def test_a_version_whose_slot_holds_another_is_gone_over_tcp_too():
    served = Served()
    manifests = [served.write(version) for version in (1, 2, 3)]
    with pytest.raises(VersionGoneError, match="s/1 is gone: slot 0 of trainer rank 0 .* holds s/3"):
        over_tcp(manifests[0])
    served.write(4, {"other": torch.zeros(3)})
    served.write(5, {"other": torch.zeros(3)})
    with pytest.raises(VersionGoneError, match="s/3 is gone: the trainer has dropped its slot"):
        over_tcp(manifests[2])


def test_a_server_that_does_not_answer_is_a_timeout_that_names_rank_and_address():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        served = Served()
        manifest = served.write(1)
        address = silent.getsockname()[:2]
        waiting = replace(manifest, parts=(replace(manifest.parts[0], address=address),))
        message = (
            rf"pull of s/1: .*read of slot 0 of trainer rank 0 .* over tcp from .*{address[1]}.* was not done in time"
        )
        with pytest.raises(TimeoutError, match=message):
            over_tcp(waiting, timeout=0.2)


DYING_SERVER = """
import os, pickle, signal, sys, time
from pathlib import Path
import torch
from test_tcp import Served
from rl_actors.transports import tcp

folder, share = Path(sys.argv[1]), float(sys.argv[2])
whole = tcp._send_file


def send_part_and_die(connection, fd, offset, num_bytes):
    if share:
        whole(connection, fd, offset, int(num_bytes * share))
    os.kill(os.getpid(), signal.SIGKILL)


tcp._send_file = send_part_and_die
served = Served()
manifest = served.write(2, {"w": torch.full((1 << 20,), 2.0)})
(folder / "partial").write_bytes(pickle.dumps(manifest))
(folder / "partial").rename(folder / "manifest")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    "share", [0.5, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.99, marks=pytest.mark.slow)]
)
def test_a_trainer_that_is_killed_in_the_middle_of_a_stream_gives_no_version(tmp_path, share):
    server = start(DYING_SERVER, tmp_path, share)
    wait_until((tmp_path / "manifest").exists)
    manifest = pickle.loads((tmp_path / "manifest").read_bytes())
    with pytest.raises(ConnectionError, match="read of slot 0 of trainer rank 0"):
        over_tcp(manifest)
    assert server.wait(GUARD) == -signal.SIGKILL


class IndexHere(IndexedTransport):
    """An index in this process."""

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
    "path, address, host", [("auto", "", None), ("tcp", "", "127.0.0.1"), ("auto", "127.0.0.1", "127.0.0.1")]
)
def test_ranks_serve_tcp_only_where_the_config_asks_for_it(path, address, host):
    transport = IndexHere(WeightsConfig(path=path, address=address))
    slot = asyncio.run(transport.put_tensors("s/1", tensors_of(1), 0))
    assert slot.address == host or slot.address[0] == host
    copy = pickle.loads(pickle.dumps(transport))
    assert copy.secret == transport.secret and len(copy.secret) == 32 and not copy._servers


class GPUMemory:
    """Memory of a GPU that this process does not see. There is no GPU here, so the bytes are the host's."""

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
        assert "it does not see the GPU GPU-7" in version.reason
        assert 'weights.path="shared_memory" would be faster' in version.reason
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in version.tensors())
    with pytest.raises(ValueError, match='weights.path="cuda_ipc": .* it does not see the GPU GPU-7'):
        over_tcp(manifest, path="cuda_ipc")


def test_a_server_ends_with_its_transport():
    served = Served()
    address = served.servers[0].address
    with socket.create_connection(address, timeout=GUARD):
        pass
    del served
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=GUARD)


def weight_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("weights_server", "weights_stream")]


def test_the_threads_of_a_server_end_with_it():
    before = weight_threads()
    served = Served(num_ranks=2)
    over_tcp(served.write(1))
    started = [thread for thread in weight_threads() if thread not in before]
    assert len(started) >= 2
    with socket.create_connection(served.servers[0].address, timeout=GUARD) as idle:  # a reader that asks for nothing
        wait_until(lambda: len([thread for thread in weight_threads() if thread not in before]) >= 3)
        started = [thread for thread in weight_threads() if thread not in before]
        del served
        for thread in started:
            thread.join(10)
        assert not any(thread.is_alive() for thread in started)
        idle.close()
