"""The shards that groups and transactions share, with a coordinator of plain keys and values."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from tests.support.group_world import FakeController, FakeLog, FakePartitions, FakeStorage
from tests.support.loops import VIRTUAL_LOOP, LoopClock
from tidelog.broker.coordinators.errors import CoordinatorNotAvailable, NotCoordinator, WriteError
from tidelog.broker.coordinators.handover import MAX_STATE_BYTES
from tidelog.broker.coordinators.shards import LOADING_S, Shard, ShardTable
from tidelog.broker.coordinators.timers import Now
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC, TRANSACTION_CONFIGS, TRANSACTION_TOPIC, CoordinatorTopic
from tidelog.broker.coordinators.writer import BATCH_BYTES, DEFECT_PAUSE_S, Write
from tidelog.runtime.errors import CorruptData, NotLeader, Overloaded, TidelogError, Unavailable

LOOPS = VIRTUAL_LOOP


class Values:
    """The newest value of each key."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.is_complete = False

    def replay(self, key: bytes, value: bytes | None) -> None:
        assert not self.is_complete
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def finish_loading(self, now: Now) -> None:
        self.is_complete = True

    def live_records(self) -> Iterator[tuple[bytes, bytes]]:
        yield from self.values.items()

    def counts(self) -> dict[str, int]:
        return {"values": len(self.values)}


class Owner:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def new_store(self) -> Values:
        return Values()

    def activated(self, shard: Shard[Values]) -> None:
        assert shard.store.is_complete and not shard.writer.is_full
        self.heard.append(("activated", shard.index, dict(shard.store.values)))

    def unloading(self, shard: Shard[Values]) -> None:
        self.heard.append(("unloading", shard.index))

    def due(self, shard: Shard[Values] | None, key: Hashable, now: Now) -> None:
        self.heard.append(("due", shard and shard.index, key, now.mono_ms))

    def topics_deleted(self, shard: Shard[Values], names: set[str]) -> None:
        self.heard.append(("deleted", shard.index, names))


class StateWorld:
    """One broker that leads two partitions of `__transaction_state`, and one of another topic."""

    def __init__(self) -> None:
        self.storage = FakeStorage()
        self.controller = FakeController()
        self.partitions = FakePartitions(self.storage)
        self.owner = Owner()
        self.table = self.new_table(self.owner)

    def new_table(self, owner: Owner) -> ShardTable[Values]:
        parts: dict[str, Any] = {"partitions": self.partitions, "controller": self.controller}
        return ShardTable(TRANSACTION_TOPIC, owner, clock=LoopClock(), rng=random.Random(1), **parts)

    def log(self, index: int) -> FakeLog:
        return FakeLog(index, self.storage, topic=TRANSACTION_TOPIC)

    async def __aenter__(self) -> StateWorld:
        self.table.start()
        for index in range(2):
            self.partitions.open(self.log(index))
        self.partitions.open(FakeLog(5, self.storage, topic=OFFSETS_TOPIC))
        async with asyncio.timeout(10):
            for index in range(2):
                await self.table.wait_until_loaded(index)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.table.close()

    async def put(self, index: int, key: bytes, value: bytes) -> WriteError:
        shard = self.table.get(index)
        return await self.table.write(shard, [(key, value)], lambda: shard.store.values.update({key: value}))

    def take(self) -> list[tuple[Any, ...]]:
        heard, self.owner.heard = self.owner.heard, []
        return heard


async def test_partitions_of_other_topics_are_left_alone() -> None:
    async with StateWorld() as world:
        assert sorted(world.take()) == [("activated", 0, {}), ("activated", 1, {})]
        assert {shard.index for shard in world.table.active()} == {0, 1}
        with pytest.raises(NotCoordinator, match=f"{TRANSACTION_TOPIC}-5"):
            world.table.get(5)


