"""Partitions that are followed here: who is told when there is more to read (KIP-392)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.kafka_world import DataController, batch
from tidelog.batch.batch import ControlType, build_control_batch
from tidelog.broker.partitions.read_replicas import DATA_STREAM, FollowedLog, FollowedReplicas, ReadReplicas
from tidelog.controller.image.image import Delta
from tidelog.controller.model import commands as c
from tidelog.runtime.errors import NotLeader
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.commits import CommitObjects, NewObject, ObjectKind, pack_ranges
from tidelog.storage.wal.base import WalRecord, WalRecordType

LEADER, HERE = 1, 2
RECORD_BYTES = 100


class Follower:
    """A broker that follows the set of another one, whose only partition it gives to consumers."""

    def __init__(self, *, shares_ends: bool = False) -> None:
        """`shares_ends`: the deltas are those of the state machine in the same process."""
        self.controller = DataController()
        for broker in (LEADER, HERE):
            self.controller.register(broker)
        self._shares_ends = shares_ends
        self.records = RecoveredRecords(LogCache(1 << 20))
        self.replica = SimpleNamespace(
            is_following=True,
            master=None,
            tail=SimpleNamespace(records=self.records),
            wal=SimpleNamespace(confirm_offset=0),
        )
        self.followed = FollowedReplicas()
        self.followed.add(LEADER, cast(Any, self.replica))
        self.read = ReadReplicas(
            cast(Any, self.controller), self.followed, cast(Any, None), broker_id=HERE, rack="r", enabled=True
        )
        self.told: list[int] = []
        self._wal_end = 0

    async def log(self) -> FollowedLog:
        """Begin, and return the partition with somebody who waits for it."""
        topic = await self.controller.create_topic("t", 1, {}, assignment=[LEADER])
        self.controller.open_partitions("t")
        self.read.start()
        log = self.read.get(topic.id, 0)
        log.add_watermark_listener(lambda: self.told.append(log.high_watermark))
        return log

    def receive(self, log: FollowedLog, base_offset: int, payload: bytes = bytes(36)) -> None:
        """A record of the master arrives, of one offset."""
        start, self._wal_end = self._wal_end, self._wal_end + RECORD_BYTES
        stream = self.controller.image.streams[log.first_stream + DATA_STREAM]
        epoch = stream.owner_since_epoch
        self.records.add(
            WalRecord(
                start, self._wal_end, WalRecordType.DATA, 1, stream.id, epoch, base_offset, 1, memoryview(payload)
            )
        )

    def confirm(self) -> None:
        """The master tells that all that was received is confirmed."""
        start, self.replica.wal.confirm_offset = self.replica.wal.confirm_offset, self._wal_end
        self.followed.confirmed(LEADER, start, self._wal_end)

    def commit(self, log: FollowedLog, ends: Sequence[tuple[int, int, int]]) -> None:
        """The master's upload of a WAL range is committed, with these parts of the data stream."""
        row = self.controller.image.replica_sets[LEADER]
        stream = log.first_stream + DATA_STREAM
        for start, end, wal_end in ends:
            first = int(self.controller.apply(c.PrepareObjects(1, 60_000)))
            one = NewObject(first, ObjectKind.STREAM, 10, pack_ranges([(stream, start, end)]))
            at = self.controller.image.replica_sets[LEADER].committed_wal_offset
            commit = c.Commit(CommitObjects(LEADER, row.master_epoch, at, wal_end, (one,)))
            self._apply(commit)

    def _apply(self, command: Any) -> None:
        if not self._shares_ends:
            self.controller.apply(command)
            return
        subscribers, self.controller.subscribers = self.controller.subscribers, []
        seen: list[Delta] = []
        self.controller.subscribers = [seen.append]
        self.controller.apply(command)
        self.controller.subscribers = subscribers
        (delta,) = seen
        streams = self.controller.image.streams
        shared = Delta(delta.version, delta.mutations, dict(streams))
        for callback in subscribers:
            callback(shared)


async def test_those_who_wait_are_told_what_the_master_has_confirmed() -> None:
    here = Follower()
    log = await here.log()
    here.receive(log, 0)
    assert (log.high_watermark, here.told) == (0, [])
    here.confirm()
    assert here.told == [1]


@pytest.mark.parametrize("shares_ends", [False, True])
async def test_those_who_wait_are_told_of_a_commit_of_records_that_have_not_come_here(shares_ends: bool) -> None:
    here = Follower(shares_ends=shares_ends)
    log = await here.log()
    here.commit(log, [(0, 5, 100)])
    assert (log.high_watermark, here.told) == (5, [5])
    here.commit(log, [(5, 6, 200)])
    assert here.told == [5, 6]


async def test_those_who_wait_are_told_that_the_log_begins_later() -> None:
    here = Follower()
    log = await here.log()
    here.commit(log, [(0, 5, 100)])
    here.told.clear()
    row = here.controller.image.streams[log.first_stream + DATA_STREAM]
    master = here.controller.image.replica_sets[LEADER]
    here.controller.apply(c.TrimStream(row.id, row.epoch, 3, LEADER, master.master_epoch))
    assert log.log_start_offset == 3
    assert here.told == [5]


async def test_those_who_wait_are_told_of_another_leader_epoch() -> None:
    here = Follower()
    log = await here.log()
    here.controller.apply(c.Elect(LEADER, LEADER))
    assert log.closed and len(here.told) == 1
    with pytest.raises(NotLeader):
        log.read_hot(0, 1, committed=False)


async def test_a_read_committed_reader_gets_what_is_before_the_first_batch_of_a_transaction() -> None:
    here = Follower()
    log = await here.log()
    in_transaction = batch(b"t", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    marker = build_control_batch(ControlType.ABORT, producer_id=7, producer_epoch=0, coordinator_epoch=0, timestamp=1)
    stored = [batch(b"a"), batch(b"b"), in_transaction, batch(b"c"), marker, batch(b"d")]
    for offset, payload in enumerate(stored):
        here.receive(log, offset, payload)
    here.confirm()

    def given(offset: int, *, committed: bool) -> list[bytes]:
        found = log.read_hot(offset, 1 << 20, committed=committed)
        assert found is not None and found.size_bytes == sum(map(len, found.records))
        return [bytes(payload) for payload in found.records]

    assert given(0, committed=False) == stored
    assert given(0, committed=True) == stored[:2]
    assert given(1, committed=True) == stored[1:2]
    assert given(5, committed=True) == stored[5:]
    for offset in (2, 4):
        with pytest.raises(NotLeader, match="transactions"):
            log.read_hot(offset, 1 << 20, committed=True)
        with pytest.raises(NotLeader, match="transactions"):
            await log.read(offset, 1 << 20, committed=True)
