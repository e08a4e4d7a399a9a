"""The file with the cluster's secret, random nonces, and the tokens of the admin HTTP that follow from the secret.

Invariants: a file that others than its owner can read is refused; no token reveals the secret, or the other token.

Entry: `read_secret`, `write_secret`, `new_nonce`, `admin_token`, `read_token`.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Final

from tidelog.controller.rpc.handshake import NONCE_BYTES
from tidelog.runtime.errors import ConfigError

MIN_SECRET_BYTES: Final = 16
ADMIN_TOKEN_PURPOSE: Final = b"tidelog admin http token 1"
"""Distinct from the purposes of the handshake, so that neither can stand for the other."""
READ_TOKEN_PURPOSE: Final = b"tidelog read token 1"


def read_secret(path: Path) -> bytes:
    """Read the cluster's secret from its file, without surrounding white space. Raises `ConfigError`."""
    try:
        secret = path.read_bytes().strip()
        readable_by_others = path.stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(
            f"cannot read the cluster secret {path}: {error.strerror}", hint="set controller.secret_file"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the cluster secret in {path} has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed",
            hint="generate one with `openssl rand -hex 32`",
        )
    if readable_by_others:
        raise ConfigError(f"the cluster secret {path} can be read by others", hint=f"chmod 600 {path}")
    return secret


def write_secret(path: Path) -> None:
    """Generate a secret and store it, readable by the owner only. An existing file is kept."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "wb") as file:
        file.write(os.urandom(32).hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def new_nonce() -> bytes:
    """Return random bytes for one handshake."""
    return os.urandom(NONCE_BYTES)


def admin_token(secret: bytes) -> str:
    """Return the bearer token that proves the secret to the admin HTTP: an HMAC of the secret, in hexadecimal."""
    return hmac.digest(secret, ADMIN_TOKEN_PURPOSE, "sha256").hex()


def read_token(secret: bytes) -> str:
    """Return the bearer token with which readers take leases and look up objects, and may do nothing else."""
    return hmac.digest(secret, READ_TOKEN_PURPOSE, "sha256").hex()
