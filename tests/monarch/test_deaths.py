"""A client notices that one of its processes is dead or stopped, and so does a transport.

The tests kill or stop real processes, which have no model.
"""

import os
import re
import signal

import pytest
from waiting import GUARD, wait_until

from rl_actors.clients.base import ActorDiedError, ActorSilentError, Client
from rl_actors.clients.call import in_background
from rl_actors.clients.ranks import Ranks
from rl_actors.transports.memory import MemoryTransport


class Pair(Ranks):
    """Two processes without an actor."""

    def __init__(self, name: str) -> None:
        super().__init__(None, name=name, call_timeout=GUARD, setup_timeout=GUARD, logs=None)
        self._start()

    async def _set_up(self) -> None:
        await self._spawn(2)


class Bare(Client):
    def __init__(self, name: str) -> None:
        super().__init__(name, is_owner=True, logs=None)
        self.ranks = Pair(name)
        self._actors = self.ranks
        self._start(self.ranks.started)


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [
        (signal.SIGKILL, ActorDiedError, r"pair: the process of rank 1 \(pid {pid}\) ended between two calls"),
        (signal.SIGSTOP, ActorSilentError, r"pair: rank 1 \(pid {pid}\) did not answer for 2 s, between two calls"),
    ],
)
def test_a_client_notices_a_dead_or_stopped_process_between_calls_and_can_kill_all_its_processes(sent, kind, text):
    client = Bare("pair")
    death = client.death(silent_after=2.0)
    client.ready().result(GUARD)
    processes = client.ranks.watched.processes
    assert not death.done()
    os.kill(processes[1].pid, sent)
    error = death.result(GUARD)
    assert type(error) is kind and error.actor == "pair"
    assert re.match(text.format(pid=processes[1].pid), str(error))
    pids = [process.pid for process in processes]
    client.kill().result(GUARD)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (signal.SIGKILL, r"store: the process of rank 0 \(pid {pid}\) ended"),
        (signal.SIGSTOP, r"store: rank 0 \(pid {pid}\) did not answer for 2 s"),
    ],
)
def test_a_memory_transport_reports_that_the_process_of_its_store_has_ended_or_is_silent(sent, text):
    transport = MemoryTransport()
    in_background(transport.open(), "open").result(GUARD)
    death = in_background(transport.death(silent_after=2.0), "death")
    [process] = transport._processes.processes
    os.kill(process.pid, sent)
    assert re.fullmatch(text.format(pid=process.pid), death.result(GUARD))
    in_background(transport.close(), "close").result(GUARD)
    wait_until(lambda: not is_running(process.pid))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_closed_client_reports_no_death():
    client = Bare("closed")
    death = client.death(silent_after=60.0)
    client.ready().result(GUARD)
    client.close().result(GUARD)
    assert death.result(GUARD) is None
