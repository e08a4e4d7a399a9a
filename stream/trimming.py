"""Trims the streams of a partition after moves of its log start, and the meta stream after its rewrites.

A trim at the controller is immediate and permanent, while the record that moved the log start may be only in the WAL.
If the disk were lost then, the streams would start after their end. A trim therefore waits until the bucket holds the
WAL up to that record. If that is not the case yet, or the controller is unreachable, the next housekeeping retries.

How far the txn stream may be trimmed is read from it, unless memory tells or nothing of the log is left. If it is
damaged, it alone stays as it is: the log start must move on, since that is what frees the space.

Entry: `Trimmer`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tidelog.runtime.errors import CorruptData, Unavailable
from tidelog.storage.records import OffsetTrimmed
from tidelog.stream.partition_state import PartitionState

if TYPE_CHECKING:
    from tidelog.storage.storage import Storage

logger = logging.getLogger(__name__)

LONG_META = 128
"""Garbage entries of a meta stream that are not left to retention: those of some thirty checkpoints. A rewrite takes an
append and a command to the controllers."""


class _Plan(NamedTuple):
    """Offsets to which the streams may be trimmed once the bucket holds the WAL up to `wal_end`."""

    wal_end: int
    log_start: int
    time_end: int
    txn_end: int
    leaves_nothing: bool
    """The log start was the log's end: nothing before `txn_end` is needed."""


@dataclass(slots=True)
class _Rewrite:
    """A rewrite of the meta stream that began at `begun_at`, and the keys still to write."""

    begun_at: int
    keys: list[str]
    wal_end: int = 0


class Trimmer:
    """Pending trims of one partition."""

    __slots__ = ("_meta", "_plan", "_rewrite", "_state", "_storage")

    def __init__(self, state: PartitionState, storage: Storage) -> None:
        self._state = state
        self._storage = storage
        self._plan: _Plan | None = None
        self._meta: tuple[int, int] | None = None
        """Pending trim after a rewrite of the meta stream: the offset, and the WAL end that the bucket must hold
        first."""
        self._rewrite: _Rewrite | None = None
        if state.log_start > state.data.start_offset:
            tail = state.meta.stream.unconfirmed()
            self.start_moved(tail[-1].wal_end if tail else storage.confirm.value)

    def start_moved(self, wal_end: int) -> None:
        """Record a move of the log start by a record that ends at `wal_end`."""
        state = self._state
        ends = state.time.stream.next_offset, state.txn.stream.next_offset
        self._plan = _Plan(wal_end, state.log_start, *ends, state.log_start >= state.data.next_offset)

    def _in_bucket(self, wal_end: int) -> bool:
        return self._storage.committed_offset >= wal_end

    async def trim(self) -> None:
        """Trim the data, time and txn streams if the bucket holds enough. Raises `Fenced`."""
        plan, state = self._plan, self._state
        if plan is None or not self._in_bucket(plan.wal_end):
            return
        try:
            await state.data.trim(plan.log_start)
            await state.time.stream.trim(min(state.segments[0].time_start, plan.time_end))
            txn_start = plan.txn_end if plan.leaves_nothing else await self._txn_start(plan.log_start)
            await state.txn.stream.trim(min(txn_start, plan.txn_end))
        except OffsetTrimmed:
            return  # another call has gone further meanwhile; this plan, or the one after it, is looked at again
        except Unavailable as error:
            logger.warning("streams are not trimmed yet", extra={"stream": state.data.stream_id, "error": str(error)})
            return
        if self._plan is plan:
            self._plan = None

    async def _txn_start(self, log_start: int) -> int:
        """Return where the txn stream may start; where it starts now if that cannot be read. Raises `Unavailable`."""
        txn = self._state.txn
        try:
            return await txn.trim_point(log_start)
        except CorruptData as error:
            fields = {"stream": txn.stream.stream_id, "error": str(error)}
            logger.warning("the index of aborted transactions is damaged, and is not trimmed", extra=fields)
            return txn.stream.start_offset

    def rewrite_meta(self) -> bool:
        """Do one bounded step of rewriting the meta stream, if most of it is garbage. Returns whether there is more.

        Raises `Overloaded`, `WalFull`: call again.
        """
        meta = self._state.meta
        if self._rewrite is None:
            if self._meta is not None or not meta.needs_compaction():
                return False
            meta.rewrite(meta.keys()[:1])  # no end that a cut has told before is where the stream begins then
            self._rewrite = _Rewrite(meta.stream.next_offset, meta.keys())
        rewrite = self._rewrite
        rewrite.wal_end = max(rewrite.wal_end, meta.rewrite(rewrite.keys))
        if not rewrite.keys:
            self._meta, self._rewrite = (rewrite.begun_at, rewrite.wal_end), None
        return self._rewrite is not None

    @property
    def is_rewriting(self) -> bool:
        """Whether a rewrite of the meta stream has begun and not ended: it is not to be cut there."""
        return self._rewrite is not None

    @property
    def can_shorten_meta(self) -> bool:
        """Whether the meta stream is to be rewritten, or can be trimmed after a rewrite, without a wait for uploads."""
        if self._meta is not None:
            return self._in_bucket(self._meta[1])
        return self._rewrite is not None or self._state.meta.needs_compaction(LONG_META)

    async def trim_meta(self) -> None:
        """Trim the meta stream when the bucket holds its rewrite. Raises `Fenced`."""
        meta = self._state.meta
        if self._meta is not None:
            await self._storage.confirm.wait(self._meta[1])
        pending = self._meta
        if pending is None or not self._in_bucket(pending[1]):
            return
        try:
            await meta.stream.trim(pending[0])
        except Unavailable as error:
            logger.warning(
                "meta stream is not trimmed yet", extra={"stream": meta.stream.stream_id, "error": str(error)}
            )
            return
        if self._meta is pending:
            self._meta = None
