"""A trainer's rank and a reader of its weights exchange tensors in a communicator, which is a process group of these
two processes.

They keep the communicator until a call fails or hangs, or one of the two processes ends. The next pull of the weights
then makes another communicator.
"""

import os
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from test_served_slots import Left, Served, receive
from test_slots import versions_in
from waiting import GUARD

from rl_actors.transports import communicator
from rl_actors.transports.communicator import BLOCKING_WAIT, GROUPS, READER, HostPieces, Pair
from rl_actors.transports.point_to_point import PAIRS, Sender, backend_for
from rl_actors.transports.slots import VersionGoneError

PATH = "point_to_point"


@pytest.fixture
def made(monkeypatch):
    """A list with a number for each end of a communicator that has been made: 0 for the trainer's end, 1 for the reader's end.

    In these tests both ends are in this process, so every communicator adds 0 and 1 to the list.
    """
    PAIRS.end()
    members: list[int] = []
    make = GROUPS["gloo"]

    def count(store, member, host, timeout):
        members.append(member)
        return make(store, member, host, timeout)

    monkeypatch.setitem(GROUPS, "gloo", count)
    yield members
    PAIRS.end()


def test_a_communicator_is_made_once_for_each_rank_and_stays_when_a_version_is_gone(made):
    served = Served(num_ranks=2)
    manifests = [served.write(version) for version in range(4)]
    for manifest in manifests[2:]:
        assert versions_in(receive(manifest, PATH)[0]) == {float(manifest.version)}
    with pytest.raises(VersionGoneError, match="s/0 is gone"):
        receive(manifests[0], PATH)
    assert versions_in(receive(manifests[3], PATH)[0]) == {3.0}
    assert sorted(made) == [0, 0, 1, 1]


def test_a_restarted_trainer_gets_another_communicator(made):
    for version in (1, 2):
        served = Served()
        assert versions_in(receive(served.write(version), PATH)[0]) == {float(version)}
    assert sorted(made) == [0, 0, 1, 1]


def test_a_pull_times_out_if_the_trainer_hangs_and_the_next_pull_makes_another_communicator(made, monkeypatch):
    served, goes_on = Served(), threading.Event()
    manifest = served.write(1)
    assert versions_in(receive(manifest, PATH)[0]) == {1.0}

    def hang(pieces, piece, number):
        goes_on.wait(GUARD)
        return piece

    with monkeypatch.context() as patch:
        patch.setattr(HostPieces, "outgoing", hang)
        message = rf"pull of s/1: .*pid {os.getpid()}\)?: read of slot 0 of trainer rank 0 .* over {PATH} from .* was not done in time"
        with pytest.raises(TimeoutError, match=message):
            receive(manifest, PATH, timeout=0.5)
        goes_on.set()
    assert versions_in(receive(manifest, PATH)[0]) == {1.0}
    assert sorted(made) == [0, 0, 1, 1]


def test_a_reader_that_hangs_holds_a_slot_no_longer_than_the_timeout_of_the_trainer(made, monkeypatch, caplog):
    left, served, goes_on = Left(), Served(), threading.Event()
    manifest = served.write(1)
    assert versions_in(receive(manifest, PATH)[0]) == {1.0}
    send, failed = Sender.__call__, []

    def hang(pieces, piece, number):
        goes_on.wait(GUARD)
        return piece

    def send_for_half_a_second(sender, slot, request):
        sender.timeout = 0.5
        send(sender, slot, request)

    def read() -> None:
        try:
            receive(manifest, PATH)
        except ConnectionError as error:
            failed.append(str(error))

    monkeypatch.setattr(HostPieces, "incoming", hang)
    monkeypatch.setattr(Sender, "__call__", send_for_half_a_second)
    reader = threading.Thread(target=read)
    reader.start()
    reader.join(GUARD)
    [error] = failed
    assert "read of slot 0 of trainer rank 0" in error
    [logged] = caplog.messages
    assert "pull of s/1: gave up the communicator with ('127.0.0.1', " in logged and "TimeoutError" in logged
    for version in (2, 3):  # version 3 is written into the slot that the reader was reading
        served.write(version)
    goes_on.set()
    del served
    left.wait_for_none()


