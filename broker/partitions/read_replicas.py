"""`ReadReplicas`: partitions that this broker follows, as consumers near it read them (KIP-392).

A consumer tells its rack (`client.rack`). The leader answers with a broker of that rack whose replica is connected and
in the SyncStateSet, and returns no records; the consumer fetches from that broker until it is refused there, or for a
few minutes, and then asks the leader again.

A follower's partition is not open: it has no producers, no segments and no time index here. What is read is the
confirmed part of the data stream: from the bucket up to the committed end, and from the warm tail of the replica of the
set's WAL up to the confirm offset that the master has told (rule 2: never past it). The master tells it with its next
records, or within milliseconds if there are none.

Invariants:
- Nothing is returned past what the replica knows to be confirmed; a consumer that is ahead of that waits.
- What is not certain here is refused as NOT_LEADER_OR_FOLLOWER, never as an offset out of range past the end: the
  client asks the leader then, and its position stays.
- Nothing is read while the replica is without its master: it may be a deposed one's.
- A read_committed reader gets no batch of a transaction here: the index of aborted ones is the leader's. It gets what
  is before the first one, and is sent to the leader at that; the leader does not send it back while one comes next.

Entry: `ReadReplicas`, `FollowedReplicas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, takewhile
from struct import Struct
from typing import TYPE_CHECKING

from tidelog.broker.replication.replica import HotReplica
from tidelog.runtime.errors import NotLeader
from tidelog.storage.records import StreamEntry
from tidelog.stream.errors import OffsetOutOfRange
from tidelog.stream.partition_log import FetchResult

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Delta, Image
    from tidelog.controller.model.records import PartitionKey, PartitionRecord, StreamRecord
    from tidelog.storage.cache.recovered import RecoveredRecords
    from tidelog.storage.reads.reader import BlockReader

DATA_STREAM = 1
"""The data stream is the second one of a partition."""
_ATTRIBUTES = Struct(">h")
_ATTRIBUTES_AT = 21
_OF_TRANSACTIONS = 0x30
"""Bits of a batch's attributes: transactional, control."""
_PLACES = ("partitions", "replica_sets")
"""Tables that say where a partition is, and in which leader epoch."""
_NOTHING = FetchResult([], [], 0)


def _nobody() -> None:
    """There is no subscription yet."""


def _untold(_records: RecoveredRecords, _start: int, _end: int) -> None:
    """Nobody reads yet."""


class FollowedReplicas:
    """The replicas of this broker, by replica set, whatever their role is. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._replicas: dict[int, HotReplica] = {}
        self.on_confirmed: Callable[[RecoveredRecords, int, int], None] = _untold
        """Called with a follower's warm records, and the WAL offsets between which it now knows them confirmed."""
        self.on_changed: Callable[[], None] = _nobody
        """Called when a replica begins or ends to follow."""

    def add(self, replica_set: int, replica: HotReplica) -> None:
        """This replica is in use."""
        self._replicas[replica_set] = replica

    def remove(self, replica_set: int) -> None:
        """The replica of a set is not in use any more."""
        if self._replicas.pop(replica_set, None) is not None:
            self.on_changed()

    def get(self, replica_set: int) -> HotReplica | None:
        """Return the replica of a set."""
        return self._replicas.get(replica_set)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of records that they hold in memory, besides those of a storage."""
        return sum(replica.tail.cache.bytes for replica in self._replicas.values())

    def confirmed(self, replica_set: int, start: int, end: int) -> None:
        """A follower's records between these WAL offsets are confirmed, and here."""
        replica = self._replicas.get(replica_set)
        if replica is not None:
            self.on_confirmed(replica.tail.records, start, end)

    def changed(self) -> None:
        """A replica follows, or does not any more."""
        self.on_changed()


