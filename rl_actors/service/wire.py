"""Addresses of a service, and the lines of JSON that a client and a service exchange before anything is unpickled. Knows no actors."""

import importlib.metadata
import ipaddress
import json
import platform
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch

import rl_actors

PROTOCOL = "rl-actors service 1"
"""First field of every greeting. A program that answers anything else is no service of this kind."""

MAX_LINE_BYTES = 1 << 20
"""Longest line of JSON that is read."""

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port at which a service listens: tcp://127.0.0.1:4400, or tls://host:4400 with certificates."""

    host: str
    port: int  # 0: the system chooses one
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises ValueError naming the text if it is not an address."""
        wanted = "it must be tcp://HOST:PORT, or tls://HOST:PORT with certificates"
        if not isinstance(text, str):
            raise ValueError(f"the address is {text!r}; {wanted}")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"the address is {text!r}: {error}; {wanted}") from None
        if parts.scheme not in ("tcp", "tls") or not host or port is None or parts.path.strip("/"):
            raise ValueError(f"the address is {text!r}; {wanted}")
        return cls(host=host, port=port, tls=parts.scheme == "tls")

    @property
    def scheme(self) -> str:
        return "tls" if self.tls else "tcp"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def for_monarch(self) -> str:
        """Monarch's transport on the same interface, at a port that the system chooses. Raises ValueError if the host has no address."""
        found = resolve(self.host)
        host = next(
            (each for each in found if ":" not in each), f"[{found[0]}]"
        )  # Monarch does not try several addresses
        return f"{self.scheme}://{host}:0"

    def is_loopback(self) -> bool:
        """True if only programs of this machine can reach the address. Raises ValueError if the host has no address."""
        return all(ipaddress.ip_address(found).is_loopback for found in resolve(self.host))


def resolve(host: str) -> list[str]:
    """The addresses of a host, as numbers. Raises ValueError naming the host if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host {host!r} has no address: {error}") from None
    # A link-local address of IPv6 carries its interface after a percent sign.
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def versions() -> dict[str, str]:
    """Versions that a client and its service must share, because they send each other pickled objects."""
    major, minor, _ = platform.python_version_tuple()
    return {
        "rl_actors": rl_actors.__version__,
        "torch": torch.__version__.partition("+")[0],  # a CPU build and a CUDA build understand each other
        "torchmonarch": importlib.metadata.version("torchmonarch"),
        "python": f"{major}.{minor}",
    }


def mismatch(own: dict[str, str], other: object) -> str:
    """The first difference between two answers of `versions`, as "torch 2.13.0 here, 2.12.0 there". Empty if there is none."""
    if not isinstance(other, dict):
        return f"versions {own} here, none there"
    for name, version in own.items():
        if other.get(name) != version:
            return f"{name} {version} here, {other.get(name, 'none')} there"
    return ""


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError if the line is not one of a service or its client."""
    try:
        message = json.loads(line)
    except ValueError:
        raise ValueError(f"it sent {line[:60]!r}") from None
    if not isinstance(message, dict) or message.get("protocol") != PROTOCOL:
        raise ValueError(f"it sent {line[:60]!r}")
    return message


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone, although it could not close the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