class SilentGroup:
    """A process group whose calls wait, without a time limit, until `abort` is called."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def send(self, tensors, destination, tag):
        return self

    recv = send

    def wait(self, timeout: timedelta) -> None:
        assert self.aborted.wait(GUARD)
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def silent_pair():
    """A reader's Pair with a SilentGroup, and the other end of the Pair's control connection."""
    PAIRS.end()
    here, there = socket.socketpair()
    pair = Pair(here, member=READER, backend="gloo", piece_bytes=2, device=torch.device("cpu"))
    pair.group = SilentGroup()
    yield pair, there
    pair.end()
    there.close()


def test_pair_run_raises_at_the_deadline_and_pair_end_aborts_a_call_that_waits_without_a_limit(silent_pair):
    left = Left()
    pair, _ = silent_pair
    group = pair.group
    with pytest.raises(TimeoutError):
        pair.run(time.monotonic() + 0.3, pair.receive, torch.zeros(3, dtype=torch.uint8))
    assert not group.aborted.is_set()
    pair.end()
    assert group.aborted.is_set()
    left.wait_for_none()


def test_a_call_that_waits_without_a_limit_fails_when_the_other_process_ends(silent_pair):
    pair, other = silent_pair

    def end_in_the_middle() -> None:
        other.sendall(b"not read")
        assert other.recv(1) == communicator.READY
        other.close()

    threading.Thread(target=end_in_the_middle).start()
    with pytest.raises(ConnectionError, match="the other process closed the connection"):
        pair.run(time.monotonic() + GUARD, pair.receive, torch.zeros(3, dtype=torch.uint8))


def test_a_failed_write_to_the_other_process_says_that_the_other_process_closed_the_connection(silent_pair):
    pair, other = silent_pair
    other.close()
    with pytest.raises(ConnectionError, match="the other process closed the connection"):
        pair.run(time.monotonic() + GUARD, pair.receive, torch.zeros(3, dtype=torch.uint8))


def test_nccl_blocks_in_wait_and_has_no_watchdog_that_would_end_the_trainer(monkeypatch):
    """The test needs no GPU: a fake ProcessGroupNCCL records its arguments and the value of BLOCKING_WAIT.

    If BLOCKING_WAIT is "1" when torch makes a group, `wait` blocks until the timeout, and the group has no watchdog. Afterwards BLOCKING_WAIT
    must have its former value again.
    """
    seen = []

    class Options:
        def __init__(self) -> None:
            self.config = type("Config", (), {})()

    class ProcessGroup:
        def __init__(self, store, rank, size, options) -> None:
            seen.append((os.environ[BLOCKING_WAIT], rank, size, options.config.blocking))

    ProcessGroup.Options = Options
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroup, raising=False)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv(BLOCKING_WAIT, before)
        GROUPS["nccl"](None, 1, "127.0.0.1", timedelta(seconds=1))
        assert os.environ.get(BLOCKING_WAIT) == before
    assert seen == [("1", 1, 2, 0)] * 2


def test_nccl_is_used_only_between_two_gpus(monkeypatch):
    here = Served().write(1).parts
    on_a_gpu = (replace(here[0], weights_on_gpu=True),)
    assert not here[0].weights_on_gpu and backend_for(on_a_gpu) == "gloo"  # this process has no GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert (backend_for(on_a_gpu), backend_for(here), backend_for(on_a_gpu + here)) == ("nccl", "gloo", "gloo")
    with pytest.raises(ValueError, match="NCCL connects GPUs, but the weights are on cpu"):
        Pair(socket.socket(), member=0, backend="nccl", piece_bytes=2, device=torch.device("cpu"))
