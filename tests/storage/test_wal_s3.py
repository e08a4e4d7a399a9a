"""The diskless WAL, case by case; the writers that compete at random are in test_wal_s3_writers.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Unpack

import pytest
from msgspec import structs

from tests.storage.wal_harness import WalChanges, durable, until
from tests.storage.wal_s3_world import Op, World, Writer
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Closed, ConfigError, CorruptData, Fenced, InvalidInput, Unavailable
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.storage.bucket.common import StoreUnsupported
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import Wal, WalFailed, WalFull, WalRecord
from tidelog.storage.wal.s3.chain import SPAN, BatchTimer, SendWindow
from tidelog.storage.wal.s3.format import FENCE_BYTES, ObjectType, decode, wal_key, wal_prefix
from tidelog.storage.wal.s3.wal import S3Wal

PREFIX = wal_prefix("c", 1)


def tiny(**changes: Unpack[WalChanges]) -> WalSettings:
    values = WalSettings(max_bytes=1 << 20, max_record_bytes=4096, s3_batch_bytes=200, s3_in_flight=4)
    return structs.replace(values, **changes)


def make(store: ObjectStore, seed: int = 1, **changes: Unpack[WalChanges]) -> S3Wal:
    return S3Wal(
        store, tiny(**changes), cluster_id="c", replica_set_id=1, clock=SystemClock(), rng=random.Random(seed)
    )  # fmt: skip


async def opened(store: ObjectStore, epoch: int, **changes: Unpack[WalChanges]) -> tuple[S3Wal, list[WalRecord]]:
    wal = make(store, epoch, **changes)
    records: list[WalRecord] = []
    await wal.recover(records.append)
    await wal.begin_epoch(epoch)
    return wal, records


async def write(wal: S3Wal, *payloads: bytes) -> None:
    """Each in an object of its own."""
    for payload in payloads:
        wal.append(StreamAppend(7, 3, 100, 2, (payload,)))
        await durable(wal)


def keys(store: MemoryObjectStore) -> list[str]:
    return store.keys()


def data_keys(store: MemoryObjectStore) -> list[str]:
    return [key for key in keys(store) if len(store.body(key)) != FENCE_BYTES]


# -- the contract


async def test_what_was_appended_is_recovered_byte_for_byte() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1)
    checked: Wal = wal
    assert checked.start_offset == 0 and checked.end_offset == checked.durable_offset == 64
    seen: list[int] = []
    wal.set_on_durable(seen.append)
    end = wal.append(StreamAppend(7, 3, 100, 2, (b"abc", memoryview(b"d"))))
    assert end == 64 + 64 + 4 and wal.durable_offset == 64
    await until(lambda: wal.durable_offset == end)
    assert seen == [end]
    wal.note_confirmed(end)
    await write(wal, b"second")
    await wal.close()
    again = make(store, 2)
    records: list[WalRecord] = []
    assert await again.recover(records.append) == end, "the second record's header proves the first confirmed"
    assert [(one.offset, one.type, one.master_epoch) for one in records] == [(0, 2, 1), (64, 1, 1), (end, 1, 1)]
    first = records[1]
    assert (first.stream_id, first.stream_epoch, first.base_offset, first.count) == (7, 3, 100, 2)
    assert [bytes(one.payload) for one in records] == [b"", b"abcd", b"second"]
    assert again.end_offset == again.durable_offset == records[-1].end_offset
    with pytest.raises(Fenced):
        await again.begin_epoch(1)
    await again.begin_epoch(2)
    assert again.epoch_history.entries == ((1, 0), (2, records[-1].end_offset))
    await again.close()


async def test_one_process_may_enter_several_epochs() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1)
    await write(wal, b"a")
    await wal.begin_epoch(4)
    await write(wal, b"b")
    with pytest.raises(Fenced):
        await wal.begin_epoch(4)
    await wal.close()
    wal, records = await opened(store, 5)
    assert [(bytes(one.payload), one.master_epoch) for one in records] == [(b"", 1), (b"a", 1), (b"", 4), (b"b", 4)]
    await wal.close()


async def test_a_trim_deletes_objects_but_no_fence_and_not_the_newest() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1)
    await write(wal, b"a", b"b", b"c")
    assert len(data_keys(store)) == 4
    await wal.trim(wal.durable_offset)
    assert wal.start_offset == wal.durable_offset
    # The newest, and one without records that says from where on the log is needed.
    await until(lambda: len(data_keys(store)) == 2)
    fences = len(keys(store)) - 2
    await write(wal, b"d")
    await wal.trim(wal.durable_offset)
    await until(lambda: len(data_keys(store)) == 2)
    assert len(keys(store)) - 2 == fences == 1
    end = wal.end_offset
    await wal.close()
    wal, records = await opened(store, 2)
    assert records[-1].end_offset == end and len(records) == 1
    await until(lambda: wal.durable_offset == end + 64)
    await wal.close()


class NoDeletes(MemoryObjectStore):
    """A bucket that refuses deletes for a reason that no retry changes, while `refuses`."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = True
        self.asked = 0

    async def delete(self, keys: Sequence[str]) -> None:
        self.asked += 1
        if self.refuses:
            raise StoreUnsupported("delete is not supported: the server answered 501 NotImplemented")
        await super().delete(keys)


