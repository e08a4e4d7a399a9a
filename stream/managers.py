"""The calls of streams to a controller, as a protocol. The controller's client implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidelog.stream.opened import OpenedStream


class StreamManager(Protocol):
    """The controller's calls for streams. Every call is fenced by master epoch and stream epoch (rule 4)."""

    @property
    def feature_level(self) -> int:
        """Return the feature level of the cluster, by which everything is written (rule 18); it may grow any time."""
        ...

    async def open_streams(
        self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        """Open `(stream id, new epoch)` pairs for the replica set's master, in one command (≤ 4,096 pairs).

        A stream opens if it is CLOSED, or OPENED with a smaller epoch. A repeated open succeeds.
        Raises `Fenced` for a stale master epoch or stream epoch, `NotFound`, `Unavailable`.
        """
        ...

    async def close_streams(self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]) -> None:
        """Close `(stream id, epoch)` pairs; everything appended must be committed. Raises `Fenced`, `Unavailable`."""
        ...

    async def trim_stream(
        self, replica_set_id: int, master_epoch: int, stream_id: int, epoch: int, start_offset: int
    ) -> None:
        """Move a stream's start forward; a smaller offset succeeds without effect.

        Raises `Fenced` for a stale master epoch or stream epoch, `NotFound`, `Unavailable`.
        """
        ...
