"""The records that a follower keeps in memory follow its WAL, whatever happens to that, within their bound."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.wal_harness import small
from tidelog.broker.replication.warm import WarmTail
from tidelog.storage.cache.log_cache import LogCache, StreamLog
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalRecord, WalRecordType
from tidelog.storage.wal.memory import MemoryWal

BOUND = 8_000

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("unseen"), st.integers(1, 2)),
        st.tuples(st.just("commit"), st.integers(0, 100)),
        st.tuples(st.just("keep"), st.integers(0, 100)),
        st.tuples(st.just("cut"), st.integers(0, 100)),
        st.tuples(st.just("restart"), st.integers(0, 100)),
        st.tuples(st.just("trim"), st.just(0)),
        st.tuples(st.just("fill"), st.just(0)),
    ),
    max_size=30,
)


class FollowedWal:
    """A WAL, the tail beside it, and what must be known of both."""

    def __init__(self) -> None:
        self.seen_to = 0
        """Up to where the tail was told of the WAL, or passed over."""
        self.wal = MemoryWal(small(max_bytes=1 << 20))
        self.cache = LogCache(BOUND)
        self.tail = WarmTail(self.cache, 0)
        self.epoch = 0
        self.base = 0

    async def records(self) -> list[WalRecord]:
        found, at = [], self.wal.start_offset
        while records := await self.wal.read_records(at, 1 << 20):
            found += records
            at = records[-1].end_offset
        return found

    async def begin(self, *, seen: bool) -> None:
        self.epoch += 2
        await self.wal.begin_epoch(self.epoch)
        await self._tell(seen)

    async def append(self, count: int, *, seen: bool) -> None:
        for _ in range(count):
            self.wal.append(StreamAppend(1, 1, self.base, 1, [bytes(500)]))
            self.base += 1
        await asyncio.sleep(0)
        await self._tell(seen)

    async def _tell(self, seen: bool) -> None:
        for record in await self.records():
            if seen and record.offset >= self.seen_to:
                self.tail.add(record)
        self.seen_to = self.wal.end_offset

    async def do(self, kind: str, value: int) -> None:
        wal, tail = self.wal, self.tail
        if kind in ("append", "unseen"):
            await self.append(value, seen=kind == "append")
            return
        boundaries = [wal.start_offset, *(record.end_offset for record in await self.records())]
        offset = boundaries[value * (len(boundaries) - 1) // 100]
        if kind in ("commit", "keep"):
            tail.note_committed(offset, offset if kind == "keep" else -1)
            return
        if kind == "fill":
            await self.fill()
            return
        if kind == "trim":
            await wal.trim(max(wal.start_offset, min(tail.committed_offset, wal.end_offset)))
            return
        await wal.promise(self.epoch + 1)
        offset = max(offset, tail.committed_offset)  # what is committed is the same on every replica
        if kind == "cut":
            await wal.truncate(offset, master_epoch=self.epoch + 1)
        else:
            await wal.restart_at(offset, master_epoch=self.epoch + 1)
        tail.reconcile(wal)
        self.seen_to = wal.end_offset
        await self.begin(seen=True)

    async def fill(self) -> None:
        tail = self.tail
        began = max(tail.committed_offset, self.wal.start_offset)
        start = await tail.fill(self.wal)
        assert start in (-1, began)
        if start >= 0:
            assert tail.warm_from == start

    async def check(self) -> None:
        tail = self.tail
        held = [
            record
            for record in await self.records()
            if record.type is WalRecordType.DATA
            and tail.warm_from <= record.offset
            and record.end_offset <= tail.end_offset
            and record.end_offset > tail.committed_offset
        ]
        assert len(tail.records) == len(held)
        assert tail.records.oldest_end == (held[0].end_offset if held else -1)
        assert self.cache.bytes <= BOUND
        committed = [
            record
            for record in await self.records()
            if record.type is WalRecordType.DATA and record.end_offset <= tail.committed_offset
        ]
        if committed and (kept := tail.records.kept(1, committed[-1].base_offset + 1, 0)) is not None:
            found = kept.read(kept.cache_start, kept.end_offset, 1 << 20)
            assert found is not None
            bases = [each.base_offset for each in found]
            assert bases == list(range(bases[0], committed[-1].base_offset + 1))

    async def check_complete(self) -> None:
        records = await self.tail.complete(self.wal)
        wanted = [
            record.base_offset
            for record in await self.records()
            if record.type is WalRecordType.DATA and record.end_offset > self.tail.committed_offset
        ]
        log = StreamLog(1, wanted[0] if wanted else 0)
        whole = wanted == list(range(wanted[0], wanted[0] + len(wanted))) if wanted else True
        assert len(records) == len(wanted)
        if whole and wanted:
            assert records.fill(log, self.wal.end_offset) == ""
            assert log.end_offset == wanted[-1] + 1


@given(OPERATIONS)
def test_the_tail_holds_what_the_wal_holds_from_where_it_is_warm(operations: list[tuple[str, int]]) -> None:
    async def run() -> None:
        followed = FollowedWal()
        await followed.begin(seen=True)
        for kind, value in operations:
            await followed.do(kind, value)
            await followed.check()
        await followed.check_complete()

    asyncio.run(run())


def test_a_commit_of_many_small_records_is_taken_in_a_few_at_a_time() -> None:
    tail = WarmTail(LogCache(1 << 30), 0)

    def add(index: int) -> None:
        data = memoryview(bytes(36))
        tail.add(WalRecord(index * 100, index * 100 + 100, WalRecordType.DATA, 1, 7, 1, index, 1, data))

    for index in range(3000):
        add(index)
    tail.note_committed(300_000, 300_000)
    assert 1000 < len(tail.records) < 3000
    for index in range(3000, 3500):
        add(index)
    assert len(tail.records) == 500
    kept = tail.records.kept(7, 3000, 1)
    assert kept is not None and (kept.cache_start, kept.end_offset) == (0, 3000)


class StreamOf:
    """A WAL that one stream is written to, and what its tail gives to those who read it."""

    def __init__(self, bound_bytes: int) -> None:
        self.wal = MemoryWal(small(max_bytes=1 << 20))
        self.tail = WarmTail(LogCache(bound_bytes), 0)
        self._base = 0

    async def append(self, count: int) -> list[WalRecord]:
        """Append records that the tail does not learn of; return them."""
        at = self.wal.end_offset
        for _ in range(count):
            self.wal.append(StreamAppend(1, 1, self._base, 1, [bytes(500)]))
            self._base += 1
        await asyncio.sleep(0)
        return await self.wal.read_records(at, 1 << 20)

    def read(self) -> list[int]:
        """The offsets that are here from the first one on."""
        end = self.tail.records.confirmed_end(1, 0, 0, self.wal.end_offset)
        found = self.tail.records.read(1, 0, 0, end, 1 << 20)
        return [] if found is None else [each.base_offset for each in found]


async def test_what_another_role_has_written_is_read_while_more_comes() -> None:
    one = StreamOf(1 << 20)
    await one.wal.begin_epoch(1)
    await one.append(20)
    one.tail.reconcile(one.wal)
    for record in await one.append(5):
        one.tail.add(record)
    assert one.read() == []
    assert await one.tail.fill(one.wal) == 0
    assert one.read() == list(range(25))
    for record in await one.append(5):
        one.tail.add(record)
    assert one.read() == list(range(30)) and one.tail.is_complete(one.wal)


async def test_of_what_has_no_room_nothing_stays() -> None:
    one = StreamOf(17_000)  # for the bytes of the WAL, and not for the overhead of its records
    await one.wal.begin_epoch(1)
    await one.append(20)
    one.tail.reconcile(one.wal)
    for record in await one.append(5):
        one.tail.add(record)
    before = one.tail.cache.bytes
    assert await one.tail.fill(one.wal) == -1
    assert (one.tail.cache.bytes, len(one.tail.records)) == (before, 5)


async def test_what_is_read_of_a_wal_that_is_cut_meanwhile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one = StreamOf(1 << 20)
    await one.wal.begin_epoch(1)
    await one.append(20)
    one.tail.reconcile(one.wal)
    read_records = one.wal.read_records

    async def cut_after(start_offset: int, max_bytes: int) -> list[WalRecord]:
        found = await read_records(start_offset, max_bytes)
        await one.wal.promise(2)
        await one.wal.truncate(found[9].end_offset, master_epoch=2)
        one.tail.reconcile(one.wal)
        return found

    monkeypatch.setattr(one.wal, "read_records", cut_after)
    assert await one.tail.fill(one.wal) == -1
    assert (one.tail.cache.bytes, len(one.tail.records)) == (0, 0)
    monkeypatch.undo()
    assert await one.tail.fill(one.wal) == 0
    assert one.read() == list(range(9)), "the tenth record is the ninth of the stream: an epoch's start comes first"
