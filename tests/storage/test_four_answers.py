"""Denied, absent, short and wrong are four answers of a bucket (rule 17): only the last three may be damage."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.storage.test_damage import KEY, World
from tests.support.compaction_world import CompactionWorld
from tests.support.storage_world import CLUSTER, FastClock
from tidelog.broker.kafka.errors import CORRUPT_MESSAGE, KAFKA_STORAGE_ERROR, fetch_code
from tidelog.runtime.errors import ConfigError, CorruptData, InvalidInput, Unavailable
from tidelog.storage.bucket.common import StoreAccessDenied, past_end
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectInfo, View
from tidelog.storage.objects.reader import MissingObject, TruncatedObject
from tidelog.storage.objects.report import verify_object
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalRecord
from tidelog.storage.wal.s3.inspect import verify_bucket
from tidelog.storage.wal.s3.wal import S3Wal

REFUSALS = [
    StoreAccessDenied("range get was refused: 403 AccessDenied"),
    ConfigError("range get was sent to the wrong region"),
    InvalidInput("range get was refused: 400 TokenOfTomorrow"),
]


class Refusing(MemoryObjectStore):
    """Answers reads with `error`, as long as there is one; `short`: as if each object ended earlier."""

    error: Exception | None = None
    short = False

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    async def get(self, key: str) -> bytes:
        self.check()
        body = await super().get(key)
        return body[:-9] if self.short else body

    async def head(self, key: str) -> ObjectInfo:
        self.check()
        return await super().head(key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        self.check()
        if self.short:
            raise past_end(key, *ranges[-1])
        return await super().get_ranges(key, ranges)


def world_of(store: Refusing) -> World:
    world = World(40_000)
    world.store = store  # type: ignore[assignment]
    return world


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
async def test_a_refused_read_is_retriable_marks_nothing_and_heals(refusal: Exception) -> None:
    world = world_of(Refusing())
    await world.store.put(KEY, [world.body])
    reader = world.reader()
    await reader.read(1, 0, 1, 1)
    world.store.error = refusal  # type: ignore[attr-defined]
    for offset in (5, 11):
        with pytest.raises(Unavailable) as caught:
            await reader.read(2, offset, offset + 1, 1)
        assert fetch_code(caught.value) == KAFKA_STORAGE_ERROR and caught.value.retriable
    fresh = world.reader()
    with pytest.raises(Unavailable):
        await fresh.read(1, 0, 1, 1)
    with pytest.raises(Unavailable):
        await verify_object(world.store, KEY)
    assert not reader.damage and not fresh.damage and not reader.damage.refused
    world.store.error = None  # type: ignore[attr-defined]
    assert await world.read_all(reader) == await world.read_all(fresh) == 0
    await reader.close()
    await fresh.close()


async def test_an_answer_cut_short_is_no_damage_while_the_object_is_whole() -> None:
    world = world_of(Refusing())
    await world.store.put(KEY, [world.body])
    reader = world.reader()
    world.store.short = True  # type: ignore[attr-defined]
    with pytest.raises(Unavailable) as caught:
        await reader.read(1, 0, 1, 1)
    assert fetch_code(caught.value) == KAFKA_STORAGE_ERROR
    assert not reader.damage
    world.store.short = False  # type: ignore[attr-defined]
    assert await world.read_all(reader) == 0
    await reader.close()


async def test_an_object_that_is_absent_and_one_that_is_cut_short_are_told_apart_from_wrong_bytes() -> None:
    world = World(40_000)
    reader = world.reader()

    async def outcome() -> CorruptData:
        with pytest.raises(CorruptData) as caught:
            await reader.read(1, 0, 1, 1)
        assert fetch_code(caught.value) == CORRUPT_MESSAGE, "a consumer would repeat anything else for ever"
        return caught.value

    assert type(await outcome()) is MissingObject
    [noted] = reader.damage.all()
    assert "is not in the bucket" in noted.message
    await world.store.put(KEY, [world.body[:-100]])
    assert type(await outcome()) is TruncatedObject
    wrong = bytearray(world.body)
    wrong[-20] ^= 1
    await world.store.put(KEY, [bytes(wrong)])
    assert type(await outcome()) not in (MissingObject, TruncatedObject)
    await world.store.put(KEY, [world.body])
    assert await world.read_all(reader) == 0 and not reader.damage
    await reader.close()


@pytest.mark.parametrize("refusal", [*REFUSALS, "short"], ids=str)
async def test_compaction_leaves_no_object_out_that_it_may_not_read_for_a_while(refusal: Exception | str) -> None:
    store = Refusing(FastClock())
    world = CompactionWorld(store)
    streams = world.topic("t", 3)
    await world.fill(streams, 8)
    compactor = world.compactor()
    store.short, store.error = refusal == "short", refusal if isinstance(refusal, Exception) else None
    assert await compactor.run() == 0
    assert compactor.stats.given_up > 0 and not compactor.excluded and not compactor.problems()
    store.short, store.error = False, None
    assert await compactor.run() > 0, "it heals by itself"
    await world.check()
    await compactor.close()


def wal_on(store: MemoryObjectStore, clock: FastClock) -> S3Wal:
    return S3Wal(
        store, WalSettings(), cluster_id=CLUSTER, replica_set_id=1, clock=clock, rng=random.Random(clock.now_s)
    )


@pytest.mark.parametrize("refusal", [REFUSALS[0], Unavailable("503"), "short"], ids=str)
async def test_recovery_of_a_wal_in_the_bucket_waits_for_access_and_calls_nothing_damaged(
    refusal: Exception | str,
) -> None:
    clock = FastClock()
    store = Refusing(clock)
    first = wal_on(store, clock)
    assert await first.recover(lambda _record: None) == 0
    await first.begin_epoch(1)
    for number in range(20):
        first.append(StreamAppend(1, 1, number, 1, [b"%d" % number]))
        await clock.sleep(1.0)
    await first.close()
    waits = 0

    class Healing(FastClock):
        async def sleep(self, seconds: float) -> None:
            nonlocal waits
            waits += 1
            if waits == 5:
                store.short, store.error = False, None
            await super().sleep(seconds)

    store.short, store.error = refusal == "short", refusal if isinstance(refusal, Exception) else None
    with pytest.raises(Unavailable):
        await verify_bucket(store, CLUSTER, 1)
    again = wal_on(store, Healing())
    recovered: list[WalRecord] = []
    await again.recover(recovered.append)
    assert waits >= 5
    assert [record.base_offset for record in recovered if record.payload][-20:] == list(range(20))
    assert (await verify_bucket(store, CLUSTER, 1)).findings == []
    await again.close()
