"""Records that wait for their streams: at a start, and on a follower (`tidelog.storage.cache.recovered`)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.cache.log_cache import LogCache, StreamLog
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.wal.base import WalRecord, WalRecordType

RECORD_BYTES = 100


def record(index: int, stream_id: int, base_offset: int) -> WalRecord:
    """The WAL's record number `index`, of one stream offset."""
    at = index * RECORD_BYTES
    payload = memoryview(bytes([index % 251]) * 36)
    return WalRecord(at, at + RECORD_BYTES, WalRecordType.DATA, 1, stream_id, 1, base_offset, 1, payload)


class Follower:
    """What a follower keeps, and a plain list beside it."""

    def __init__(self) -> None:
        self.cache = LogCache(1 << 30)
        self.records = RecoveredRecords(self.cache)
        self.model: list[tuple[int, int]] = []
        """WAL index and stream of each record kept."""
        self.begin = self.end = 0

    def receive(self, stream_id: int) -> None:
        base = sum(each == stream_id for _, each in self.model)
        self.records.add(record(self.end, stream_id, base))
        self.model.append((self.end, stream_id))
        self.end += 1

    def commit(self, count: int) -> None:
        self.begin = min(self.end, self.begin + count)
        self.records.discard_before(self.begin * RECORD_BYTES)
        self.model = [each for each in self.model if each[0] >= self.begin]

    def cut(self, count: int) -> None:
        self.end = max(self.begin, self.end - count)
        self.records.discard_from(self.end * RECORD_BYTES)
        self.model = [each for each in self.model if each[0] < self.end]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), st.integers(1, 4)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.tuples(st.just("cut"), st.integers(0, 5)),
    ),
    max_size=80,
)


@given(STEPS)
def test_it_keeps_what_is_neither_committed_nor_cut(steps: list[tuple[str, int]]) -> None:
    one = Follower()
    for step, argument in steps:
        {"receive": one.receive, "commit": one.commit, "cut": one.cut}[step](argument)
        assert len(one.records) == len(one.model)
        assert sorted(one.records.unclaimed()) == sorted({stream for _, stream in one.model})
    assert (one.cache.bytes == 0) == (not one.model)
    entries = one.records.settle()
    assert not entries, "no stream was opened"
    assert one.cache.bytes == 0


def test_a_stream_that_opens_gets_its_records_in_order() -> None:
    one = Follower()
    for _ in range(3):
        one.receive(7)
        one.receive(9)
    one.cut(1)
    log = StreamLog(7, 0)
    log.owner_since_epoch = 1
    assert not one.records.fill(log, 300)
    assert log.unconfirmed == [(2, 3, 500)]
    assert (log.cache_start, log.end_offset) == (0, 3)
    assert one.records.unclaimed() == [9]
    assert [entry.wal_end for entry in one.records.settle()] == [100, 300, 500]
