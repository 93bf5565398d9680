"""Tests of a run's hosts: which host runs which processes, and the errors for wrong settings and unusable hosts."""

import asyncio
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs.tiny import tiny
from controllers.program import describe_plan
from controllers.run.hosts import HostsConfig
from rl_actors import TrainerClient, TrainerConfig
from rl_actors.clients import ranks
from rl_actors.processes import hosts, spawn, worker

THREE = "tcp://10.0.0.1:4444, tcp://10.0.0.2:4444,tcp://[fd00::3]:4444"


@pytest.mark.parametrize(
    ("addresses", "trainer", "of_trainer", "of_generators"),
    [
        (THREE, 0, [0, 1], [2]),  # by default the generators are on the last host
        (THREE, 1, [0], [1, 2]),
        # The trainer has all hosts, so the generators share the last host with it.
        (THREE, 3, [0, 1, 2], [2]),
        ("process://1", 0, [0], [0]),
        ("process://4", 2, [0, 1], [2, 3]),
    ],
)
def test_the_first_hosts_run_the_trainer_and_the_last_hosts_run_the_generators(
    addresses, trainer, of_trainer, of_generators
):
    config = HostsConfig(addresses=addresses, trainer=trainer)
    assert (list(config.of_trainer()), list(config.of_generators())) == (of_trainer, of_generators)
    config.validate(6)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"addresses": "10.0.0.1:4444"}, "hosts.addresses: the address is '10.0.0.1:4444'"),
        ({"addresses": "tcp://a:1,tcp://a:1"}, "the host tcp://a:1 is named 2 times"),
        ({"addresses": "tcp://a:1,tls://b:1"}, "some of .* use TLS and some do not"),
        ({"addresses": "process://0"}, "it must be process://N"),
        ({"addresses": "process://two"}, "it must be process://N"),
        ({"addresses": THREE, "trainer": 4}, "hosts.trainer=4, but hosts.addresses names 3 hosts"),
        ({"addresses": THREE, "trainer": 3}, "4 ranks cannot be spread evenly over 3 hosts; set hosts.trainer"),
        ({"trainer": 1}, "need hosts.addresses"),
        ({"addresses": "tls://a:1"}, "tls:// addresses need certificates"),
        ({"addresses": "tcp://a:1", "certificates": "/none"}, "/none/authority.pem does not exist"),
    ],
)
def test_impossible_hosts_are_refused_and_the_error_names_the_field(values, error):
    with pytest.raises(ValueError, match=error):
        HostsConfig(**values).validate(4)


def test_the_plan_says_which_host_has_which_rank():
    config = tiny()
    config.trainer.parallelism.data_parallel_replicate_degree = 2
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config = replace(config, hosts=HostsConfig(addresses=THREE))
    config.generator.replicas = 2
    config.validate()
    plan = describe_plan.describe(config)
    places = dict(re.findall(r"^  ((?:trainer|generator)-\d) +(\S+?)[:,] ", plan, re.MULTILINE))
    first, second, third = "tcp://10.0.0.1:4444", "tcp://10.0.0.2:4444", "tcp://[fd00::3]:4444"
    assert places == {
        "trainer-0": first,
        "trainer-1": first,
        "trainer-2": second,
        "trainer-3": second,
        "generator-0": third,
        "generator-1": third,
    }
    assert re.search(r"trainer-2 +tcp://10.0.0.2:4444: data_parallel_replicate 1, data_parallel_shard 0", plan)


def test_a_worker_that_does_not_listen_is_named_with_the_command_that_starts_it():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=f"no worker listens at {address} .*make worker ADDRESS={address}"):
        hosts.connect([address])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tcp://192.0.2.1:4444"], "reachable from other machines; use tls:// with --tls FOLDER, or --insecure"),
        (["tls://127.0.0.1:4444"], "--tls FOLDER must be given for an address tls://"),
        (["4444"], "the address is '4444'"),
    ],
)
def test_a_worker_with_unsafe_or_wrong_arguments_does_not_start(monkeypatch, arguments, error):
    monkeypatch.setattr(sys, "argv", ["worker", *arguments])
    with pytest.raises(SystemExit, match=error):
        worker.main()


class Reads:
    """Replaces the endpoint `read` of the Probes on two hosts. A Probe is an actor that reads files on its host.

    The first host sees every file. The second host sees only the files in the folder `other`.
    """

    def __init__(self, other: Path) -> None:
        self.other = other

    def stream(self, path: str):
        yield self._read(0, "gpu-1", Path(path))
        yield self._read(1, "gpu-2", self.other / Path(path).name)

    async def _read(self, rank: int, host: str, path: Path) -> tuple[int, str, str]:
        return rank, host, path.read_text() if path.exists() else ""


def test_a_host_that_does_not_see_the_run_folder_is_named_at_the_start(tmp_path):
    folder, other = tmp_path / "logs", tmp_path / "other"
    with pytest.raises(
        ValueError, match=f"trainer: rank 1 on gpu-2 does not see the files of {folder}; put the run on"
    ):
        asyncio.run(spawn.require_shared("trainer", Reads(other), folder))
    asyncio.run(spawn.require_shared("trainer", Reads(folder), folder))
    assert list(folder.iterdir()) == []


def test_a_host_that_does_not_see_the_run_folder_does_not_count_as_a_dead_process(monkeypatch):
    async def refuse(*given, **named):
        raise spawn.NotSharedError("trainer: rank 1 on gpu-2 does not see the files of logs")

    monkeypatch.setattr(ranks, "spawn_processes", refuse)
    with (
        TrainerClient.spawn(TrainerConfig()) as trainer,
        pytest.raises(spawn.NotSharedError, match="gpu-2 does not see"),
    ):
        trainer.info().result()
