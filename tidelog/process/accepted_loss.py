"""The acceptance of a WAL's loss, as a file of the data directory: written by the command line, used by the next start.

    DIR/accept-loss    one line: the loss as `BROKER.EPOCH`, as the refused start printed it

A broker that was refused has no admin HTTP, and its controller may be in the same process; so the command line cannot
reach them. The broker compares the line with the loss that the controllers know, records the loss in the metadata, and
removes the file (`tidelog.broker.wal_keeper`).

Entry: `accept`, `read_accepted`, `forget`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tidelog.runtime.errors import InvalidInput, NotFound, StorageFailed

ACCEPT_FILE = "accept-loss"
_TOKEN = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}")


def accept(data_dir: Path, loss: str) -> Path:
    """Write the acceptance durably and return its file. Raises `InvalidInput`, `NotFound`, `StorageFailed`."""
    if not _TOKEN.fullmatch(loss):
        raise InvalidInput(
            f"{loss!r} does not name a loss", hint="give it as the broker's refused start printed it: 1.7"
        )
    if not (data_dir / "identity.json").exists():
        raise NotFound(
            f"{data_dir} is not the data directory of a broker", hint="the broker's refused start printed the directory"
        )
    path = data_dir / ACCEPT_FILE
    try:
        with path.open("w", encoding="ascii") as file:
            file.write(f"{loss}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageFailed(f"cannot write {path}: {error.strerror}", hint="check its permissions") from error
    return path


def read_accepted(data_dir: Path) -> str:
    """Return the accepted loss; empty if there is none. Raises `StorageFailed`."""
    path = data_dir / ACCEPT_FILE
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageFailed(f"cannot read {path}: {error.strerror}", hint="check its permissions") from error


def forget(data_dir: Path) -> None:
    """Remove the acceptance, if there is one. Raises `OSError`."""
    (data_dir / ACCEPT_FILE).unlink(missing_ok=True)
