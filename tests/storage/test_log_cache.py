"""The log cache against a model: what is read, what is kept, what is evicted, what it costs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.examples import examples
from tidelog.storage.cache.footprint import RECORD_BYTES, footprint
from tidelog.storage.cache.log_cache import CacheEntry, LogCache, StreamLog
from tidelog.storage.records import StreamEntry

BOUND = 40 * 640


class CacheMachine(RuleBasedStateMachine):
    """Appends, releases and reads; the model keeps every record of every stream."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = LogCache(BOUND)
        self.logs = {stream: StreamLog(stream, 100 * stream) for stream in range(3)}
        self.model: dict[int, list[StreamEntry]] = {stream: [] for stream in self.logs}
        self.order: list[CacheEntry] = []
        self.released = 0
        self.wal_end = 0

    @rule(stream=st.integers(0, 2), count=st.integers(1, 5), size=st.integers(0, 2000))
    def append(self, stream: int, count: int, size: int) -> None:
        pending_before = self.cache.pending_bytes
        if not self.cache.has_room(size + RECORD_BYTES):
            assert pending_before > 0
            assert pending_before + size + RECORD_BYTES > BOUND
            return
        log = self.logs[stream]
        record = StreamEntry(log.end_offset, count, bytes(size))
        log.push(record)
        self.cache.add(footprint(record.payload))
        self.wal_end += size + 1
        self.model[stream].append(record)
        self.order.append(CacheEntry(self.wal_end, log, record))

    @rule(amount=st.integers(1, 10))
    def release(self, amount: int) -> None:
        entries = self.order[self.released : self.released + amount]
        self.cache.release(entries)
        self.released += len(entries)

    @rule(stream=st.integers(0, 2), start=st.integers(0, 400), span=st.integers(1, 50), size=st.integers(0, 5000))
    def read(self, stream: int, start: int, span: int, size: int) -> None:
        log = self.logs[stream]
        got = log.read(start, start + span, size)
        records = self.model[stream]
        cached = [record for record in records if record.base_offset >= log.cache_start]
        wanted = [r for r in cached if r.base_offset + r.count > start and r.base_offset < start + span]
        if not wanted or wanted[0].base_offset > start:
            assert got is None
            return
        assert got is not None
        assert got == wanted[: len(got)]
        taken = sum(len(record.payload) for record in got)
        assert len(got) == 1 or taken <= size
        if len(got) < len(wanted):
            assert taken + len(wanted[len(got)].payload) > size

    @invariant()
    def what_is_not_uploaded_is_in_memory_and_the_rest_within_the_bound(self) -> None:
        pending = self.order[self.released :]
        assert self.cache.pending_bytes == sum(footprint(e.record.payload) for e in pending)
        for entry in pending:
            assert entry.log.cache_start <= entry.record.base_offset
        kept = sum(
            footprint(record.payload)
            for stream, log in self.logs.items()
            for record in self.model[stream]
            if record.base_offset >= log.cache_start
        )
        assert kept == self.cache.bytes
        assert self.cache.bytes <= BOUND or self.cache.bytes == self.cache.pending_bytes

    @invariant()
    def the_oldest_go_first(self) -> None:
        gone = [entry.record.base_offset < entry.log.cache_start for entry in self.order]
        assert gone == sorted(gone, reverse=True)


CacheMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
test_the_cache_behaves_as_its_model = CacheMachine.TestCase


def test_a_record_over_the_bound_is_let_in_alone() -> None:
    cache, log = LogCache(1000), StreamLog(1, 0)
    assert cache.has_room(5000)
    record = StreamEntry(0, 1, bytes(5000))
    log.push(record)
    cache.add(footprint(record.payload))
    assert not cache.has_room(1)
    cache.release([CacheEntry(1, log, record)])
    assert cache.bytes == 0
    assert len(log) == 0
    assert log.end_offset == 1
    assert log.committed_end == 1


def test_a_stream_is_reported_when_its_last_record_is_evicted() -> None:
    gone: list[StreamLog] = []
    cache, log = LogCache(RECORD_BYTES * 2 + 10), StreamLog(1, 0)
    cache.on_empty = gone.append
    entries = []
    for offset in range(2):
        record = StreamEntry(offset, 1, b"x")
        log.push(record)
        cache.add(footprint(record.payload))
        entries.append(CacheEntry(offset + 1, log, record))
    cache.release(entries)
    assert gone == []
    assert cache.has_room(500 + RECORD_BYTES)
    assert gone == [log]
