"""A service that owns the trainer and the generator of a config. Other programs attach to them, call them, and detach.

The service runs no training loop. These commands start a service and ask for its status:

python -m controllers.service --config tiny --address tcp://127.0.0.1:4400
python -m controllers.service status tcp://127.0.0.1:4400

To attach, a program calls TrainerClient.attach("tcp://127.0.0.1:4400") or GeneratorClient.attach(…). If the config has a value model (PPO),
the service also owns this model, and a program calls ValueTrainerClient.attach(…). See docs/service.md.
"""

import argparse
import asyncio
import contextlib
import json
import logging
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
from controllers.service.coordinator import spawn_coordinator
from controllers.service.door import Listener
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
DEFAULT_METRICS = "127.0.0.1:0"
METRICS_TIMEOUT = 5.0
"""For the service to collect its numbers for Prometheus."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command-line options that only a service has."""

    address: Address
    certificates: str  # folder; empty: no TLS
    idle_timeout: float | None  # seconds without a client until the service ends; None: no limit
    has_generator: bool
    metrics: tuple[str, int] | None  # host and port for Prometheus; None: none


def main() -> None:
    """Start a service, or send `status`, `logs` or `stop` to a running one."""
    prog = started_as(PROGRAM)
    argv = sys.argv[1:]
    if argv and argv[0] in ("status", "stop", "logs"):
        sys.exit(_ask(prog, argv))
    own, rest = _parser(prog).parse_known_args(argv)
    if own.help:
        print(_parser(prog).format_help())
        rest = ["--help", *rest]
    invocation = cli.parse(prog, _configs(), _config_flags(own, rest))
    try:
        has_generator = invocation.config.has_generator and not own.without_generator
        options = _options(own, has_generator=has_generator)
        _require_servable(invocation, options)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    status = _serve(invocation, options)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        shutdown_context().get(timeout=SHUTDOWN_TIMEOUT)
    sys.exit(status)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a service that owns the trainer and the generator of a config. Other programs attach to them, call them, and detach.",
        epilog=f"To ask or stop a running service: {prog} status|logs|stop ADDRESS\nAll other options, such as the fields of the config, are below.",
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", help="name of a config, or a file of JSON, YAML or TOML (default: tiny)")
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        help=f"tcp://HOST:PORT; port 0: any free port (default: {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--tls", default="", metavar="FOLDER", help="folder of the certificates; --address must then begin with tls://"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve without TLS at an address that other machines can reach; everyone on these machines can then run code as you",
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        metavar="SECONDS",
        help="end the service after this time without a client (default: never)",
    )
    parser.add_argument(
        "--metrics",
        default=DEFAULT_METRICS,
        metavar="HOST:PORT",
        help=f"address at which Prometheus reads numbers, without a password; port 0: any free port; none: no numbers are served "
        f"(default: {DEFAULT_METRICS})",
    )
    parser.add_argument("--without-generator", action="store_true", help="do not start the generator")
    return parser


def _configs() -> cli.Configs:
    """By name. Only PPO's have a value model."""
    by_loop = import_module("configs").CONFIGS
    return by_loop["controllers.grpo"] | by_loop["controllers.ppo"]


