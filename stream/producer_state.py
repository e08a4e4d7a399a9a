"""Producer state of a partition: idempotence (KIP-98, KIP-360) and undecided transactions.

Sans-I/O: `check` before an append, `append` after it, `replay` in recovery. Rules:
- The last five batches of a producer, in its current epoch, are kept. A batch with the first and last sequence of a
  kept one is a duplicate and gets the original offset.
- A smaller producer epoch is refused; a larger one must start at sequence 0. Sequences wrap from 2³¹−1 to 0.
- An unknown producer (new, or expired) may start at any sequence.
- A transactional batch is undecided until a marker of its producer. The first undecided offset bounds the last stable
  offset; a marker takes effect only when it is confirmed.

A table of `MAX_PRODUCERS` encodes to over 10 MiB, which would hold the event loop for a tenth of a second. A large
table is therefore encoded in pieces (`ProducerSnapshot`) of at most `MAX_ROW_BYTES` a row, between which it may change.

Invariants: `_ongoing` holds exactly the producers with an open transaction, in the order of their first offsets; the
pieces of a snapshot are together the table as it was when the snapshot began, less producers removed since. Entry:
`ProducerStates`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from tidelog.batch.batch import BatchHeader
from tidelog.stream.errors import (
    FencedCoordinator,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequence,
    require_version,
)

KEPT_BATCHES = 5
"""As many batches as a producer may have in flight (max.in.flight.requests.per.connection ≤ 5)."""
MAX_PRODUCERS = 65_536
"""Bound on the producers of one partition; above it the tenth that was silent longest is removed (rule 12)."""
ROWS_PER_PIECE = 1024
"""Rows of one piece of a snapshot: at most 280 KiB, about a millisecond of encoding."""
MAX_ROW_BYTES = 280
"""The largest encoding of one producer: 30 integers of at most 9 bytes, and the headers of 7 arrays."""
_MAX_SEQUENCE = 0x7FFFFFFF
"""Sequences are int32 ≥ 0; 0 follows this one."""
_NONE = -1
_VERSION = 1


class BatchEntry(NamedTuple):
    """One kept batch. Sequences int32, offsets int64, timestamp in ms."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp: int
    """The log append time, or the batch's largest timestamp."""


