"""A service that owns the trainer and the generator of a config, and runs no training loop. Other
programs attach to them, call them, and detach; docs/service.md.

python -m controllers.service --config tiny --address tcp://127.0.0.1:4400
python -m controllers.service status tcp://127.0.0.1:4400
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

from monarch.actor import context, enable_transport, shutdown_context

from controllers.command import started_as
from controllers.observe.prometheus import MetricsPort, address_of
from controllers.observe.run_folder import RunFolder
from controllers.program import cli
from controllers.program.launch import SHUTDOWN_TIMEOUT
from controllers.rollouts.tokenizer import build_character_tokenizer
from controllers.run.actors import Actors, shares_gpu
from controllers.run.config import RunConfig
from controllers.service.door import Listener, spawn_coordinator
from controllers.service.members import GeneratorMember, Member, ModelMember
from controllers.service.numbers import prometheus
from controllers.service.service import Service
from rl_actors import validation
from rl_actors.clients import remote
from rl_actors.clients.base import ATTACH_TIMEOUT
from rl_actors.clients.call import in_background
from rl_actors.processes import tls
from rl_actors.processes.address import Address
from rl_actors.processes.output import route_logs
from rl_actors.processes.spawn import prepare_this_process

PROGRAM = "controllers.service"
DEFAULT_ADDRESS = "tcp://127.0.0.1:4400"
METRICS_TIMEOUT = 5.0
"""For the service to collect its numbers for Prometheus."""

Ending = asyncio.Future[tuple[int, str]]
"""(exit status, reason), set when the service must end."""


@dataclass(frozen=True, kw_only=True)
class ServiceInvocation(cli.Invocation):
    """Run a service. To ask or stop a running one: status, logs or stop, and its address."""

    address: str = DEFAULT_ADDRESS
    """tcp://HOST:PORT; port 0: any free port."""
    tls: str = ""
    """Folder of the certificates; --address must then begin with tls://."""
    insecure: cli.Switch = False
    """Serve without TLS where other machines can reach it; everyone there can then run code as you."""
    idle_timeout: float | None = None
    """End the service after this many seconds without a client. None: never."""
    metrics: str = "127.0.0.1:0"
    """HOST:PORT at which Prometheus reads numbers, without a password; port 0: any; none: nowhere."""
    without_generator: cli.Switch = False
    """Do not start the generator."""

    @property
    def has_generator(self) -> bool:
        return self.config.has_generator and not self.without_generator

    def metrics_address(self) -> tuple[str, int] | None:
        try:
            return None if self.metrics == "none" else address_of(self.metrics)
        except ValueError as error:
            raise ValueError(f"--metrics: {error}") from None

    def validate(self) -> None:
        """Raises ValueError for a wrong option, or a config that a service cannot serve."""
        address = Address.parse(self.address)
        if address.tls and not self.tls:
            raise ValueError(f"--address {address} needs --tls FOLDER")
        if self.tls and not address.tls:
            raise ValueError(f"--tls needs an address tls://…, not {address}")
        if self.tls:
            tls.require_files(self.tls)
        elif not address.is_loopback() and not self.insecure:
            raise ValueError(
                f"--address {address} is reachable from other machines, and without TLS everyone on them can run code as you; use --tls FOLDER "
                "with tls://, a loopback address, or --insecure on a private network"
            )
        if self.idle_timeout is not None and self.idle_timeout <= 0:
            raise ValueError(f"--idle-timeout {self.idle_timeout:g}; it must be positive")
        self.metrics_address()
        if self.resume or self.eval_only:
            raise ValueError(
                "a service neither resumes nor evaluates a run, so leave out --resume and --eval-only; to load a checkpoint, a client calls load_checkpoint"
            )
        if self.config.alphabet == "auto":
            raise ValueError(
                "alphabet='auto' takes the characters of a task, but a service has no task; name the characters, as in --alphabet 0123456789+="
            )
        validation.require_gpus(self.config.trainer)
        if self.has_generator:
            validation.require_gpu(self.config.generator)


def main() -> None:
    """Start a service, or send `status`, `logs` or `stop` to a running one."""
    prog = started_as(PROGRAM)
    argv = sys.argv[1:]
    if argv and argv[0] in ("status", "stop", "logs"):
        sys.exit(_ask(prog, argv))
    by_loop = import_module("configs").CONFIGS
    configs = by_loop["controllers.grpo"] | by_loop["controllers.ppo"]  # only PPO's have a value model
    invocation = cli.parse(prog, configs, argv, program=ServiceInvocation)
    assert isinstance(invocation, ServiceInvocation)
    try:
        invocation.validate()
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    status = _serve(invocation)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        shutdown_context().get(timeout=SHUTDOWN_TIMEOUT)
    sys.exit(status)


def _serve(invocation: ServiceInvocation) -> int:
    """Serve until a signal, `stop` or the idle timeout. Returns the exit status."""
    folder = RunFolder(_folder(invocation))
    folder.path.mkdir(parents=True, exist_ok=True)
    route_logs(folder.log("service"), label="service", verbose=invocation.verbose)
    if invocation.config.alphabet:
        build_character_tokenizer(folder.path / "tokenizer", invocation.config.alphabet)
    prepare_this_process()
    if invocation.tls:
        tls.use_for_monarch(invocation.tls)
    enable_transport(str(Address.parse(invocation.address).numeric().any_port()))
    context()
    try:
        return asyncio.run(_run(invocation, folder))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _folder(invocation: ServiceInvocation) -> Path:
    """--output-dir, or runs/service-<time>-<pid>."""
    path = invocation.output_dir
    is_default = path.parent == Path("runs") and path.name.startswith(f"{invocation.config_name}-")
    return Path("runs") / f"service-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}" if is_default else path


