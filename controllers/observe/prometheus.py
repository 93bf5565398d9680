"""Writes numbers as the text that Prometheus reads, and serves the text at a port."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 10.0
"""Seconds in which a reader must send its request, and then take the answer."""

Labels = tuple[tuple[str, str], ...]
"""(name, value) of each label of a number."""


@dataclass(eq=False, slots=True, kw_only=True)
class Family(Collector):
    """All numbers that share a name: a counter if the name ends in _total, otherwise a gauge."""

    name: str
    about: str = ""  # one line that explains the numbers
    numbers: Mapping[Labels, float] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        labels = [name for name, _ in next(iter(self.numbers), ())]
        metric = kind(self.name, self.about, labels=labels)
        for key, number in self.numbers.items():
            metric.add_metric([value for _, value in key], number)
        yield metric


def text(families: Iterable[Family]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    for family in families:
        registry.register(family)
    return generate_latest(registry).decode()


class MetricsPort(ThreadingHTTPServer):
    """Answers `GET /metrics` at one address until `close`, on threads of its own."""

    daemon_threads = True

    def __init__(self, host: str, port: int, read: Callable[[], str]) -> None:
        """port: 0 is any free one. read: returns the text; called on a thread for each request.

        Raises OSError, naming the address, if the port cannot be opened.
        """
        self.read = read
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            text = f"metrics cannot be served at {host}:{port}: {error.strerror or error}"
            raise OSError(error.errno, text) from None
        bracketed = f"[{host}]" if ":" in host else host
        self.url = f"http://{bracketed}:{self.server_port}/metrics"
        threading.Thread(target=self.serve_forever, name="metrics_port", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsPort
    timeout = REQUEST_TIMEOUT

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the only page is /metrics")
            return
        try:
            body = self.server.read().encode()
        except Exception as error:
            logger.warning("the metrics could not be read", exc_info=error)
            self.send_error(503, "the metrics could not be read; the log of the service says why")
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        logger.debug(format, *arguments)


def address_of(value: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:9090" or "[::1]:9090". Raises ValueError naming another text."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT with a port from 0 to 65535")
    return host, int(port)
