"""Mutual TLS from three files: this process's certificate and key, and the authority that signs those of all peers.

Both sides of a connection show a certificate and check the other's: its chain up to the authority, its dates, its
purposes, and, where a connection is opened, that it names the host which was asked for. TLS 1.3 only: both sides are
this product.

`MutualTls` is made from files that were tried: the certificate has been shown to itself in both roles, so a wrong
authority, an expired certificate, or one that may not be used by clients is an error at the start and not at the first
connection. Files that change are read again for the connections that come later; files that do not fit are a problem,
and the ones before stay in use.

Invariants: never a context that accepts a peer without a certificate of the authority; an error names the setting and
the file; a key with a password is refused, and nobody is asked for it.

Entry: `TlsFiles`, `MutualTls`; `try_files` for tools.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""The files are looked at for changes at most once in this time."""
EXPIRY_WARNING_S: Final = 14 * 86_400
"""A certificate that is valid for less than this is a problem for the operator."""
_SELF: Final = "this-process"


class TlsFiles(NamedTuple):
    """Paths of PEM files, and the settings that named them."""

    cert_file: Path
    """The certificate of this process, then those between it and the authority, if any."""
    key_file: Path
    """Its private key, without a password."""
    ca_file: Path
    """Certificates of the authority, one or several."""
    section: str
    """Section of the configuration: the settings are `tls_cert_file`, `tls_key_file` and `tls_ca_file` in it."""
    check_host_names: bool = True
    """Whether the certificate of a listener must name the host that was asked for."""

    @classmethod
    def of(cls, section: str, cert: str, key: str, ca: str, *, check_host_names: bool) -> TlsFiles | None:
        """Return the files of these settings; None if all are empty. Raises `ConfigError` if only some are."""
        named = {"tls_cert_file": cert, "tls_key_file": key, "tls_ca_file": ca}
        missing = [f"{section}.{name}" for name, value in named.items() if not value]
        if len(missing) == len(named):
            return None
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, and others of TLS are",
                hint=f"set {section}.tls_cert_file, tls_key_file and tls_ca_file, or none of them",
            )
        return cls(Path(cert), Path(key), Path(ca), section, check_host_names)


class _Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext
    expires_at_s: float
    """When this process's certificate expires: seconds since the Unix epoch."""


class MutualTls:
    """Contexts for both sides of a connection, made from files."""

    def __init__(self, files: TlsFiles, clock: Clock) -> None:
        """Read and try the files. Raises `ConfigError`."""
        self.files = files
        self._clock = clock
        self._seen = _versions(files)
        self._contexts = _load(files)
        self._looked_at = clock.monotonic()
        self._problem = ""
        self.is_key_exposed = _is_open_to_others(files.key_file)
        if self.is_key_exposed:
            extra = {"file": str(files.key_file)}
            logger.warning("the private key for TLS can be read by other users: chmod 600", extra=extra)

    def server(self) -> ssl.SSLContext:
        """Return the context for connections that are accepted now."""
        self._look()
        return self._contexts.server

    def client(self) -> ssl.SSLContext:
        """Return the context for connections that are opened now."""
        self._look()
        return self._contexts.client

    def certificate_left_s(self) -> float:
        """Return the time until this process's certificate expires; below 0 it has."""
        self._look()
        return self._contexts.expires_at_s - self._clock.time_ms() / 1000

    def problems(self) -> list[str]:
        """Return what an operator has to see to, one sentence each."""
        left_s = self.certificate_left_s()
        files = self.files
        found = [self._problem] if self._problem else []
        if left_s <= 0:
            found.append(f"the certificate {files.cert_file} has expired: no new connection is accepted with it")
        elif left_s < EXPIRY_WARNING_S:
            found.append(f"the certificate {files.cert_file} expires in {left_s / 86_400:.1f} days: replace the file")
        if self.is_key_exposed:
            found.append(f"the private key {files.key_file} can be read by other users: chmod 600")
        return found

    def _look(self) -> None:
        """Read the files again if they have changed. Files that do not fit yet are tried again when they change."""
        now = self._clock.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self.is_key_exposed = _is_open_to_others(self.files.key_file)
        versions = _versions(self.files)
        if versions == self._seen:
            return
        self._seen = versions
        try:
            self._contexts = _load(self.files)
        except ConfigError as error:
            self._problem = f"changed files for TLS are not used, the ones before are: {error}"
            logger.error("changed files for TLS cannot be used", extra={"error": str(error)})
            return
        self._problem = ""
        logger.info("the files for TLS have changed, and are used from now on", extra=_names(self.files))


