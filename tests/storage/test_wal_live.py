"""What a master's WAL tells before it is durable, and the tail that keeps it for sending."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.faulty_disk import FaultyDisk
from tests.storage.wal_harness import SEGMENT, append, durable, make_wal, recovered, small, until
from tests.storage.wal_replicas import Line, encoded
from tidelog.runtime.disk import FileDisk
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import ReplicatedWal, Submitted, WalRecordType
from tidelog.storage.wal.live import LiveTail
from tidelog.storage.wal.memory import MemoryWal


@pytest.mark.parametrize("kind", ["disk", "memory"])
async def test_what_is_told_at_submission_are_the_bytes_of_the_log_in_order(kind: str, tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    wal: ReplicatedWal = make_wal(disk) if kind == "disk" else MemoryWal(small(max_bytes=1 << 20))
    await wal.recover(lambda _record: None)
    told: list[Submitted] = []
    wal.set_on_submitted(told.append)
    for epoch in (1, 4):
        await wal.begin_epoch(epoch)
        for i in range(30):
            await wal.writable(700)
            wal.append(StreamAppend(1, 1, 30 * epoch + i, 1, [bytes([i]) * 300, bytes([i]) * 400]))
        await durable(wal)
    assert [each.offset for each in told] == [0, *(each.end_offset for each in told[:-1])]
    sent = b"".join(bytes(buffer) for each in told for buffer in each.buffers)
    assert len(sent) == wal.end_offset == told[-1].end_offset
    at, read = wal.start_offset, []
    while (raw := await wal.read_raw(at, 5000)) is not None:
        read += [bytes(buffer) for buffer in raw.buffers]
        at = raw.end_offset
    assert sent[wal.start_offset :] == b"".join(read)
    wal.set_on_submitted(None)
    wal.append(StreamAppend(1, 1, 999, 1, [b"x"]))
    await durable(wal)
    assert told[-1].end_offset < wal.end_offset
    assert [one.base_offset for one in await wal.read_records(at, 1)] == [999]
    await wal.close()
    await disk.close()


async def test_it_is_told_before_the_disk_has_it() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    told: list[tuple[int, int]] = []
    wal.set_on_submitted(lambda submitted: told.append((submitted.end_offset, wal.durable_offset)))
    begin = wal.end_offset
    end = await append(wal, 0, b"x" * 100)
    disk.stalled = True
    await until(lambda: told)
    assert told == [(end, begin)] and wal.durable_offset == begin
    disk.stalled = False
    disk.run()
    await durable(wal)
    await wal.close()


async def test_a_replica_that_starts_over_can_keep_its_files(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    for i in range(2 * SEGMENT // 1000):
        await append(wal, i, bytes(1000))
    await durable(wal)
    names = {each.name for each in await disk.entries() if each.name.endswith(".wal")}
    await wal.promise(2)
    await wal.restart_at(5_000_000, master_epoch=3, kept_as=".kept-3")
    assert wal.start_offset == wal.end_offset == 5_000_000 and wal.promised_epoch == 3
    there = {each.name for each in await disk.entries()}
    assert {f"{name}.kept-3" for name in names} | {"epochs.kept-3"} <= there and not names & there
    await wal.close()
    again = make_wal(disk)
    assert await recovered(again) == []
    await again.close()
    await disk.close()


def submissions(sizes: list[list[int]]) -> tuple[list[Submitted], bytes, list[int]]:
    """Submissions of records of these payload sizes, all their bytes, and where records end."""
    at, raw, ends, found = 0, b"", [0], []
    for group in sizes:
        begin, buffers = at, []
        for size in group:
            line = Line(at, at + 64 + size, 1, WalRecordType.DATA, 0, random.Random(at).randbytes(size))
            data = encoded(line)
            parts = [data[:64], data[64 : 64 + size // 2], data[64 + size // 2 :]]
            buffers += parts if size or at % 3 else parts[:1]  # an empty payload may have buffers, too
            raw += data
            at = line.end_offset
            ends.append(at)
        found.append(Submitted(begin, at, list(buffers)))
    return found, raw, ends


@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6), min_size=1, max_size=20),
    st.integers(1, 3000),
    st.randoms(use_true_random=False),
)
def test_a_reader_of_the_tail_gets_whole_records_in_order_or_is_sent_to_the_files(
    sizes: list[list[int]], bound: int, rng: random.Random
) -> None:
    told, raw, ends = submissions(sizes)
    tail = LiveTail(0, bound)
    readers = [0, 0, 0]
    for submitted in told:
        tail.add(submitted)
        assert tail.end_offset == submitted.end_offset
        assert tail.end_offset - tail.start_offset <= max(bound, submitted.end_offset - submitted.offset)
        if rng.random() < 0.1:
            tail.clear()
            assert tail.take(tail.end_offset, 1 << 40) is None
        for index, at in enumerate(readers):
            for _ in range(rng.randrange(4)):
                max_end = at + rng.randrange(1, 900)
                piece = tail.take(at, max_end)
                if piece is None:
                    if at < tail.end_offset:  # from the files, to a record's end
                        at = rng.choice([end for end in ends if at < end <= tail.end_offset])
                    continue
                got = b"".join(bytes(each) for each in piece.buffers)
                assert got == raw[at : piece.end_offset]
                first = next(end for end in ends if end > at)
                assert piece.end_offset in ends and (piece.end_offset <= max_end or piece.end_offset == first)
                at = piece.end_offset
            readers[index] = at