async def test_a_bucket_that_refuses_deletes_does_not_end_the_log() -> None:
    store = NoDeletes()
    wal, _ = await opened(store, 1)
    await write(wal, b"a", b"b", b"c")
    await wal.trim(wal.durable_offset)
    await until(lambda: store.asked)
    await write(wal, b"d")
    await wal.close()
    left = data_keys(store)[0]
    for epoch in (2, 3):
        store.refuses, store.asked = epoch == 2, 0
        wal, records = await opened(store, epoch)  # it deletes what the one before could not
        await until(lambda: store.asked)
        await write(wal, b"e")
        assert records[-1].end_offset < wal.durable_offset
        await wal.close()
        assert (left in keys(store)) == store.refuses


async def test_a_reset_starts_the_log_over_elsewhere() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1)
    await write(wal, b"a", b"b")
    await wal.close()
    wal = make(store, 2)
    await wal.recover(lambda _record: None)
    await wal.reset(1 << 40)
    await wal.begin_epoch(2)
    assert wal.start_offset == 1 << 40 and wal.durable_offset == (1 << 40) + 64
    await write(wal, b"c")
    await until(lambda: len(data_keys(store)) == 2)
    await wal.close()
    wal, records = await opened(store, 3)
    assert [(one.offset, bytes(one.payload)) for one in records] == [(1 << 40, b""), ((1 << 40) + 64, b"c")]
    await wal.close()


async def test_bounds_are_back_pressure() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1, max_bytes=5000)
    with pytest.raises(InvalidInput):
        wal.append(StreamAppend(1, 1, 0, 1, (bytes(5000),)))
    await write(wal, bytes(4000))
    with pytest.raises(WalFull):
        wal.append(StreamAppend(1, 1, 0, 1, (bytes(1000),)))
    waiting = asyncio.ensure_future(wal.writable(1000))
    await asyncio.sleep(0)
    assert not waiting.done()
    await wal.trim(wal.durable_offset)
    await waiting
    await write(wal, bytes(1000))
    await wal.close()
    with pytest.raises(Closed):
        wal.append(StreamAppend(1, 1, 0, 1, (b"x",)))


@pytest.mark.parametrize(
    "changes",
    [{"s3_batch_min_ms": 300}, {"s3_in_flight": 257}, {"max_bytes": 4000}],
)
def test_settings_that_cannot_work_are_refused(changes: WalChanges) -> None:
    with pytest.raises(ConfigError):
        make(MemoryObjectStore(), **changes)


# -- damage


async def test_every_flipped_bit_is_found_and_named() -> None:
    store, rng = MemoryObjectStore(), random.Random(3)
    wal, _ = await opened(store, 1)
    await write(wal, b"a" * 50, b"b" * 150, b"c")
    await wal.close()
    for key in keys(store):
        whole = store.body(key)
        for bit in rng.sample(range(8 * len(whole)), 40):
            broken = bytearray(whole)
            broken[bit // 8] ^= 1 << bit % 8
            await store.put(key, [broken])
            with pytest.raises(CorruptData, match=key):
                await make(store).recover(lambda _record: None)
        await store.put(key, [whole])
    await make(store).recover(lambda _record: None)


async def test_an_acknowledged_object_that_is_gone_is_damage_and_not_the_end() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1)
    await write(wal, b"a", b"b", b"c", b"d")
    await wal.close()
    for key in data_keys(store)[:-2]:  # what was acknowledged before the last was built is proven
        whole = store.body(key)
        await store.delete([key])
        with pytest.raises(CorruptData, match=f"{key} is missing"):
            await make(store).recover(lambda _record: None)
        await store.put(key, [whole])
    await make(store).recover(lambda _record: None)


