"""The rules of the diskless WAL, without I/O: which objects form the log, when a batch is sent, what is durable.

Theory of operation. A log is a chain of objects, each created once (`If-None-Match: *`) and never changed. The object
after *n* in the chain is *n* + 1; after a fence, the one at the place that the fence names. A writer has up to
`s3_in_flight` objects in flight and acknowledges in order, so everything it ever acknowledged lies before the first
empty place: the *hole*. Creating a fence at the hole ends the log of every older writer there: that writer needs this
place, gets 412, finds another writer's object, and acknowledges nothing any more. Objects that it has put after the
fence were never acknowledged and are dead; the new writer continues `SPAN` places further, beyond any older writer.

A running writer may fill holes faster than a new one finds them. Then the new one puts a *barrier*: a fence some
hundred
places ahead, which the old writer cannot pass. The hole is found before it, or the barrier becomes part of the chain.

Invariants, with "place" for a seq:
1. Places of the chain stay filled: an object is deleted only when its place is below the first seq that a *durable*
   object of the chain names, and a fence is never deleted. So an object of the chain stays in it, and
   a late writer finds every place that it could use either taken or below the first seq (`Chain`).
2. The object at the first seq exists, and gives the WAL offset at which the log starts.
3. A writer's places lie below its lowest unacknowledged one plus `MAX_IN_FLIGHT`, and barriers below the hole plus
   `MAX_BARRIER`; `SPAN` is more than both together.
4. durable advances over landed objects in their order, without a gap, and never after a failure (`SendWindow`).

Entry: `Chain`, `SendWindow`, `BatchTimer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidelog.runtime.errors import CorruptData
from tidelog.runtime.types import Buffer
from tidelog.storage.wal.s3.format import ObjectType, WalObject, damaged

SPAN = 1 << 16
"""Places between a fence (or the furthest object known) and where its writer continues. Part of the format."""
MAX_IN_FLIGHT = 256
"""Limit of `wal.s3_in_flight`. Part of the format."""
MAX_BARRIER = 1 << 15
"""How far ahead of the hole a barrier may be put. Part of the format."""
assert MAX_IN_FLIGHT + MAX_BARRIER < SPAN


class Chain:
    """The objects that form the log, oldest first, as far as they were added."""

    def __init__(self, first_seq: int = 0) -> None:
        self.objects: list[WalObject] = []
        self.first_seq = first_seq
        """The oldest object needed."""
        self.hole = first_seq
        """The first empty place: where a fence would end this log."""
        self.furthest = first_seq
        """The largest place at which any object was seen, in the chain or not."""
        self.start_offset = self.end_offset = 0
        self.epoch = -1
        """The largest master epoch in the chain; -1 for none."""
        self.writer_id = b""
        """The writer of the end of the chain."""

    @property
    def fences(self) -> list[WalObject]:
        """Return the fences in the chain, oldest first."""
        return [one for one in self.objects if one.kind is ObjectType.FENCE]

    def extend(self, one: WalObject) -> None:
        """Add the object at the hole. Raises `CorruptData` when it cannot follow the chain."""
        assert one.seq == self.hole
        if one.kind is ObjectType.FENCE:
            self._extend_fence(one)
        else:
            self._extend_data(one)
        self.objects.append(one)
        self.hole = one.next_seq
        self.furthest = max(self.furthest, one.seq)
        self.epoch = one.master_epoch
        self.writer_id = one.writer_id

    def _extend_fence(self, one: WalObject) -> None:
        if one.master_epoch <= self.epoch:
            raise damaged(one.key, 56, f"a fence of master epoch {one.master_epoch} after epoch {self.epoch}")
        if one.reset_offset >= 0:
            if self.objects:
                raise damaged(one.key, 104, "the log restarts in its middle")
            self.start_offset = self.end_offset = one.reset_offset
        elif not self.objects:
            raise damaged(one.key, 104, "the log's first object does not say where the log starts")

    def _extend_data(self, one: WalObject) -> None:
        if not self.objects:
            self.start_offset = self.end_offset = one.wal_start
        elif (one.master_epoch, one.writer_id) != (self.epoch, self.writer_id):
            raise damaged(one.key, 56, f"written in master epoch {one.master_epoch} by a writer other than the chain's")
        if one.wal_start != self.end_offset:
            raise damaged(one.key, 32, f"it begins at WAL offset {one.wal_start}, not {self.end_offset}")
        self.end_offset = one.wal_end

    def missing(self, others: Iterable[WalObject]) -> WalObject | None:
        """Return an object that proves that the one at the hole was acknowledged; None if there is no proof."""
        return next((one for one in others if one.durable_offset > self.end_offset), None)


def next_place(chain: Chain) -> int:
    """Return the place after a fence at the chain's hole: beyond everything that older writers can put."""
    return max(chain.hole, chain.furthest) + SPAN


