"""Finds the network interface and address by which this machine reaches a host, without sending to
it.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's gloo listens on this interface


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
    """Environment that makes gloo listen on the interface that leads to a host. Raises OSError if
    none does.

    gloo's default is the address of this machine's name, often loopback. Empty if `environment`
    names an interface, or if the address is not the first IPv4 address of one.
    """
    if GLOO_INTERFACE in environment:
        return {}
    name = interface_of(address_towards(host, port))
    return {GLOO_INTERFACE: name} if name else {}
