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


@given(STEPS, st.integers(0, 40), st.lists(st.integers(0, 5), max_size=20))
def test_what_is_committed_and_confirmed_is_kept_without_a_gap(
    steps: list[tuple[str, int]], confirmed: int, evictions: list[int]
) -> None:
    """A kept log holds the newest committed records of its stream, as they were received; evicted ones leave it."""
    cache = LogCache(1 << 30)
    records = RecoveredRecords(cache)
    cache.on_empty = records.left
    received: dict[int, list[tuple[int, int]]] = {stream: [] for stream in range(1, 5)}
    """WAL index and base offset of what each stream has: the cut ones are gone."""
    begin = end = evicted = 0
    for step, argument in steps:
        if step == "receive":
            own = received[argument]
            own.append((end, own[-1][1] + 1 if own else 0))
            records.add(record(end, argument, own[-1][1]))
            end += 1
        elif step == "commit":
            begin = min(end, begin + argument)
            records.discard_before(begin * RECORD_BYTES, confirmed * RECORD_BYTES)
        else:
            end = max(begin, end - argument)
            records.discard_from(end * RECORD_BYTES)
            received = {stream: [each for each in own if each[0] < end] for stream, own in received.items()}
        if evictions:
            wanted = evictions.pop() * 100
            cache.evict(wanted)
            evicted += wanted
        for stream, own in received.items():
            committed = [each for each in own if each[0] < begin]
            committed_end = committed[-1][1] + 1 if committed else 0
            log = records.kept(stream, committed_end, 1)
            assert records.kept(stream, committed_end, 2) is None, "an earlier ownership"
            if log is None:
                assert evicted or not committed or committed[-1][0] >= confirmed
                continue
            held = log.read(log.cache_start, log.end_offset, 1 << 20)
            assert held is not None
            assert log.end_offset == committed_end
            wanted_records = [each for each in committed if each[0] < confirmed][-len(held) :]
            assert [(one.base_offset, bytes(one.payload)[:1]) for one in held] == [
                (base, bytes([at % 251])) for at, base in wanted_records
            ]
            assert evicted or len(held) == len([each for each in committed if each[0] < confirmed])
    cache.evict(1 << 30)
    assert all(records.kept(stream, own[-1][1] + 1 if own else 0, 1) is None for stream, own in received.items())
    assert cache.bytes == cache.pending_bytes


def test_a_log_that_is_kept_goes_on_when_its_stream_is_opened_at_its_end() -> None:
    def kept() -> RecoveredRecords:
        records = RecoveredRecords(LogCache(1 << 30))
        for at in range(5):
            records.add(record(at, 7, at))
        records.discard_before(3 * RECORD_BYTES, 3 * RECORD_BYTES)
        return records

    records = kept()
    log = records.take_kept(7, 3, 1)
    assert log is not None
    assert records.take_kept(7, 3, 1) is None, "once"
    log.owner_since_epoch = 1
    assert not records.fill(log, 1 << 30)
    assert (log.cache_start, log.committed_end, log.end_offset) == (0, 3, 5)
    assert kept().take_kept(7, 2, 1) is None, "more was committed than the metadata say"
    assert kept().take_kept(7, 4, 1) is None, "more was committed than is kept"
    assert kept().take_kept(7, 3, 2) is None, "another ownership"


def test_records_that_do_not_follow_begin_a_log_of_their_own() -> None:
    records = RecoveredRecords(LogCache(1 << 30))
    for at, base in enumerate((0, 1, 5, 6)):
        records.add(record(at, 7, base))
    records.discard_before(4 * RECORD_BYTES, 4 * RECORD_BYTES)
    log = records.kept(7, 7, 1)
    assert log is not None and (log.cache_start, log.end_offset) == (5, 7)
