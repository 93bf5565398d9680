"""The machines of a run, and the machine of each rank and generator."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rl_actors.field_types import NonNegativeFloat
from rl_actors.processes import hosts, jobs, tls
from rl_actors.processes.hosts import Hosts
from rl_actors.processes.jobs import Job, JobConfig

ATTEMPT_PAUSE = 1.0  # seconds between two attempts to reach the lost workers


@dataclass(kw_only=True)
class HostsConfig:
    """A worker on each host (`make worker`, or a Monarch job) starts the run's processes."""

    addresses: str = ""
    """Running workers, such as tcp://10.0.0.5:4444,tcp://10.0.0.6:4444, or a job that starts them:
    ssh://gpu-1,ssh://gpu-2, slurm://4, kubernetes://4, or process://2 (two on this machine, for a
    trial). Empty: only this machine. All hosts must share the disk of the run folder."""
    job: JobConfig = field(default_factory=JobConfig)
    trainer: int = 0
    """Trainer, critic and reference spread evenly over the first N hosts; generators have the
    others, or the last if none is left. 0: all hosts but one, at least 1."""
    certificates: str = ""
    """Folder of the TLS certificates, under the same path on all hosts. Needed for tls://."""
    return_timeout: NonNegativeFloat = 600.0
    """Seconds of waiting for a lost worker that the user must start again. 0: its loss ends the run."""

    def names(self) -> list[str]:
        """[] if the run uses only this machine. Raises ValueError for wrong addresses."""
        if not self.addresses:
            return []
        job = self.started_by()
        return list(job.names) if job else [str(address) for address in hosts.parse(self._split())]

    def started_by(self) -> Job | None:
        """The job that starts the workers, or None."""
        return jobs.parse(self._split()) if self.addresses else None

    def _split(self) -> list[str]:
        return [address.strip() for address in self.addresses.split(",")]

    def of_trainer(self) -> range:
        """Indices of the hosts of the trainer's ranks."""
        count = len(self.names())
        return range(self.trainer or max(1, count - 1))

    def of_generators(self) -> range:
        """Replica i of the generator uses host i of this range, modulo its length."""
        count = len(self.names())
        return range(min(len(self.of_trainer()), count - 1), count)

    def validate(self, num_ranks: int) -> None:
        """num_ranks: of the trainer."""
        try:
            count = len(self.names())
        except ValueError as error:
            raise ValueError(f"hosts.addresses: {error}") from None
        job = self.started_by()
        if job is not None:
            self.job.validate(job)
        elif self.job != JobConfig():
            raise ValueError(
                f"hosts.addresses={self.addresses!r} starts no job, so hosts.job must keep its default values; "
                "only the jobs ssh://, slurm:// and kubernetes:// have options"
            )
        if not count:
            if self.trainer or self.certificates:
                given = f"hosts.trainer={self.trainer}, hosts.certificates={self.certificates!r}"
                raise ValueError(f"{given}; these fields need hosts.addresses, which is empty")
            return
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
        """Start the job, if any, and connect. logs: folder for the output of a Slurm job."""
        if not self.addresses:
            return Placement()
        connected = hosts.connect(self._split(), certificates=self.certificates, job=self.job, logs=logs)
        trainer = self.of_trainer()
        generators = self.of_generators()
        return Placement(
            all=connected,
            trainer=connected.part(trainer.start, trainer.stop),
            generators=connected.part(generators.start, generators.stop),
        )

    def wait_for_workers(self) -> list[str]:
        """Those that are still lost after return_timeout seconds; [] for a job: `connect` starts it."""
        workers = [] if self.started_by() else [address.numeric() for address in hosts.parse(self._split())]
        deadline = time.monotonic() + self.return_timeout
        while (missing := [str(worker) for worker in workers if hosts.refusal(worker)]) and time.monotonic() < deadline:
            time.sleep(ATTEMPT_PAUSE)
        return missing

    def of_rank(self, rank: int, num_ranks: int) -> str:
        """The host of this rank of trainer, critic or reference; "" for this machine."""
        names = self.names()
        return names[rank // (num_ranks // len(self.of_trainer()))] if names else ""

    def of_replica(self, replica: int) -> str:
        """The host of this replica of the generator; "" for this machine."""
        names = self.names()
        own = self.of_generators()
        return names[own[replica % len(own)]] if names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The connected hosts; None if the run uses only this machine."""

    all: Hosts | None = None
    trainer: Hosts | None = None
    generators: Hosts | None = None

    def lost(self) -> list[str]:
        """The hosts whose workers are gone."""
        return [] if self.all is None else self.all.lost()

    def close(self) -> None:
        if self.all is not None:
            self.all.close()
