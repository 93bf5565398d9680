"""Writes numbers as the text that Prometheus reads, and serves the text at a port."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 10.0
"""Largest number of seconds for which a reader of the metrics may pause while it sends its request. The reader then has
the same number of seconds to take the whole answer."""

Labels = tuple[tuple[str, str], ...]
"""(name, value) of each label of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric of Prometheus: all numbers that share a name. It is a counter if the name ends in _total, otherwise a gauge."""

    name: str
    about: str = ""  # one line that explains the numbers
    numbers: Mapping[Labels, float] = field(default_factory=dict)

    def metric(self) -> Metric:
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        labels = [name for name, _ in next(iter(self.numbers), ())]
        metric = kind(self.name, self.about, labels=labels)
        for key, number in self.numbers.items():
            metric.add_metric([value for _, value in key], number)
        return metric


def text(families: Iterable[Family]) -> str:
    """The text of several metrics, in the format that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector([family.metric() for family in families]))
    return generate_latest(registry).decode()


class _Collector(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics


class MetricsPort:
    """Answers `GET /metrics` at one address until `close`, on threads of its own."""

    def __init__(self, host: str, port: int, read: Callable[[], str]) -> None:
        """port: 0 stands for any free port. read: function that returns the text. Every request has its own thread,
        which calls `read`.

        Raises OSError, naming the address, if the port cannot be opened.
        """
        server_class = type("Server", (_Server,), {"address_family": _family(host)})
        try:
            self._server = server_class((host, port), read)
        except OSError as error:
            raise OSError(
                error.errno, f"metrics cannot be served at {host}:{port}: {error.strerror or error}"
            ) from None
        self.url = f"http://{_bracketed(host)}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics_port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], read: Callable[[], str]) -> None:
        self.read = read
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
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
    """The host and the port in a text such as "127.0.0.1:9090" or "[::1]:9090".

    Raises ValueError, naming the text, if it has another form.
    """
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT with a port from 0 to 65535")
    return host, int(port)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
