"""Tests of Monarch's jobs, which start a run's workers on other machines or on this machine.

The tests check which options are refused, and what Monarch sends to Slurm and to Kubernetes for our config.

There is no cluster here. A stub replaces `sbatch` and records the script that it gets. A fixture records the calls to Kubernetes.
"""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import monarch
import pytest

from configs.tiny import tiny
from controllers.program import describe_plan
from controllers.run.hosts import HostsConfig
from rl_actors.processes import hosts, jobs
from rl_actors.processes.jobs import JobConfig

SLURM = JobConfig(
    insecure=True,
    port=23456,
    start_timeout=1800,
    arguments="--constraint=h100 '--comment=a run'",
    gpus_per_host=8,
    partition="gpu",
    time_limit="1-04:00:00",
    account="team",
)
KUBERNETES = JobConfig(
    insecure=True,
    start_timeout=900,
    gpus_per_host=4,
    image="registry.example/rl-actors:1",
    namespace="training",
    claim="disk",
)


@pytest.fixture(autouse=True)
def own_transport():
    """Monarch's jobs change the transport of the whole program. This fixture restores it after each test."""
    with monarch.configured(default_transport="tcp://127.0.0.1:0"):
        yield


def built(addresses: list[str], config: JobConfig, logs: Path | None = None):
    job = jobs.parse(addresses)
    config.validate(job)
    return jobs.build(job, config, mesh="hosts1", logs=logs)


@pytest.mark.parametrize(
    ("addresses", "kind", "names"),
    [
        (["process://2"], "process", ("worker 0 of this machine", "worker 1 of this machine")),
        (["ssh://gpu-1", "ssh://10.0.0.6"], "ssh", ("gpu-1", "10.0.0.6")),
        (["slurm://2"], "slurm", ("node 0 of the Slurm job", "node 1 of the Slurm job")),
        (["kubernetes://1"], "kubernetes", ("pod 0 of the job",)),
    ],
)
def test_the_addresses_of_a_job_give_its_kind_and_the_names_of_its_hosts(addresses, kind, names):
    assert jobs.parse(addresses) == jobs.Job(kind=kind, names=names)
    assert jobs.parse(["tcp://a:1", "tcp://b:1"]) is None


@pytest.mark.parametrize(
    ("addresses", "error"),
    [
        (["slurm://0"], "it must be slurm://N, where N is the number of workers, at least 1"),
        (["kubernetes://many"], "it must be kubernetes://N"),
        (["slurm://2", "slurm://3"], "give one job, or ssh:// for every host"),
        (["ssh://a", "tcp://b:1"], "give one job, or ssh:// for every host"),
        (["ssh://a", "ssh://a"], "ssh://a is named 2 times"),
        (["ssh://me@a"], "the host is 'ssh://me@a'.*Give the user and the port of ssh in hosts.job.arguments"),
        (["ssh://a:22"], "the host is 'ssh://a:22'"),
        (["ssh://-oProxyCommand=x"], "the host is 'ssh://-oProxyCommand=x'"),
    ],
)
def test_impossible_addresses_of_a_job_are_refused(addresses, error):
    with pytest.raises(ValueError, match=error):
        jobs.parse(addresses)


