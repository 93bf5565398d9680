"""Makes the TLS certificates of a service and its clients, or of a run on several hosts: a private certificate authority, and one
certificate for all machines.

python scripts/certificates.py certificates --host gpu-1 --host 10.0.0.5

This command writes the folder `certificates`. Copy the folder, without its subfolder `authority`, to every machine, over a connection that
you trust. A person who has the folder can run code in the service or on the hosts. If you run the command again, it makes a new certificate
of the same authority, for the hosts that the new command names.
"""

import argparse
import datetime
import ipaddress
import os
import socket
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ALWAYS = ("localhost", "127.0.0.1", "::1")  # hosts that every certificate names
BACKDATED = datetime.timedelta(hours=1)  # validity begins this long before now, because machines' clocks differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the certificates; it is made if it does not exist")
    parser.add_argument("--host", action="append", default=[], help="name or address of a machine; may be repeated")
    parser.add_argument(
        "--days", type=int, default=365, help="number of days for which the certificate is valid (default: 365)"
    )
    given = parser.parse_args()
    if given.days < 1:
        parser.error(f"--days {given.days}; it must be at least 1")
    hosts = list(dict.fromkeys([*ALWAYS, socket.gethostname(), *given.host]))
    hosts = list(dict.fromkeys([*hosts, *(address for host in given.host for address in _addresses(host))]))
    try:
        make(given.folder, hosts, days=given.days)
    except OSError as error:
        sys.exit(f"error: {error}")
    print(f"{given.folder}: a certificate for {', '.join(hosts)}, valid for {given.days} days")


def make(folder: Path, hosts: list[str], *, days: int) -> None:
    """Write the authority's certificate (authority.pem), the certificate for the hosts (certificate.pem) and its key (key.pem).

    The authority's own key is in the subfolder `authority`. If this key exists already, the authority stays the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "authority" / "key.pem"
    if not secret.exists():
        secret.parent.mkdir(mode=0o700, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(secret, key)
        (folder / "authority.pem").write_bytes(_pem(_authority(key, days=10 * 365)))
    authority_key = serialization.load_pem_private_key(secret.read_bytes(), password=None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    authority = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(key, authority_key, authority.subject, hosts, days=days)
    _write_key(folder / "key.pem", key)
    (folder / "certificate.pem").write_bytes(_pem(certificate))


def _authority(key: ec.EllipticCurvePrivateKey, *, days: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rl-actors private authority")])
    usage = _usage(certifies=True)
    return (
        _builder(name, name, key, days=days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    hosts: list[str],
    *,
    days: int,
) -> x509.Certificate:
    """A certificate for these hosts. Both the server and the client of a connection can show this certificate."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rl-actors")])
    of_authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    both_sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        _builder(name, issuer, key, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certifies=False), critical=True)
        .add_extension(both_sides, critical=False)
        .add_extension(of_authority, critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, certifies: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certifies,
        crl_sign=certifies,
        encipher_only=False,
        decipher_only=False,
    )


def _addresses(host: str) -> list[str]:
    """The addresses of a host; an empty list if this machine cannot resolve the host's name.

    The certificate needs addresses, because Monarch connects to addresses and not to names.
    """
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key into a new file. From the moment the file exists, only its owner can read it."""
    path.unlink(missing_ok=True)
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(plain)


if __name__ == "__main__":
    main()
