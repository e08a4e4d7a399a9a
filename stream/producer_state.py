"""Producer state of a partition: idempotence (KIP-98, KIP-360) and undecided transactions.

Sans-I/O: `check` before an append, `append` after it, `replay` in recovery. Rules:
- The last five batches of a producer, in its current epoch, are kept. A batch with the first and last sequence of a
  kept one is a duplicate and gets the original offset.
- A smaller producer epoch is refused; a larger one must start at sequence 0. Sequences wrap from 2³¹−1 to 0.
- An unknown producer (new, or expired) may start at any sequence, but not where batches before that may have been
  refused (`sends_ahead`).
- A transactional batch is undecided until a marker of its producer. The first undecided offset bounds the last stable
  offset; a marker takes effect only when it is confirmed.
- The first batch of a transaction needs the coordinator's word, which may come late. A guard is made before the
  question (`begin_verification`) and compared at the append (`require_verified`). Any append of the producer removes
  it, and so does a marker of transaction version 0 or 1, so that a late "yes" lets no batch in behind the marker that
  has ended the transaction. A guard tells nothing of who asked or with which epoch, so one serves all questions about
  a producer.
- Markers of transaction version 2 carry an epoch larger than the batches' (KIP-890): what was sent before is fenced.
  So they leave guards alone: a question with the marker's epoch is about the producer's next transaction, which begins
  while the markers of the one before are under way.

A table of `MAX_PRODUCERS` encodes to over 10 MiB, which would hold the event loop for a tenth of a second. A large
table is therefore encoded in pieces (`ProducerSnapshot`) of at most `MAX_ROW_BYTES` a row, between which it may change.

Guards are in memory only: after a move or a restart the next batch asks again.

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
    TransactionNotVerified,
    VerificationLapsed,
    require_version,
)

KEPT_BATCHES = 5
"""As many batches as a producer may have in flight (max.in.flight.requests.per.connection ≤ 5)."""
MAX_PRODUCERS = 65_536
"""Bound on the producers of one partition; above it the tenth that was silent longest is removed (rule 12)."""
MAX_GUARDS = 4096
"""Bound on the guards of one partition; above it the oldest lapses, and its batch is sent again (rule 12)."""
GUARD_EXPIRATION_MS = 120_000
"""A guard that was not used for this long lapses at the next `expire`: clients wait for an answer for 30 s."""
EPOCH_BUMP_VERSION = 2
"""Transaction version from which on a marker's epoch is above that of the transaction's batches (KIP-890)."""
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
        """Return the timestamp of the last batch, ms. Without one in this epoch: when the last marker came."""
        return self.batches[-1].timestamp if self.batches else self.seen_ms


class CompletedTxn(NamedTuple):
    """A transaction that a marker has ended."""

    producer_id: int
    first_offset: int
    last_offset: int
    """The marker's own offset."""


class VerificationGuard:
    """Made before the coordinator is asked about a producer. It is compared by identity."""

    __slots__ = ("lapsed", "made_ms")

    def __init__(self, made_ms: int) -> None:
        self.made_ms = made_ms
        """Wall clock, for its expiration only."""
        self.lapsed = False
        """It was removed for want of room or by its age; nothing is known against its batch."""


