"""Addresses of a run's programs, and the interface that leads to one. Depends on no actor."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's gloo listens on this interface


@dataclass(frozen=True, slots=True)
class Address:
    """tcp://HOST:PORT, or tls://HOST:PORT with certificates."""

    host: str
    port: int  # 0: the system chooses
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises ValueError naming the text if it is not an address."""
        wanted = "it must be tcp://HOST:PORT, or tls://HOST:PORT with certificates"
        if not isinstance(text, str):
            raise ValueError(f"the address is {text!r}; {wanted}")
        try:
            parts = urlsplit(text)
            host = parts.hostname
            port = parts.port
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

    def numeric(self) -> "Address":
        """With one address of the host, IPv4 if it has one: Monarch would not try several.

        Raises ValueError if the host has no address.
        """
        found = resolve(self.host)
        return replace(self, host=next((each for each in found if ":" not in each), found[0]))

    def any_port(self) -> "Address":
        """The system chooses the port."""
        return replace(self, port=0)

    def is_loopback(self) -> bool:
        """True if only this machine can reach it. Raises ValueError if the host has no address."""
        return all(ipaddress.ip_address(found).is_loopback for found in resolve(self.host))


def resolve(host: str) -> list[str]:
    """The IP addresses of a host. Raises ValueError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host {host!r} has no address: {error}") from None
    # without the %interface of link-local IPv6 addresses
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def address_towards(host: str, port: int) -> str:
    """The address of the interface that leads to a host. Raises OSError if none does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # connect of UDP sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The interface whose first IPv4 address is `address`, "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def lead_gloo_to(host: str, port: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment that makes gloo listen on the interface that leads to a host, not at the address
    of this machine's name. Raises OSError if none does.

    Empty if `environment` names an interface, or the address is not the first IPv4 address of one.
    """
    if GLOO_INTERFACE in environment:
        return {}
    name = interface_of(address_towards(host, port))
    return {GLOO_INTERFACE: name} if name else {}