class ProducerState:
    """State of one producer id on one partition."""

    __slots__ = ("batches", "coordinator_epoch", "epoch", "producer_id", "seen_ms", "txn_start_offset")

    def __init__(self, producer_id: int, epoch: int, seen_ms: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.seen_ms = seen_ms
        """Wall clock of the last append by this producer."""
        self.coordinator_epoch = _NONE
        self.txn_start_offset = _NONE
        """First offset of the open transaction, or -1."""
        self.batches: list[BatchEntry] = []

    @property
    def last_sequence(self) -> int:
        """Return the last sequence of the current epoch, or -1."""
        return self.batches[-1].last_sequence if self.batches else _NONE

    @property
    def last_timestamp(self) -> int:
        """Return the timestamp of the last batch, ms, or -1."""
        return self.batches[-1].timestamp if self.batches else _NONE


class VerificationGuard:
    """Says that a question about a producer's transaction was begun, and that nothing of the producer came since.

    It has no content: `ProducerStates.check_transactional` compares its identity.
    """

    __slots__ = ()


class CompletedTxn(NamedTuple):
    """A transaction that a marker has ended."""

    producer_id: int
    first_offset: int
    last_offset: int
    """The marker's own offset."""


class _StateRow(NamedTuple):
    producer_id: int
    epoch: int
    seen_ms: int
    coordinator_epoch: int
    txn_start_offset: int
    batches: list[BatchEntry]


class ProducerSnapshot:
    """The table as it was at one moment, encoded in pieces while the table changes.

    A state that is about to change is put aside first (`keep`), so no piece holds anything newer than the moment.
    `peek` returns the same piece until `advance`: one that could not be written is not lost.
    """

    __slots__ = ("_kept", "_ready", "_rows", "_waiting")

    def __init__(self, states: dict[int, ProducerState], rows: int) -> None:
        """`rows`: the most rows of one piece."""
        self._waiting = dict(states)
        self._kept: list[_StateRow] = []
        self._ready: bytes | None = None
        self._rows = rows

    def keep(self, state: ProducerState) -> None:
        """Put aside a state that is about to change."""
        if self._waiting.pop(state.producer_id, None) is not None:
            self._kept.append(_row(state))

    def forget(self, producer_id: int) -> None:
        """Leave out a producer that is removed from the table."""
        self._waiting.pop(producer_id, None)

    def peek(self) -> bytes:
        """Return the next piece; it encodes to the form of `ProducerStates.encode`. It may hold no rows."""
        if self._ready is None:
            rows, self._kept = self._kept[: self._rows], self._kept[self._rows :]
            while self._waiting and len(rows) < self._rows:
                rows.append(_row(self._waiting.popitem()[1]))
            self._ready = msgspec.msgpack.encode((_VERSION, rows))
        return self._ready

    def advance(self) -> None:
        """Go on to the next piece."""
        self._ready = None

    @property
    def is_last(self) -> bool:
        """Whether no rows follow those that `peek` returned."""
        return not self._waiting and not self._kept


def _row(state: ProducerState) -> _StateRow:
    return _StateRow(
        state.producer_id,
        state.epoch,
        state.seen_ms,
        state.coordinator_epoch,
        state.txn_start_offset,
        list(state.batches),
    )


class ProducerStates:
    """All producers of one partition."""

    __slots__ = ("_guards", "_ongoing", "_snapshot", "_states", "_unconfirmed")

    def __init__(self) -> None:
        self._states: dict[int, ProducerState] = {}
        self._ongoing: dict[int, int] = {}
        self._guards: dict[int, VerificationGuard] = {}
        self._unconfirmed: deque[CompletedTxn] | None = None
        self._snapshot: ProducerSnapshot | None = None

    def __len__(self) -> int:
        return len(self._states)

    def get(self, producer_id: int) -> ProducerState | None:
        """Return the state of one producer, if it is known."""
        return self._states.get(producer_id)

    def all(self) -> list[ProducerState]:
        """Return the states of all known producers."""
        return list(self._states.values())

    def check(self, header: BatchHeader) -> BatchEntry | None:
        """Check a client's batch before its append. Returns None, or the original batch of a duplicate.

        Raises `InvalidProducerEpoch`, `OutOfOrderSequence`, `InvalidTxnState`.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            return None
        epoch, first = header.producer_epoch, header.base_sequence
        if epoch == state.epoch:
            last = (first + header.last_offset_delta) & _MAX_SEQUENCE
            for entry in state.batches:
                if entry[0] == first and entry[1] == last:
                    return entry
            previous = state.batches[-1][1] if state.batches else _NONE
            if first != ((previous + 1) & _MAX_SEQUENCE):
                raise OutOfOrderSequence(
                    f"producer {header.producer_id} sent sequence {first}, expected {previous + 1 & _MAX_SEQUENCE}"
                )
        elif epoch < state.epoch:
            raise InvalidProducerEpoch(
                f"producer {header.producer_id} wrote with epoch {epoch}, epoch {state.epoch} is current"
            )
        elif first != 0:
            raise OutOfOrderSequence(
                f"producer {header.producer_id} starts epoch {epoch} at sequence {first}, not at 0"
            )
        if state.txn_start_offset >= 0 and not header.is_transactional:
            raise InvalidTxnState(f"producer {header.producer_id} writes outside its open transaction")
        return None

    def sends_ahead(self, header: BatchHeader, since_offset: int) -> bool:
        """Whether a batch out of order may follow others that its producer has sent and that are not in the log.

        So it begins after its producer's last sequence, or under a newer epoch, and its producer is known and has
        appended nothing at `since_offset` or after it.
        """
        state = self._states.get(header.producer_id)
        if state is None or (state.batches and state.batches[-1].last_offset >= since_offset):
            return False
        if header.producer_epoch > state.epoch:
            return True
        ahead = (header.base_sequence - state.last_sequence - 1) & _MAX_SEQUENCE
        return header.producer_epoch == state.epoch and 0 < ahead <= _MAX_SEQUENCE // 2

    def begin_verification(self, producer_id: int, producer_epoch: int) -> VerificationGuard | None:
        """Return the guard for a question about the producer's transaction; None if it is open here.

        One of an older epoch does not count: its marker is on its way, and the producer has begun another (KIP-890).
        Any batch or marker of the producer removes the guard: an answer that comes later lets no batch in.
        """
        if self._is_open(producer_id, producer_epoch):
            return None
        guard = self._guards.get(producer_id)
        if guard is None:
            if len(self._guards) >= MAX_PRODUCERS:
                del self._guards[next(iter(self._guards))]  # the oldest: its producer asks again
            guard = self._guards[producer_id] = VerificationGuard()
        return guard

    def check_transactional(self, header: BatchHeader, guard: VerificationGuard | None) -> None:
        """Check a batch without sequences of a producer's transaction before its append.

        Raises `InvalidProducerEpoch`; `InvalidTxnState` if the transaction is neither open here nor guarded.
        """
        producer_id = header.producer_id
        state = self._states.get(producer_id)
        if state is not None and header.producer_epoch < state.epoch:
            raise InvalidProducerEpoch(
                f"producer {producer_id} wrote with epoch {header.producer_epoch}, epoch {state.epoch} is current"
            )
        if not self._is_open(producer_id, header.producer_epoch) and (
            guard is None or self._guards.get(producer_id) is not guard
        ):
            raise InvalidTxnState(
                f"producer {producer_id} has no open transaction of epoch {header.producer_epoch} here"
            )

    def _is_open(self, producer_id: int, producer_epoch: int) -> bool:
        return producer_id in self._ongoing and self._states[producer_id].epoch == producer_epoch

    def check_marker(self, header: BatchHeader, coordinator_epoch: int, transaction_version: int = 1) -> None:
        """Check a transaction marker before its append. Raises `InvalidProducerEpoch`, `FencedCoordinator`.

        From transaction version 2 on its epoch is above that of the transaction; an equal one is a repeated marker.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            return
        if transaction_version >= 2 and header.producer_epoch == state.epoch and header.producer_id in self._ongoing:
            raise InvalidProducerEpoch(f"a marker has the epoch {state.epoch} of the transaction that it ends")
        if header.producer_epoch < state.epoch:
            raise InvalidProducerEpoch(f"a marker has epoch {header.producer_epoch}, epoch {state.epoch} is current")
        if coordinator_epoch < state.coordinator_epoch:
            raise FencedCoordinator(f"coordinator epoch {coordinator_epoch} is older than {state.coordinator_epoch}")

    def append(self, header: BatchHeader, base_offset: int, timestamp: int, now_ms: int) -> None:
        """Record a data batch with a producer id that was appended at `base_offset`."""
        producer_id, first, delta = header.producer_id, header.base_sequence, header.last_offset_delta
        if self._guards:
            self._guards.pop(producer_id, None)
        state = self._states.get(producer_id)
        if state is None:
            if len(self._states) >= MAX_PRODUCERS:
                self._forget_silent()
            state = self._states[producer_id] = ProducerState(producer_id, header.producer_epoch, now_ms)
        else:
            if self._snapshot is not None:
                self._snapshot.keep(state)
            if state.epoch != header.producer_epoch:
                state.epoch = header.producer_epoch
                state.batches.clear()
        state.seen_ms = now_ms
        if first >= 0:  # a coordinator's records have no sequence
            batches = state.batches
            if len(batches) == KEPT_BATCHES:
                del batches[0]
            last = (first + delta) & _MAX_SEQUENCE
            batches.append(BatchEntry(first, last, base_offset, base_offset + delta, timestamp))
        if header.is_transactional and state.txn_start_offset < 0:
            state.txn_start_offset = base_offset
            self._ongoing[producer_id] = base_offset

    def append_marker(
        self, header: BatchHeader, offset: int, coordinator_epoch: int, now_ms: int
    ) -> CompletedTxn | None:
        """Record a marker appended at `offset`. Returns the transaction that it ended, if any."""
        self._guards.pop(header.producer_id, None)
        state = self._states.get(header.producer_id)
        if state is None:
            state = self._states[header.producer_id] = ProducerState(header.producer_id, header.producer_epoch, now_ms)
        else:
            if self._snapshot is not None:
                self._snapshot.keep(state)
            if state.epoch != header.producer_epoch:
                state.epoch = header.producer_epoch
                state.batches.clear()
        state.seen_ms = now_ms
        state.coordinator_epoch = coordinator_epoch
        if state.txn_start_offset < 0:
            return None
        completed = CompletedTxn(header.producer_id, state.txn_start_offset, offset)
        state.txn_start_offset = _NONE
        del self._ongoing[header.producer_id]
        if self._unconfirmed is None:
            self._unconfirmed = deque()
        self._unconfirmed.append(completed)
        return completed

    def confirmed(self, high_watermark: int) -> None:
        """Make markers below the high watermark effective."""
        pending = self._unconfirmed
        if pending:
            while pending and pending[0].last_offset < high_watermark:
                pending.popleft()
            if not pending:
                self._unconfirmed = None

    def first_unstable(self) -> int | None:
        """Return the first offset of a transaction without a confirmed marker, or None."""
        first = next(iter(self._ongoing.values())) if self._ongoing else None
        if self._unconfirmed:
            held = min(completed.first_offset for completed in self._unconfirmed)
            return held if first is None else min(first, held)
        return first

    def first_ongoing(self) -> int | None:
        """Return the first offset of a transaction without a marker, confirmed or not, or None."""
        return next(iter(self._ongoing.values())) if self._ongoing else None

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Remove producers that are silent for `expiration_ms` and not in a transaction. Returns their number."""
        gone = [
            state.producer_id
            for state in self._states.values()
            if state.txn_start_offset < 0 and now_ms - state.seen_ms >= expiration_ms
        ]
        self._remove(gone)
        return len(gone)

    def _forget_silent(self) -> None:
        idle = sorted(
            (state for state in self._states.values() if state.txn_start_offset < 0), key=lambda state: state.seen_ms
        )
        self._remove([state.producer_id for state in idle[: max(1, MAX_PRODUCERS // 10)]])

    def _remove(self, producer_ids: list[int]) -> None:
        for producer_id in producer_ids:
            del self._states[producer_id]
            if self._snapshot is not None:
                self._snapshot.forget(producer_id)

    def begin_snapshot(self, rows: int) -> ProducerSnapshot:
        """Begin a snapshot of the table as it is now, with at most `rows` rows a piece; it replaces an earlier one."""
        self._snapshot = ProducerSnapshot(self._states, rows)
        return self._snapshot

    def end_snapshot(self) -> None:
        """Keep nothing more for a snapshot that is complete or given up."""
        self._snapshot = None

    def encode(self) -> bytes:
        """Return the versioned snapshot.

        Its msgpack is `[1, [[id, epoch, seen ms, coordinator epoch, txn start, [batch, …]], …]]`.

        A batch is `[first sequence, last sequence, base offset, last offset, timestamp]`.
        """
        rows = [_row(state) for state in self._states.values()]
        return msgspec.msgpack.encode((_VERSION, rows))

    @classmethod
    def decode(cls, data: bytes) -> ProducerStates:
        """Decode the result of `encode`. Raises `msgspec.ValidationError`, `UnknownVersion`."""
        states = cls()
        states.add_piece(data)
        states.complete()
        return states

    def add_piece(self, data: bytes) -> None:
        """Add the producers of a piece; `complete` follows the last one.

        Raises `msgspec.ValidationError`, `UnknownVersion`.
        """
        version, rows = msgspec.msgpack.decode(data, type=tuple[int, list[_StateRow]])
        require_version(version, _VERSION, "the table of producers")
        for row in rows:
            state = ProducerState(row.producer_id, row.epoch, row.seen_ms)
            state.coordinator_epoch = row.coordinator_epoch
            state.txn_start_offset = row.txn_start_offset
            state.batches = row.batches
            self._states[row.producer_id] = state

    def complete(self) -> None:
        """Put the open transactions in order, after the last piece."""
        states = self._states.values()
        ongoing = sorted((state.txn_start_offset, state.producer_id) for state in states if state.txn_start_offset >= 0)
        self._ongoing = {producer_id: start for start, producer_id in ongoing}
