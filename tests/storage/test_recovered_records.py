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


@given(STEPS, st.integers(0, 60), st.integers(1, 200))
def test_a_stream_is_read_up_to_what_is_confirmed(steps: list[tuple[str, int]], confirmed: int, max_bytes: int) -> None:
    """Every offset from the committed end to the confirmed end is here, and nothing past it is returned."""
    records = RecoveredRecords(LogCache(1 << 30))
    kept: list[tuple[int, int, int]] = []
    """WAL index, stream and base offset of each record."""
    committed = dict.fromkeys(range(1, 5), 0)
    begin = end = 0
    for step, argument in steps:
        if step == "receive":
            base = max([base + 1 for _, stream, base in kept if stream == argument], default=committed[argument])
            records.add(record(end, argument, base))
            kept.append((end, argument, base))
            end += 1
        elif step == "commit":
            begin = min(end, begin + argument)
            records.discard_before(begin * RECORD_BYTES)
            committed |= {stream: base + 1 for at, stream, base in kept if at < begin}
            kept = [each for each in kept if each[0] >= begin]
        else:
            end = max(begin, end - argument)
            records.discard_from(end * RECORD_BYTES)
            kept = [each for each in kept if each[0] < end]
    confirm = confirmed * RECORD_BYTES
    for stream in committed:
        bases = [base for at, each, base in kept if each == stream and at < confirmed]
        bound = records.confirmed_end(stream, 1, committed[stream], confirm)
        assert bound == committed[stream] + len(bases)
        for start in bases:
            found = records.read(stream, 1, start, bound, max_bytes)
            assert found is not None and found[0].base_offset == start
            assert [one.base_offset for one in found] == bases[bases.index(start) :][: max(1, max_bytes // 36)]
        assert records.confirmed_end(stream, 2, committed[stream], confirm) == committed[stream], "an earlier ownership"
        assert records.read(stream, 2, committed[stream], committed[stream] + 1, max_bytes) is None
        behind = committed[stream] - 1
        assert records.confirmed_end(stream, 1, behind, confirm) == behind, "what lies between is not here"
    changed = records.streams_between(begin * RECORD_BYTES, confirm)
    assert changed == {stream for at, stream, _ in kept if at < confirmed}


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
