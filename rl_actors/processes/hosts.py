"""Connects a program to Monarch's workers on other machines, so that its actors can run there. `make worker` starts a worker."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch.actor import attach_to_workers, context, enable_transport

from rl_actors.processes import tls
from rl_actors.processes.address import Address
from rl_actors.processes.spawn import LOOPBACK, prepare_this_process

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.job import ProcessJob

CONNECT_TIMEOUT = 10.0
"""Seconds in which a worker must accept a connection."""

JOB = "process://"  # begins the text process://N, a job of N workers on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts in a fixed order, and the address at which their processes reach this program."""

    names: tuple[str, ...]
    mesh: "HostMesh"
    own_address: str
    job: "ProcessJob | None" = None  # of process://N; `close` ends the workers of the job

    def __len__(self) -> int:
        return len(self.names)

    def part(self, start: int, stop: int) -> "Hosts":
        """The hosts from index `start` to index `stop` - 1. `close` of a part does nothing."""
        part = self.mesh.slice(hosts=slice(start, stop))
        return Hosts(names=self.names[start:stop], mesh=part, own_address=self.own_address)

    def close(self) -> None:
        """End the workers of a job. Other workers go on, and wait for the next program."""
        if self.job is not None:
            self.job.kill()


def parse(addresses: Sequence[str]) -> list[Address]:
    """The addresses of workers. Raises ValueError for a text that is no address, a repeated address, and a mixture of TCP and TLS."""
    parsed = [Address.parse(address) for address in addresses]
    for address in parsed:
        if parsed.count(address) > 1:
            raise ValueError(f"the host {address} is named {parsed.count(address)} times")
    if len({address.tls for address in parsed}) > 1:
        raise ValueError(f"some of {', '.join(addresses)} use TLS and some do not; all must use it, or none")
    return parsed


def connect(addresses: Sequence[str], *, certificates: str = "") -> Hosts:
    """Connect to the workers. Call it before anything else in this program uses Monarch.

    addresses: tcp://HOST:PORT or tls://HOST:PORT, or one text process://N, which starts N workers on this machine by Monarch's ProcessJob.
    Raises ValueError for wrong addresses, ConnectionError naming a worker that does not listen, and RuntimeError if Monarch is in use
    already.
    """
    if len(addresses) == 1 and addresses[0].startswith(JOB):
        return _of_job(job_size(addresses[0]))
    workers = [address.numeric() for address in parse(addresses)]
    if workers[0].tls != bool(certificates):
        raise ValueError("workers at tls:// need a folder of certificates, and workers at tcp:// take none")
    if certificates:
        tls.use_for_monarch(certificates)
    for worker in workers:
        _require_listening(worker)
    own_address = _own_address(workers[0])
    prepare_this_process()
    try:
        enable_transport(str(Address(own_address, 0, workers[0].tls)))
    except RuntimeError as error:
        raise RuntimeError(f"hosts must be connected before Monarch is used in this program: {error}") from None
    context()
    mesh = attach_to_workers(ca="trust_all_connections", workers=[str(worker) for worker in workers], name="hosts")
    return Hosts(names=tuple(map(str, workers)), mesh=mesh, own_address=own_address)


def job_size(address: str) -> int:
    """The number of workers of process://N. Raises ValueError for anything else."""
    number = address.removeprefix(JOB)
    if not address.startswith(JOB) or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"the host is {address!r}; it must be process://N, which starts N workers on this machine")
    return int(number)


def _of_job(num_hosts: int) -> Hosts:
    prepare_this_process()
    context()
    from monarch.job import ProcessJob  # here, because it also imports a web server

    job = ProcessJob({"hosts": num_hosts})
    try:
        mesh = job.state(cached_path=None).hosts
    except BaseException:
        job.kill()
        raise
    names = tuple(f"worker {index} of this machine" for index in range(num_hosts))
    return Hosts(names=names, mesh=mesh, own_address=LOOPBACK, job=job)


def _require_listening(worker: Address) -> None:
    """Raises ConnectionError if nothing listens at the address. Monarch itself would wait until a worker listens there."""
    try:
        socket.create_connection((worker.host, worker.port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConnectionError(
            f"no worker listens at {worker} ({error.strerror or error}); start one there: make worker ADDRESS={worker}"
        ) from None


def _own_address(worker: Address) -> str:
    """The address of the network interface of this machine through which it reaches a worker. Nothing is sent."""
    family = socket.AF_INET6 if ":" in worker.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((worker.host, worker.port))
        return str(probe.getsockname()[0])
