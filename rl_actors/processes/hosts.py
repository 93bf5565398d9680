"""Connects to Monarch's workers on other machines, started by `make worker` or by a job (jobs.py)."""

import contextlib
import ipaddress
import shlex
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import monarch
from monarch.actor import attach_to_workers, context, enable_transport

from rl_actors.processes import jobs, tls
from rl_actors.processes.address import Address, address_towards, resolve
from rl_actors.processes.jobs import Job, JobConfig
from rl_actors.processes.spawn import LOOPBACK, prepare_this_process

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.job import JobTrait

CONNECT_TIMEOUT = 10.0
"""Seconds in which a worker must accept a connection."""
SHUTDOWN_TIMEOUT = 5.0
"""Seconds to wait for the end of a job's workers before the job is killed."""
PAUSE = 0.2
"""Seconds between attempts to connect to a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The connected hosts, and the address at which they reach this program."""

    names: tuple[str, ...]
    mesh: "HostMesh"
    own_address: str
    workers: tuple[Address, ...] = ()  # empty if only Monarch knows them
    job: "JobTrait | None" = None  # None: a user started the workers

    def __len__(self) -> int:
        return len(self.names)

    def part(self, start: int, stop: int) -> "Hosts":
        """The hosts start to stop - 1, without `workers` and `job`, so `close` does nothing."""
        part = self.mesh.slice(hosts=slice(start, stop))
        return Hosts(names=self.names[start:stop], mesh=part, own_address=self.own_address)

    def lost(self) -> list[str]:
        """The hosts whose workers are gone; all hosts if only Monarch knows which one is gone."""
        if self.workers:
            return [name for name, worker in zip(self.names, self.workers, strict=True) if refusal(worker)]
        if self.job is not None and not self.job.can_run(self.job):
            return list(self.names)
        return []

    def close(self) -> None:
        """End the workers of a job. Workers that a user has started wait for the next program."""
        if self.job is not None:
            # SSHJob.kill ends only the local ssh processes, which a remote worker might outlive
            with contextlib.suppress(Exception):
                self.mesh.shutdown().get(timeout=SHUTDOWN_TIMEOUT)
            self.job.kill()


def parse(addresses: Sequence[str]) -> list[Address]:
    """Raises ValueError for a wrong or repeated address, or a mixture of TCP and TLS."""
    parsed = [Address.parse(address) for address in addresses]
    for address in parsed:
        if parsed.count(address) > 1:
            raise ValueError(f"the host {address} is named {parsed.count(address)} times")
    if len({address.tls for address in parsed}) > 1:
        raise ValueError(f"some of {', '.join(addresses)} use TLS and some do not; all must use it, or none")
    return parsed


def connect(
    addresses: Sequence[str], *, certificates: str = "", job: JobConfig | None = None, logs: Path | None = None
) -> Hosts:
    """Connect to the workers, before other code uses Monarch.

    addresses: tcp://HOST:PORT or tls://HOST:PORT of each worker, or a job: process://N (N workers
    here), ssh://HOST for each host, slurm://N or kubernetes://N (N hosts). certificates: folder for
    tls://. logs: folder for a Slurm job. Raises ValueError for wrong addresses or options,
    RuntimeError if Monarch is in use or a scheduler does not start the job, ConnectionError if the
    workers and this program do not reach each other, a port is taken, or a host lacks this Python.
    """
    started_by = jobs.parse(addresses)
    if started_by is not None:
        config = job or JobConfig()
        config.validate(started_by)
        return _of_job(started_by, config, logs)
    workers = [address.numeric() for address in parse(addresses)]
    if workers[0].tls != bool(certificates):
        raise ValueError("workers at tls:// need a folder of certificates, and workers at tcp:// take none")
    if certificates:
        tls.use_for_monarch(certificates)
    for worker in workers:
        if reason := refusal(worker):  # Monarch itself would wait for ever
            raise ConnectionError(
                f"no worker listens at {worker} ({reason}); start one there: make worker ADDRESS={worker}"
            )
    own_address = address_towards(workers[0].host, workers[0].port)
    prepare_this_process()
    try:
        enable_transport(str(Address(own_address, 0, workers[0].tls)))
    except RuntimeError as error:
        raise RuntimeError(f"hosts must be connected before Monarch is used in this program: {error}") from None
    context()
    mesh = attach_to_workers(ca="trust_all_connections", workers=[str(worker) for worker in workers], name="hosts")
    return Hosts(names=tuple(map(str, workers)), mesh=mesh, own_address=own_address, workers=tuple(workers))


def _of_job(started_by: Job, config: JobConfig, logs: Path | None) -> Hosts:
    prepare_this_process()
    workers: list[Address] = []
    if started_by.kind == "ssh":
        workers = [Address(name, jobs.port(started_by, config)).numeric() for name in started_by.names]
        _require_free(workers)
        jobs.require_ssh(started_by, config)
    name = f"hosts{uuid.uuid4().hex[:8]}"  # new for each run: two runs on Kubernetes must not share it
    job = jobs.build(started_by, config, mesh=name, logs=logs)
    own_address = _listen_for(started_by, workers)
    try:
        job.apply()
        _wait_until_listening(workers, config)
        mesh = getattr(job.state(cached_path=None), name)
    except BaseException:
        job.kill()
        raise
    return Hosts(names=started_by.names, mesh=mesh, own_address=own_address, workers=tuple(workers), job=job)


def _listen_for(started_by: Job, workers: Sequence[Address]) -> str:
    """Let Monarch listen where the job's workers and the ranks' rendezvous can reach it."""
    if started_by.kind == "process":
        context()  # Monarch's default transport connects the processes of one machine
        return LOOPBACK
    own_address = address_towards(workers[0].host, workers[0].port) if workers else _address_of_name()
    # Monarch's default is the address of this machine's name, which the workers may not reach
    monarch.configure(default_transport=str(Address(own_address, 0)))
    context()
    return own_address


def _address_of_name() -> str:
    """The first that is neither loopback nor link-local. Raises ConnectionError if there is none."""
    name = socket.gethostname()
    for address in resolve(name):
        parsed = ipaddress.ip_address(address)
        if not (parsed.is_loopback or parsed.is_link_local):
            return address
    raise ConnectionError(
        f"the name of this machine, {name}, resolves to {', '.join(resolve(name))}, which the hosts of a job cannot reach; "
        "give the name an address that they can reach, for example in /etc/hosts"
    )


def _require_free(workers: Sequence[Address]) -> None:
    """Raises ConnectionError if a program listens already where a worker will."""
    for worker in workers:
        if refusal(worker) is None:
            end = shlex.quote(f"run_worker_loop_forever.*:{worker.port}")
            raise ConnectionError(
                f"a program listens at {worker} already, perhaps the worker of a run that was killed; end that program on its host "
                f"(pkill -f {end}), or choose another port with hosts.job.port"
            )


def _wait_until_listening(workers: Sequence[Address], config: JobConfig) -> None:
    """Raises ConnectionError naming the first worker that does not listen in time."""
    deadline = time.monotonic() + config.start_timeout
    for worker in workers:
        while refusal(worker) is not None:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no worker listens at {worker} after hosts.job.start_timeout={config.start_timeout} s; errors of ssh "
                    "and of the worker are in this program's output"
                )
            time.sleep(PAUSE)


def refusal(worker: Address) -> str | None:
    """None if a program accepts connections there."""
    try:
        socket.create_connection((worker.host, worker.port), CONNECT_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None
