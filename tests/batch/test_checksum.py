"""Checksums that follow from others: exact, and a bit that flips after the first check is found by the next."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.storage.test_object_format import decode
from tests.storage.wal_harness import durable, make_wal, recovered
from tests.support.examples import examples
from tidelog.batch.batch import Record, build_batch, check_crc, parse_header
from tidelog.batch.checksum import BATCH_CRC_AT, COMBINE_FROM_BYTES, batch_crc_onward, combine
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import CorruptData
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import CheckedBatch, StreamAppend, StreamEntry
from tidelog.storage.wal.format import crc_matches, encode_header, read_header

uint32 = st.integers(0, (1 << 32) - 1)
lengths = st.integers(0, (1 << 32) - 1)
BATCH = build_batch([Record(0, 0, None, random.Random(7).randbytes(COMBINE_FROM_BYTES))])
CRC = parse_header(BATCH).crc


def flipped(batch: bytes, bit: int) -> bytearray:
    changed = bytearray(batch)
    changed[bit // 8] ^= 1 << bit % 8
    return changed


@given(st.binary(max_size=600), st.binary(max_size=3000))
@example(b"", b"")
def test_combined_is_the_checksum_of_both_parts(first: bytes, second: bytes) -> None:
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@pytest.mark.parametrize("length", [1 << 16, (1 << 20) - 1, 1_000_003, 9_876_543])
def test_long_parts_combine(length: int) -> None:
    second = random.Random(length).randbytes(length)
    assert combine(crc32c(b"first"), crc32c(second), length) == crc32c(second, crc32c(b"first"))


@given(uint32, uint32, uint32, lengths, lengths)
@settings(max_examples=examples(200))
def test_it_does_not_matter_which_parts_are_combined_first(a: int, b: int, c: int, m: int, n: int) -> None:
    if m + n < 1 << 32:
        assert combine(combine(a, b, m), c, n) == combine(a, combine(b, c, n), m + n)


@given(uint32, st.integers(1, 2 * COMBINE_FROM_BYTES))
@settings(max_examples=examples(30))
def test_a_sound_batch_gives_the_checksum_of_its_bytes(before: int, value_bytes: int) -> None:
    batch = build_batch([Record(0, 0, None, bytes(value_bytes))])
    want = crc32c(batch, before)
    assert batch_crc_onward(before, memoryview(batch)) == want
    assert batch_crc_onward(before, batch, parse_header(batch).crc) == want


def test_the_records_of_the_wal_are_the_same_bytes_as_before() -> None:
    fields, where = (9, 2, 77, 1, (BATCH,)), (1, len(BATCH), 1 << 40, 1 << 39, 3)
    assert encode_header(*where, StreamAppend(*fields, CRC)) == encode_header(*where, StreamAppend(*fields))


@given(st.integers(BATCH_CRC_AT * 8, len(BATCH) * 8 - 1))
@settings(max_examples=examples(100))
def test_a_bit_that_flips_between_check_and_write_is_found_in_the_wal(bit: int) -> None:
    batch = flipped(BATCH, bit)
    raw = encode_header(1, len(batch), 0, 0, 3, StreamAppend(9, 2, 77, 1, (batch,), CRC)) + batch
    assert not crc_matches(read_header(raw, 0), memoryview(raw), 0)


@given(st.integers(BATCH_CRC_AT * 8, len(BATCH) * 8 - 1))
@settings(max_examples=examples(50))
def test_a_bit_that_flips_in_the_cache_is_found_in_the_object(bit: int) -> None:
    small = StreamEntry(5, 2, b"not a batch")
    sound, bad = CheckedBatch(7, 1, BATCH), CheckedBatch(7, 1, bytes(flipped(BATCH, bit)))

    def build(record: StreamEntry) -> bytes:
        parts = [(9, [small, record])]
        built = build_object(
            object_id=1, kind=ObjectKind.STREAM, cluster_id="c", created_ms=0, parts=parts, block_bytes=1 << 20
        )
        return b"".join(built.body)

    assert build(sound) == build(StreamEntry(*sound))
    assert decode(build(sound)) == {9: [small, StreamEntry(*sound)]}
    with pytest.raises(CorruptData, match="crc32c"):
        decode(build(bad))


async def test_recovery_refuses_what_flipped_between_check_and_write(tmp_path: Path) -> None:
    """The batch passed its check, was appended, and changed in memory before the disk had it."""

    async def write() -> None:
        disk = FileDisk(tmp_path)
        wal = make_wal(disk, max_record_bytes=1 << 18, max_bytes=1 << 20)
        await recovered(wal)
        await wal.begin_epoch(1)
        batch = bytearray(BATCH)
        assert check_crc(batch)
        await wal.writable(len(batch))
        wal.append(StreamAppend(1, 1, 0, 1, (batch,), CRC))
        batch[len(batch) // 2] ^= 4
        await durable(wal)
        wal.note_confirmed(wal.durable_offset)
        await wal.writable(1)
        wal.append(StreamAppend(1, 1, 1, 1, (b"proof",)))  # its header says that all before it was confirmed
        await durable(wal)
        await wal.close()
        await disk.close()

    async def read() -> None:
        disk = FileDisk(tmp_path)
        try:
            with pytest.raises(CorruptData):
                await recovered(make_wal(disk, max_record_bytes=1 << 18, max_bytes=1 << 20))
        finally:
            await disk.close()

    await write()
    await read()