async def _run(invocation: ServiceInvocation, folder: RunFolder) -> int:
    """Start the actors, serve until the service must end, close them, and return the exit status."""
    loop = asyncio.get_running_loop()
    ending: Ending = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, ending, 128 + number, number.name)
    actors = Actors(invocation.config, folder, verbose=invocation.verbose)
    try:
        starting = asyncio.ensure_future(_start(actors, invocation.config, has_generator=invocation.has_generator))
        await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            starting.cancel()
        else:
            await _serve_members(starting.result(), invocation, folder, ending)
    finally:
        await actors.close()
    status, reason = ending.result()
    print(f"the service ends: {reason}", flush=True)
    return status


async def _serve_members(
    members: dict[str, Member], invocation: ServiceInvocation, folder: RunFolder, ending: Ending
) -> None:
    """Let programs attach until `ending` has a result."""
    loop = asyncio.get_running_loop()
    service = Service(members)
    coordinator = await asyncio.to_thread(spawn_coordinator, service)
    wanted = Address.parse(invocation.address)

    def stop(reason: str) -> None:
        loop.call_soon_threadsafe(_end, ending, 0, reason)

    logs = folder.log("service").parent
    door = Listener(service, coordinator, logs=logs, stop=stop, transport=wanted.scheme)
    protection = tls.server_context(invocation.tls) if invocation.tls else None
    address = await in_background(door.open(wanted, protection), "opening the door")
    try:
        metrics = _open_metrics(service, invocation.metrics_address())
    except OSError:
        await in_background(door.close("its metrics cannot be served"), "closing the door")
        raise
    at = "" if metrics is None else f"; metrics: {metrics.url}"
    print(f"serving {', '.join(members)} at {address}; logs: {logs}{at}", flush=True)
    try:
        while not ending.done():
            await asyncio.wait((ending,), timeout=1.0)
            if invocation.idle_timeout is not None and service.idle_seconds() > invocation.idle_timeout:
                _end(ending, 0, f"no client for {invocation.idle_timeout:g} s")
    finally:
        if metrics is not None:
            await asyncio.to_thread(metrics.close)
        reason = ending.result()[1] if ending.done() else "it failed"
        await in_background(door.close(reason), "closing the door")


def _open_metrics(service: Service, address: tuple[str, int] | None) -> MetricsPort | None:
    """Serve numbers to Prometheus. Raises OSError if the address cannot be used."""
    if address is None:
        return None

    def read() -> str:
        return in_background(prometheus(service), "numbers of the service").result(METRICS_TIMEOUT)

    return MetricsPort(*address, read)


def _end(ending: Ending, status: int, reason: str) -> None:
    if not ending.done():
        ending.set_result((status, reason))


async def _start(actors: Actors, config: RunConfig, *, has_generator: bool) -> dict[str, Member]:
    """Spawn the config's actors, by the names that clients ask for, and wait until they are ready."""
    generator = None  # on a shared GPU it starts last, because vLLM measures the free memory at its start
    if has_generator and not shares_gpu(config):
        generator = actors.spawn_generator()  # else first, because it takes longest
    trainer = actors.spawn_trainer()
    critic = actors.spawn_critic() if config.has_critic else None
    members: dict[str, Member] = {"trainer": ModelMember(trainer, await trainer.info())}
    if critic is not None:
        members["value_trainer"] = ModelMember(critic, await critic.info())
    if has_generator:
        generator = generator or actors.spawn_generator()
        await generator.ready()
        members["generator"] = GeneratorMember(generator)
    return members


def _ask(prog: str, argv: Sequence[str]) -> int:
    """Send `status`, `stop` or `logs`, print the answer, and return the exit status."""
    wants = argv[0]
    parser = argparse.ArgumentParser(
        prog=f"{prog} {wants}", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("address", nargs="?", default=DEFAULT_ADDRESS, help="of the service")
    parser.add_argument("--tls", default="", metavar="FOLDER", help="of the certificates, for an address tls://…")
    parser.add_argument("--timeout", type=float, default=ATTACH_TIMEOUT, help="seconds to wait for the answer")
    if wants == "logs":
        parser.add_argument("--lines", type=int, default=20, help="most lines from the end of each log")
    asked = parser.parse_args(argv[1:])
    question = {"wants": wants} | ({"lines": asked.lines} if wants == "logs" else {})
    try:
        answer = remote.ask(asked.address, question, certificates=asked.tls, timeout=asked.timeout)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    if wants == "logs":
        logs = answer["logs"]
        assert isinstance(logs, dict)
        for name, lines in logs.items():
            print(f"==> {name} <==", *lines, "", sep="\n")
    elif wants == "stop":
        print(f"the service at {asked.address} ends")
    else:
        print(json.dumps(answer["status"], indent=2))
    return 0
