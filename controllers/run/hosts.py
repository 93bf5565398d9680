"""Config fields that choose the machines of a run's processes, and functions that give the machine of a trainer's rank or
of a generator."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rl_actors.processes import hosts, jobs, tls
from rl_actors.processes.hosts import Hosts
from rl_actors.processes.jobs import Job, JobConfig


@dataclass(kw_only=True)
class HostsConfig:
    """The machines (hosts) on which the processes of a run live.

    On each host a Monarch worker starts the run's processes. The worker is a program that listens at an address. Either
    the user has started the workers with `make worker`, or a Monarch job starts them.
    """

    addresses: str = ""
    """Addresses of running workers, separated by commas, such as tcp://10.0.0.5:4444,tcp://10.0.0.6:4444. The
    value can instead name a job that starts the workers: ssh://gpu-1,ssh://gpu-2 (over SSH on these two hosts),
    slurm://4 or kubernetes://4 (on four hosts), or process://2 (two workers on this machine, for a trial). Empty: all
    processes live on this machine. The run folder must be on a disk that all hosts share."""
    job: JobConfig = field(default_factory=JobConfig)
    trainer: int = 0
    """Number N of hosts of the trainer. The trainer, the value model and the reference all use the first N hosts, and
    the ranks of each model are spread evenly over these hosts. The generators use the other hosts. If N is the number
    of all hosts, the generators use the last host. 0: N is the number of all hosts minus 1, but at least 1."""
    certificates: str = ""
    """Folder of the TLS certificates. Addresses that begin with tls:// need this folder. It must have the same path on
    all hosts."""
    return_timeout: float = 600.0
    """Largest number of seconds that a run waits for a worker that has ended. If a process on a host dies, the run goes
    on in a new controller process. If the host's worker has ended too, the user must first start it again within this
    time. If a job has started the workers, the run does not wait, because the new controller process starts the job
    again. 0: the death of a process on a host ends the run."""

    def names(self) -> list[str]:
        """The names of the hosts in the order of `addresses`.

        An empty list if the run uses only this machine. Raises ValueError if `addresses` is wrong.
        """
        if not self.addresses:
            return []
        job = self.started_by()
        return list(job.names) if job else [str(address) for address in hosts.parse(self._split())]

    def started_by(self) -> Job | None:
        """The job that starts the workers. None if the user starts the workers, or if the run uses only this machine.

        Raises ValueError if `addresses` is wrong.
        """
        return jobs.parse(self._split()) if self.addresses else None

    def _split(self) -> list[str]:
        return [address.strip() for address in self.addresses.split(",")]

    def of_trainer(self) -> range:
        """Indices of the hosts of the trainer's ranks."""
        count = len(self.names())
        return range(self.trainer or max(1, count - 1))

    def of_generators(self) -> range:
        """Indices of the hosts of the generators.

        Replica i of the generator uses host i of this range. If there are more replicas than hosts, the range repeats.
        """
        count = len(self.names())
        return range(min(len(self.of_trainer()), count - 1), count)

    def validate(self, num_ranks: int) -> None:
        """Raises ValueError naming the field if a field is wrong.

        num_ranks: number of the trainer's ranks. Also raises ValueError if these ranks cannot be spread evenly over the
        trainer's hosts.
        """
        try:
            count = len(self.names())
        except ValueError as error:
            raise ValueError(f"hosts.addresses: {error}") from None
        if not 0 <= self.return_timeout < float("inf"):
            raise ValueError(f"hosts.return_timeout={self.return_timeout}; it must be finite and at least 0")
        job = self.started_by()
        if job is None and self.job != JobConfig():
            raise ValueError(
                f"hosts.addresses={self.addresses!r} starts no job, so hosts.job must keep its default values; only the jobs ssh://, "
                "slurm:// and kubernetes:// have options"
            )
        if not count:
            if self.trainer or self.certificates:
                given = f"hosts.trainer={self.trainer}, hosts.certificates={self.certificates!r}"
                raise ValueError(f"{given}; these fields need hosts.addresses, which is empty")
            return
        if job is not None:
            self.job.validate(job)
        if not 0 <= self.trainer <= count:
            raise ValueError(f"hosts.trainer={self.trainer}, but hosts.addresses names {count} hosts")
        if num_ranks % len(self.of_trainer()):
            raise ValueError(
                f"the trainer's {num_ranks} ranks cannot be spread evenly over {len(self.of_trainer())} hosts; set hosts.trainer"
            )
        if self.certificates:
            tls.require_files(self.certificates)
        if self.addresses.startswith("tls://") != bool(self.certificates):
            raise ValueError(
                f"hosts.certificates={self.certificates!r} with hosts.addresses={self.addresses!r}; tls:// addresses need certificates, and "
                "other addresses must have none"
            )

    def connect(self, logs: Path | None = None) -> "Placement":
        """Start the job of the workers, if `addresses` names a job, and connect to the workers. Does nothing if the run
        uses only this machine.

        Raises the errors of rl_actors.processes.hosts.connect.

        logs: folder for the output of a Slurm job.
        """
        if not self.addresses:
            return Placement(all=None, trainer=None, generators=None)
        connected = hosts.connect(self._split(), certificates=self.certificates, job=self.job, logs=logs)
        trainer, generators = self.of_trainer(), self.of_generators()
        return Placement(
            all=connected,
            trainer=connected.part(trainer.start, trainer.stop),
            generators=connected.part(generators.start, generators.stop),
        )

    def wait_for_workers(self, pause: float = 1.0) -> list[str]:
        """Wait until all workers listen, for at most return_timeout seconds. Returns the names of the workers that still do not listen.

        If a job starts the workers, this method returns at once, because `connect` starts the job again.
        pause: seconds between two attempts to connect.
        """
        workers = [] if self.started_by() else [address.numeric() for address in hosts.parse(self._split())]
        deadline = time.monotonic() + self.return_timeout
        while (missing := [str(worker) for worker in workers if hosts.refusal(worker)]) and time.monotonic() < deadline:
            time.sleep(pause)
        return missing

    def place_of_rank(self, rank: int, num_ranks: int) -> str:
        """The name of the host that runs this rank of the trainer, value model or reference. Empty if the run uses only this machine."""
        names = self.names()
        return names[rank // (num_ranks // len(self.of_trainer()))] if names else ""

    def place_of_generator(self, replica: int) -> str:
        """The name of the host that runs this replica of the generator. Empty if the run uses only this machine."""
        names, own = self.names(), self.of_generators()
        return names[own[replica % len(own)]] if names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The connected hosts of a run: all hosts, those of the trainer and those of the generators.

    All fields are None if the run uses only this machine.
    """

    all: Hosts | None
    trainer: Hosts | None
    generators: Hosts | None

    def lost(self) -> list[str]:
        """The names of the hosts whose workers are gone. An empty list if the run uses only this machine."""
        return [] if self.all is None else self.all.lost()

    def close(self) -> None:
        if self.all is not None:
            self.all.close()
