"""Mutual TLS with a private authority's certificates, for a service's port and for Monarch.

A folder of certificates has authority.pem, certificate.pem and key.pem.
"""

import os
import ssl
import stat
from pathlib import Path

from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

from rl_actors.processes.address import Address

AUTHORITY = "authority.pem"
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
MONARCH_VARIABLES = {"HYPERACTOR_TLS_CERT": CERTIFICATE, "HYPERACTOR_TLS_KEY": KEY, "HYPERACTOR_TLS_CA": AUTHORITY}
"""Where Monarch 0.7 reads the paths of its certificates; spawned processes inherit them."""


def require_files(folder: str) -> Path:
    """Raises ValueError naming a missing file, or a key that others can read."""
    path = Path(folder)
    for name in (AUTHORITY, CERTIFICATE, KEY):
        if not (path / name).is_file():
            raise ValueError(f"{path / name} does not exist; `make certificates` makes a folder of certificates")
    mode = (path / KEY).stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{path / KEY} can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it")
    return path


def server_context(folder: str) -> ssl.SSLContext:
    """Admits only programs with a certificate of the authority. Raises as require_files."""
    made = _context(ssl.PROTOCOL_TLS_SERVER, folder)
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def client_context(address: Address, folder: str) -> ssl.SSLContext | None:
    """None without TLS. Raises ValueError if only one of TLS and `folder` is given."""
    if address.tls != bool(folder):
        missing = "needs a folder of certificates" if address.tls else "is without TLS, but certificates were given"
        raise ValueError(f"{address} {missing}; see docs/service.md")
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder) if folder else None


def _context(protocol: int, folder: str) -> ssl.SSLContext:
    path = require_files(folder)
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        made.load_cert_chain(path / CERTIFICATE, path / KEY)
        made.load_verify_locations(path / AUTHORITY)
    except ssl.SSLError as error:
        raise ValueError(f"{path} has no usable certificates: {error}") from None
    return made


def use_for_monarch(folder: str) -> None:
    """Make Monarch use them here and in spawned processes. Call it before Monarch is used."""
    path = require_files(folder).absolute()
    for variable, name in MONARCH_VARIABLES.items():
        os.environ[variable] = str(path / name)
    reload_config_from_env()  # Monarch has read the environment at its import
