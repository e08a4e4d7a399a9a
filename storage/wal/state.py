"""`WalState`: the common state of all WAL backends: offsets, epochs, waiting tasks, and the failure that ends the WAL.
`ReplicaState`: that of the backends that may be one of several replicas, which follow one master at a time.

Invariants: start ≤ durable ≤ end, all WAL offsets (bytes, int64); the first failure is kept, is reported once, and
every later call raises it.

Entry: the backends derive from it (`tidelog.storage.wal.disk.wal`, `tidelog.storage.wal.s3.wal`,
`tidelog.storage.wal.memory`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidelog.runtime.errors import Closed, Fenced, InvalidInput
from tidelog.storage.wal.base import Submitted, WalFailed
from tidelog.storage.wal.epochs import EpochHistory


class WalState:
    """The common part of `tidelog.storage.wal.base.Wal`."""

    def __init__(self, start_offset: int = 0) -> None:
        self._start = self._end = self._durable = start_offset
        self._confirm = 0
        self._epoch = -1
        self._history = EpochHistory()
        self._closed = False
        self._failure: WalFailed | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}
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

    @property
    def missing_files(self) -> tuple[str, ...]:
        """See `Wal.missing_files`. None: a log without files of its own."""
        return ()

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
        if self._failure is not None or self._closed:  # each append asks, so without another call
            self._check_failure()
            raise Closed("the WAL is closed")

    async def _changed(self) -> None:
        """Wait for the next state change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class ReplicaState(WalState):
    """The common part of `tidelog.storage.wal.base.ReplicatedWal`."""

    @property
    def promised_epoch(self) -> int:
        """See `ReplicatedWal.promised_epoch`."""
        raise NotImplementedError

    @property
    def confirm_offset(self) -> int:
        """See `ReplicatedWal.confirm_offset`."""
        return self._confirm

    def _check_promise(self, epoch: int) -> None:
        """Check that no newer master was promised. Raises `Fenced`, and what ended the WAL."""
        self._check_usable()
        if epoch < self.promised_epoch:
            raise Fenced(f"master epoch {epoch} is older than {self.promised_epoch}, which the WAL has promised")

    def _check_new(self, epoch: int) -> None:
        """Check that a master's epoch may begin. Raises `Fenced`, and what ended the WAL."""
        self._check_usable()
        if epoch <= self._history.last_epoch:
            raise Fenced(f"master epoch {epoch} is not newer than {self._history.last_epoch}, which the WAL has seen")
        self._check_promise(epoch)

    def _check_asker(self, master_epoch: int) -> None:
        """Check that a master of this epoch may change the log, and that this WAL is not a master's.

        Raises `Fenced`, `InvalidInput`, and what ended the WAL.
        """
        self._check_promise(master_epoch)
        if self._epoch >= 0:
            raise InvalidInput(
                f"this WAL is the master's of epoch {self._epoch}: it takes nothing from one of epoch {master_epoch}",
                hint="promise the newer epoch first",
            )