@pytest.mark.parametrize(
    ("addresses", "config", "error"),
    [
        ("slurm://1", JobConfig(), "slurm:// listen without TLS.*hosts.job.insecure"),
        ("ssh://gpu-1", JobConfig(), "ssh:// listen without TLS"),
        ("slurm://1", replace(SLURM, port=70000), "hosts.job.port=70000; it must be from 0 to 65535"),
        ("slurm://1", replace(SLURM, start_timeout=0), "hosts.job.start_timeout=0; it must be at least 1"),
        ("slurm://1", replace(SLURM, gpus_per_host=-1), "hosts.job.gpus_per_host=-1; it must be at least 0"),
        ("slurm://1", replace(SLURM, time_limit="4h"), "hosts.job.time_limit='4h'; it must be HH:MM:SS"),
        (
            "slurm://1",
            replace(SLURM, arguments="--constraint h100"),
            "'h100' does not begin with -; write --name=value",
        ),
        ("slurm://1", replace(SLURM, arguments="--comment='a"), "hosts.job.arguments=.*No closing quotation"),
        ("slurm://1", replace(SLURM, image="x"), "hosts.job.image='x' is for kubernetes://, but .* a job of slurm://"),
        ("process://1", JobConfig(port=1), "hosts.job.port=1 is for ssh:// and slurm:// and kubernetes://"),
        ("kubernetes://1", replace(KUBERNETES, image=""), "hosts.job.image is empty"),
        ("kubernetes://1", replace(KUBERNETES, namespace="A_b"), "hosts.job.namespace='A_b'; it must have"),
        ("kubernetes://1", replace(KUBERNETES, mount="disk"), "hosts.job.mount='disk'; it must be an absolute path"),
        ("tcp://127.0.0.1:1", SLURM, "starts no job, so hosts.job must keep its default values"),
        ("", SLURM, "starts no job, so hosts.job must keep its default values"),
        ("slurm://0", SLURM, "hosts.addresses: the host is 'slurm://0'"),
    ],
)
def test_an_impossible_option_of_a_job_is_refused_and_the_error_names_its_field(addresses, config, error):
    with pytest.raises(ValueError, match=error):
        HostsConfig(addresses=addresses, job=config).validate(1)


def test_kubernetes_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package kubernetes; install it: pip install"):
        KUBERNETES.validate(jobs.parse(["kubernetes://1"]))


