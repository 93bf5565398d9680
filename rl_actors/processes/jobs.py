"""Monarch's jobs, which start the workers of a run here, over SSH, by Slurm or on Kubernetes.

They listen without TLS, because Monarch 0.7 gives jobs no certificates.
"""

import importlib.util
import ipaddress
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.client import V1PodTemplateSpec
    from monarch.job import JobTrait

MARK = "://"
HOST_TEXTS = {
    "process": "worker {} of this machine",
    "slurm": "node {} of the Slurm job",
    "kubernetes": "pod {} of the job",
}
"""By kind of job: stands for the name of host {} before the job starts."""
PORTS = {"ssh": 22222, "slurm": 22222, "kubernetes": 26600}
"""By kind of job: Monarch's default port for workers."""
SHARED_MEMORY = "/dev/shm"
PORT_VARIABLE = "MONARCH_PORT"  # the worker's port, which Monarch reads in the pod
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SSH_CHECK_TIMEOUT = 60.0
"""Seconds in which a host must answer over SSH."""


@dataclass(kw_only=True)
class JobConfig:
    """Options of the job that starts the workers."""

    insecure: bool = False
    """Allow workers without TLS that other machines reach: anyone who does can run code as you."""
    port: int = 0
    """Port of the workers. 0: Monarch's default, 22222, or 26600 on Kubernetes."""
    start_timeout: int = 600
    """Seconds, with queueing, until the workers must listen or the Slurm job must have started."""
    arguments: str = ""
    """Further arguments for ssh, such as "-p 2222 -l me", or for sbatch, as --name=value."""
    gpus_per_host: int = 0
    """GPUs of each host under Slurm or Kubernetes."""
    partition: str = ""
    """Slurm's partition. Empty: its default."""
    time_limit: str = ""
    """Longest time of the Slurm job, HH:MM:SS or days-HH:MM:SS. Empty: the partition's default."""
    account: str = ""
    """Slurm's account."""
    image: str = ""
    """Image of the pods, and of the controller's pod: the package needs the same path everywhere."""
    namespace: str = "default"
    """Namespace of the pods."""
    claim: str = ""
    """PersistentVolumeClaim of the disk that all pods share, for the run folder."""
    mount: str = "/shared"
    """Path at which the pods mount the claim."""

    def validate(self, job: "Job") -> None:
        """Raises ValueError naming the field and the limit."""
        self._require_own_fields(job.kind)
        for name, lowest, highest in (("port", 0, 65535), ("start_timeout", 1, None), ("gpus_per_host", 0, None)):
            value = getattr(self, name)
            if value < lowest or (highest is not None and value > highest):
                limit = f"from {lowest} to {highest}" if highest is not None else f"at least {lowest}"
                raise ValueError(f"hosts.job.{name}={value}; it must be {limit}")
        if self.time_limit and not TIME_LIMIT.fullmatch(self.time_limit):
            raise ValueError(f"hosts.job.time_limit={self.time_limit!r}; it must be HH:MM:SS or days-HH:MM:SS")
        self._require_arguments(job.kind)
        if job.kind == "kubernetes":
            self._require_kubernetes()
        if not self.insecure and job.is_reachable():
            raise ValueError(
                f"the workers of a job at {job.kind}:// listen without TLS, and other machines reach them, so anyone who reaches them "
                "can run code as you. In a private network set hosts.job.insecure. For TLS, start workers by `make worker` and name them as "
                "tls://HOST:PORT"
            )

    def _require_own_fields(self, kind: str) -> None:
        own = FIELDS[kind]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in own and value != field.default:
                kinds = " and ".join(f"{kind}://" for kind, names in FIELDS.items() if field.name in names)
                raise ValueError(
                    f"hosts.job.{field.name}={value!r} is for {kinds}, but the hosts are a job of {kind}://"
                )

    def _require_arguments(self, kind: str) -> None:
        try:
            arguments = shlex.split(self.arguments)
        except ValueError as error:
            raise ValueError(f"hosts.job.arguments={self.arguments!r}: {error}") from None
        wrong = [argument for argument in arguments if not argument.startswith("-")]
        if kind == "slurm" and wrong:
            raise ValueError(
                f"hosts.job.arguments={self.arguments!r}: {wrong[0]!r} does not begin with -; write --name=value as one word"
            )

    def _require_kubernetes(self) -> None:
        if not self.image:
            raise ValueError("hosts.job.image is empty; kubernetes:// needs the image of the pods")
        if not KUBERNETES_NAME.fullmatch(self.namespace):
            raise ValueError(
                f"hosts.job.namespace={self.namespace!r}; it must have 1 to 63 lower-case letters, digits and -, "
                "and begin and end with a letter or digit"
            )
        if not self.mount.startswith("/"):
            raise ValueError(f"hosts.job.mount={self.mount!r}; it must be an absolute path")
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                "kubernetes:// needs the package kubernetes; install it: pip install 'rl-actors[kubernetes]'"
            )


