"""What an audit finds in blocks that pass their checksums: record batches that no consumer can read."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.jobs.audit_tasks import AuditedObject, CheckedObject, check_objects
from pyspark_tidelog.plan import DATA as DATA_NUMBER
from pyspark_tidelog.plan import STREAM_PARTS
from tidelog.batch.batch import ControlType, build_batch, build_control_batch, set_base_offset
from tidelog.batch.codec import Record
from tidelog.batch.compression import Compression
from tidelog.controller.model.records import STREAMS_PER_PARTITION
from tidelog.controller.model.wal_notes import DATA_STREAM
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

CLUSTER = "a cluster"
DATA = 4 * 7 + DATA_NUMBER
HEADER = 61
Damage = Callable[[bytearray], None]


def batch(at: int, count: int = 10, codec: Compression = Compression.NONE) -> bytearray:
    records = [
        Record(n, 5 + n, b"k%d" % n, random.Random(at + n).randbytes(50), (("h", b"x"), ("n", None)) if n % 2 else ())
        for n in range(count)
    ]
    return bytearray(build_batch(records, base_offset=at, compression=codec))


def sealed(damage: Damage) -> Damage:
    """Damage that the batch's CRC-32C covers as if a client had sent it."""

    def done(data: bytearray) -> None:
        damage(data)
        struct.pack_into(">i", data, 8, len(data) - 12)
        struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))

    return done


def put(form: str, at: int, value: int) -> Damage:
    return lambda data: struct.pack_into(form, data, at, value)


async def checked(path: Path, entries: list[StreamEntry], *, batches: bool = True) -> CheckedObject:
    """Put an object with these appends of a data stream, and bytes that are no batches in others; check it."""
    await asyncio.to_thread(path.mkdir)
    store = LocalObjectStore(path, SystemClock())
    other = [StreamEntry(0, 3, b"no batch")]
    built = build_object(
        object_id=1,
        kind=ObjectKind.STREAM_SET,
        cluster_id=CLUSTER,
        created_ms=5,
        parts=[(DATA - 1, other), (DATA, entries), (DATA + 1, other), (DATA + 2, other)],
        block_bytes=1_000,
    )
    info = await store.put(object_key(CLUSTER, 1), built.body)
    await store.close()
    ranges = ((DATA, entries[0].base_offset, entries[-1].base_offset + entries[-1].count),)
    one = AuditedObject(1, info.key, "stream-set", info.size, ranges)
    bucket = {EMBEDDED: path.as_uri()}
    (found,) = await asyncio.to_thread(lambda: list(check_objects([one], bucket, batches=batches)))
    return found


def entries(*damages: tuple[int, Damage], codec: Compression = Compression.NONE) -> list[StreamEntry]:
    """Twenty appends of ten records, of which some are damaged by number."""
    changes = dict(damages)
    found = []
    for number in range(20):
        data = batch(10 * number, codec=codec)
        if number in changes:
            changes[number](data)
        found.append(StreamEntry(10 * number, 10, bytes(data)))
    return found


def test_the_streams_are_those_of_the_controller() -> None:
    assert (DATA_NUMBER, len(STREAM_PARTS)) == (DATA_STREAM, STREAMS_PER_PARTITION)


