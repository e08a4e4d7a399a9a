"""Producer state of a partition: idempotence (KIP-98, KIP-360) and undecided transactions.

Sans-I/O: `check` before an append, `append` after it, `replay` in recovery. Rules:
- The last five batches of a producer, in its current epoch, are kept. A batch with the first and last sequence of a
  kept one is a duplicate and gets the original offset.
- A smaller producer epoch is refused; a larger one must start at sequence 0. Sequences wrap from 2³¹−1 to 0.
- An unknown producer (new, or expired) may start at any sequence.
- A transactional batch is undecided until a marker of its producer. The first undecided offset bounds the last stable
  offset; a marker takes effect only when it is confirmed.

Invariant: `_ongoing` holds exactly the producers with an open transaction, in the order of their first offsets. Entry:
`ProducerStates`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from tidelog.batch.batch import BatchHeader
from tidelog.stream.errors import FencedCoordinator, InvalidProducerEpoch, InvalidTxnState, OutOfOrderSequence

KEPT_BATCHES = 5
"""As many batches as a producer may have in flight (max.in.flight.requests.per.connection ≤ 5)."""
MAX_PRODUCERS = 65_536
"""Bound on the producers of one partition; above it the tenth that was silent longest is removed (rule 12)."""
_SEQUENCE_MASK = 0x7FFFFFFF
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


class ProducerStates:
    """All producers of one partition."""

    __slots__ = ("_ongoing", "_states", "_unconfirmed")

    def __init__(self) -> None:
        self._states: dict[int, ProducerState] = {}
        self._ongoing: dict[int, int] = {}
        self._unconfirmed: deque[CompletedTxn] | None = None

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
            last = (first + header.last_offset_delta) & _SEQUENCE_MASK
            for entry in state.batches:
                if entry[0] == first and entry[1] == last:
                    return entry
            previous = state.batches[-1][1] if state.batches else _NONE
            if first != ((previous + 1) & _SEQUENCE_MASK):
                raise OutOfOrderSequence(
                    f"producer {header.producer_id} sent sequence {first}, expected {previous + 1 & _SEQUENCE_MASK}"
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

    def check_marker(self, header: BatchHeader, coordinator_epoch: int) -> None:
        """Check a transaction marker before its append. Raises `InvalidProducerEpoch`, `FencedCoordinator`."""
        state = self._states.get(header.producer_id)
        if state is None:
            return
        if header.producer_epoch < state.epoch:
            raise InvalidProducerEpoch(f"a marker has epoch {header.producer_epoch}, epoch {state.epoch} is current")
        if coordinator_epoch < state.coordinator_epoch:
            raise FencedCoordinator(f"coordinator epoch {coordinator_epoch} is older than {state.coordinator_epoch}")

    def append(self, header: BatchHeader, base_offset: int, timestamp: int, now_ms: int) -> None:
        """Record a data batch with a producer id that was appended at `base_offset`."""
        producer_id, first, delta = header.producer_id, header.base_sequence, header.last_offset_delta
        state = self._states.get(producer_id)
        if state is None:
            if len(self._states) >= MAX_PRODUCERS:
                self._forget_silent()
            state = self._states[producer_id] = ProducerState(producer_id, header.producer_epoch, now_ms)
        elif state.epoch != header.producer_epoch:
            state.epoch = header.producer_epoch
            state.batches.clear()
        state.seen_ms = now_ms
        batches = state.batches
        if len(batches) == KEPT_BATCHES:
            del batches[0]
        batches.append(BatchEntry(first, (first + delta) & _SEQUENCE_MASK, base_offset, base_offset + delta, timestamp))
        if header.is_transactional and state.txn_start_offset < 0:
            state.txn_start_offset = base_offset
            self._ongoing[producer_id] = base_offset

    def append_marker(
        self, header: BatchHeader, offset: int, coordinator_epoch: int, now_ms: int
    ) -> CompletedTxn | None:
        """Record a marker appended at `offset`. Returns the transaction that it ended, if any."""
        state = self._states.get(header.producer_id)
        if state is None:
            state = self._states[header.producer_id] = ProducerState(header.producer_id, header.producer_epoch, now_ms)
        elif state.epoch != header.producer_epoch:
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
        for producer_id in gone:
            del self._states[producer_id]
        return len(gone)

    def _forget_silent(self) -> None:
        idle = sorted(
            (state for state in self._states.values() if state.txn_start_offset < 0), key=lambda state: state.seen_ms
        )
        for state in idle[: max(1, MAX_PRODUCERS // 10)]:
            del self._states[state.producer_id]

    def encode(self) -> bytes:
        """Return the versioned snapshot.

        Its msgpack is `[1, [[id, epoch, seen ms, coordinator epoch, txn start, [batch, …]], …]]`.

        A batch is `[first sequence, last sequence, base offset, last offset, timestamp]`.
        """
        rows = [
            (s.producer_id, s.epoch, s.seen_ms, s.coordinator_epoch, s.txn_start_offset, s.batches)
            for s in self._states.values()
        ]
        return msgspec.msgpack.encode((_VERSION, rows))

    @classmethod
    def decode(cls, data: bytes) -> ProducerStates:
        """Decode the result of `encode`. Raises `msgspec.ValidationError`."""
        _, rows = msgspec.msgpack.decode(data, type=tuple[int, list[_StateRow]])
        states = cls()
        for row in rows:
            state = ProducerState(row.producer_id, row.epoch, row.seen_ms)
            state.coordinator_epoch = row.coordinator_epoch
            state.txn_start_offset = row.txn_start_offset
            state.batches = row.batches
            states._states[row.producer_id] = state
        ongoing = sorted((row.txn_start_offset, row.producer_id) for row in rows if row.txn_start_offset >= 0)
        states._ongoing = {producer_id: start for start, producer_id in ongoing}
        return states
