"""Files that a configuration names and that hold secrets: whether they are there, and who may read them.

The content is never read. Entry: `file_facts`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One file that a setting names."""

    setting: str
    """Dotted key of the setting."""
    path: str
    mode: int = 0
    """Permission bits."""
    size: int = 0
    is_readable: bool = False
    """Whether this process may read it."""
    is_own: bool = False
    """Whether it belongs to the user of this process."""
    error: str = ""
    """Why it cannot be looked at, in the system's words; or that it is no file."""

    @property
    def open_to_others(self) -> bool:
        """Whether other users may read or write it."""
        return bool(self.mode & 0o077)


def file_facts(setting: str, path: str) -> FileFacts:
    """Look at a file without reading it."""
    try:
        found = os.stat(path)
    except OSError as error:
        return FileFacts(setting=setting, path=path, error=error.strerror or str(error))
    return FileFacts(
        setting=setting,
        path=path,
        mode=stat.S_IMODE(found.st_mode),
        size=found.st_size,
        is_readable=os.access(path, os.R_OK),
        is_own=found.st_uid == os.getuid(),
        error="" if stat.S_ISREG(found.st_mode) else f"{Path(path).name} is no file",
    )
