"""What streams need of a controller, as a protocol of its own. The controller's client implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class OpenedStream(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stream as the controller opened it for this broker. All offsets int64."""

    stream_id: int
    epoch: int
    start_offset: int
    end_offset: int
    """The committed end: what the bucket holds. What the WAL holds beyond it is the opener's to recover."""
    owner_since_epoch: int
    """WAL records of this stream with a smaller stream epoch are from an earlier ownership and do not count."""
    released_at: int = -1
    """Where the stream ended when an operator let it go on without what it held beyond (a quarantine); -1: never."""


class StreamManager(Protocol):
    """The controller, as streams see it. Every call is fenced by master epoch and stream epoch (rule 4)."""

    async def open_streams(
        self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        """Open `(stream id, new epoch)` pairs for the replica set's master, in one command (≤ 4,096 pairs).

        A stream opens if it is CLOSED, or OPENED with a smaller epoch. The same open twice is success.
        Raises `Fenced` for a stale master epoch or stream epoch, `NotFound`, `Unavailable`.
        """
        ...

    async def close_streams(self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]) -> None:
        """Close `(stream id, epoch)` pairs; everything appended must be committed. Raises `Fenced`, `Unavailable`."""
        ...

    async def trim_stream(self, stream_id: int, epoch: int, start_offset: int) -> None:
        """Move a stream's start forward (never back; a smaller one is success). Raises `Fenced`, `Unavailable`."""
        ...
