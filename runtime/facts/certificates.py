"""Certificates that a configuration names: whether they can be used, and when they expire.

Entry: `certificate_facts`.
"""

from __future__ import annotations

import msgspec

from tidelog.runtime.errors import ConfigError
from tidelog.runtime.tls import TlsFiles, try_files


class CertificateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate with its key and authority, as a broker would load them."""

    section: str
    """Of the configuration: the settings are `tls_cert_file`, `tls_key_file` and `tls_ca_file` in it."""
    cert_file: str
    ca_file: str
    expires_ms: int = 0
    """When the certificate expires: milliseconds since the Unix epoch."""
    ca_expires_ms: int = 0
    """When the first of the authority's certificates does."""
    error: str = ""
    """Why they cannot be used together."""
    hint: str = ""


def certificate_facts(files: TlsFiles) -> CertificateFacts:
    """Load and try the files as a broker does when it starts."""
    facts = CertificateFacts(section=files.section, cert_file=str(files.cert_file), ca_file=str(files.ca_file))
    try:
        expiry = try_files(files)
    except ConfigError as error:
        return msgspec.structs.replace(facts, error=error.message, hint=error.hint or "")
    return msgspec.structs.replace(facts, expires_ms=expiry.certificate_ms, ca_expires_ms=expiry.authority_ms)
