"""Large tables of producers: written in bounded pieces between appends, complete or not used."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.fake_storage import DATA, META, FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tidelog.batch.batch import ControlType, Record, build_batch, build_control_batch
from tidelog.runtime.errors import CorruptData, Overloaded
from tidelog.storage.records import StreamAppend, StreamEntry
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog
from tidelog.stream.partition_state import CHECKPOINT, PIECE_PREFIX, PRODUCERS, Checkpoint, piece_key
from tidelog.stream.producer_state import (
    MAX_PRODUCERS,
    MAX_ROW_BYTES,
    ROWS_PER_PIECE,
    BatchEntry,
    ProducerState,
    ProducerStates,
)

NOW = 1_700_000_000_000
CONFIG = LogConfig(checkpoint_bytes=4000, index_interval_bytes=500, retention_ms=-1, producers_per_piece=5)
PIDS = 23


def batch(pid: int, sequence: int, *, txn: bool = False) -> memoryview:
    records = [Record(0, NOW + sequence, b"k", b"x" * 30)]
    built = build_batch(records, producer_id=pid, producer_epoch=0, base_sequence=sequence, transactional=txn)
    return memoryview(bytearray(built))


def table(log: PartitionLog) -> dict[int, tuple[object, ...]]:
    return {
        one.producer_id: (one.epoch, one.coordinator_epoch, one.txn_start_offset, tuple(one.batches))
        for one in log.state.producers.all()
    }


def keys(log: PartitionLog) -> list[str]:
    return log.state.meta.keys(PRODUCERS)


class Script:
    """Appends of many producers in turn, each with its own sequence."""

    def __init__(self) -> None:
        self.world, self.clock = FakeWorld(), FakeClock(NOW)
        self.count = 0

    async def open(self, config: LogConfig = CONFIG) -> PartitionLog:
        self.process = Process(self.world, self.clock)
        return await self.process.open(config)

    def send(self, log: PartitionLog, batches: int, pids: int = PIDS) -> None:
        for _ in range(batches):
            log.append(batch(self.count % pids, self.count // pids))
            self.count += 1

    async def until_writing(self, log: PartitionLog) -> None:
        while log.state.writing is None:
            self.send(log, 1)

    async def until_written(self, log: PartitionLog) -> None:
        while log.state.writing is not None:
            self.send(log, 1)


async def test_a_large_table_is_written_one_piece_with_an_append() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    size, appends = len(script.world.wal), 0
    while log.state.writing is not None:
        script.send(log, 1)
        appends += 1
    assert appends == 5, "23 producers, 5 to a piece"
    written = script.world.wal[size:]
    assert [stream_id for stream_id, _ in written if stream_id in (META, DATA)] == [META, DATA] * 5
    assert len(keys(log)) == 5
    assert log.state.producers_offset == log.state.checkpoint_offset > 0


async def test_at_feature_level_0_a_large_table_is_one_value_which_older_versions_read() -> None:
    script = Script()
    script.world.feature_level = 0
    log = await script.open()
    script.send(log, 10 * PIDS)
    log.state.checkpoint()
    assert log.state.writing is None
    assert keys(log) == [PRODUCERS]
    stored = log.state.meta.get(CHECKPOINT)
    assert stored is not None and msgspec.msgpack.decode(stored) == msgspec.msgpack.decode(
        msgspec.msgpack.encode(Checkpoint(1, log.state.data.next_offset))
    )
    await log.close()
    log = await script.open()
    assert len(table(log)) == PIDS
    script.send(log, 1)
    script.world.feature_level = 1
    await script.until_writing(log)
    await script.until_written(log)
    assert [key for key in keys(log) if not key.startswith(PIECE_PREFIX)] == []
    before = table(log)
    script.world.crash()
    assert table(await script.open()) == before


async def test_pieces_of_a_build_between_the_levels_are_read_and_replaced_at_feature_level_0() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    await script.until_written(log)
    script.world.feature_level = 0
    log = await script.open()
    assert len(table(log)) == PIDS
    script.send(log, 1)
    log.state.checkpoint()
    assert keys(log) == [PRODUCERS]


@pytest.mark.parametrize("appends", range(7))
async def test_a_crash_between_pieces_leaves_the_snapshot_before_and_its_batches(appends: int) -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    await script.until_written(log)
    await script.until_writing(log)
    first = log.state.producers_offset
    script.send(log, appends)
    second = log.state.producers_offset
    assert (second > first) == (appends >= 5)
    before = table(log)
    script.world.crash()
    log = await script.open()
    assert table(log) == before
    assert log.state.producers_offset == second
    script.send(log, 60)
    assert len({key.rsplit("/", 1)[0] for key in keys(log)}) <= 2, "what the crash left has gone with the next one"
    again = await script.open()
    assert table(again) == table(log)


@settings(max_examples=examples(60), deadline=None)
@given(
    script=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["data", "txn", "end"])), max_size=120),
    cut=st.floats(0, 1),
    rows=st.integers(1, 4),
)
async def test_every_cut_of_the_wal_gives_the_table_of_the_batches_before_it(
    script: list[tuple[int, str]], cut: float, rows: int
) -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    config = msgspec.structs.replace(CONFIG, producers_per_piece=rows, checkpoint_bytes=900)
    log = await Process(world, clock).open(config)
    tables = {0: table(log)}
    sequences: dict[int, int] = {}
    in_txn: set[int] = set()
    for pid, kind in script:
        if kind == "end" and pid in in_txn:
            in_txn.discard(pid)
            log.append_internal(
                build_control_batch(
                    ControlType.ABORT, producer_id=pid, producer_epoch=0, coordinator_epoch=1, timestamp=NOW
                )
            )
        else:
            if kind == "txn":
                in_txn.add(pid)
            append_guarded(log, batch(pid, sequences.get(pid, 0), txn=pid in in_txn))
            sequences[pid] = sequences.get(pid, 0) + 1
        tables[log.log_end_offset] = table(log)
    world.confirmed = 0
    world.crash(int(len(world.wal) * cut))
    log = await Process(world, clock).open(config)
    assert table(log) == tables[log.log_end_offset]
    await log.close()
    log = await Process(world, clock).open(config)
    assert not log.state.dirty
    assert table(log) == tables[log.log_end_offset]


async def test_a_producer_that_expired_and_came_back_is_not_in_the_snapshot_twice() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    script.clock.now_ms += CONFIG.producer_id_expiration_ms
    log.state.producers.expire(script.clock.now_ms, CONFIG.producer_id_expiration_ms)
    log.append(batch(3, 700))
    assert log.state.writing is None, "nothing was left to write"
    before = table(log)[3]
    last = (script.count - 1) % PIDS
    script.world.crash()
    log = await script.open()
    assert table(log)[3] == before
    assert set(table(log)) == {3, last}, "and the one whose batch is behind the snapshot"


async def test_a_missing_piece_is_corrupt_data() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    await script.until_written(log)
    generation, pieces = log.state.pieces
    log.state.meta.put({piece_key(generation, pieces - 1): None})
    with pytest.raises(CorruptData, match=f"piece {pieces - 1} of {pieces} of the producers"):
        await script.open()


@pytest.mark.parametrize("piece", [b"", b"\x92\x01", b"\x92\x01\x91\x93\x01\x02\x03", b"\xc1"])
async def test_a_torn_piece_is_corrupt_data(piece: bytes) -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    await script.until_written(log)
    log.state.meta.put({piece_key(log.state.pieces[0], 0): piece})
    with pytest.raises(CorruptData):
        await script.open()


@pytest.mark.parametrize("value", [(3, 10), (2, 10), (2, 10, 11, 1, 1)])
async def test_a_checkpoint_of_another_form_is_refused(value: tuple[int, ...]) -> None:
    script = Script()
    log = await script.open()
    script.send(log, 20)
    log.state.meta.put({CHECKPOINT: msgspec.msgpack.encode(value)})
    with pytest.raises(CorruptData, match="checkpoint"):
        await script.open()


async def test_a_whole_table_of_an_older_version_is_read_and_replaced() -> None:
    script = Script()
    whole = LogConfig(checkpoint_bytes=4000, retention_ms=-1)
    log = await script.open(whole)
    script.send(log, 150)
    assert keys(log) == [PRODUCERS]
    assert log.state.meta.get(CHECKPOINT) == msgspec.msgpack.encode((1, log.state.checkpoint_offset, -1, 0, 0))
    end = log.state.checkpoint_offset
    log.state.meta.put({CHECKPOINT: msgspec.msgpack.encode((1, end))})
    before = table(log)
    script.world.crash()
    log = await script.open()
    assert table(log) == before
    assert log.state.producers_offset == end
    await script.until_writing(log)
    assert PRODUCERS in keys(log), "the old one counts until the pieces are complete"
    assert table(await script.open()) == table(log)
    log = await script.open()
    await script.until_writing(log)
    await script.until_written(log)
    assert PRODUCERS not in keys(log)


async def test_a_table_that_became_small_is_one_value_again() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    await script.until_written(log)
    await script.until_writing(log)
    script.send(log, 2)
    script.clock.now_ms += CONFIG.producer_id_expiration_ms
    await log.apply_retention()
    log.append(batch(0, 1000))
    await log.close()
    assert keys(log) == [PRODUCERS]
    log = await script.open()
    assert set(table(log)) == {0}


async def test_a_clean_close_begins_a_second_snapshot_where_one_is_half_written() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    script.send(log, 2)
    torn = keys(log)
    assert len(torn) == 2
    before = table(log)
    await log.close()
    log = await script.open()
    assert not log.state.dirty
    assert table(log) == before
    assert len(keys(log)) == 5
    assert not set(torn) & set(keys(log))


async def test_other_work_runs_between_the_pieces_of_a_close() -> None:
    script = Script()
    log = await script.open()
    script.send(log, 200)
    steps = 0
    append = script.process.storage.append
    pieces: list[int] = []

    def counted(record: StreamAppend) -> int:
        if record.stream_id == META:
            pieces.append(steps)
        return append(record)

    script.process.storage.append = counted  # type: ignore[method-assign]
    closing = asyncio.ensure_future(log.close())
    while not closing.done():
        await asyncio.sleep(0)
        steps += 1
    await closing
    assert len(pieces) >= 6
    assert len(set(pieces)) == len(pieces), "at most one piece in a step of the loop"


async def test_a_piece_that_the_wal_refused_is_written_by_the_next_append() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    script.send(log, 1)
    refused = batch(script.count % PIDS, script.count // PIDS)
    script.process.storage.refusals.append(Overloaded("full"))
    with pytest.raises(Overloaded):
        log.append(refused)
    await script.until_written(log)
    before = table(log)
    script.world.crash()
    log = await script.open()
    assert table(log) == before


async def test_records_are_deleted_only_behind_a_snapshot_that_covers_them() -> None:
    script = Script()
    log = await script.open()
    await script.until_writing(log)
    script.send(log, 2)
    target = log.high_watermark - 1
    assert log.state.producers_offset < target
    assert await log.delete_records(target) == target
    assert log.state.producers_offset >= target
    assert await log.apply_retention() == target
    before = table(log)
    script.world.crash()
    log = await script.open()
    assert table(log) == before
    assert script.world.starts[DATA] == target
    assert await log.delete_records(-1) == log.high_watermark
    assert table(await script.open()) == before


async def test_a_released_stream_starts_with_the_producers_of_its_last_segment() -> None:
    script = Script()
    config = msgspec.structs.replace(CONFIG, segment_bytes=8000)
    log = await script.open(config)
    script.send(log, 300)
    await log.close()
    script.world.release(DATA, log.log_end_offset - 1)
    log = await script.open(config)
    assert len(table(log)) == PIDS
    before = table(log)
    script.world.crash()
    log = await script.open(config)
    assert table(log) == before


async def test_housekeeping_completes_the_snapshot_of_a_partition_that_is_idle() -> None:
    script = Script()
    config = msgspec.structs.replace(CONFIG, checkpoint_bytes=1 << 30)
    log = await script.open(config)
    for n in range(30):
        records = [Record(0, NOW, b"k", bytes(50_000))]
        built = build_batch(records, producer_id=n, producer_epoch=0, base_sequence=0)
        log.append(memoryview(bytearray(built)))
    await log.apply_retention()
    assert log.state.producers_offset == log.log_end_offset
    assert len(keys(log)) == 6


def test_no_step_encodes_more_than_the_bound() -> None:
    """The largest table of the largest rows."""
    states = ProducerStates()
    largest = (1 << 63) - 1
    rows = [[n + largest - MAX_PRODUCERS, *[largest] * 4, [[largest] * 5] * 5] for n in range(MAX_PRODUCERS)]
    states.add_piece(msgspec.msgpack.encode((1, rows)))
    states.complete()
    snapshot = states.begin_snapshot(ROWS_PER_PIECE)
    again, pieces = ProducerStates(), 0
    while True:
        piece, is_last = snapshot.peek(), snapshot.is_last
        assert len(piece) <= ROWS_PER_PIECE * MAX_ROW_BYTES + 8
        again.add_piece(piece)
        snapshot.advance()
        pieces += 1
        if is_last:
            break
    assert pieces == 64
    assert len(again) == MAX_PRODUCERS
    some = again.get(largest - 1)
    assert isinstance(some, ProducerState)
    assert some.batches == [BatchEntry(*[largest] * 5)] * 5


async def test_a_stream_entry_of_a_step_is_bounded() -> None:
    """All that goes to the meta stream of a large table, with the product's own numbers, in one append each."""
    script = Script()
    config = LogConfig(checkpoint_bytes=200_000, retention_ms=-1)
    log = await script.open(config)
    script.send(log, 9000, 3000)
    await log.close()
    entries: list[StreamEntry] = script.process.storage.records[META]
    assert any(key.startswith(PIECE_PREFIX) for key in keys(log))
    bound = ROWS_PER_PIECE * MAX_ROW_BYTES + 1024
    assert max(len(entry.payload) for entry in entries) <= bound
    checkpoint = msgspec.msgpack.decode(log.state.meta.get(CHECKPOINT) or b"", type=Checkpoint)
    assert (checkpoint.version, checkpoint.producers_offset, checkpoint.pieces) == (2, checkpoint.data_offset, 3)
