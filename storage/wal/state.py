"""`WalState`: the common state of all WAL backends: offsets, epochs, waiting tasks, and the failure that ends the WAL.

Invariants: start ≤ durable ≤ end, all WAL offsets (bytes, int64); the first failure is kept, is reported once, and
every later call raises it.

Entry: the backends derive from it (`tidelog.storage.wal.disk.wal`, `tidelog.storage.wal.s3.wal`,
`tidelog.storage.wal.memory`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidelog.runtime.errors import Closed
from tidelog.storage.wal.base import Submitted, WalFailed
from tidelog.storage.wal.epochs import EpochHistory


class WalState:
    """The common part of `tidelog.storage.wal.base.Wal`."""

    def __init__(self, start_offset: int = 0) -> None:
        self._start = self._end = self._durable = start_offset
        self._epoch = -1
        self._history = EpochHistory()
        self._closed = False
        self._failure: WalFailed | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._on_durable: Callable[[int], None] = lambda _offset: None
        self._on_failed: Callable[[Exception], None] = lambda _error: None
        self._on_submitted: Callable[[Submitted], None] | None = None

    @property
    def start_offset(self) -> int:
        """See `Wal.start_offset`. After a restart: the start of the oldest file or object kept."""
        return self._start

    @property
    def end_offset(self) -> int:
        """See `Wal.end_offset`."""
        return self._end

    @property
    def durable_offset(self) -> int:
        """See `Wal.durable_offset`."""
        return self._durable

    @property
    def synced_offset(self) -> int:
        """See `Wal.synced_offset`."""
        return self._durable

    @property
    def master_epoch(self) -> int:
        """See `Wal.master_epoch`."""
        return self._epoch

    @property
    def epoch_history(self) -> EpochHistory:
        """See `Wal.epoch_history`."""
        return self._history

    def set_on_durable(self, callback: Callable[[int], None]) -> None:
        """See `Wal.set_on_durable`."""
        self._on_durable = callback

    def set_on_failed(self, callback: Callable[[Exception], None]) -> None:
        """See `Wal.set_on_failed`."""
        self._on_failed = callback

    def set_on_submitted(self, callback: Callable[[Submitted], None] | None) -> None:
        """See `ReplicatedWal.set_on_submitted`."""
        self._on_submitted = callback

    def _end_with(self, failure: WalFailed, cause: Exception) -> WalFailed:
        """End the log with this failure; return the first failure."""
        if self._failure is None:
            failure.__cause__ = cause
            self._failure = failure
            self._drop_pending()
            self._wake()
            self._on_failed(failure)
        return self._failure

    def _drop_pending(self) -> None:
        """Discard pending records: after a failure nothing more is written."""

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise WalFailed(self._failure.message, hint=self._failure.hint) from self._failure

    def _check_usable(self) -> None:
        self._check_failure()
        if self._closed:
            raise Closed("the WAL is closed")

    async def _changed(self) -> None:
        """Wait for the next state change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
