"""Run the Tinker server, to which programs with the SDK `tinker` send their calls. The server runs until SIGINT or SIGTERM."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controllers.command import started_as
from controllers.observe.prometheus import address_of
from controllers.tinker_server.access import Access, is_loopback, read_keys
from controllers.tinker_server.config import ServeConfig
from controllers.tinker_server.routes import make_app
from controllers.tinker_server.start import claimed, start_server

API_KEY = "tml-local"
"""For clients of a server without keys: the SDK needs a key, and accepts this one."""
HEADER_SECONDS = 30.0
BODY_SECONDS = 300.0  # for a whole body: 32 MiB at 110 kB/s
MAX_HEADER_BYTES = 64 << 10
SHUTDOWN_SECONDS = 5  # for open connections to finish when the server stops


def main() -> None:
    """Serve until SIGINT or SIGTERM. Exits with one line and status 2 if the server cannot start."""
    prog = started_as("controllers.tinker_server")
    try:
        arguments = read_arguments(prog)
        asyncio.run(serve(arguments, listen(arguments.address)))
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


@dataclass(frozen=True, kw_only=True)
class Options:
    config: str | None = None
    """name of the config; None: the first"""
    address: str = "127.0.0.1:8000"
    """HOST:PORT to listen at; port 0: any free port"""
    state: Path | None = None
    """folder for the server's state; None: runs/serve-CONFIG"""
    serve_as: Annotated[str, tyro.conf.arg(metavar="NAME=DIRECTORY")] = ""
    """serve the model of a Hugging Face directory under the name NAME; a NAME without DIRECTORY renames the config's own model"""
    max_trainers: int | None = None
    """largest number of trainers in memory"""
    max_tenants: int | None = None
    """largest number of runs with adapters in one trainer"""
    max_answer_mib: float | None = None
    """size in MiB above which a request for samples is refused"""
    keep_parked_hours: float | None = None
    """hours for which the state of a run whose client is gone stays on disk"""
    max_parked_gib: float | None = None
    """size of the states of runs on disk above which those whose clients are gone are deleted, oldest first"""
    max_adapters: int | None = None
    """largest number of different adapters in a step of vLLM; 0: vLLM gets whole weights with adapters merged"""
    max_adapter_rank: int | None = None
    """largest rank of an adapter that vLLM applies; adapters of larger ranks are merged"""
    keys: Path | None = None
    """file of the allowed keys; each line has an owner and the SHA-256 of a key"""
    rate: float | None = None
    """training and sampling requests that one owner may send per second, in addition to a burst of 100"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    config: ServeConfig
    folder: Path  # of the server's state
    address: tuple[str, int]
    owners: Mapping[str, str] | None  # SHA-256 of a key -> owner; None: no check
    rate: float | None  # requests for work per second and owner; None: no limit


def read_arguments(prog: str, argv: Sequence[str] | None = None) -> Arguments:
    """Raises ValueError or OSError naming an invalid argument."""
    configs = import_module("configs").SERVERS
    names = ", ".join(configs)
    options = tyro.cli(Options, prog=prog, description=f"{__doc__} Configs: {names}.", args=argv)
    config_name = options.config or next(iter(configs))
    if config_name not in configs:
        raise ValueError(f"--config {config_name}; it must be one of {names}")
    config: ServeConfig = configs[config_name]()
    if options.serve_as:
        config.name, _, directory = options.serve_as.partition("=")
        config.hf_path = directory or config.hf_path
    for name in ("max_trainers", "max_tenants", "keep_parked_hours"):
        if (value := getattr(options, name)) is not None:
            setattr(config, name, value)
    for name in ("max_adapters", "max_adapter_rank"):
        if (value := getattr(options, name)) is not None:
            setattr(config.generator, name, value)
    if options.max_answer_mib is not None:
        config.max_answer_bytes = int(options.max_answer_mib * (1 << 20))
    if options.max_parked_gib is not None:
        config.max_parked_bytes = int(options.max_parked_gib * (1 << 30))
    if options.rate is not None and not options.rate > 0:
        raise ValueError(f"--rate {options.rate}; it must be positive")
    folder = options.state or Path("runs") / f"serve-{config_name}"
    return Arguments(
        config=config,
        folder=folder.absolute(),
        address=read_address(options.address, has_keys=options.keys is not None),
        owners=None if options.keys is None else read_keys(options.keys),
        rate=options.rate,
    )


def read_address(text: str, *, has_keys: bool) -> tuple[str, int]:
    """(host, port) of HOST:PORT. Raises ValueError for an address that is not loopback without keys."""
    try:
        host, port = address_of(text)
    except ValueError as error:
        raise ValueError(f"--address: {error}") from None
    if not is_loopback(host):
        if not has_keys:
            raise ValueError(f"--address {text}: other machines can reach it, so give --keys, or listen at 127.0.0.1")
        warning = f"warning: at {text} keys and data travel unencrypted; use a private network or a TLS proxy"
        print(warning, file=sys.stderr)
    return host, port


def listen(address: tuple[str, int]) -> socket.socket:
    """A bound socket. Raises OSError naming the address if it is taken."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only with IPPROTO_TCP; without it the kernel can delay a small answer
    # by 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return listener


class Connection(HttpToolsProtocol):
    """Limits that uvicorn lacks. MAX_HEADER_BYTES: of headers, trailers or chunk lengths."""

    _late: asyncio.TimerHandle | None = None  # set while a request is incomplete
    _in_headers = True
    _num_bytes = 0  # since the request or the last byte of its body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_end(HEADER_SECONDS)

    def _expect_end(self, seconds: float | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None if seconds is None else self.loop.call_later(seconds, self.transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:
            self._in_headers = True
            self._num_bytes = 0
            self._expect_end(HEADER_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else a trailer, which no route reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._expect_end(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        self._expect_end(None)
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_end(None)
        super().connection_lost(exc)


class HttpServer(uvicorn.Server):
    """Without uvicorn's signal handlers, which would end the process before the runs are written."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(arguments: Arguments, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises ValueError if another server holds the folder."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    with claimed(arguments.folder), (arguments.folder / "access.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        print(f"starting {arguments.config.name}; state in {arguments.folder}", file=sys.stderr, flush=True)
        starting = asyncio.create_task(start_server(arguments.config, arguments.folder))
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():  # the start takes a minute, and a signal ends it at once
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return
        server = starting.result()
        app = make_app(server)
        access = Access(app, owners=arguments.owners, rate=arguments.rate, log=log)
        app.state.counts = access.counts
        try:
            await _answer_until(stopped, access, listener)
        finally:
            print("stopping; writing the state of the training runs", file=sys.stderr, flush=True)
            await server.close()


async def _answer_until(stopped: asyncio.Task, access: Access, listener: socket.socket) -> None:
    http = HttpServer(
        uvicorn.Config(
            access,
            interface="asgi3",
            log_level="warning",
            access_log=False,
            http=Connection,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            backlog=4096,
        )
    )
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    greet(listener.getsockname()[:2], API_KEY if access.owners is None else "YOUR_KEY")
    await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
    http.should_exit = True
    await serving


def greet(address: tuple[str, int], key: str) -> None:
    """Print the environment variables for a client on stdout, and on stderr where the page is."""
    host, port = address
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"the page of this server: {url}/", file=sys.stderr, flush=True)
    print(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={key}", flush=True)