class OpenTransaction(NamedTuple):
    """A transaction without a marker."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    """It may be below the log start."""
    since_ms: int
    """Wall clock of its first append. If a checkpoint was loaded since, of its last append before that: it is at least
    this old."""


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

    __slots__ = ("_guards", "_ongoing", "_since", "_snapshot", "_states", "_unconfirmed")

    def __init__(self) -> None:
        self._states: dict[int, ProducerState] = {}
        self._guards: dict[int, VerificationGuard] = {}
        """By producer id, the oldest first."""
        self._ongoing: dict[int, int] = {}
        self._since: dict[int, int] = {}
        """Wall clock of the first append of the open transactions."""
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
            raise _stale_epoch(header.producer_id, epoch, state)
        elif first != 0:
            raise OutOfOrderSequence(
                f"producer {header.producer_id} starts epoch {epoch} at sequence {first}, not at 0"
            )
        if state.txn_start_offset >= 0 and not header.is_transactional:
            raise InvalidTxnState(f"producer {header.producer_id} writes outside its open transaction")
        return None

    def sends_ahead(self, header: BatchHeader, since_offset: int) -> bool:
        """Whether a batch out of order may follow others that its producer has sent and that are not in the log.

        So it begins after its producer's last sequence, or under a newer epoch, and its producer has appended nothing
        at `since_offset` or after it. One that is not known has appended nothing, and begins with 0.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            return header.base_sequence > 0
        if state.batches and state.batches[-1].last_offset >= since_offset:
            return False
        if header.producer_epoch > state.epoch:
            return True
        ahead = (header.base_sequence - state.last_sequence - 1) & _MAX_SEQUENCE
        return header.producer_epoch == state.epoch and 0 < ahead <= _MAX_SEQUENCE // 2

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a producer has an open transaction in this epoch: its further batches need no verification."""
        state = self._states.get(producer_id)
        return state is not None and state.txn_start_offset >= 0 and state.epoch == producer_epoch

    def begin_verification(self, producer_id: int, producer_epoch: int, now_ms: int) -> VerificationGuard:
        """Return the producer's guard; call it before the coordinator is asked. Raises `InvalidProducerEpoch`.

        `now_ms`: the wall clock.
        """
        state = self._states.get(producer_id)
        if state is not None and producer_epoch < state.epoch:
            raise _stale_epoch(producer_id, producer_epoch, state)
        guards = self._guards
        guard = guards.get(producer_id)
        if guard is None:
            if len(guards) >= MAX_GUARDS:
                guards.pop(next(iter(guards))).lapsed = True
            guard = guards[producer_id] = VerificationGuard(now_ms)
        return guard

    def end_verification(self, producer_id: int, transaction_version: int) -> None:
        """Remove the producer's guard if the marker that was appended has no epoch to fence late batches with."""
        if transaction_version < EPOCH_BUMP_VERSION:
            self._guards.pop(producer_id, None)

    def require_verified(self, header: BatchHeader, guard: VerificationGuard | None) -> None:
        """Check that a transactional batch continues an open transaction, or has the guard of a verified question.

        Raises `InvalidProducerEpoch`, `TransactionNotVerified`, `VerificationLapsed`.
        """
        producer_id, state = header.producer_id, self._states.get(header.producer_id)
        if state is not None:
            if header.producer_epoch < state.epoch:
                raise _stale_epoch(producer_id, header.producer_epoch, state)
            if state.txn_start_offset >= 0 and state.epoch == header.producer_epoch:
                return
        if guard is None:
            raise TransactionNotVerified(f"producer {producer_id} has no transaction here that its coordinator knows")
        if guard.lapsed:
            raise VerificationLapsed(f"the coordinator's answer about producer {producer_id} came too late")
        if self._guards.get(producer_id) is not guard:
            raise TransactionNotVerified(
                f"the transaction of producer {producer_id} was decided while its coordinator was asked"
            )

    def require_first_sequence(self, header: BatchHeader) -> None:
        """Check that a producer without any batch here starts at sequence 0 (KIP-890). Raises `OutOfOrderSequence`."""
        if header.base_sequence > 0 and header.producer_id not in self._states:
            raise OutOfOrderSequence(
                f"producer {header.producer_id} starts at sequence {header.base_sequence}, not at 0"
            )

    def check_marker(self, header: BatchHeader, coordinator_epoch: int, transaction_version: int) -> None:
        """Check a transaction marker before its append. Raises `InvalidProducerEpoch`, `FencedCoordinator`.

        From version 2 on it needs a larger epoch than the producer's. An equal one is a repeat of the marker that has
        ended the transaction (KAFKA-19999), so without an open transaction it is accepted.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            return
        epoch = header.producer_epoch
        if epoch < state.epoch:
            raise InvalidProducerEpoch(f"a marker has epoch {epoch}, epoch {state.epoch} is current")
        if epoch == state.epoch and transaction_version >= EPOCH_BUMP_VERSION and state.txn_start_offset >= 0:
            raise InvalidProducerEpoch(
                f"a marker of transaction version {transaction_version} has epoch {epoch}, that of the open transaction"
            )
        if coordinator_epoch < state.coordinator_epoch:
            raise FencedCoordinator(f"coordinator epoch {coordinator_epoch} is older than {state.coordinator_epoch}")

    def append(self, header: BatchHeader, base_offset: int, timestamp: int, now_ms: int) -> None:
        """Record a data batch with a producer id that was appended at `base_offset`.

        The broker's own batches in a transaction (offsets of groups) have no sequence, -1.
        """
        producer_id, first, delta = header.producer_id, header.base_sequence, header.last_offset_delta
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
        if self._guards:
            self._guards.pop(producer_id, None)
        state.seen_ms = now_ms
        batches = state.batches
        if len(batches) == KEPT_BATCHES:
            del batches[0]
        last = (first + delta) & _MAX_SEQUENCE if first >= 0 else _NONE
        batches.append(BatchEntry(first, last, base_offset, base_offset + delta, timestamp))
        if header.is_transactional and state.txn_start_offset < 0:
            state.txn_start_offset = base_offset
            self._ongoing[producer_id] = base_offset
            self._since[producer_id] = now_ms

    def append_marker(
        self, header: BatchHeader, offset: int, coordinator_epoch: int, now_ms: int
    ) -> CompletedTxn | None:
        """Record a marker appended at `offset`. Returns the transaction that it ended, if any.

        `end_verification` follows where questions may be under way.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            if len(self._states) >= MAX_PRODUCERS:
                self._forget_silent()
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
        del self._ongoing[header.producer_id], self._since[header.producer_id]
        if self._unconfirmed is None:
            self._unconfirmed = deque()
        self._unconfirmed.append(completed)
        return completed

    def hold(self, completed: list[CompletedTxn]) -> None:
        """Add transactions whose markers the table has already, and which are not confirmed, in their order."""
        if completed:
            self._unconfirmed = deque([*completed, *(self._unconfirmed or ())])

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

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions without a marker, by first offset."""
        return [
            OpenTransaction(producer_id, self._states[producer_id].epoch, first_offset, self._since[producer_id])
            for producer_id, first_offset in self._ongoing.items()
        ]

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Remove producers that are silent for `expiration_ms` and not in a transaction. Returns their number.

        Guards lapse that were not used for `GUARD_EXPIRATION_MS`.
        """
        old = [key for key, guard in self._guards.items() if now_ms - guard.made_ms >= GUARD_EXPIRATION_MS]
        for producer_id in old:
            self._guards.pop(producer_id).lapsed = True
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
        self._since = {producer_id: self._states[producer_id].seen_ms for producer_id in self._ongoing}


def _stale_epoch(producer_id: int, epoch: int, state: ProducerState) -> InvalidProducerEpoch:
    return InvalidProducerEpoch(f"producer {producer_id} wrote with epoch {epoch}, epoch {state.epoch} is current")
