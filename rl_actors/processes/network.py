"""Finds the network interface and the address by which this machine reaches another host. This module sends nothing to the host."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's gloo listens on the network interface that this variable names


def address_towards(host: str, port: int) -> str:
    """The address of this machine's network interface that leads to a host.

    Raises OSError if no interface leads there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # for UDP, connect only chooses the local address and sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface whose first IPv4 address is `address`. Empty if no interface has this address."""
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
    """Environment variables that make gloo listen on the interface that leads to a host.

    By default gloo listens at the address to which this machine's name resolves. This address is often loopback, which
    other hosts cannot reach. The result is empty if `environment` names an interface already. The result is also empty if
    the address towards the host is not the first IPv4 address of any interface, for example if it is an IPv6 address.
    Raises OSError if no interface leads to the host.
    """
    if GLOO_INTERFACE in environment:
        return {}
    name = interface_of(address_towards(host, port))
    return {GLOO_INTERFACE: name} if name else {}
