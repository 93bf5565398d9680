"""The choice of the machines of a run as fields of its config, and the machine of each rank."""

from dataclasses import dataclass, field
from pathlib import Path

from rl_actors.processes import hosts, jobs, tls
from rl_actors.processes.hosts import Hosts
from rl_actors.processes.jobs import Job, JobConfig


@dataclass(kw_only=True)
class HostsConfig:
    """Workers on which the processes of a run live. `make worker` has started them, or a job of Monarch starts them."""

    addresses: str = ""
    """Addresses of the workers, separated by commas: tcp://10.0.0.5:4444,tcp://10.0.0.6:4444. Or a job that starts them:
    ssh://gpu-1,ssh://gpu-2 (over SSH), slurm://4, kubernetes://4, or process://2 on this machine, for a trial. Empty: all processes are on
    this machine. The run folder must be on a disk that all hosts share."""
    job: JobConfig = field(default_factory=JobConfig)
    trainer: int = 0
    """Number of hosts of the trainer, the value model and the reference, counted from the first host. The ranks of each are spread evenly
    over them. The generators have the other hosts, or the last host if there is no other. 0: all hosts but the last, or the only host."""
    certificates: str = ""
    """Folder of certificates for addresses tls://. It must have the same path on all hosts."""

    def names(self) -> list[str]:
        """The hosts in their order. Empty without hosts. Raises ValueError if `addresses` is wrong."""
        if not self.addresses:
            return []
        job = self.started_by()
        return list(job.names) if job else [str(address) for address in hosts.parse(self._split())]

    def started_by(self) -> Job | None:
        """The job that starts the workers. None: they are there already, or there are none. Raises ValueError if `addresses` is wrong."""
        return jobs.parse(self._split()) if self.addresses else None

    def _split(self) -> list[str]:
        return [address.strip() for address in self.addresses.split(",")]

    def of_trainer(self) -> range:
        """Indices of the hosts of the trainer's ranks."""
        count = len(self.names())
        return range(self.trainer or max(1, count - 1))

    def of_generators(self) -> range:
        """Indices of the hosts of the generators. The replicas get these hosts in turn."""
        count = len(self.names())
        return range(min(len(self.of_trainer()), count - 1), count)

    def validate(self, num_ranks: int) -> None:
        """Raises ValueError, naming the field, for wrong addresses or certificates, and for hosts that cannot share num_ranks evenly."""
        try:
            count = len(self.names())
        except ValueError as error:
            raise ValueError(f"hosts.addresses: {error}") from None
        job = self.started_by()
        if job is None and self.job != JobConfig():
            raise ValueError(
                f"hosts.addresses={self.addresses!r} starts no job, so it takes no options hosts.job; a job is ssh://, slurm:// or kubernetes://"
            )
        if not count:
            if self.trainer or self.certificates:
                given = f"hosts.trainer={self.trainer}, hosts.certificates={self.certificates!r}"
                raise ValueError(f"{given}; they need hosts.addresses, which is empty")
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
                f"hosts.certificates={self.certificates!r} with hosts.addresses={self.addresses!r}; addresses tls:// need certificates, and "
                "no others take them"
            )

    def connect(self, logs: Path | None = None) -> "Placement":
        """Connect to the workers, if there are hosts, and start their job before. Raises as rl_actors.processes.hosts.connect does.

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

    def place_of_rank(self, rank: int, num_ranks: int) -> str:
        """The host of a rank of the trainer; empty without hosts."""
        names = self.names()
        return names[rank // (num_ranks // len(self.of_trainer()))] if names else ""

    def place_of_generator(self, replica: int) -> str:
        """The host of a replica; empty without hosts."""
        names, own = self.names(), self.of_generators()
        return names[own[replica % len(own)]] if names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The connected hosts of a run. None: this machine."""

    all: Hosts | None
    trainer: Hosts | None
    generators: Hosts | None

    def lost(self) -> list[str]:
        """The hosts whose workers are gone. Empty without hosts."""
        return [] if self.all is None else self.all.lost()

    def close(self) -> None:
        if self.all is not None:
            self.all.close()