async def test_what_was_written_is_there_when_another_table_loads_it() -> None:
    async with StateWorld() as world:
        assert await world.put(1, b"k", b"1") is WriteError.NONE
        assert await world.put(1, b"k", b"2") is WriteError.NONE
        world.take()
        log = world.partitions.logs[1]
        world.partitions.close(1)
        assert world.take() == [("unloading", 1)]
        world.partitions.open(log.reopened(world.storage))
        async with asyncio.timeout(10):
            await world.table.wait_until_loaded(1)
        assert world.take() == [("activated", 1, {b"k": b"2"})]


@pytest.mark.parametrize("is_old_late", [False, True])
@pytest.mark.parametrize("old_epoch", [1, 7])
async def test_a_topic_that_is_created_again_is_served_whatever_its_leader_epoch(
    old_epoch: int, is_old_late: bool
) -> None:
    """A partition that is being moved or opened closes some time after its topic was deleted."""
    async with StateWorld() as world:
        old = world.controller.add_topic(TRANSACTION_TOPIC, 3)
        before = FakeLog(2, world.storage, old_epoch, TRANSACTION_TOPIC)
        before.topic_id = old.id
        if not is_old_late:
            world.partitions.open(before)
        world.controller.delete_topic(old)
        after = FakeLog(2, world.storage, 3, TRANSACTION_TOPIC)
        after.topic_id = world.controller.add_topic(TRANSACTION_TOPIC, 3).id
        world.partitions.open(after)
        if is_old_late:
            world.partitions.open(before)
            world.partitions.logs[2] = after
        world.partitions.tell_closed(before)
        async with asyncio.timeout(10):
            await world.table.wait_until_loaded(2)
        served: Any = world.table.get(2).log
        assert served is after
        assert await world.put(2, b"k", b"1") is WriteError.NONE


async def moved(world: StateWorld, note: bytes, *errors: TidelogError) -> FakeLog:
    """The partition's log at its next leader, loaded."""
    log = world.partitions.logs.get(1) or world.log(1)
    again = log.reopened(world.storage)
    again.hint_note = lambda: note
    again.read_errors += errors
    world.partitions.open(again)
    async with asyncio.timeout(10):
        await world.table.wait_until_loaded(1)
    return again


async def test_a_state_that_was_passed_on_is_used_once_and_a_failed_load_reads_the_log() -> None:
    async with StateWorld() as world:
        for number in range(20):
            await world.put(1, b"k%d" % (number % 3), b"%d" % number)
        log = world.partitions.logs[1]
        world.partitions.close(1)
        note = log.hint_note()
        assert log.log_end_offset == 20
        world.partitions.logs[1] = log
        again = await moved(world, note)
        assert (again.read_from, again.hint_note()) == (-1, b"")
        assert await world.put(1, b"k0", b"new") is WriteError.NONE
        assert again.log_end_offset == 21
        world.partitions.close(1)
        world.partitions.logs[1] = again
        late = await moved(world, note, Unavailable("away"))
        assert late.read_from == 0, "the rest could not be read: all is"
        assert world.table.get(1).store.values == {b"k0": b"new", b"k1": b"19", b"k2": b"17"}


@pytest.mark.parametrize(
    "note", [b"\x93", b"\x95\x02\x00\x00\x90\x90", b"\x95\x01\xff\x00\x90\x90", b"\x95\x01\x63\x00\x90\x90"]
)
async def test_a_state_that_does_not_fit_is_not_used(note: bytes) -> None:
    """Torn; of another version; of an offset that cannot be; of more than the log has."""
    async with StateWorld() as world:
        await world.put(1, b"k", b"1")
        log = world.partitions.logs[1]
        world.partitions.close(1)
        world.partitions.logs[1] = log
        again = await moved(world, note)
        assert again.read_from == 0
        assert world.table.get(1).store.values == {b"k": b"1"}


async def test_a_large_state_is_not_passed_on() -> None:
    async with StateWorld() as world:
        await world.put(1, b"k", bytes(MAX_STATE_BYTES))
        log = world.partitions.logs[1]
        world.partitions.close(1)
        assert log.hint_note() == b""


