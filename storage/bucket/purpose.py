"""The purpose of a bucket request, which sets its priority and the account it is counted on.

A component creates its view once, in its constructor: `self._store = store.for_purpose(Purpose.UPLOAD)`. No context
variables are used, so the purpose is visible in the code.

Entry: `Purpose`.
"""

from __future__ import annotations

from enum import Enum


class Purpose(Enum):
    """The reason for a request, most urgent first. The value is the name in metrics."""

    WAL = "wal"
    """Write-ahead log objects: a producer waits for each."""
    TAIL = "tail"
    """Reads near the end of a log, for a waiting consumer, and those of a partition that is being opened."""
    UPLOAD = "upload"
    """From the log cache to the bucket: when uploads stop, producers soon have to stop too."""
    COLD = "cold"
    """Reads of old data, read-ahead included."""
    COMPACTION = "compaction"
    CLEAN = "clean"
    """Deletes, orphan search, verification."""
    METADATA = "metadata"
    """The metadata that the active controller writes, and the claims of the bucket's owner."""
    OTHER = "other"
    """Probes and tools."""
