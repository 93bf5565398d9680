"""The lines of JSON that a client and a service exchange before either of them unpickles anything."""

import importlib.metadata
import json
import platform
import socket

import torch

import rl_actors

PROTOCOL = "rl-actors service 1"
"""Value of the field `protocol` of every message."""
MAX_LINE_BYTES = 1 << 20  # of a line of JSON that is read

Message = dict[str, object]


def versions() -> dict[str, str]:
    """Versions that client and service must share, because they exchange pickled objects."""
    major, minor, _ = platform.python_version_tuple()
    return {
        "rl_actors": rl_actors.__version__,
        # Without +cpu or +cu130: all builds of a version can unpickle each other's objects.
        "torch": torch.__version__.partition("+")[0],
        "torchmonarch": importlib.metadata.version("torchmonarch"),
        "python": f"{major}.{minor}",
    }


def mismatch(of_service: dict[str, str], of_client: object) -> str:
    """The first difference, such as "the service has torch 2.13.0, the client 2.12.0", or ""."""
    if not isinstance(of_client, dict):
        return f"the service has {of_service}, the client sent no versions"
    for name, version in of_service.items():
        if of_client.get(name) != version:
            return f"the service has {name} {version}, the client {of_client.get(name, 'sent none')}"
    return ""


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError if the line is not from a service or its client."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        raise ValueError(f"the other program sent {line[:60]!r}") from None
    if not isinstance(message, dict) or message.get("protocol") != PROTOCOL:
        raise ValueError(f"the other program sent {line[:60]!r}")
    return message


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone; with unacknowledged bytes only
    after a quarter of an hour.

    Linux then sends no keepalive probes, but repeats the bytes until it gives up (tcp_retries2).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
