"""A stream as the controller opened it: the reply to an open, from which a partition is built.

Entry: `OpenedStream`.
"""

from __future__ import annotations

import msgspec


class OpenedStream(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stream as the controller opened it for this broker. All offsets int64."""

    stream_id: int
    epoch: int
    start_offset: int
    end_offset: int
    """The committed end. The opener recovers later records from the WAL."""
    owner_since_epoch: int
    """WAL records of this stream with a smaller stream epoch are from an earlier owner and are ignored."""
    released_at: int = -1
    """End of the stream at its release from quarantine, without the records set aside; -1: never."""
