"""Objects in a bucket to record batches: what a task of Spark fetches, and what a bucket may do to it."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from pyspark_tidelog import fetch
from pyspark_tidelog.fetch import EMBEDDED, Fetch, StoredStream, open_bucket
from pyspark_tidelog.plan import SharedOffsets, Slice
from tidelog.batch.batch import build_batch, iter_batches, iter_records
from tidelog.batch.codec import Record
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, CorruptData
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.store import ObjectNotFound
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

CLUSTER = "a cluster"
STREAM = 5
PER_BATCH = 10


class Bucket:
    """An embedded store with objects of stream 5, and of its neighbours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.settings = {EMBEDDED: path.as_uri()}
        self.slices: list[Slice] = []
        self._store = LocalObjectStore(path, SystemClock())

    async def put(self, object_id: int, first: int, batches: int, holes: Collection[int] = ()) -> None:
        """Put an object with this many batches from an offset on, or holes at some, and note its slice."""
        offsets = range(first, first + batches * PER_BATCH, PER_BATCH)
        entries = [StreamEntry(at, PER_BATCH, b"" if at in holes else self._batch(at)) for at in offsets]
        built = build_object(
            object_id=object_id,
            kind=ObjectKind.STREAM_SET,
            cluster_id=CLUSTER,
            created_ms=5,
            parts=[(STREAM - 1, entries), (STREAM, entries), (STREAM + 1, entries)],
            block_bytes=1_000,
        )
        info = await self._store.put(object_key(CLUSTER, object_id), built.body)
        self.slices.append(Slice(object_id, 1, info.size, first, first + batches * PER_BATCH))

    @staticmethod
    def _batch(at: int) -> bytes:
        records = [Record(0, 5, None, random.Random(at + n).randbytes(50)) for n in range(PER_BATCH)]
        return build_batch(records, base_offset=at)

    def file(self, number: int) -> Path:
        (found,) = self.path.rglob(f"{self.slices[number].object_id:016x}")
        return found

    def fetch(self, start: int, end: int) -> Fetch:
        wanted = [each for each in self.slices if each.end > start and each.start < end]
        return Fetch(self.settings, StoredStream(CLUSTER, STREAM), wanted, start, end)

    async def close(self) -> None:
        await self._store.close()


@pytest.fixture
async def bucket(tmp_path: Path) -> Bucket:
    found = Bucket(tmp_path / "bucket")
    for number, batches in enumerate((30, 1, 200)):
        first = found.slices[-1].end if found.slices else 0
        await found.put(number + 1, first, batches)
    await found.close()
    return found


def offsets(payloads: Fetch) -> list[int]:
    with payloads as found:
        return [
            record.offset
            for payload in found
            for header, batch in iter_batches(payload)
            for record in iter_records(batch, header=header)
        ]


@pytest.mark.parametrize(("start", "end"), [(0, 2_310), (305, 306), (299, 311), (0, 1), (2_309, 2_310)])
async def test_all_batches_of_a_range_come_in_order(bucket: Bucket, start: int, end: int) -> None:
    found = offsets(bucket.fetch(start, end))
    first, last = start // PER_BATCH * PER_BATCH, -(-end // PER_BATCH) * PER_BATCH
    assert found == list(range(first, last))


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [(0, 80, [*range(20, 30), *range(60, 70)]), (0, 15, []), (25, 65, [*range(20, 30), *range(60, 70)]), (31, 59, [])],
)
async def test_what_log_compaction_has_removed_is_passed_over(
    tmp_path: Path, start: int, end: int, found: list[int]
) -> None:
    bucket = Bucket(tmp_path / "bucket")
    await bucket.put(1, 0, 4, holes={0, 10, 30})
    await bucket.put(2, 40, 4, holes={40, 50, 70})
    await bucket.close()
    assert offsets(bucket.fetch(start, end)) == found


@pytest.mark.parametrize(("start", "end"), [(0, 200), (140, 160), (0, 150), (149, 151), (150, 200)])
async def test_of_what_a_branch_shares_nothing_behind_its_cut_is_read(tmp_path: Path, start: int, end: int) -> None:
    """The cut is within an object, and within a block of it, which go on with what is the source's alone."""
    own = STREAM + 1
    bucket = Bucket(tmp_path / "bucket")
    await bucket.put(1, 0, 30)
    await bucket.put(2, 150, 5)
    await bucket.close()
    source, mine = bucket.slices[0]._replace(end=150), bucket.slices[1]
    branch = StoredStream(CLUSTER, own, (SharedOffsets(STREAM - 1, 0, 80), SharedOffsets(STREAM, 80, 150)))
    slices = [source._replace(end=80), source._replace(start=80), mine]
    wanted = [each for each in slices if each.end > start and each.start < end]
    first, last = start // PER_BATCH * PER_BATCH, -(-end // PER_BATCH) * PER_BATCH
    assert offsets(Fetch(bucket.settings, branch, wanted, start, end)) == list(range(first, last))


async def test_an_object_without_the_offsets_that_were_told_is_an_error(bucket: Bucket) -> None:
    with pytest.raises(CorruptData, match="has no offsets 0 to 299 of stream 99, as was told"):
        offsets(Fetch(bucket.settings, StoredStream(CLUSTER, 99), bucket.slices[:1], 0, 500))


async def test_large_ranges_are_fetched_in_pieces(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RUN_BYTES", 2_000)
    assert offsets(bucket.fetch(0, 2_310)) == list(range(2_310))


async def test_who_stops_early_leaves_no_thread(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RUN_BYTES", 500)
    with bucket.fetch(0, 2_310) as found:
        payloads: Iterator[object] = iter(found)
        next(payloads)
    assert not [each for each in threading.enumerate() if each.name == "tidelog-fetch"]


async def test_an_object_that_is_gone_is_told_after_what_came_before_it(bucket: Bucket) -> None:
    bucket.file(2).unlink()
    seen: list[int] = []
    with pytest.raises(ObjectNotFound), bucket.fetch(0, 2_310) as found:
        for payload in found:
            seen += [header.base_offset for header, _ in iter_batches(payload)]
    assert seen == list(range(0, 310, PER_BATCH))


async def test_nothing_that_lies_behind_a_problem_is_handed_over(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on behind what he got last would leave out what was damaged, or gone, between."""
    monkeypatch.setattr(fetch, "RUN_BYTES", 500)
    file = bucket.file(2)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    seen: list[int] = []
    with pytest.raises(CorruptData), bucket.fetch(0, 2_310) as found:
        for payload in found:
            seen += [header.base_offset for header, _ in iter_batches(payload)]
    assert seen == list(range(0, len(seen) * PER_BATCH, PER_BATCH))
    assert 31 < len(seen) < 231


async def test_damage_and_a_foreign_object_are_never_read(bucket: Bucket) -> None:
    file, first = bucket.file(0), bucket.slices[0]
    other = bucket.path / object_key(CLUSTER, 9)
    other.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, other)
    bucket.slices[0] = first._replace(object_id=9)
    with pytest.raises(CorruptData):
        offsets(bucket.fetch(0, 10))
    bucket.slices[0] = first
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptData):
        offsets(bucket.fetch(0, 300))


def test_a_bucket_that_is_not_here_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which this machine does not have"):
        open_bucket({EMBEDDED: (tmp_path / "nothing").as_uri()})
    with pytest.raises(ConfigError, match="max_concurrency"):
        open_bucket({"bucket": "b", "max_concurrency": "many"})
    with pytest.raises(ConfigError, match="unknown field"):
        open_bucket({"bucket": "b", "acess_key_id": "x"})
