"""The acceptance of a loss, as a file of the data directory: written by the command line, used by the next start.

    DIR/accept-loss    one line, as the refused start printed it: `BROKER.EPOCH`, a WAL, or `bucket.CLUSTER`, the
                       objects of a cluster

A broker that was refused has no admin HTTP, and its controller may be in the same process; so the command line cannot
reach them. The broker compares the line with the loss that the controllers know, records the loss in the metadata, and
removes the file (`tidelog.broker.wal_keeper`). The objects of a bucket that was given up stay in the metadata: whoever
reads them is told that they are missing.

Entry: `accept`, `read_accepted`, `use_lost_bucket`, `forget`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from tidelog.runtime.errors import InvalidInput, NotFound, StorageFailed

logger = logging.getLogger(__name__)

ACCEPT_FILE = "accept-loss"
WAL_LOSS = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}")
BUCKET_LOSS = re.compile(r"bucket\.[A-Za-z0-9_-]{1,64}")


def accept(data_dir: Path, loss: str, form: re.Pattern[str]) -> Path:
    """Write the acceptance durably and return its file. Raises `InvalidInput`, `NotFound`, `StorageFailed`.

    `form`: `WAL_LOSS` or `BUCKET_LOSS`.
    """
    if not form.fullmatch(loss):
        example = "1.7" if form is WAL_LOSS else "bucket.CLUSTER"
        raise InvalidInput(
            f"{loss!r} does not name a loss of this kind",
            hint=f"give it as the broker's refused start printed it: {example}",
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


def use_lost_bucket(data_dir: Path, cluster_id: str) -> bool:
    """Return whether the objects of the cluster were given up, for this start only. Raises `StorageFailed`."""
    if read_accepted(data_dir) != f"bucket.{cluster_id}":
        return False
    logger.warning("an operator has given up the objects of the cluster", extra={"cluster": cluster_id})
    forget(data_dir)
    return True


def forget(data_dir: Path) -> None:
    """Remove the acceptance, if there is one. Raises `StorageFailed`."""
    path = data_dir / ACCEPT_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageFailed(f"cannot remove {path}: {error.strerror}", hint="check its permissions") from error