class FollowedLog:
    """A partition of a set that this broker follows. It reads like a `PartitionLog`, for consumers only."""

    came_at = -math.inf
    """As `PartitionLog.came_at`: it has come from nowhere."""

    def __init__(
        self, image: Callable[[], Image], reader: BlockReader, replica: HotReplica, place: PartitionRecord, topic: str
    ) -> None:
        self._image = image
        self._reader = reader
        self.replica = replica
        self.topic = topic
        self.topic_id = place.topic_id
        self.partition = place.index
        self.first_stream = place.first_stream
        self.leader_epoch = image().leader(place)[1]
        self.closed = False
        self._watchers: dict[int, Callable[[], None]] = {}
        self._next_watcher = 0
        self._told = (-1, -1)

    # --- where it ends -------------------------------------------------------------------------------------------

    def _stream(self) -> StreamRecord | None:
        """Return the row of its data stream; None if it cannot be read here."""
        record = self._image().stream(self.first_stream + DATA_STREAM)
        return record if record is not None and not record.quarantined else None

    @property
    def high_watermark(self) -> int:
        """Return the offset up to which its records are known to be confirmed here; -1 if it cannot be read."""
        record = self._stream()
        return -1 if record is None else self._confirmed_end(record)

    def _confirmed_end(self, record: StreamRecord) -> int:
        replica = self.replica
        return replica.tail.records.confirmed_end(
            record.id, record.owner_since_epoch, record.end_offset, replica.wal.confirm_offset
        )

    @property
    def last_stable_offset(self) -> int:
        """Return the high watermark: no batch of a transaction is given to those who ask."""
        return self.high_watermark

    @property
    def log_start_offset(self) -> int:
        """Return the first offset kept, as the metadata has it; -1 if it cannot be read."""
        record = self._stream()
        return -1 if record is None else record.start_offset

    @property
    def told_log_start(self) -> int:
        """Return -1 (not known): the leader tells a log start that has moved before the streams are trimmed."""
        return -1

    def end_offset_for_epoch(self, _epoch: int) -> tuple[int, int]:
        """Raise `NotLeader`: the history of leader epochs is the leader's."""
        raise self._ask_the_leader("leader epochs are compared there")

    # --- reading -------------------------------------------------------------------------------------------------

    def read_hot(self, offset: int, max_bytes: int, *, committed: bool) -> FetchResult | None:
        """As `PartitionLog.read_hot`. Raises `NotLeader` where the leader must be asked, `OffsetOutOfRange`."""
        record, bound = self._bounds(offset)
        if offset >= bound:
            return _NOTHING
        found = self._in_tail(record, offset, bound, max_bytes)
        if found is None:
            found = self._reader.read_cached(record.id, offset, min(bound, record.end_offset), max_bytes)
        if not found or all(entry.is_hole for entry in found):
            return None
        return self._result(found, committed=committed)

    async def read(self, offset: int, max_bytes: int, *, committed: bool, minimum_one: bool = True) -> FetchResult:
        """As `PartitionLog.read`. Raises `NotLeader`, `OffsetOutOfRange`, `CorruptData`, `Unavailable`."""
        record, bound = self._bounds(offset)
        if offset >= bound:
            return _NOTHING
        at = offset
        while at < bound:
            found = self._in_tail(record, at, bound, max_bytes)
            if found is None:
                found = await self._reader.read(record.id, at, min(bound, record.end_offset), max_bytes)
            if not found:
                raise self._ask_the_leader(f"offset {at} is not in the bucket yet, nor in memory here")
            result = self._result(found, committed=committed)
            if result.records:
                is_too_large = not minimum_one and len(result.records[0]) > max_bytes
                return _NOTHING if is_too_large else result
            at = found[-1].base_offset + found[-1].count
        return _NOTHING

    def _bounds(self, offset: int) -> tuple[StreamRecord, int]:
        record = self._stream()
        if record is None or self.closed or not self.replica.is_following:
            raise self._ask_the_leader("it is not followed here now")
        if offset < record.start_offset:
            raise OffsetOutOfRange(f"{self.topic}-{self.partition} begins at {record.start_offset}, not {offset}")
        return record, self._confirmed_end(record)

    def _in_tail(self, record: StreamRecord, start: int, end: int, max_bytes: int) -> list[StreamEntry] | None:
        return self.replica.tail.records.read(record.id, record.owner_since_epoch, start, end, max_bytes)

    def _result(self, found: Sequence[StreamEntry], *, committed: bool) -> FetchResult:
        records = [entry.payload for entry in found if entry.payload]
        if committed:
            plain = list(takewhile(lambda payload: not is_of_transaction(payload), records))
            if records and not plain:
                raise self._ask_the_leader("transactions are read there with read_committed")
            records = plain
        return FetchResult(records, [], sum(map(len, records)))

    def _ask_the_leader(self, why: str) -> NotLeader:
        return NotLeader(f"{self.topic}-{self.partition} is not read from this follower: {why}")

    # --- who waits -----------------------------------------------------------------------------------------------

    def add_watermark_listener(self, callback: Callable[[], None]) -> Callable[[], None]:
        """As `PartitionLog.add_watermark_listener`: call `callback` when high watermark or log start move, or it is
        closed."""
        if not self._watchers and not self.closed:
            self._told = self._extent()
        self._next_watcher += 1
        number = self._next_watcher
        self._watchers[number] = callback

        def remove() -> None:
            self._watchers.pop(number, None)

        return remove

    def close(self) -> None:
        """It is not read here any more; those who wait are told."""
        self.closed = True
        self._tell()

    def look(self) -> None:
        """Tell those who wait if the high watermark or the log start has moved."""
        if self._watchers and (bounds := self._extent()) != self._told:
            self._told = bounds
            self._tell()

    def _extent(self) -> tuple[int, int]:
        return self.log_start_offset, self.high_watermark

    def _tell(self) -> None:
        for callback in list(self._watchers.values()):
            callback()