_EVERYWHERE = ("insecure", "port", "start_timeout")
FIELDS: dict[str, tuple[str, ...]] = {
    "process": (),
    "ssh": (*_EVERYWHERE, "arguments"),
    "slurm": (*_EVERYWHERE, "arguments", "gpus_per_host", "partition", "time_limit", "account"),
    "kubernetes": (*_EVERYWHERE, "gpus_per_host", "image", "namespace", "claim", "mount"),
}
"""By kind of job: the fields of JobConfig that it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Kind and host names of the job that starts a run's workers."""

    kind: str  # a key of FIELDS
    names: tuple[str, ...]

    def is_reachable(self) -> bool:
        """True if other machines may reach the workers."""
        if self.kind == "ssh":
            return not all(_is_loopback(name) for name in self.names)
        return self.kind != "process"


def parse(addresses: Sequence[str]) -> Job | None:
    """None if the addresses are of workers that run already.

    Raises ValueError for an N below 1, a wrong or repeated name, or several jobs.
    """
    kinds = [address.partition(MARK)[0] for address in addresses]
    if not any(kind in FIELDS and MARK in address for kind, address in zip(kinds, addresses, strict=True)):
        return None
    if len(set(kinds)) > 1 or (len(addresses) > 1 and kinds[0] != "ssh"):
        raise ValueError(f"the hosts are {', '.join(addresses)}; give one job, or ssh:// for every host")
    kind = kinds[0]
    values = [address.partition(MARK)[2] for address in addresses]
    if kind == "ssh":
        return Job(kind=kind, names=_ssh_names(values))
    if not values[0].isdecimal() or int(values[0]) < 1:
        raise ValueError(
            f"the host is {addresses[0]!r}; it must be {kind}://N, where N is the number of workers, at least 1"
        )
    return Job(kind=kind, names=tuple(HOST_TEXTS[kind].format(index) for index in range(int(values[0]))))