@pytest.mark.parametrize("codec", list(Compression))
async def test_sound_batches_of_every_codec_have_no_findings(tmp_path: Path, codec: Compression) -> None:
    marker = bytearray(
        build_control_batch(ControlType.ABORT, producer_id=7, producer_epoch=0, coordinator_epoch=1, timestamp=5)
    )
    set_base_offset(marker, 69)
    sound = entries(codec=codec)
    sound[3] = StreamEntry(30, 10, b"")  # a hole
    sound[4] = StreamEntry(40, 10, bytes(batch(40, 4) + batch(44, 6, codec)))
    sound[5] = StreamEntry(50, 10, bytes(batch(52, 3, codec)))  # what log compaction has left
    sound[6] = StreamEntry(60, 10, bytes(batch(60, 9, codec) + marker))
    found = await checked(tmp_path / "bucket", sound)
    assert found.problems == () and found.records == 20 + 3


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        pytest.param(put(">B", HEADER + 20, 0xFF), "batch 70 fails its CRC32C", id="a record"),
        pytest.param(put(">I", 17, 1), "batch 70 fails its CRC32C", id="the CRC"),
        pytest.param(put(">B", 16, 1), "has format 1", id="the format"),
        pytest.param(put(">q", 0, 69), "batch 69 has offsets up to 78; 70 to 79 are its place", id="before its place"),
        pytest.param(put(">q", 0, 71), "batch 71 has offsets up to 80; 70 to 79 are its place", id="behind its place"),
        pytest.param(put(">q", 0, 1 << 62), "70 to 79 are its place", id="far behind its place"),
        pytest.param(put(">i", 8, 1 << 30), "does not fit", id="longer than its append"),
        pytest.param(put(">i", 8, 1), "does not fit", id="shorter than a header"),
        pytest.param(sealed(put(">i", 57, 9)), "bytes follow the last record", id="one record too few"),
        pytest.param(sealed(put(">i", 57, 11)), "cut short", id="one record too many"),
        pytest.param(sealed(put(">i", 57, (1 << 31) - 1)), "has 2147483647 records in", id="very many records"),
        pytest.param(sealed(put(">i", 57, -1)), "has -1 records in", id="a negative number of records"),
        pytest.param(sealed(put(">i", 23, 5)), "has offset deltas 0 to 9, beyond 5", id="more offsets than told"),
        pytest.param(sealed(put(">B", HEADER + 3, 4)), "do not ascend", id="offsets that do not ascend"),
        pytest.param(sealed(put(">h", 21, 1)), "gzip data do not decompress", id="records that are no gzip"),
        pytest.param(sealed(put(">h", 21, 7)), "codec", id="an unknown codec"),
        pytest.param(lambda data: data.extend(b"more"), "fewer than its header", id="bytes behind it"),
    ],
)
async def test_a_damaged_batch_in_a_sound_block_is_told_with_its_offsets(
    tmp_path: Path, damage: Damage, told: str
) -> None:
    found = await checked(tmp_path / "bucket", entries((7, damage)))
    (problem,) = found.problems
    assert (problem.part, problem.stream_id) == ("batch", DATA)
    assert (problem.start_offset, problem.end_offset) == (70, 80)
    assert told in problem.message and object_key(CLUSTER, 1) in problem.message
    assert problem.position > 0 and problem.length > 0
    assert (await checked(tmp_path / "again", entries((7, damage)), batches=False)).problems == ()


@pytest.mark.parametrize("codec", [each for each in Compression if each])
async def test_compressed_records_are_decompressed_and_counted(tmp_path: Path, codec: Compression) -> None:
    def few(data: bytearray) -> None:
        struct.pack_into(">i", data, 57, 9)

    def cut(data: bytearray) -> None:
        del data[-12:]

    found = await checked(tmp_path / "bucket", entries((3, sealed(few)), (12, sealed(cut)), codec=codec))
    assert [(each.part, each.start_offset, each.end_offset) for each in found.problems] == [
        ("batch", 30, 40), ("batch", 120, 130),
    ]  # fmt: skip
    assert "bytes follow the last record" in found.problems[0].message


async def test_a_batch_that_decompresses_beyond_all_bounds_is_told(tmp_path: Path) -> None:
    record = Record(0, 5, None, bytes(65 << 20), ())
    bomb = build_batch([record], base_offset=0, compression=Compression.GZIP)
    assert len(bomb) < 1 << 20
    (problem,) = (await checked(tmp_path / "bucket", [StreamEntry(0, 1, bytes(bomb))])).problems
    assert problem.part == "batch" and "decompress" in problem.message