def barrier_place(chain: Chain, attempt: int) -> int | None:
    """Return the place of a barrier, further ahead at each attempt; None when that is too far."""
    distance = MAX_IN_FLIGHT << attempt
    return chain.hole + distance if distance <= MAX_BARRIER else None


class MissingWalObject(CorruptData):
    """An acknowledged object of a WAL is not in the bucket. It is as lost as a damaged one, with another cause."""


def missing_object(key: str, wal_offset: int, proof: str) -> MissingWalObject:
    """Return the error for a missing acknowledged object."""
    return MissingWalObject(
        f"WAL object {key} is missing: its byte 0, WAL offset {wal_offset}, was acknowledged according to {proof}",
        hint="restore it from a version or a copy of the bucket; does a lifecycle rule apply to it?",
    )


@dataclass(slots=True)
class Batch:
    """Records that go into one object."""

    wal_start: int
    wal_end: int
    buffers: list[Buffer] = field(default_factory=list)
    records: int = 0
    seq: int = -1
    first_seq: int = -1
    """The first seq that its object carries."""
    landed: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its records."""
        return self.wal_end - self.wal_start


class SendWindow:
    """A writer's state: waiting batches, batches in flight, and the live objects before them."""

    def __init__(self, batch_bytes: int, in_flight: int) -> None:
        assert 1 <= in_flight <= MAX_IN_FLIGHT
        self._batch_bytes = batch_bytes
        self._limit = in_flight
        self._waiting: deque[Batch] = deque()
        self._sent: deque[Batch] = deque()
        self._live: deque[tuple[int, int]] = deque()  # durable DATA objects: seq, WAL end
        self._doomed: deque[int] = deque()  # durable objects that the log no longer needs
        self.next_seq = 0
        """The place of the next object."""
        self.first_seq = 0
        """The oldest object needed, as the next object will record."""
        self._carried = 0
        self.durable_offset = 0
        """The WAL offset up to which all objects have landed."""

    def open(self, next_seq: int, first_seq: int, durable_offset: int, live: Iterable[tuple[int, int]]) -> None:
        """Continue after a fence: from `next_seq`, with the durable DATA objects `live` (seq, WAL end)."""
        assert not self._waiting and not self._sent
        self.next_seq, self.first_seq, self._carried = next_seq, first_seq, first_seq
        self.durable_offset = durable_offset
        self._live = deque(live)

    @property
    def in_flight(self) -> int:
        """Return the number of objects in flight."""
        return len(self._sent)

    @property
    def has_room(self) -> bool:
        """Return whether one more object may be sent."""
        return len(self._sent) < self._limit

    @property
    def live_objects(self) -> int:
        """Return the number of durable objects that the log needs."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Return the number of batches waiting to be sent."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Return whether the next batch to be sent has reached its full size."""
        return bool(self._waiting) and self._waiting[0].size_bytes >= self._batch_bytes

    @property
    def idle(self) -> bool:
        """Return whether nothing is waiting or in flight."""
        return not self._waiting and not self._sent

    def add(self, wal_start: int, size: int, buffers: Iterable[Buffer]) -> None:
        """Add a record of `size` bytes at the end of the log."""
        batch = self._waiting[-1] if self._waiting else None
        if batch is None or batch.size_bytes >= self._batch_bytes:
            batch = Batch(wal_start, wal_start)
            self._waiting.append(batch)
        assert batch.wal_end == wal_start
        batch.buffers.extend(buffers)
        batch.wal_end += size
        batch.records += 1

    def add_carrier(self) -> None:
        """Add a batch without records, whose object publishes a trim."""
        assert self.idle
        self._waiting.append(Batch(self.durable_offset, self.durable_offset))

    def next_batch(self) -> Batch | None:
        """Take the next batch to send and assign its place; None if nothing waits or the window is full."""
        if not self._waiting or not self.has_room:
            return None
        batch = self._waiting.popleft()
        batch.seq, self.next_seq = self.next_seq, self.next_seq + 1
        batch.first_seq = self.first_seq
        self._sent.append(batch)
        return batch

    def landed(self, batch: Batch) -> bool:
        """Record that a batch is in the bucket; return whether `durable_offset` or the doomed objects changed."""
        assert not batch.landed
        batch.landed = True
        moved = False
        while self._sent and self._sent[0].landed:
            first = self._sent.popleft()
            assert first.wal_start == self.durable_offset
            self.durable_offset = first.wal_end
            self._live.append((first.seq, first.wal_end))
            self._carried = max(self._carried, first.first_seq)
            moved = True
        return moved

    def trim(self, offset: int) -> None:
        """Release everything before WAL offset `offset`. The newest durable object is kept in any case."""
        while len(self._live) > 1 and self._live[0][1] <= offset:
            self._doomed.append(self._live.popleft()[0])
        if self._doomed and self._live:
            self.first_seq = max(self.first_seq, self._live[0][0])

    @property
    def wants_carrier(self) -> bool:
        """Return whether objects could be deleted after another object recorded that, and none is in flight."""
        return self.idle and self.first_seq > self._carried

    @property
    def has_deletable(self) -> bool:
        """Return whether `deletable` would return a place."""
        return bool(self._doomed) and self._doomed[0] < self._carried

    def deletable(self) -> list[int]:
        """Return each place once that may be deleted now: a durable object of the chain says it is not needed."""
        found: list[int] = []
        while self._doomed and self._doomed[0] < self._carried:
            found.append(self._doomed.popleft())
        return found

    def clear(self) -> None:
        """Discard everything pending: the log has failed."""
        self._waiting.clear()


