"""Authorities and certificates for tests of TLS.

Entry: `Authority`.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tidelog.runtime.tls import TlsFiles

BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
SERVER_ONLY = (ExtendedKeyUsageOID.SERVER_AUTH,)
DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for host in hosts:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            found.append(x509.DNSName(host))
    return found


class Authority:
    """Signs certificates, which it writes below a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._now = datetime.datetime.now(datetime.UTC)
        certificate = (
            self._builder(self._name, self._key.public_key(), self._now - DAY, self._now + 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(_key_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = directory / f"{name}-ca.pem"
        self.ca_file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: Any, begins: datetime.datetime, ends: datetime.datetime
    ) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        return builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)

    def issue(
        self,
        name: str,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        begins_days: float = -1,
        days: float = 30,
        usages: Sequence[x509.ObjectIdentifier] = BOTH,
        password: bytes = b"",
        check_host_names: bool = True,
    ) -> TlsFiles:
        """Write the certificate and key of `name`; another one of the same name replaces them.

        It is valid from `begins_days` days from now until `days` days from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        begins, ends = self._now + begins_days * DAY, self._now + days * DAY
        certificate = (
            self._builder(_name(name), key.public_key(), begins, ends)
            .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        cert_file, key_file = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        encryption = BestAvailableEncryption(password) if password else NoEncryption()
        cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        key_file.chmod(0o600)
        return TlsFiles(cert_file, key_file, self.ca_file, "replication", check_host_names)


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