def test_ssh_on_loopback_does_not_need_the_option_insecure():
    JobConfig().validate(jobs.parse(["ssh://127.0.0.1", "ssh://localhost"]))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder on PATH with stubs of sbatch and scancel. The stubs write these files into the folder:

    sbatch.in: the script. sbatch.arguments: the number of arguments of sbatch. scancel.arguments: the arguments of scancel.
    """
    for name, script in {
        "sbatch": f"cat > {tmp_path}/sbatch.in; echo $# > {tmp_path}/sbatch.arguments; echo Submitted batch job 4711",
        "scancel": f"echo $@ > {tmp_path}/scancel.arguments",
    }.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_sbatch_gets_a_script_with_our_options(slurm):
    job = built(["slurm://3"], SLURM, slurm / "logs")
    job.apply()
    directives, command = [], []
    for line in (slurm / "sbatch.in").read_text().splitlines():
        if line.startswith("#SBATCH "):
            directives.append(line.removeprefix("#SBATCH "))
        elif line and not line.startswith("#!"):
            command.append(line)
    name = f"rl_actors_{os.getpid()}"
    assert directives == [
        f"--job-name={name}",
        "--ntasks-per-node=1",
        "--nodes=3",
        f"--output={slurm}/logs/slurm_%j_{name}.out",
        f"--error={slurm}/logs/slurm_%j_{name}.err",
        "--time=1-04:00:00",
        "--gpus-per-node=8",
        "--exclusive",
        "--partition=gpu",
        "--account=team",
        "--constraint=h100",
        "--comment=a run",
    ]
    identities, worker = command
    identities = json.loads(re.fullmatch(r"export MONARCH_SERVICE_PROC_IDS='(.*)'", identities)[1])
    assert len(set(identities)) == 3  # each worker has an identity of its own
    assert worker.startswith(f"srun {sys.executable} -c ") and "run_worker_loop_forever" in worker
    assert "tcp://{socket.gethostname()}:23456" in worker
    assert (slurm / "sbatch.arguments").read_text() == "0\n"
    job.kill()
    assert (slurm / "scancel.arguments").read_text() == "4711\n"


def test_the_worker_of_the_sbatch_script_is_a_python_program(slurm):
    """A stub replaces srun, too. It compiles the program that srun would start, but does not run it."""
    built(["slurm://1"], replace(SLURM, arguments=""), slurm / "logs").apply()
    srun = slurm / "srun"
    srun.write_text(
        '#!/bin/sh\nexec "$1" -c \'import sys; compile(sys.argv[1], "worker", "exec"); print("good")\' "$3"\n'
    )
    srun.chmod(0o700)
    ran = subprocess.run(["bash", str(slurm / "sbatch.in")], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "good\n"), ran.stderr


def test_an_option_that_is_not_set_is_not_in_the_sbatch_script(slurm):
    built(["slurm://1"], JobConfig(insecure=True), slurm).apply()
    script = (slurm / "sbatch.in").read_text()
    assert "--nodes=1" in script and ":22222" in script
    for option in ("--time", "--gpus-per-node", "--partition", "--account"):
        assert option not in script


@pytest.fixture
def cluster(monkeypatch):
    """The recorded calls to Kubernetes: [("create" or "delete", arguments), …]."""
    from kubernetes import client, config

    calls: list[tuple[str, dict]] = []
    monkeypatch.setattr(config, "load_incluster_config", lambda: None)

    def recorder(what: str):
        return lambda self, **given: calls.append((what, given))

    for what in ("create", "delete"):
        monkeypatch.setattr(client.CustomObjectsApi, f"{what}_namespaced_custom_object", recorder(what))
    return calls


def test_kubernetes_gets_a_mesh_of_pods_with_our_options(cluster):
    job = built(["kubernetes://3"], KUBERNETES)
    job.apply()
    [(what, given)] = cluster
    assert what == "create" and (given["namespace"], given["plural"]) == ("training", "monarchmeshes")
    body = given["body"]
    assert (body["kind"], body["metadata"]) == ("MonarchMesh", {"name": "hosts1", "namespace": "training"})
    assert (body["spec"]["replicas"], body["spec"]["port"]) == (3, 26600)
    pod = body["spec"]["podTemplate"]["spec"]
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "disk"}},
    ]
    [worker] = pod["containers"]
    assert worker == {
        "name": "worker",
        "image": "registry.example/rl-actors:1",
        "command": [sys.executable, "-m", "rl_actors.processes.worker", "tcp://$(POD_IP):26600", "--insecure"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MONARCH_PORT", "value": "26600"},
        ],
        "resources": {"requests": {"nvidia.com/gpu": "4"}, "limits": {"nvidia.com/gpu": "4"}},
        "readinessProbe": {"tcpSocket": {"port": 26600}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "claim", "mountPath": "/shared"}],
    }
    job.kill()
    assert cluster[-1][0] == "delete" and cluster[-1][1]["name"] == "hosts1"


def test_pods_request_no_gpus_and_no_claim_if_the_config_has_none(cluster):
    built(["kubernetes://1"], replace(KUBERNETES, gpus_per_host=0, claim="", port=4444)).apply()
    pod = cluster[0][1]["body"]["spec"]["podTemplate"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["shm"]
    assert "resources" not in pod["containers"][0] and "tcp://$(POD_IP):4444" in pod["containers"][0]["command"]


def test_the_plan_names_the_hosts_of_a_job():
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config = replace(config, hosts=HostsConfig(addresses="slurm://3", job=JobConfig(insecure=True)))
    config.validate()
    plan = describe_plan.describe(config)
    assert re.search(r"^  trainer-0 +node 0 of the Slurm job: ", plan, re.MULTILINE)
    assert re.search(r"^  trainer-1 +node 1 of the Slurm job: ", plan, re.MULTILINE)
    assert re.search(r"^  generator-0 +node 2 of the Slurm job, ", plan, re.MULTILINE)


def test_the_error_says_why_a_host_cannot_be_used_over_ssh(tmp_path, monkeypatch):
    """A stub replaces ssh. Status 255 is a failure of ssh itself, and status 1 means that the host lacks this Python."""
    for status, said, error in (
        (255, "Permission denied", "failed with status 255: Permission denied"),
        (1, "", "has no /"),
    ):
        stub = tmp_path / "ssh"
        stub.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {status}\n")
        stub.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        with pytest.raises(ConnectionError, match=error):
            hosts.connect(["ssh://127.0.0.1"], job=JobConfig(port=1))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConnectionError, match="this machine has no program ssh"):
        hosts.connect(["ssh://127.0.0.1"], job=JobConfig(port=1))


def test_the_error_names_a_port_at_which_another_program_listens_already():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConnectionError, match=f"a program listens at tcp://127.0.0.1:{port} already, .*hosts.job.port"
        ):
            hosts.connect(["ssh://127.0.0.1"], job=JobConfig(port=port))