# -- a bucket that fails, and writers that were shut out


class Scene:
    """A world with what the cases below need."""

    def __init__(self) -> None:
        self.world = World(tiny())

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()

    def started(self) -> Writer:
        writer = self.world.start()
        self.world.drain(lambda: writer.running)
        return writer

    def all_durable(self, writer: Writer) -> None:
        self.world.drain(lambda: writer.wal.durable_offset == writer.wal.end_offset)

    def quiet(self) -> None:
        self.world.drain(lambda: not self.world.ops)

    def ops(self, writer: Writer, what: str = "put") -> list[Op]:
        return [op for op in self.world.ops if op.writer == writer.number and op.what.startswith(what)]


def test_a_lost_answer_is_recognised_as_our_own_success() -> None:
    with Scene() as scene:
        writer = scene.started()
        scene.world.append(writer, b"x")
        scene.world.finish(scene.ops(writer)[0], "lost")
        scene.world.tick(1.0)
        scene.all_durable(writer)
        assert not writer.failed and writer.wal.stats()["puts"] == 2
        scene.world.end()


def test_objects_that_land_out_of_order_are_acknowledged_in_order() -> None:
    with Scene() as scene:
        writer = scene.started()
        for _ in range(3):
            scene.world.append(writer, b"x" * 200)
        before = writer.wal.durable_offset
        first, second, third = scene.ops(writer)
        scene.world.finish(third, "ok")
        scene.world.finish(second, "ok")
        assert writer.wal.durable_offset == before
        scene.world.finish(first, "ok")
        assert writer.wal.durable_offset == writer.wal.end_offset


def test_what_lies_behind_a_hole_was_never_acknowledged_and_is_cleared_away() -> None:
    with Scene() as scene:
        old = scene.started()
        for payload in (b"a", b"b", b"c"):
            scene.world.append(old, payload.ljust(200))
        first, _second, third = scene.ops(old)
        scene.world.finish(first, "ok")
        scene.world.finish(third, "ok")
        dead = third.what.removeprefix("put ")
        scene.world.crash(old)
        assert dead in keys(scene.world.store)
        new = scene.started()
        assert [payload.strip() for _, payload in new.recovered] == [b"", b"a"]
        scene.world.append(new, b"d")
        scene.all_durable(new)
        scene.quiet()
        assert dead not in keys(scene.world.store)
        last = scene.started()
        assert [payload.strip() for _, payload in last.recovered] == [b"", b"a", b"", b"d"]
        scene.world.end()


def test_a_zombie_gets_412_at_the_fence_and_fails_for_good() -> None:
    with Scene() as scene:
        old = scene.started()
        for _ in range(3):
            scene.world.append(old, b"x" * 200)
        held, *others = scene.ops(old)
        for op in others:
            scene.world.finish(op, "ok")  # landed, but not in order: dead
        scene.world.ops.remove(held)  # it hangs
        before = old.wal.durable_offset
        new = scene.started()
        scene.world.append(new, b"new")
        scene.all_durable(new)
        scene.world.ops.append(held)
        scene.world.finish(held, "ok")
        scene.world.drain(lambda: old.failed)
        assert isinstance(old.errors[0], WalFailed) and isinstance(old.errors[0].__cause__, Fenced)
        assert "FENCE object of master epoch 2" in str(old.errors[0])
        assert old.wal.durable_offset == before
        with pytest.raises(WalFailed):
            old.wal.append(StreamAppend(1, 1, 0, 1, (b"y",)))
        scene.world.end()


def test_a_fence_outlives_trims_and_restarts_so_that_the_slowest_zombie_meets_it() -> None:
    with Scene() as scene:
        old = scene.started()
        scene.world.append(old, b"x")
        (held,) = scene.ops(old)
        scene.world.ops.remove(held)  # a request that hangs, in a process that sleeps
        for _ in range(3):
            new = scene.started()
            scene.world.append(new, b"new")
            scene.all_durable(new)
            scene.world.commit(new)
            scene.quiet()
            scene.world.crash(new)
        scene.world.ops.append(held)
        scene.world.finish(held, "ok")
        scene.world.drain(lambda: old.failed)
        assert old.wal.durable_offset == 64
        scene.world.end()


