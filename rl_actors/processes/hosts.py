"""Connect a program to Monarch's workers on other machines, so that the program's actors can run on these machines.

A worker is a process that starts the program's actors on its machine. Either a user starts each worker with `make worker`, or a Monarch job
starts all workers (jobs.py), for example over SSH.
"""

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

from rl_actors.processes import jobs, network, tls
from rl_actors.processes.address import Address, resolve
from rl_actors.processes.jobs import Job, JobConfig
from rl_actors.processes.spawn import LOOPBACK, prepare_this_process

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.job import JobTrait

CONNECT_TIMEOUT = 10.0
"""Seconds in which a worker must accept a connection."""
SHUTDOWN_TIMEOUT = 5.0
"""Longest wait in seconds for the end of a job's workers. After the wait the job is killed."""
PAUSE = 0.2
"""Seconds between two attempts to connect to a worker that does not listen yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The connected hosts in a fixed order, and the address at which their processes reach this program."""

    names: tuple[str, ...]
    mesh: "HostMesh"
    own_address: str
    workers: tuple[Address, ...] = ()  # where the workers listen; empty if only Monarch knows these addresses
    job: "JobTrait | None" = None  # Monarch's job that started the workers; None: a user started them

    def __len__(self) -> int:
        return len(self.names)

    def part(self, start: int, stop: int) -> "Hosts":
        """The hosts from index `start` to index `stop` - 1, as another Hosts.

        The returned object has neither `workers` nor `job`. So its `lost` returns an empty list, and its `close` does nothing.
        """
        part = self.mesh.slice(hosts=slice(start, stop))
        return Hosts(names=self.names[start:stop], mesh=part, own_address=self.own_address)

    def lost(self) -> list[str]:
        """The names of the hosts whose workers are gone.

        For some jobs only Monarch knows the addresses of the workers. For such a job Monarch tells only whether all hosts
        are still there. If one of them is gone, this method returns the names of all hosts.
        """
        if self.workers:
            return [name for name, worker in zip(self.names, self.workers, strict=True) if refusal(worker)]
        if self.job is not None and not self.job.can_run(self.job):
            return list(self.names)
        return []

    def close(self) -> None:
        """End the workers that a job has started. Workers that a user has started keep running, and wait for the next program."""
        if self.job is not None:
            # SSHJob.kill ends only the ssh processes on this machine, and a worker on another host might outlive them. So the workers are
            # shut down first.
            with contextlib.suppress(Exception):
                self.mesh.shutdown().get(timeout=SHUTDOWN_TIMEOUT)
            self.job.kill()


def parse(addresses: Sequence[str]) -> list[Address]:
    """Parse the addresses of workers.

    Raises ValueError for a text that is not an address, for a repeated address, and for a mixture of TCP and TLS.
    """
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
    """Connect to the workers. Call this function before other code in this program uses Monarch.

    addresses: either the address of each running worker, tcp://HOST:PORT or tls://HOST:PORT, or a job that starts the workers:
    process://N (N workers on this machine), ssh://HOST for each host, slurm://N or kubernetes://N (N hosts).
    certificates: folder of the certificates for tls:// addresses. job: the options of the job. logs: folder for the output of a Slurm job.
    Raises ValueError for wrong addresses or options, and RuntimeError if Monarch is in use already or if a scheduler does not start the job.
    Raises ConnectionError if a worker does not listen. For a job, also raises ConnectionError if ssh fails or a host lacks this Python, if the
    port of a worker is in use, or if the name of this machine has no address that the workers can reach.
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
        _require_listening(worker)
    own_address = network.address_towards(workers[0].host, workers[0].port)
    prepare_this_process()
    try:
        enable_transport(str(Address(own_address, 0, workers[0].tls)))
    except RuntimeError as error:
        raise RuntimeError(f"hosts must be connected before Monarch is used in this program: {error}") from None
    context()
    mesh = attach_to_workers(ca="trust_all_connections", workers=[str(worker) for worker in workers], name="hosts")
    return Hosts(names=tuple(map(str, workers)), mesh=mesh, own_address=own_address, workers=tuple(workers))


def _of_job(started_by: Job, config: JobConfig, logs: Path | None) -> Hosts:
    """Start the job, and connect to its workers."""
    prepare_this_process()
    workers: list[Address] = []
    if started_by.kind == "ssh":
        workers = [Address(name, jobs.port(started_by, config)).numeric() for name in started_by.names]
        _require_free(workers)
        jobs.require_ssh(started_by, config)
    name = f"hosts{uuid.uuid4().hex[:8]}"  # a new name for each run, because two runs on Kubernetes must not share one
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
    """Let Monarch listen at an address that the job's workers can reach, and return the address.

    The ranks of a trainer must reach the address, too, because this program serves their rendezvous there.
    """
    if started_by.kind == "process":
        context()  # starts Monarch with its default transport, which connects the processes of one machine
        return LOOPBACK
    own_address = network.address_towards(workers[0].host, workers[0].port) if workers else _address_of_name()
    # By default Monarch listens at the address to which this machine's name resolves. The workers may be unable to
    # reach that address, but they can reach `own_address`.
    monarch.configure(default_transport=str(Address(own_address, 0)))
    context()
    return own_address


def _address_of_name() -> str:
    """The first address of this machine's name that is neither loopback nor link-local. Raises ConnectionError if there is none.

    The hosts of a scheduler cannot reach a loopback or link-local address of this machine.
    """
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
    """Raises ConnectionError if another program already listens at the address of a worker. The workers are not started yet."""
    for worker in workers:
        if refusal(worker) is None:
            end = shlex.quote(f"run_worker_loop_forever.*:{worker.port}")
            raise ConnectionError(
                f"a program listens at {worker} already, perhaps the worker of a run that was killed; end that program on its host "
                f"(pkill -f {end}), or choose another port with hosts.job.port"
            )


def _wait_until_listening(workers: Sequence[Address], config: JobConfig) -> None:
    """Wait until all workers listen. Raises ConnectionError naming the first worker that does not listen after start_timeout seconds."""
    deadline = time.monotonic() + config.start_timeout
    for worker in workers:
        while refusal(worker) is not None:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no worker listens at {worker} after hosts.job.start_timeout={config.start_timeout} s; errors of ssh "
                    "and of the worker are in this program's output"
                )
            time.sleep(PAUSE)


def _require_listening(worker: Address) -> None:
    """Raises ConnectionError if nothing listens at the address. Monarch itself would wait until a worker listens there."""
    if reason := refusal(worker):
        raise ConnectionError(
            f"no worker listens at {worker} ({reason}); start one there: make worker ADDRESS={worker}"
        )


def refusal(worker: Address) -> str | None:
    """The reason why no program accepts connections at the address. None: a program accepts them."""
    try:
        socket.create_connection((worker.host, worker.port), CONNECT_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None