async def test_a_rewrite_of_the_log_is_in_the_state_that_is_passed_on() -> None:
    async with StateWorld() as world:
        for _ in range(20):
            await world.put(1, b"k", bytes(100_000))
        log = world.partitions.logs[1]
        async with asyncio.timeout(10):
            while log.log_start_offset == 0:  # noqa: ASYNC110  # virtual time: it waits for nobody
                await asyncio.sleep(0.01)
        world.partitions.close(1)
        world.partitions.logs[1] = log
        again = await moved(world, log.hint_note())
        assert again.read_from == -1
        assert again.log_start_offset > 0
        assert world.table.get(1).store.values == {b"k": bytes(100_000)}


async def test_the_owner_hears_of_the_end_before_its_waiting_writes_fail() -> None:
    async with StateWorld() as world:
        world.storage.auto_confirm = False
        world.take()
        shard = world.table.get(0)
        failed = Write(lambda: [(b"k", b"v")], lambda error: world.owner.heard.append(("done", error)))
        waiting = asyncio.create_task(world.table.submit(shard, failed))
        await asyncio.sleep(0.1)
        world.partitions.close(0)
        assert await waiting is WriteError.NOT_COORDINATOR
        assert world.take() == [("unloading", 0), ("done", WriteError.NOT_COORDINATOR)]
        assert shard.store.values == {}


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [([NotLeader("moved")], WriteError.NOT_COORDINATOR), ([Overloaded("full")] * 10_000, None)],
)
async def test_the_outcome_of_a_write_that_fails(errors: list[Any], outcome: WriteError | None) -> None:
    async with StateWorld() as world:
        world.partitions.logs[0].errors = errors
        if outcome is None:
            with pytest.raises(CoordinatorNotAvailable, match=f"{TRANSACTION_TOPIC}-0"):
                await world.put(0, b"k", b"v")
        else:
            assert await world.put(0, b"k", b"v") is outcome


async def test_an_exception_that_nobody_expects_has_the_partition_loaded_again() -> None:
    async with StateWorld() as world:
        assert await world.put(0, b"k", b"1") is WriteError.NONE
        odd: Any = [KeyError("a defect")]
        world.partitions.logs[0].errors = odd
        assert await world.put(0, b"k", b"2") is WriteError.NOT_COORDINATOR
        assert await world.put(0, b"k", b"3") is WriteError.NOT_COORDINATOR, "not before the log was read again"
        world.take()
        await asyncio.sleep(DEFECT_PAUSE_S)
        async with asyncio.timeout(10):
            while len(world.owner.heard) < 2:  # noqa: ASYNC110  # virtual time: it waits for nobody
                await asyncio.sleep(0.01)
        assert world.take() == [("unloading", 0), ("activated", 0, {b"k": b"1"})]
        assert await world.put(0, b"k", b"4") is WriteError.NONE


