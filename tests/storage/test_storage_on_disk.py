"""`Storage` over the real disk WAL and the local-directory bucket: restarts, a lost WAL, a bound WAL."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.support.fake_objects import FakeObjects
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.disk import FileDisk
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.inputs import ReplicaSetData
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.report import verify_object
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import CacheSettings, StorageSettings, UploadSettings, WalSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import WalFull
from tidelog.storage.wal.disk.wal import DiskWal

STREAM = 7


class Process:
    """One life of a storage process on a directory."""

    def __init__(
        self, root: Path, objects: FakeObjects, *, wal_bytes: int = 16 << 20, single_member: bool = True
    ) -> None:
        self.objects = objects
        self.disk = FileDisk(root / "wal")
        self.store = LocalObjectStore(root / "bucket")
        settings = WalSettings(segment_bytes=1 << 20, max_bytes=wal_bytes, max_record_bytes=1 << 20)
        wal = DiskWal(self.disk, settings, rng=random.Random(1))
        self.storage = Storage(
            ReplicaSetData("c", 1, wal, self.store, objects, single_member=single_member),
            StorageSettings(
                UploadSettings(size_bytes=2 << 20, split_bytes=1 << 19, age_ms=100_000),
                CacheSettings(log_bytes=32 << 20, block_bytes=8 << 20),
            ),
            SystemClock(),
            random.Random(2),
        )
        self.next_offset = 0

    async def start(self, *, gives_up: bool = False) -> None:
        self.objects.master_epoch += 1
        await self.storage.recover()
        if gives_up:
            await self.storage.start_over(f".rejected-{self.objects.master_epoch}")
        await self.storage.start(self.objects.master_epoch)
        end = self.objects.ends.get(STREAM, 0)
        self.next_offset = self.storage.open_stream(STREAM, self.objects.master_epoch, 0, end, 0)
        self.storage.recovered_done()

    async def append(self, payload: bytes) -> int:
        while True:
            try:
                end = self.storage.append(
                    StreamAppend(STREAM, self.objects.master_epoch, self.next_offset, 1, [payload])
                )
                break
            except WalFull:
                await self.storage.writable()
        self.next_offset += 1
        return end

    async def read_all(self) -> list[bytes]:
        out: list[bytes] = []
        while len(out) < self.next_offset:
            out += [bytes(one.payload) for one in await self.storage.read(STREAM, len(out), self.next_offset, 1 << 19)]
        return out

    async def stop(self, *, upload: bool) -> None:
        await self.storage.close(upload=upload)
        await self.disk.close()
        await self.store.close()


async def test_restarts_and_a_lost_wal_lose_nothing(tmp_path: Path) -> None:
    objects = FakeObjects(master_epoch=0)
    rng = random.Random(9)
    written: list[bytes] = []
    for life in range(4):
        process = Process(tmp_path, objects)
        await process.start()
        assert await process.read_all() == written
        for _ in range(60):
            payload = rng.randbytes(rng.randrange(1, 60_000))
            written.append(payload)
            end = await process.append(payload)
        await process.storage.confirm.wait(end)
        await process.stop(upload=life == 3)
    for one in objects.slices[STREAM]:
        assert await verify_object(LocalObjectStore(tmp_path / "bucket"), object_key("c", one.object_id)) == []
    shutil.rmtree(tmp_path / "wal")
    process = Process(tmp_path, objects)
    await process.start()
    assert await process.read_all() == written
    await process.append(b"and on")
    await process.stop(upload=True)
    assert objects.ends == {STREAM: len(written) + 1}


async def test_a_wal_at_its_bound_makes_room_by_uploading(tmp_path: Path) -> None:
    process = Process(tmp_path, FakeObjects(master_epoch=0), wal_bytes=3 << 20)
    await process.start()
    payload = random.Random(4).randbytes(200_000)
    for _ in range(100):
        await process.append(payload)
    await process.stop(upload=True)
    assert process.objects.ends == {STREAM: 100}


async def test_what_the_wal_does_not_prove_confirmed_is_a_tail_where_a_quorum_confirms(tmp_path: Path) -> None:
    objects = FakeObjects(master_epoch=0)
    process = Process(tmp_path, objects)
    await process.start()
    ends = []
    for number in range(4):
        ends.append(await process.append(b"%d" % number))
        await process.storage.confirm.wait(ends[-1])
    await process.stop(upload=False)

    process = Process(tmp_path, objects, single_member=False)
    await process.start()
    storage = process.storage
    assert storage.confirm_offset < ends[-1], "the header of the last record was written before it was confirmed"
    tail = storage.unconfirmed(STREAM)
    assert [each.wal_end for each in tail] == [end for end in ends if end > storage.confirm_offset]
    assert [each.end_offset for each in tail] == list(range(5 - len(tail), 5))
    storage.confirm.advance(ends[-1])
    assert storage.unconfirmed(STREAM) == []
    assert await process.read_all() == [b"0", b"1", b"2", b"3"]
    await process.stop(upload=True)
    assert objects.ends == {STREAM: 4}


async def test_what_a_wal_that_was_given_up_had_confirmed_confirms_nothing_of_the_next_one(tmp_path: Path) -> None:
    objects = FakeObjects(master_epoch=0)
    process = Process(tmp_path, objects)
    await process.start()
    for number in range(20):
        given_up = await process.append(b"%d" % number * 500)
        await process.storage.confirm.wait(given_up)
    await process.stop(upload=False)

    process = Process(tmp_path, objects)
    await process.start(gives_up=True)
    storage = process.storage
    acknowledged: list[int] = []
    end = await process.append(b"first")
    assert end < given_up, "it lies where the other WAL had confirmed records"
    storage.confirm.add_listener(end, lambda: acknowledged.append(end))
    places = storage.whereabouts(STREAM)
    assert places is not None
    assert not acknowledged and storage.confirm_offset <= places.wal_durable < end, places
    await storage.upload_now()
    assert objects.committed_wal_offset(1) <= end
    await storage.confirm.wait(end)
    assert acknowledged == [end]
    await process.append(b"second")
    await process.stop(upload=True)

    process = Process(tmp_path, objects)
    await process.start()
    assert await process.read_all() == [b"first", b"second"]
    await process.stop(upload=False)
