"""Addresses at which programs of a run listen. Depends on no actor."""

import ipaddress
import socket
from dataclasses import dataclass, replace
from urllib.parse import urlsplit


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
        """With the first IPv4 address of the host, or its first address, because Monarch would not
        try several.

        Raises ValueError if the host has no address.
        """
        found = resolve(self.host)
        return replace(self, host=next((each for each in found if ":" not in each), found[0]))

    def any_port(self) -> "Address":
        """With a port that the system chooses."""
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