async def test_others_run_while_what_a_loaded_log_holds_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition with 100,000 committed offsets held all clients of its next broker up for some tenths of a second."""
    turns, told = 0, list[int]()
    live_records = Values.live_records

    def others_run() -> None:
        nonlocal turns
        turns += 1

    def telling(store: Values) -> Iterator[tuple[bytes, bytes]]:
        for key, value in live_records(store):
            told.append(turns)
            asyncio.get_running_loop().call_soon(others_run)
            yield key, value

    async with StateWorld() as world:
        for number in range(20):
            assert await world.put(0, b"k%d" % number, bytes(BATCH_BYTES)) is WriteError.NONE
        log = world.partitions.logs[0].reopened(world.storage)
        world.partitions.close(0)
        monkeypatch.setattr(Values, "live_records", telling)
        world.partitions.open(log)
        async with asyncio.timeout(10):
            await world.table.wait_until_loaded(0)
            assert await world.put(0, b"k0", b"new") is WriteError.NONE, "it waits: nothing changes meanwhile"
        assert told == list(range(20)), "each in a turn of its own"
        live_bytes = world.table.get(0).writer.stats()["live_bytes"]
        assert live_bytes == sum(len(b"k%d" % number) + BATCH_BYTES for number in range(20))


async def problems_of(world: StateWorld, index: int, errors: list[Any], after_s: float) -> list[str]:
    """What the table tells of a partition whose log cannot be read, that long after it was opened."""
    assert await world.put(index, b"k", b"1") is WriteError.NONE
    log = world.partitions.logs[index].reopened(world.storage)
    log.read_errors = errors
    world.partitions.close(index)
    world.partitions.open(log)
    await asyncio.sleep(after_s)
    return world.table.problems()


async def test_a_damaged_partition_is_told_until_it_is_served() -> None:
    """Else the groups or transactions in it are refused while `tidelog status` finds nothing wrong."""
    async with StateWorld() as world:
        assert world.table.problems() == []
        errors: list[Any] = [CorruptData("batch 7 fails its CRC32C")] * 3
        (told,) = await problems_of(world, 1, errors, 0.05)
        assert told.startswith(f"{TRANSACTION_TOPIC}-1 is damaged, ") and told.endswith("batch 7 fails its CRC32C")
        await asyncio.sleep(LOADING_S)
        assert world.table.get(1).store.values == {b"k": b"1"}
        assert world.table.problems() == []


@pytest.mark.parametrize("error", [Unavailable("no quorum"), AssertionError("a defect")])
async def test_a_partition_that_does_not_load_is_told(error: Any) -> None:
    """Also one whose loading has ended with a defect, which nobody tries again."""
    async with StateWorld() as world:
        assert await problems_of(world, 1, [error] * 1_000, LOADING_S - 1) == []
        await asyncio.sleep(2)
        (told,) = world.table.problems()
        assert told.startswith(f"{TRANSACTION_TOPIC}-1 has been loading for 31 s, ")
        assert told.endswith(": no quorum") == isinstance(error, Unavailable)
        world.partitions.close(1)
        assert world.table.problems() == []


async def test_one_alarm_rings_for_all_deadlines_and_those_of_a_shard_end_with_it() -> None:
    async with StateWorld() as world:
        world.take()
        table = world.table
        start = table.now().mono_ms
        first, second = table.get(0), table.get(1)
        table.set_timer("own", start + 300)
        table.set_timer("a", start + 500, first)
        table.set_timer("a", start + 100, second)
        table.set_timer("b", start + 200, first)
        table.set_timer("b", start + 400, first)  # further away
        table.set_timer("c", start + 350, second)
        table.set_timer("d", start + 50, second)
        table.cancel_timer("d", second)
        await asyncio.sleep(0.32)
        assert world.take() == [("due", 1, "a", start + 100), ("due", None, "own", start + 300)]
        table.unload(1)
        table.set_timer("late", start + 360, second)
        await asyncio.sleep(1)
        expected = [("unloading", 1), ("due", 0, "b", start + 400), ("due", 0, "a", start + 500)]
        assert world.take() == expected


async def test_topics_deleted_while_a_shard_loads_are_told_after_it() -> None:
    async with StateWorld() as world:
        topic = world.controller.add_topic("orders", 1)
        log = world.partitions.logs[0]
        world.partitions.close(0)
        world.take()
        world.partitions.open(log)
        world.controller.delete_topic(topic)
        async with asyncio.timeout(10):
            await world.table.wait_until_loaded(0)
        assert world.take() == [
            ("deleted", 1, {"orders"}),
            ("activated", 0, {}),
            ("deleted", 0, {"orders"}),
        ]


async def test_a_topic_of_a_coordinator_is_created_with_its_own_size_and_settings() -> None:
    controller = FakeController()
    stand_in: Any = controller
    topic = CoordinatorTopic(stand_in, TRANSACTION_TOPIC, 50, TRANSACTION_CONFIGS)
    assert topic.partition_of("id") is None
    async with asyncio.timeout(10):
        broker = await topic.find("id")
    assert broker.id == 1
    assert controller.created == [(TRANSACTION_TOPIC, 50, dict(TRANSACTION_CONFIGS), True)]
    partition = topic.partition_of("id")
    assert partition is not None and 0 <= partition < 50
