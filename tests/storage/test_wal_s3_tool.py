"""`tidelog wal inspect|verify` over a WAL in the bucket: damage is named, what is merely old or dead is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tests.storage.test_wal_s3 import data_keys, keys, make, opened, write
from tests.support.bit_flips import flipped
from tests.support.loops import VIRTUAL_LOOP
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import View
from tidelog.storage.wal.base import WalRecord
from tidelog.storage.wal.s3.inspect import BucketWalReport, inspect_bucket, verify_bucket
from tidelog.storage.wal.s3.recovery import BucketLog, Created

LOOPS = VIRTUAL_LOOP


async def a_log(epochs: int = 2, objects: int = 6) -> MemoryObjectStore:
    """A log of two writers, the last one gone without a word."""
    store = MemoryObjectStore()
    for epoch in range(1, epochs + 1):
        wal, _ = await opened(store, epoch)
        for number in range(objects):
            await write(wal, bytes([epoch, number]) * 50)
            wal.note_confirmed(wal.durable_offset)
        await wal.close()
    return store


async def verify(store: MemoryObjectStore) -> BucketWalReport:
    return await verify_bucket(store, "c", 1)


def body(store: MemoryObjectStore, key: str) -> bytes:
    return store.body(key)


def errors(report: BucketWalReport) -> list[tuple[str, str]]:
    return [(one.kind, one.file) for one in report.findings if one.is_error]


async def test_a_sound_log_has_no_findings_and_shows_its_objects() -> None:
    store = await a_log()
    report = await verify(store)
    assert report.findings == []
    assert [one.key for one in report.info.objects] == sorted(keys(store))
    assert all(one.is_live for one in report.info.objects)
    records: list[WalRecord] = []
    info = await inspect_bucket(store, "c", 1, on_record=records.append)
    assert info == report.info
    wal = make(store, 9)
    recovered: list[WalRecord] = []
    await wal.recover(recovered.append)
    assert [(one.offset, bytes(one.payload)) for one in records] == [
        (one.offset, bytes(one.payload)) for one in recovered
    ]
    assert (info.start_offset, info.end_offset) == (wal.start_offset, wal.end_offset)
    assert info.last_epoch == 2
    await wal.close()
    nothing = await verify(MemoryObjectStore())
    assert nothing.findings == [] and nothing.info.objects == []


@pytest.mark.parametrize("seed", range(4))
async def test_a_flipped_bit_in_any_object_is_named_and_recovery_refuses_it(seed: int) -> None:
    store = await a_log()
    rng = random.Random(seed)
    for key in sorted(keys(store)):
        sound = body(store, key)
        for bit in [rng.randrange(len(sound) * 8) for _ in range(12)]:
            await store.put(key, [flipped(sound, bit)])
            report = await verify(store)
            assert errors(report) == [("corrupt", key)], (key, bit)
            assert report.findings[0].file_offset <= bit // 8
            wal = make(store, 9)
            with pytest.raises(CorruptData, match="damaged at byte") as caught:
                await wal.recover(lambda record: None)
            assert key in str(caught.value)
            await wal.close()
        await store.put(key, [sound])
    assert (await verify(store)).findings == []


async def test_a_missing_object_is_lost_when_it_was_acknowledged() -> None:
    for epochs in (1, 2):
        store = await a_log(epochs=epochs)
        for key in sorted(data_keys(store))[:-1]:
            sound = body(store, key)
            await store.delete([key])
            assert errors(await verify(store)) == [("lost", key)]
            await store.put(key, [sound])
        assert (await verify(store)).findings == []


class Flaky(MemoryObjectStore):
    """Hands out damaged bytes, as a bad transfer would."""

    spoil: Callable[[str, View], bytes] = staticmethod(lambda key, data: bytes(data))

    async def get(self, key: str) -> bytes:
        return self.spoil(key, await super().get(key))

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        return [self.spoil(key, data) for data in await super().get_ranges(key, ranges)]


async def test_a_bit_that_flipped_on_the_way_is_asked_for_again() -> None:
    store = Flaky()
    wal, _ = await opened(store, 1)
    await write(wal, b"a" * 100, b"b" * 100)
    await wal.close()
    seen: set[str] = set()

    def once(key: str, data: View) -> bytes:
        first = key not in seen
        seen.add(key)
        return flipped(data, 800) if first else bytes(data)

    store.spoil = once
    assert (await verify(store)).findings == []
    seen.clear()
    again = make(store, 2)
    records: list[WalRecord] = []
    await again.recover(records.append)
    assert len(records) == 3
    await again.close()


async def test_our_own_object_that_comes_back_damaged_once_is_not_taken_for_another_writers() -> None:
    store = Flaky()
    log = BucketLog(store, "wal/", 1, SystemClock(), random.Random(1))
    assert await log.create(1, b"ours") is Created.OURS
    answers = iter([flipped(b"ours", 3), b"ours"])
    store.spoil = lambda key, data: next(answers)
    assert await log.create(1, b"ours") is Created.OURS  # as if the answer of the first put had been lost
    store.spoil = lambda key, data: b"theirs"
    assert await log.create(1, b"ours") is Created.THEIRS


async def test_damage_in_what_is_trimmed_or_dead_is_a_note() -> None:
    store = await a_log()
    old = sorted(data_keys(store))[0]
    kept = body(store, old)
    wal, _ = await opened(store, 3)
    await write(wal, b"x" * 100)
    await wal.trim(wal.end_offset)
    await write(wal, b"y" * 100)
    await wal.close()
    await store.put(old, [flipped(kept, 500)])  # as a delete that was lost, and damage on top
    report = await verify(store)
    assert errors(report) == []
    assert [(one.kind, one.file) for one in report.findings] == [("leftover", old)]
    again = make(store, 4)
    await again.recover(lambda record: None)
    await again.close()