def _ssh_names(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not HOST_NAME.fullmatch(name):
            raise ValueError(
                f"the host is 'ssh://{name}'; it must be ssh://HOST, with a name or an IPv4 address. Give the user and the port of ssh "
                "in hosts.job.arguments: -l USER -p PORT"
            )
        if names.count(name) > 1:
            raise ValueError(f"the host ssh://{name} is named {names.count(name)} times")
    return tuple(names)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def build(job: Job, config: JobConfig, *, mesh: str, logs: Path | None = None) -> "JobTrait":
    """Monarch's job with one mesh of hosts, not started until `apply` or `state`.

    mesh: lower-case letters and digits. logs: folder for a Slurm job's output.
    """
    # imported here because Monarch's jobs import a web server
    if job.kind == "process":
        from monarch.job import ProcessJob

        return ProcessJob({mesh: len(job.names)})
    if job.kind == "slurm":
        return _slurm(job, config, mesh, logs)
    if job.kind == "kubernetes":
        return _kubernetes(job, config, mesh)
    from monarch._src.job.job import SSHJob

    made = SSHJob(python_exe=sys.executable, ssh_args=ssh_arguments(config), monarch_port=port(job, config))
    made.add_mesh(mesh, list(job.names))
    return made


def port(job: Job, config: JobConfig) -> int:
    """Port of a job's workers; those of process:// have none."""
    return config.port or PORTS[job.kind]


def ssh_arguments(config: JobConfig) -> list[str]:
    """BatchMode: no questions. -tt: the worker ends when ssh ends."""
    return ["-tt", "-o", "BatchMode=yes", *shlex.split(config.arguments)]


def require_ssh(job: Job, config: JobConfig) -> None:
    """Raises ConnectionError without ssh, for an unreachable host, or if a host lacks this Python."""
    for name in job.names:
        command = ["ssh", *ssh_arguments(config), "-n", name, f"test -x {shlex.quote(sys.executable)}"]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=SSH_CHECK_TIMEOUT, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise ConnectionError(f"ssh {name} did not answer within {SSH_CHECK_TIMEOUT:g} s") from None
        except FileNotFoundError:
            raise ConnectionError("this machine has no program ssh; ssh:// needs it") from None
        if ended.returncode == 1:
            raise ConnectionError(f"{name} has no {sys.executable}; all hosts need this package under the same path")
        if ended.returncode:
            said = (ended.stderr or ended.stdout).strip()
            raise ConnectionError(f"{shlex.join(command)} failed with status {ended.returncode}: {said}")


def _slurm(job: Job, config: JobConfig, mesh: str, logs: Path | None) -> "JobTrait":
    from monarch.job import SlurmJob

    return SlurmJob(
        {mesh: len(job.names)},
        python_exe=sys.executable,
        slurm_args=shlex.split(config.arguments),
        monarch_port=port(job, config),
        job_name="rl_actors",
        time_limit=config.time_limit or None,
        partition=config.partition or None,
        log_dir=None if logs is None else str(logs),
        gpus_per_node=config.gpus_per_host or None,
        job_start_timeout=config.start_timeout,
        account=config.account or None,
    )


def _kubernetes(job: Job, config: JobConfig, mesh: str) -> "JobTrait":
    from monarch.job.kubernetes import KubernetesJob

    made = KubernetesJob(namespace=config.namespace, timeout=config.start_timeout)
    # Monarch's ImageSpec cannot describe the volume of the shared disk
    made.add_mesh(mesh, len(job.names), pod_template=_pod_template(config, port(job, config)), port=port(job, config))
    return made


def _pod_template(config: JobConfig, worker_port: int) -> "V1PodTemplateSpec":
    """A pod with one worker, which listens at the pod's IP address."""
    from kubernetes import client

    address = client.V1EnvVarSource(field_ref=client.V1ObjectFieldSelector(field_path="status.podIP"))
    volumes = [client.V1Volume(name="shm", empty_dir=client.V1EmptyDirVolumeSource(medium="Memory"))]
    mounts = [client.V1VolumeMount(name="shm", mount_path=SHARED_MEMORY)]
    if config.claim:
        claim = client.V1PersistentVolumeClaimVolumeSource(claim_name=config.claim)
        volumes.append(client.V1Volume(name="claim", persistent_volume_claim=claim))
        mounts.append(client.V1VolumeMount(name="claim", mount_path=config.mount))
    gpus = {"nvidia.com/gpu": str(config.gpus_per_host)} if config.gpus_per_host else None
    worker = client.V1Container(
        name="worker",
        image=config.image,
        # Kubernetes substitutes $(POD_IP) from `env`
        command=[sys.executable, "-m", "rl_actors.processes.worker", f"tcp://$(POD_IP):{worker_port}", "--insecure"],
        env=[
            client.V1EnvVar(name="POD_IP", value_from=address),
            client.V1EnvVar(name=PORT_VARIABLE, value=str(worker_port)),
        ],
        resources=client.V1ResourceRequirements(requests=gpus, limits=gpus) if gpus else None,
        readiness_probe=client.V1Probe(tcp_socket=client.V1TCPSocketAction(port=worker_port)),
        volume_mounts=mounts,
    )
    return client.V1PodTemplateSpec(spec=client.V1PodSpec(containers=[worker], volumes=volumes))