_SMOOTHING = 0.2
"""Weight of the newest put in the measured latency, which covers about the last ten puts."""
_PUTS_AT_ONCE = 2
"""Batches per latency of a put: a batch waits on average half as long as without overlap, for at most twice as many
requests."""


class BatchTimer:
    """Decides when to send: at once while nothing is in flight, else after the interval or when the batch is full.

    The interval follows the measured latency of a put between two limits: a slow bucket gets fewer, larger objects.
    """

    def __init__(self, min_s: float, max_s: float) -> None:
        assert 0 < min_s <= max_s
        self._min_s = min_s
        self._max_s = max_s
        self._latency_s = 0.0
        self._last_sent_s = float("-inf")

    @property
    def latency_s(self) -> float:
        """Return the measured latency of a put; 0 before the first."""
        return self._latency_s

    @property
    def interval_s(self) -> float:
        """Return the current time between two batches."""
        return min(self._max_s, max(self._min_s, self._latency_s / _PUTS_AT_ONCE))

    def observe(self, took_s: float) -> None:
        """Record the duration of a put."""
        weight = _SMOOTHING if self._latency_s else 1.0
        self._latency_s += weight * (took_s - self._latency_s)

    def sent(self, now_s: float) -> None:
        """Record that a batch was sent."""
        self._last_sent_s = now_s

    def delay_s(self, now_s: float, window: SendWindow) -> float:
        """Return how long the next batch should wait; only called when the window has room."""
        if window.in_flight == 0 or window.is_full:
            return 0.0
        return max(0.0, self._last_sent_s + self.interval_s - now_s)