def _config_flags(own: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    return ([] if own.config is None else ["--config", own.config]) + list(rest)


def _options(own: argparse.Namespace, *, has_generator: bool) -> Options:
    """Raises ValueError for a wrong option, a --tls that does not fit, or a reachable address
    without TLS and --insecure.
    """
    address = Address.parse(own.address)
    if address.tls != bool(own.tls):
        raise ValueError(
            f"--address {address} needs --tls FOLDER"
            if address.tls
            else f"--tls needs an address tls://…, not {address}"
        )
    if own.tls:
        tls.require_files(own.tls)
    elif not address.is_loopback() and not own.insecure:
        raise ValueError(
            f"--address {address} is reachable from other machines, and without TLS everyone on them can run code as you; use --tls FOLDER "
            "with tls://, a loopback address, or --insecure on a private network"
        )
    if own.idle_timeout is not None and own.idle_timeout <= 0:
        raise ValueError(f"--idle-timeout {own.idle_timeout:g}; it must be positive")
    try:
        metrics = None if own.metrics == "none" else address_of(own.metrics)
    except ValueError as error:
        raise ValueError(f"--metrics: {error}") from None
    return Options(
        address=address,
        certificates=own.tls,
        idle_timeout=own.idle_timeout,
        has_generator=has_generator,
        metrics=metrics,
    )


def _require_servable(invocation: cli.Invocation, options: Options) -> None:
    """Raises ValueError if a service cannot serve this config, or for --resume and --eval-only."""
    config = invocation.config
    if invocation.resume or invocation.eval_only:
        raise ValueError(
            "a service neither resumes nor evaluates a run, so leave out --resume and --eval-only; to load a checkpoint, a client calls load_checkpoint"
        )
    if config.alphabet == "auto":
        raise ValueError(
            "alphabet='auto' takes the characters of a task, but a service has no task; name the characters, as in --alphabet 0123456789+="
        )
    validation.require_gpus(config.trainer)
    if options.has_generator:
        validation.require_gpu(config.generator)


def _serve(invocation: cli.Invocation, options: Options) -> int:
    """Serve until a signal, `stop` or the idle timeout. Returns the exit status."""
    folder = RunFolder(_folder(invocation))
    folder.path.mkdir(parents=True, exist_ok=True)
    route_logs(folder.log("service"), label="service", verbose=invocation.verbose)
    if invocation.config.alphabet:
        build_character_tokenizer(folder.path / "tokenizer", invocation.config.alphabet)
    prepare_this_process()
    if options.certificates:
        tls.use_for_monarch(options.certificates)
    enable_transport(str(options.address.numeric().any_port()))
    context()
    try:
        return asyncio.run(_run(invocation, options, folder))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _folder(invocation: cli.Invocation) -> Path:
    """--output-dir, or runs/service-<time>-<pid>."""
    path = invocation.output_dir
    is_default = path.parent == Path("runs") and path.name.startswith(f"{invocation.config_name}-")
    return Path("runs") / f"service-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}" if is_default else path


async def _run(invocation: cli.Invocation, options: Options, folder: RunFolder) -> int:
    """Start the actors, serve until the service must end, close them, and return the exit status."""
    # (exit status, reason), set when the service must end
    ending: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    _watch_signals(ending)
    actors = Actors(invocation.config, folder, verbose=invocation.verbose)
    try:
        starting = asyncio.ensure_future(_start(actors, invocation.config, has_generator=options.has_generator))
        await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            starting.cancel()
        else:
            await _keep_door_open(starting.result(), options, folder, ending)
    finally:
        await actors.close()
    status, reason = ending.result()
    print(f"the service ends: {reason}", flush=True)
    return status


async def _keep_door_open(
    members: dict[str, Member],
    options: Options,
    folder: RunFolder,
    ending: "asyncio.Future[tuple[int, str]]",
) -> None:
    """Let programs attach at options.address until `ending` has a result."""
    loop = asyncio.get_running_loop()
    service = Service(members)
    coordinator = await asyncio.to_thread(spawn_coordinator, service)

    def stop(reason: str) -> None:
        loop.call_soon_threadsafe(_end, ending, 0, reason)

    logs = folder.log("service").parent
    door = Listener(service, coordinator, logs=logs, stop=stop, transport=options.address.scheme)
    protection = tls.server_context(options.certificates) if options.certificates else None
    address = await in_background(door.open(options.address, protection), "opening the door")
    try:
        metrics = _open_metrics(service, options.metrics)
    except OSError:
        await in_background(door.close("its metrics cannot be served"), "closing the door")
        raise
    at = "" if metrics is None else f"; metrics: {metrics.url}"
    print(f"serving {', '.join(members)} at {address}; logs: {logs}{at}", flush=True)
    try:
        while not ending.done():
            await asyncio.wait((ending,), timeout=1.0)
            if options.idle_timeout is not None and service.idle_seconds() > options.idle_timeout:
                _end(ending, 0, f"no client for {options.idle_timeout:g} s")
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
        return prometheus(in_background(service.numbers(), "numbers of the service").result(METRICS_TIMEOUT))

    return MetricsPort(*address, read)


def _watch_signals(ending: "asyncio.Future[tuple[int, str]]") -> None:
    """The first Ctrl-C or SIGTERM ends the service."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, ending, 128 + number, number.name)


def _end(ending: "asyncio.Future[tuple[int, str]]", status: int, reason: str) -> None:
    if not ending.done():
        ending.set_result((status, reason))


async def _start(actors: Actors, config: RunConfig, *, has_generator: bool) -> dict[str, Member]:
    """Spawn the config's actors, by the names that clients ask for, and wait until they are ready.

    On a shared GPU the trainer starts first, because vLLM measures the free memory at its start.
    """
    generator = None
    if has_generator and not shares_gpu(config):
        generator = actors.spawn_generator()  # first, because it takes longest
    trainer = actors.spawn_trainer()
    critic = actors.spawn_critic() if config.has_critic else None
    infos = await trainer.info()
    members: dict[str, Member] = {"trainer": ModelMember(trainer, infos)}
    if critic is not None:
        members["value_trainer"] = ModelMember(critic, await critic.info())
    if has_generator:
        generator = generator or actors.spawn_generator()
        await generator.ready()
        members["generator"] = GeneratorMember(generator)
    return members


def _ask(prog: str, argv: Sequence[str]) -> int:
    """Send `status`, `stop` or `logs`, print the answer, and return the exit status."""
    parser = argparse.ArgumentParser(prog=f"{prog} {argv[0]}", allow_abbrev=False)
    parser.add_argument(
        "address", nargs="?", default=DEFAULT_ADDRESS, help=f"address of the service (default: {DEFAULT_ADDRESS})"
    )
    parser.add_argument(
        "--tls", default="", metavar="FOLDER", help="folder of the certificates, for an address tls://…"
    )
    parser.add_argument(
        "--timeout", type=float, default=ATTACH_TIMEOUT, help="seconds to wait for the answer (default: %(default)g)"
    )
    if argv[0] == "logs":
        parser.add_argument(
            "--lines",
            type=int,
            default=20,
            help="print at most this many lines from the end of each log (default: %(default)s)",
        )
    asked = parser.parse_args(argv[1:])
    question = {"wants": argv[0]} | ({"lines": asked.lines} if argv[0] == "logs" else {})
    try:
        answer = remote.ask(asked.address, question, certificates=asked.tls, timeout=asked.timeout)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    if argv[0] == "logs":
        logs = answer["logs"]
        assert isinstance(logs, dict)
        for name, lines in logs.items():
            print(f"==> {name} <==", *lines, "", sep="\n")
    elif argv[0] == "stop":
        print(f"the service at {asked.address} ends")
    else:
        print(json.dumps(answer["status"], indent=2))
    return 0
