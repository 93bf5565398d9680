"""The command line of the Tinker server, and its run until a signal ends it."""

import argparse
import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import uvicorn

from controllers.command import started_as
from controllers.serve.config import ServeConfig
from controllers.serve.routes import make_app
from controllers.serve.start import start_server

API_KEY = "tml-local"
"""A key that the SDK accepts, for a server without keys."""
SHUTDOWN_SECONDS = 5
"""Seconds that open connections have to end when the server stops."""


def main() -> None:
    """Serve until SIGINT or SIGTERM. Exits with 2 and one line if the server cannot start from these arguments."""
    prog = started_as("controllers.serve")
    try:
        config, folder, address = read_arguments(prog)
        listener = listen(address)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(serve(config, folder, listener))
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


def read_arguments(prog: str, argv: Sequence[str] | None = None) -> tuple[ServeConfig, Path, tuple[str, int]]:
    """(config, folder of the state, host and port). Raises ValueError naming an argument that is not possible."""
    configs = import_module("configs").SERVERS
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--config", choices=sorted(configs), default=next(iter(configs)), help="name of the config")
    parser.add_argument("--address", default="127.0.0.1:8000", help="HOST:PORT to listen at; port 0 takes a free one")
    parser.add_argument("--state", type=Path, help="folder of the state; default runs/serve-CONFIG")
    parser.add_argument(
        "--serve-as",
        metavar="NAME=DIRECTORY",
        default="",
        help="answer for the model NAME with a Hugging Face directory; a NAME without DIRECTORY renames the config's own model",
    )
    parser.add_argument("--max-trainers", type=int, help="largest number of training runs in memory")
    arguments = parser.parse_args(argv)
    config: ServeConfig = configs[arguments.config]()
    if arguments.serve_as:
        config.name, _, directory = arguments.serve_as.partition("=")
        config.hf_path = directory or config.hf_path
    if arguments.max_trainers is not None:
        config.max_trainers = arguments.max_trainers
    folder = arguments.state or Path("runs") / f"serve-{arguments.config}"
    return config, folder.absolute(), read_address(arguments.address)


def read_address(text: str) -> tuple[str, int]:
    """read_address("127.0.0.1:8000") -> ("127.0.0.1", 8000). Raises ValueError for an address that is not a loopback one."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--address {text!r}; it must be HOST:PORT")
    if not is_loopback(host):
        raise ValueError(
            f"--address {text}: the server has no keys yet, so it listens only at a loopback address such as 127.0.0.1"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket at the address. Raises OSError naming it if it is taken."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn, which here leaves signals to `serve`: it would end the process before the runs are written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: ServeConfig, folder: Path, listener: socket.socket) -> None:
    """Start the server, tell how to reach it, and serve until a signal."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    print(f"starting {config.name}; state in {folder}", file=sys.stderr, flush=True)
    server = await start_server(config, folder)
    try:
        http = HttpServer(
            uvicorn.Config(
                make_app(server),
                log_level="warning",
                access_log=False,
                timeout_keep_alive=120,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                backlog=4096,
            )
        )
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        stopped = asyncio.create_task(stopping.wait())
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"export TINKER_BASE_URL=http://{shown}:{port}\nexport TINKER_API_KEY={API_KEY}", flush=True)
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        stopped.cancel()
        await serving
    finally:
        print("stopping; the state of the training runs is written", file=sys.stderr, flush=True)
        await server.close()
