"""Settings of the bucket whose values are in files, so that they are neither on a command line nor in the environment.

Entry: `with_secret_files`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from tidelog.runtime.errors import ConfigError
from tidelog.storage.settings import S3Settings

logger = logging.getLogger(__name__)

FILED: Final = ("access_key_id", "secret_access_key")
"""Settings of `[s3]` that may be in the file that `<name>_file` names."""


def with_secret_files(s3: S3Settings) -> S3Settings:
    """Return the settings with the values of their files. Warns of files that others can read. Raises `ConfigError`."""
    values = {}
    for name in FILED:
        file: str = getattr(s3, f"{name}_file")
        if not file:
            continue
        if getattr(s3, name):
            raise ConfigError(f"both s3.{name} and s3.{name}_file are set", hint="keep the file")
        values[name] = _read(Path(file), f"s3.{name}_file")
    return msgspec.structs.replace(s3, **values)


def _read(file: Path, key: str) -> str:
    """Return the file's text without surrounding white space."""
    try:
        text = file.read_text(encoding="utf-8").strip()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read {file}, which {key} names: {reason}", hint=f"check {key}") from error
    if not text or len(text.splitlines()) > 1:
        raise ConfigError(
            f"{file}, which {key} names, has {len(text.splitlines())} lines", hint="it holds the value on one line"
        )
    if mode & 0o077:
        extra = {"file": str(file), "mode": f"{mode & 0o777:o}", "setting": key}
        logger.warning("a file with a secret is open to other users: chmod 600", extra=extra)
    return text
