"""Transactions as one partition log sees them: guards, markers, the last stable offset over all that happens to it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_storage import DATA, TXN, FakeClock, FakeWorld, HeldRead, Process
from tests.support.guarded import append_guarded
from tidelog.batch.batch import Record, build_batch, control_epoch, control_type, iter_records, parse_header
from tidelog.runtime.errors import Closed, Overloaded, Unavailable
from tidelog.stream import txn_index
from tidelog.stream.admission import EARLIER_BATCH_S
from tidelog.stream.errors import (
    EarlierBatchMissing,
    FencedCoordinator,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    TransactionNotVerified,
)
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import AppendResult, PartitionLog
from tidelog.stream.producer_state import OpenTransaction
from tidelog.stream.stream import Stream

NOW = 1_700_000_000_000
CONFIG = LogConfig(segment_bytes=500, checkpoint_bytes=300, retention_ms=-1)


def batch(sequence: int = -1, *, pid: int = -1, epoch: int = 0, txn: bool = True, count: int = 1) -> memoryview:
    records = [Record(0, NOW, b"k", b"v")] * count
    if pid < 0:
        return memoryview(bytearray(build_batch(records)))
    built = build_batch(records, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, transactional=txn)
    return memoryview(bytearray(built))


def end(log: PartitionLog, pid: int = 7, epoch: int = 0, *, commit: bool = True, version: int = 1) -> AppendResult:
    return log.write_marker(pid, epoch, commit=commit, coordinator_epoch=3, transaction_version=version)


class Bench:
    """A world and its processes, one after the other."""

    def __init__(self, *, auto_confirm: bool = True) -> None:
        self.world, self.clock = FakeWorld(), FakeClock(NOW)
        self.process = Process(self.world, self.clock, auto_confirm=auto_confirm)

    async def open(self) -> PartitionLog:
        return await self.process.open(CONFIG)

    async def again(self, log: PartitionLog, how: str) -> PartitionLog:
        """Open it anew: after a clean close, a move, or a crash of the process."""
        if how == "clean":
            await log.close()
        elif how == "move":
            await log.close_for_move()
        self.process = Process(self.world, self.clock)
        return await self.open()


async def test_the_log_itself_refuses_a_transaction_that_nobody_has_verified() -> None:
    log = await Bench().open()
    with pytest.raises(TransactionNotVerified):
        log.append(batch(0, pid=7))
    with pytest.raises(TransactionNotVerified):
        log.append_internal(batch(-1, pid=7))
    assert log.log_end_offset == 0
    guard = log.begin_verification(7, 0)
    assert log.append(batch(0, pid=7), guard=guard).base_offset == 0
    assert log.append(batch(1, pid=7)).base_offset == 1
    assert log.append_internal(batch(-1, pid=7)).base_offset == 2
    assert log.has_open_transaction(7, 0)


async def test_a_duplicate_of_a_decided_transaction_is_still_known() -> None:
    log = await Bench().open()
    append_guarded(log, batch(0, pid=7))
    end(log)
    assert log.append(batch(0, pid=7)).duplicate


async def test_a_guard_that_an_append_without_room_has_compared_is_still_good() -> None:
    bench = Bench()
    log = await bench.open()
    log.append(batch())
    guard = log.begin_verification(7, 0)
    bench.process.storage.refusals.append(Overloaded("full"))
    with pytest.raises(Overloaded):
        log.append(batch(0, pid=7), guard=guard)
    assert log.append(batch(0, pid=7), guard=guard).base_offset == 1


async def test_a_guard_of_the_log_before_a_move_is_not_good_after_it() -> None:
    bench = Bench()
    log = await bench.open()
    guard = log.begin_verification(7, 0)
    again = await bench.again(log, "move")
    with pytest.raises(Closed):
        log.begin_verification(7, 0)
    with pytest.raises(TransactionNotVerified):
        again.append(batch(0, pid=7), guard=guard)


async def test_a_new_producer_starts_at_zero_where_the_request_asks_for_it() -> None:
    bench = Bench()
    log = await bench.open()
    guard = log.begin_verification(7, 0)
    with pytest.raises(EarlierBatchMissing):
        log.append(batch(3, pid=7), guard=guard, from_zero=True)
    bench.clock.now_ms += int(EARLIER_BATCH_S * 1000) + 1
    with pytest.raises(OutOfOrderSequence):
        log.append(batch(3, pid=7), guard=guard, from_zero=True)
    assert log.append(batch(3, pid=7), guard=guard).base_offset == 0


@pytest.mark.parametrize("commit", [False, True])
async def test_a_marker_is_a_control_batch_of_the_producer(commit: bool) -> None:
    log = await Bench().open()
    append_guarded(log, batch(0, pid=7))
    written = end(log, epoch=1, commit=commit, version=2)
    assert (written.base_offset, written.last_offset, written.duplicate) == (1, 1, False)
    (stored,) = (await log.read(1, 1000, committed=True)).records
    header = parse_header(stored)
    assert header.is_control and header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 1, -1)
    (record,) = iter_records(stored)
    assert (control_type(record), control_epoch(record), record.timestamp) == (int(commit), 3, NOW)
    assert (await log.read(0, 1000, committed=True)).aborted == ([] if commit else [(7, 0)])
    assert end(log, epoch=1, commit=commit, version=2).base_offset == 2, "a repeat is written again"
    with pytest.raises(InvalidProducerEpoch):
        append_guarded(log, batch(1, pid=7))


async def test_markers_of_older_epochs_and_coordinators_are_refused() -> None:
    log = await Bench().open()
    append_guarded(log, batch(0, pid=7, epoch=4))
    for epoch, version in ((3, 1), (3, 2), (4, 2)):
        with pytest.raises(InvalidProducerEpoch):
            end(log, epoch=epoch, version=version)
    end(log, epoch=4)
    with pytest.raises(FencedCoordinator):
        log.write_marker(7, 4, commit=True, coordinator_epoch=2, transaction_version=1)
    assert log.log_end_offset == 2


async def test_a_marker_without_room_is_refused_at_once_and_has_ended_nothing() -> None:
    bench = Bench()
    log = await bench.open()
    append_guarded(log, batch(0, pid=7))
    bench.process.storage.refusals.append(Overloaded("full"))
    with pytest.raises(Overloaded):
        end(log)
    assert log.has_open_transaction(7, 0)
    assert end(log).base_offset == 1


async def test_a_confirmed_marker_wakes_readers_at_the_last_stable_offset() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    append_guarded(log, batch(0, pid=7))
    bench.process.storage.confirm_all()
    woken: list[int] = []
    log.add_watermark_listener(lambda: woken.append(log.last_stable_offset))
    end(log)
    assert (woken, log.last_stable_offset) == ([], 0)
    bench.process.storage.confirm_all()
    assert woken == [2]


@pytest.mark.parametrize("how", ["clean", "move", "crash"])
@pytest.mark.parametrize("later", [0, 1, 20])
async def test_the_last_stable_offset_is_never_below_the_log_start(how: str, later: int) -> None:
    """Records are deleted past the start of an open transaction; `later` batches make segments and checkpoints."""
    bench = Bench()
    log = await bench.open()
    for _ in range(3):
        log.append(batch())
    append_guarded(log, batch(0, pid=7, count=2))
    for _ in range(5):
        log.append(batch())
    assert (log.log_start_offset, log.last_stable_offset, log.high_watermark) == (0, 3, 10)
    assert await log.delete_records(8) == 8
    assert log.last_stable_offset == 8
    for _ in range(later):
        log.append(batch())
    log = await bench.again(log, how)
    assert (log.log_start_offset, log.last_stable_offset, log.high_watermark) == (8, 8, 10 + later)
    assert log.open_transactions() == [OpenTransaction(7, 0, 3, NOW)]
    assert (await log.read(8, 1000, committed=True)).records == []
    assert log.read_hot(8, 1000, committed=True) == ([], [], 0)
    end(log, commit=False)
    assert log.last_stable_offset == log.high_watermark == 11 + later
    assert log.open_transactions() == []
    assert (await log.read(8, 1000, committed=True)).aborted == [(7, 3)]


async def test_a_deletion_up_to_the_end_leaves_no_reader_behind() -> None:
    log = await Bench().open()
    append_guarded(log, batch(0, pid=7))
    log.append(batch())
    assert await log.delete_records(-1) == 2
    assert (log.log_start_offset, log.last_stable_offset, log.high_watermark) == (2, 2, 2)


async def test_a_move_of_the_log_start_that_may_be_reverted_shows_nothing_undecided() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    append_guarded(log, batch(0, pid=7))
    log.append(batch())
    bench.process.storage.confirm_all()
    deleting = asyncio.ensure_future(log.delete_records(2))
    await asyncio.sleep(0)
    assert (log.log_start_offset, log.last_stable_offset) == (0, 0)
    assert (await log.read(0, 1000, committed=True)).records == []
    while not deleting.done():
        bench.process.storage.confirm_all()
        await asyncio.sleep(0)
    assert await deleting == 2
    assert log.last_stable_offset == 2


async def test_retention_passes_an_open_transaction_and_so_does_the_last_stable_offset() -> None:
    bench = Bench()
    log = await bench.process.open(LogConfig(segment_bytes=500, retention_ms=-1, retention_bytes=600))
    append_guarded(log, batch(0, pid=7))
    for _ in range(40):
        log.append(batch())
    start = await log.apply_retention()
    assert 0 < start <= log.last_stable_offset == log.log_start_offset
    bench.clock.now_ms += 2 * 86_400_000
    await log.apply_retention()
    assert [one.producer_id for one in log.open_transactions()] == [7], "it is not forgotten, however old it is"


async def test_the_largest_timestamp_is_that_of_decided_records_for_those_who_ask_so() -> None:
    log = await Bench().open()
    log.append(memoryview(bytearray(build_batch([Record(0, NOW - 5, b"k", b"v")]))))
    append_guarded(log, batch(0, pid=7))
    decided, everything = [await log.offset_of_max_timestamp(committed=committed) for committed in (True, False)]
    assert decided is not None and everything is not None
    assert (decided.offset, everything.offset) == (0, 1)


async def aborted_from(log: PartitionLog, offset: int) -> tuple[tuple[int, int], ...]:
    """What a read_committed reader at `offset` is told: producer and first offset of each aborted transaction."""
    found = await log.read(offset, 1 << 20, committed=True)
    return tuple((each[0], each[1]) for each in found.aborted)


async def released(bench: Bench, how: str) -> PartitionLog:
    """Three transactions of producer 7 are aborted, each of one record; the last one is set aside."""
    log = await bench.open()
    for sequence in range(3):
        append_guarded(log, batch(sequence, pid=7))
        end(log, commit=False)
    if how == "clean":
        await log.close()
    elif how == "checkpoint":
        log.state.checkpoint()
    bench.world.release(DATA, 4)
    again = await bench.again(log, "crash")
    assert again.log_end_offset == 4
    assert await aborted_from(again, 0) == ((7, 0), (7, 2))
    return again


@pytest.mark.parametrize("how", ["clean", "checkpoint", "crash"])
async def test_what_was_aborted_among_released_records_hides_nothing_that_is_written_there_later(how: str) -> None:
    bench = Bench()
    log = await released(bench, how)
    append_guarded(log, batch(0, pid=7, epoch=1))
    end(log, epoch=1, commit=True)
    assert await aborted_from(log, 4) == ()
    assert await aborted_from(await bench.again(log, "crash"), 4) == ()


@pytest.mark.parametrize("how", ["clean", "checkpoint", "crash"])
async def test_what_is_aborted_after_a_release_is_known_after_a_crash(how: str) -> None:
    bench = Bench()
    log = await released(bench, how)
    append_guarded(log, batch(0, pid=8))
    end(log, 8, commit=False)
    assert await aborted_from(log, 4) == ((8, 4),)
    again = await bench.again(log, "crash")
    assert await aborted_from(again, 4) == ((8, 4),)
    assert await aborted_from(again, 0) == ((7, 0), (7, 2), (8, 4))


@pytest.mark.parametrize("at_once", [1, 1024])
async def test_a_crash_between_the_writing_and_the_trimming_of_aborted_transactions_changes_nothing(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(txn_index, "KEPT_ENTRIES", at_once)
    bench = Bench()
    log = await bench.open()
    for sequence in range(3):
        append_guarded(log, batch(sequence, pid=7))
        end(log, commit=False)
    bench.world.release(DATA, 4)
    entries = log.state.txn.stream.next_offset

    async def cannot_trim(stream: Stream, start_offset: int) -> None:
        assert stream.next_offset == entries + 2 and bench.world.confirmed == len(bench.world.wal)
        raise Unavailable("no controller answers")

    with monkeypatch.context() as patched:
        patched.setattr(Stream, "trim", cannot_trim)
        with pytest.raises(Unavailable):
            await bench.again(log, "crash")
    again = await bench.again(log, "crash")
    assert await aborted_from(again, 0) == ((7, 0), (7, 2))
    assert again.state.txn.stream.next_offset - again.state.txn.stream.start_offset == 2


async def test_a_reader_whose_offset_is_still_there_does_not_notice_that_the_index_is_trimmed() -> None:
    """OFFSET_OUT_OF_RANGE would send a consumer to the end of the log."""
    bench = Bench()
    log = await bench.open()
    for sequence in range(3):
        append_guarded(log, batch(sequence, pid=7))
        end(log, commit=False)
    log = await bench.again(log, "clean")
    bench.process.storage.hot = False
    held = bench.process.storage.held = HeldRead(TXN)
    async with asyncio.timeout(10):
        reading = asyncio.create_task(log.read(4, 1000, committed=True))
        await held.reached.wait()
        assert await log.delete_records(4) == 4
        assert log.state.txn.stream.start_offset == 2
        held.released.set()
        assert (await reading).aborted == [(7, 4)]