def _names(files: TlsFiles) -> dict[str, str]:
    return {"cert": str(files.cert_file), "key": str(files.key_file), "ca": str(files.ca_file)}


def _versions(files: TlsFiles) -> tuple[tuple[int, int, int] | None, ...]:
    """Return what changes when a file is replaced or rewritten."""
    found: list[tuple[int, int, int] | None] = []
    for path in (files.cert_file, files.key_file, files.ca_file):
        try:
            state = os.stat(path)
        except OSError:
            found.append(None)
            continue
        found.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)


def _is_open_to_others(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False


class TlsExpiry(NamedTuple):
    """When the certificates of usable files expire: milliseconds since the Unix epoch."""

    certificate_ms: int
    authority_ms: int
    """The first of the authority's certificates; 0: not known."""


def try_files(files: TlsFiles) -> TlsExpiry:
    """Try files as `MutualTls` does, for somebody who only looks. Raises `ConfigError`."""
    contexts = _load(files)
    ends = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in contexts.client.get_ca_certs()]
    return TlsExpiry(int(contexts.expires_at_s * 1000), min(ends, default=0) * 1000)


# --- reading and trying the files --------------------------------------------------------------------------------


def _load(files: TlsFiles) -> _Contexts:
    for name in ("cert_file", "key_file", "ca_file"):
        _check_readable(f"{files.section}.tls_{name}", getattr(files, name))
    server = _context(files, ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0  # a resumed session would not show its certificate again
    client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
    shown = _try(files, server, client)
    client.check_hostname = files.check_host_names
    return _Contexts(server, client, shown)


def _check_readable(setting: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            begin = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", hint="check its path and mode") from error
    if b"-----BEGIN " not in begin:
        raise ConfigError(f"{setting}: {path} is not a PEM file", hint="it begins with -----BEGIN ...-----")


def _no_password() -> str:
    raise ConfigError("the key has a password", hint="store it without one, readable by its owner only")


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    """Return a context with all three files. `check_hostname` is off."""
    section = files.section
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=files.ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{section}.tls_ca_file: {files.ca_file} holds no usable certificate: {tls_reason(error)}",
            hint="it must have the certificate of the authority that signed those of all brokers",
        ) from error
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password=_no_password)
    except ConfigError as error:
        raise ConfigError(f"{section}.tls_key_file: {files.key_file}: {error.message}", hint=error.hint) from error
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{section}.tls_cert_file {files.cert_file} and tls_key_file {files.key_file} cannot be used together:"
            f" {tls_reason(error)}",
            hint="the first must begin with this broker's certificate, and the second have the key that belongs to it",
        ) from error
    return context


def _try(files: TlsFiles, server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Let both contexts shake hands with each other, in memory; return when the certificate expires."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server, server_hostname=_SELF)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        _step(files, client_side.do_handshake, "a client of it")
        _step(files, server_side.do_handshake, "a listener")
    shown = client_side.getpeercert()
    assert shown is not None, "the handshake is complete"
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _step(files: TlsFiles, do_handshake: Callable[[], None], judge: str) -> None:
    try:
        do_handshake()
    except ssl.SSLWantReadError:
        return
    except ssl.SSLError as error:
        raise ConfigError(
            f"{files.section}.tls_cert_file: {judge} that trusts {files.ca_file} refuses the certificate"
            f" {files.cert_file}: {tls_reason(error)}",
            hint="it must be signed by an authority in tls_ca_file, be valid now, and allow both TLS server and TLS"
            " client authentication",
        ) from error


def tls_reason(error: Exception) -> str:
    """Return what an error of TLS says, without the names of the library's files."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error) or type(error).__name__