def is_of_transaction(payload: bytes | memoryview) -> bool:
    """Return whether a batch is in a transaction, or a marker."""
    (attributes,) = _ATTRIBUTES.unpack_from(payload, _ATTRIBUTES_AT)
    return bool(attributes & _OF_TRANSACTIONS)


class LeaderOnly:
    """A broker that follows nothing, with the methods of `ReadReplicas` for requests."""

    def nearest(self, _topic_id: bytes, _index: int, _rack: str) -> int:
        """Return -1: no follower is to be read."""
        return -1

    def get(self, _topic_id: bytes, _index: int) -> FollowedLog:
        """Raise `NotLeader`."""
        raise NotLeader("this broker follows no partition")


class ReadReplicas:
    """See the module. Used on the event loop's thread."""

    def __init__(
        self,
        controller: ControllerClient,
        replicas: FollowedReplicas,
        reader: BlockReader,
        *,
        broker_id: int,
        rack: str,
        enabled: bool,
    ) -> None:
        """`enabled`: as a leader, name followers to consumers of their rack. Followers are read whatever it says."""
        self._controller = controller
        self._replicas = replicas
        self._reader = reader
        self._broker_id = broker_id
        self._rack = rack
        self._enabled = enabled
        self._logs: dict[PartitionKey, FollowedLog] = {}
        self._by_stream: dict[int, FollowedLog] = {}
        """The same, by data stream."""
        self._unsubscribe: Callable[[], None] = _nobody

    def start(self) -> None:
        """Follow the metadata and the replicas."""
        self._unsubscribe = self._controller.subscribe(self._image_changed)
        self._replicas.on_changed = self._look
        self._replicas.on_confirmed = self._confirmed

    def close(self) -> None:
        """Serve nothing any more."""
        self._unsubscribe()
        self._replicas.on_changed, self._replicas.on_confirmed = _nobody, _untold
        for log in list(self._logs.values()):
            self._end(log)

    def nearest(self, topic_id: bytes, index: int, rack: str) -> int:
        """Return the follower that a consumer of this rack is to read a partition from that is led here; -1: none."""
        if not self._enabled or not rack or rack == self._rack:
            return -1
        image = self._controller.image
        record = image.partition(topic_id, index)
        replica = self._replicas.get(record.replica_set) if record is not None else None
        if replica is None or replica.master is None:
            return -1
        near = [
            each
            for each in sorted(replica.master.readable())
            if (broker := image.brokers.get(each)) is not None and broker.alive and broker.rack == rack
        ]
        return near[index % len(near)] if near else -1

    def get(self, topic_id: bytes, index: int) -> FollowedLog:
        """Return a partition that this broker follows. Raises `NotLeader`."""
        key, image = (topic_id, index), self._controller.image
        record, topic = image.partition(topic_id, index), image.topics.get(topic_id)
        replica = self._replicas.get(record.replica_set) if record is not None else None
        if record is None or topic is None or replica is None or not replica.is_following:
            raise NotLeader(f"broker {self._broker_id} neither leads nor follows this partition")
        known = self._logs.get(key)
        if known is not None and self._stays(known):
            return known
        if known is not None:
            self._end(known)
        log = FollowedLog(lambda: self._controller.image, self._reader, replica, record, topic.name)
        self._logs[key] = self._by_stream[log.first_stream + DATA_STREAM] = log
        return log

    def _end(self, log: FollowedLog) -> None:
        del self._logs[log.topic_id, log.partition], self._by_stream[log.first_stream + DATA_STREAM]
        log.close()

    def _stays(self, log: FollowedLog) -> bool:
        image = self._controller.image
        record = image.partition(log.topic_id, log.partition)
        return (
            record is not None
            and record.first_stream == log.first_stream
            and self._replicas.get(record.replica_set) is log.replica
            and log.replica.is_following
            and image.leader(record)[1] == log.leader_epoch
        )

    # --- what changes --------------------------------------------------------------------------------------------

    def _image_changed(self, delta: Delta) -> None:
        if not self._logs:
            return
        if any(True for table in _PLACES for _ in delta.of(table)):
            self._look()
        for stream_id in chain((change.key for change in delta.of("streams")), delta.advanced()):
            log = self._by_stream.get(stream_id)
            if log is not None:
                log.look()

    def _confirmed(self, records: RecoveredRecords, start: int, end: int) -> None:
        if self._logs:
            for stream_id in records.streams_between(start, end):
                log = self._by_stream.get(stream_id)
                if log is not None:
                    log.look()

    def _look(self) -> None:
        for log in list(self._logs.values()):
            if not self._stays(log):
                self._end(log)