def test_nothing_is_deleted_before_a_durable_object_says_that_it_is_not_needed() -> None:
    with Scene() as scene:
        writer = scene.started()
        for _ in range(3):
            scene.world.append(writer, b"x")
            scene.all_durable(writer)
        scene.world.commit(writer)
        (carrier,) = scene.ops(writer)
        assert not scene.ops(writer, "delete")
        scene.world.finish(carrier, "refused")
        scene.world.tick(10.0)
        assert not scene.ops(writer, "delete")
        (carrier,) = scene.ops(writer)
        scene.world.finish(carrier, "ok")
        assert scene.ops(writer, "delete")
        scene.world.end()


def test_a_put_that_arrives_again_after_its_object_was_trimmed_does_no_harm() -> None:
    with Scene() as scene:
        writer = scene.started()
        scene.world.append(writer, b"x")
        scene.world.finish(scene.ops(writer)[0], "late")
        scene.world.tick(1.0)
        for payload in (b"y", b"z"):
            scene.world.append(writer, payload)
            scene.all_durable(writer)
        scene.world.commit(writer)
        scene.quiet()
        scene.world.land_late(scene.world.late[0])
        later = scene.started()
        assert later.wal.start_offset <= scene.world.committed
        scene.world.end()


def test_who_sleeps_between_recovery_and_its_fence_finds_out_that_it_was_overtaken() -> None:
    """Its place was filled and trimmed since, so its create succeeds; the chain shows that it does not count."""
    with Scene() as scene:
        old = scene.started()
        scene.world.append(old, b"x" * 200)
        scene.world.append(old, b"y" * 200)
        held = scene.ops(old)
        sleeper = scene.world.start()
        while not scene.ops(sleeper):
            for op in [op for op in scene.world.ops if op not in held]:
                scene.world.finish(op, "ok")
        fence = scene.ops(sleeper)[0]
        scene.world.ops.remove(fence)
        for op in held:
            scene.world.finish(op, "ok")
        newest = scene.started()
        for payload in (b"1", b"2"):
            scene.world.append(newest, payload)
            scene.all_durable(newest)
        scene.world.commit(newest)
        scene.quiet()
        scene.world.ops.append(fence)
        scene.world.finish(fence, "ok")
        scene.world.drain(lambda: sleeper.failed or sleeper.running)
        assert sleeper.failed and isinstance(sleeper.errors[0], Fenced)
        scene.world.append(newest, b"3")
        scene.all_durable(newest)
        scene.world.end()


def test_a_bucket_that_is_away_at_the_end_does_not_hold_up_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_args: object, **_kwargs: object) -> None:
        raise Unavailable("away")

    async def scenario() -> None:
        store = MemoryObjectStore()
        wal, _ = await opened(store, 1)
        monkeypatch.setattr(store, "put", away)
        wal.append(StreamAppend(1, 1, 0, 1, (b"x",)))
        before = loop.time()
        await wal.close()
        assert 1 < loop.time() - before < 60
        assert wal.durable_offset == 64

    loop = VirtualLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


# -- pieces


def test_the_interval_follows_the_latency_between_its_limits() -> None:
    timer, window = BatchTimer(0.01, 0.2), SendWindow(1000, 4)
    window.open(0, 0, 0, ())
    assert timer.interval_s == 0.01
    timer.observe(0.1)
    assert timer.interval_s == 0.05
    for _ in range(50):
        timer.observe(5.0)
    assert timer.interval_s == 0.2
    window.add(0, 100, (b"",))
    assert timer.delay_s(1.0, window) == 0, "nothing is under way"
    assert window.next_batch() is not None
    timer.sent(1.0)
    window.add(100, 100, (b"",))
    assert timer.delay_s(1.1, window) == pytest.approx(0.1)
    window.add(200, 900, (b"",))
    assert timer.delay_s(1.1, window) == 0, "the batch is full"


async def test_a_fence_names_a_place_beyond_all_that_older_writers_can_reach() -> None:
    store = MemoryObjectStore()
    wal, _ = await opened(store, 1)
    await wal.close()
    fence = decode(PREFIX, wal_key(PREFIX, 0), await store.get(wal_key(PREFIX, 0)), 1)
    assert fence.kind is ObjectType.FENCE and fence.next_seq == SPAN and fence.reset_offset == 0
    assert keys(store) == [wal_key(PREFIX, 0), wal_key(PREFIX, SPAN)]
