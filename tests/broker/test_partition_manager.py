"""The partition manager against the image: whatever changes and whenever, what is open is what is placed here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.kafka_world import CLUSTER_ID, NODE_ID, DataController, batch, until
from tidelog.broker.kafka.errors import fetch_code, produce_code
from tidelog.broker.partitions import checkpoints, openings
from tidelog.broker.partitions.manager import PartitionDamaged, PartitionManager
from tidelog.broker.partitions.openings import LeaderNotAvailable, Opening
from tidelog.broker.partitions.reconciler import PartitionPlan, PartitionReconciler
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.partitions.topic_config import log_config
from tidelog.broker.settings import KafkaSettings, LogSettings
from tidelog.controller.image.image import Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import PartitionKey, TopicRecord
from tidelog.controller.model.replication import ElectionRecord, InSyncRecord, ReplicationRecord
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import NotLeader, Unavailable
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import View
from tidelog.storage.inputs import ReplicaSetData
from tidelog.storage.settings import StorageSettings, UploadSettings, WalSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.memory import MemoryWal
from tidelog.stream.log_config import LogConfig
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_close import ClosedLog
from tidelog.stream.partition_log import LedPartition, PartitionLog

OTHER = 2


class BusyController(DataController):
    """Refuses to open streams as often as it is told to, and answers a turn of the loop later."""

    refusals = 0
    hold: asyncio.Event | None = None
    """The next answer waits for it."""

    async def open_streams(self, *args: Any) -> list[OpenedStream]:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("the controller is busy")
        opened = await super().open_streams(*args)
        hold, self.hold = self.hold, None
        if hold is not None:
            await hold.wait()
        return opened


class CountingStore(MemoryObjectStore):
    """A bucket that counts its GETs, and may be held up."""

    gets = 0
    read = 0
    """Bytes that were asked for."""
    gate: asyncio.Event | None = None

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        self.gets += len(ranges)
        self.read += sum(end - start for start, end in ranges)
        if self.gate is not None:
            await self.gate.wait()
        return await super().get_ranges(key, ranges)


class World:
    """A broker's partitions over a storage in memory."""

    controller: BusyController
    store: CountingStore

    def __init__(self, seed: int, before: World | None = None, defaults: LogSettings | None = None) -> None:
        """`before`: one that was closed, whose controller and bucket this one goes on with."""
        rng = random.Random(seed)
        self.controller = controller = BusyController() if before is None else before.controller
        if before is None:
            controller.register(NODE_ID)
            controller.register(OTHER)
        objects: Any = controller
        self.store = CountingStore() if before is None else before.store
        self.storage = self.make_storage(NODE_ID)
        self.storages = MasterStorages()
        self.partitions = PartitionManager(
            node_id=NODE_ID,
            controller=objects,
            storages=self.storages,
            clock=SystemClock(),
            kafka=KafkaSettings(),
            defaults=defaults or LogSettings(),
            rng=rng,
        )

    def make_storage(self, replica_set: int) -> Storage:
        objects: Any = self.controller
        return Storage(
            ReplicaSetData(CLUSTER_ID, replica_set, MemoryWal(WalSettings()), self.store, objects),
            StorageSettings(UploadSettings(age_ms=3_600_000)),
            SystemClock(),
            random.Random(replica_set),
        )

    async def start(self) -> None:
        await self.storage.recover()
        await self.storage.start(self.controller.image.replica_sets[NODE_ID].master_epoch)
        self.storages.add(self.storage)
        await self.partitions.start()

    async def close(self) -> None:
        await self.partitions.close()
        await self.storage.close(upload=False)

    async def create(self, name: str, owners: list[int]) -> TopicRecord:
        return await self.controller.create_topic(name, len(owners), {}, assignment=owners)

    def wanted(self) -> dict[tuple[str, int], tuple[int, LogConfig]]:
        """What must be open: leader epoch and one setting, by topic and partition."""
        image = self.controller.image
        found: dict[tuple[str, int], tuple[int, LogConfig]] = {}
        for partition in image.all_partitions():
            topic = image.topics[partition.topic_id]
            leader, epoch = image.leader(partition)
            if leader == NODE_ID:
                found[topic.name, partition.index] = epoch, log_config(topic.configs, KafkaSettings(), LogSettings())
        return found

    def is_settled(self) -> bool:
        wanted = self.wanted()
        counts = {"led": len(wanted), "open": len(wanted), "failing": 0, "moving": 0}
        return self.open() == wanted and self.partitions.counts() == counts

    def open(self) -> dict[tuple[str, int], tuple[int, LogConfig]]:
        return {(one.topic, one.partition): (one.leader_epoch, one.config) for one in self.partitions.all()}


@asynccontextmanager
async def world(
    seed: int = 1, before: World | None = None, defaults: LogSettings | None = None
) -> AsyncIterator[World]:
    made = World(seed, before, defaults)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


OWNERS = st.lists(st.sampled_from([NODE_ID, OTHER]), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), OWNERS),
        st.tuples(st.just("delete"), st.integers(0, 5)),
        st.tuples(st.just("grow"), st.tuples(st.integers(0, 5), OWNERS)),
        st.tuples(st.just("configure"), st.tuples(st.integers(0, 5), st.integers(1, 5))),
        st.tuples(st.just("refuse"), st.integers(1, 3)),
        st.tuples(st.just("turns"), st.integers(1, 20)),
        st.tuples(st.just("commit"), st.none()),
    ),
    max_size=25,
)


async def test_all_partitions_together_have_few_batches_behind_their_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some write often, some seldom: whoever opens them after a death scans about `recovery_batches` of all."""
    monkeypatch.setattr(checkpoints, "INTERVAL_S", 0.01)
    async with world(defaults=LogSettings(recovery_batches=100)) as here:
        await here.create("orders", [NODE_ID] * 8)
        await until(here.is_settled, "the partitions are open")
        logs = sorted(here.partitions.all(), key=lambda one: one.partition)
        for _ in range(80):
            for one in logs[:2]:
                one.append(memoryview(bytearray(batch(b"often"))))
        for one in logs[2:]:
            one.append(memoryview(bytearray(batch(b"seldom"))))
        await until(lambda: sum(one.batches_to_scan for one in logs) <= 100, "the busy partitions have checkpoints")
        assert [one.batches_to_scan for one in logs[2:]] == [1] * 6
        assert checkpoints.due(logs, 100) == []


async def test_meta_streams_are_shortened_long_before_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers that fail more often than retention runs: each opening would read all that was ever put."""
    monkeypatch.setattr(checkpoints, "INTERVAL_S", 0.01)
    async with world() as here:
        await here.create("orders", [NODE_ID])
        await until(here.is_settled, "the partition is open")
        (log,) = here.partitions.all()
        for _ in range(40):
            for _ in range(16):
                log.append(memoryview(bytearray(batch(b"often"))))
            await log.write_checkpoint()
        assert log.can_shorten_meta
        await until(lambda: not log.can_shorten_meta, "what is live was written again")
        assert log.state.meta.stream.start_offset == 0, "the bucket does not have it"
        await here.storage.upload_now()
        await until(lambda: log.state.meta.stream.start_offset > 0, "the meta stream was trimmed")
        assert not log.can_shorten_meta


@settings(max_examples=examples(40), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(steps=STEPS)
def test_what_is_open_is_what_is_placed_here_whatever_happens(steps: list[tuple[str, Any]]) -> None:
    async def run() -> None:
        async with world() as here:
            controller = here.controller
            for number, (what, value) in enumerate(steps):
                topics = sorted(controller.image.topics.values(), key=lambda topic: topic.name)
                if what == "create":
                    await here.create(f"t{number:02}", value)
                elif what == "delete" and value < len(topics):
                    await controller.delete_topic(topics[value].id)
                elif what == "grow" and value[0] < len(topics):
                    total = topics[value[0]].partitions + len(value[1])
                    await controller.create_partitions(topics[value[0]].id, total, assignment=value[1])
                elif what == "configure" and value[0] < len(topics):
                    await controller.alter_topic_configs(topics[value[0]].id, {"retention.ms": str(value[1])})
                elif what == "refuse":
                    controller.refusals = value
                elif what == "turns":
                    for _ in range(value):
                        await asyncio.sleep(0)
                elif what == "commit":
                    await append_everywhere(here)
            await until(here.is_settled, "what is open is what is placed here")
            await here.partitions.wait_settled()
            assert here.partitions.problems() == []

    asyncio.run(run())


async def test_a_name_stands_for_the_newest_topic_that_has_it() -> None:
    """Though the older one, deleted while it opened, opens after it."""

    async with world() as here:
        opened: list[PartitionLog] = []
        here.partitions.on_opened(opened.append)
        hold = here.controller.hold = asyncio.Event()
        old = await here.create("t", [NODE_ID])
        await until(lambda: here.controller.hold is None, "its streams are open")
        await here.controller.delete_topic(old.id)
        new = await here.create("t", [NODE_ID])
        await until(here.is_settled, "the new one is open")
        hold.set()
        await until(lambda: len(opened) == 2, "the old one opens")
        assert here.partitions.get("t", 0) is here.partitions.get_by_id(new.id, 0)
        await until(lambda: here.partitions.counts()["open"] == 1, "and closes")
        assert here.partitions.get("t", 0) is here.partitions.get_by_id(new.id, 0)


async def test_a_start_is_not_held_up_by_a_partition_that_leaves() -> None:
    """Uploads are held back until the start is settled, and a partition that leaves waits for one."""

    made = World(1)
    topic = await made.create("t", [NODE_ID, NODE_ID])
    made.controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 1, OTHER),)))
    held = asyncio.Event()
    made.storage.upload_now = held.wait  # type: ignore[method-assign,assignment]
    await made.start()
    try:
        async with asyncio.timeout(60):
            await made.partitions.wait_settled()
        assert made.partitions.counts()["open"] == 2
        assert made.partitions.unsettled() == []
    finally:
        held.set()
        await made.close()


def placed_on(here: World, topic: TopicRecord, index: int) -> int:
    partition = here.controller.image.partition(topic.id, index)
    assert partition is not None
    return partition.replica_set


async def append_everywhere(here: World, value: bytes = b"x") -> None:
    ends = [one.append_internal(batch(value)).wal_end for one in here.partitions.all()]
    await here.storage.confirm.wait(max(ends, default=0))
    await here.storage.upload_now()


async def test_a_commit_of_objects_changes_no_placement_and_looks_at_no_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    opened: set[PartitionKey] = set()
    plan, ended = PartitionReconciler.plan, PartitionReconciler.ended

    def counted(reconciler: PartitionReconciler, image: Image, now: float, now_ms: int) -> PartitionPlan:
        looks.append(image.version)
        return plan(reconciler, image, now, now_ms)

    def told(reconciler: PartitionReconciler, keys: Iterable[PartitionKey]) -> None:
        opened.update(keys)
        if len(opened) <= 3:
            looks.clear()  # the end of an opening asks for one more look
        ended(reconciler, keys)

    monkeypatch.setattr(PartitionReconciler, "plan", counted)
    monkeypatch.setattr(PartitionReconciler, "ended", told)
    async with world() as here:
        await here.create("t", [NODE_ID] * 3)
        await until(lambda: len(opened) == 3 and looks != [], "all are open, and looked at for the last time")
        version, placed = here.controller.image.version, here.controller.image.placement_version
        looks.clear()
        await append_everywhere(here)
        committed = here.controller.image.version
        assert committed > version
        assert here.controller.image.replica_sets[NODE_ID].committed_wal_offset > 0
        assert here.controller.image.placement_version == placed
        await here.create("u", [NODE_ID])
        await until(lambda: len(here.open()) == 4, "what places a partition is looked at")
        assert min(looks) > committed


async def test_everything_that_places_a_partition_moves_the_placement_version() -> None:
    controller = DataController()
    changes: list[Callable[[], object]] = [
        lambda: controller.register(NODE_ID),
        lambda: controller.set_alive(NODE_ID, False),
        lambda: controller.set_alive(NODE_ID, True),
        lambda: controller.apply(c.CreateTopic(b"t" * 16, "t", 1, {}, False, False, None)),
        lambda: controller.apply(c.AlterTopicConfigs(b"t" * 16, {"retention.ms": "1"})),
        lambda: controller.apply(c.CreatePartitions(b"t" * 16, 2, None, False)),
        lambda: controller.apply(c.Elect(NODE_ID, NODE_ID)),
        lambda: controller.apply(c.AlterConfigs("cluster", "", {"log.retention.ms": "1"})),
        lambda: controller.apply(c.DeleteTopic(b"t" * 16)),
    ]
    for change in changes:
        before = controller.image.placement_version
        change()
        assert controller.image.placement_version == controller.image.version > before


async def test_a_partition_whose_data_is_damaged_is_told_from_one_that_is_opening() -> None:
    async with world() as here:
        topic = await here.create("t", [NODE_ID])
        [stream] = [one.first_stream + 1 for one in here.controller.image.partitions(topic.id)]
        master_epoch = here.controller.image.replica_sets[NODE_ID].master_epoch
        here.controller.apply(c.QuarantineStream(NODE_ID, master_epoch, stream, "a gap"))
        await until(lambda: here.partitions.counts()["failing"] == 1, "it does not open")
        with pytest.raises(PartitionDamaged, match=r"t-0 cannot be opened: .* quarantined: a gap") as caught:
            here.partitions.get("t", 0)
        assert (produce_code(caught.value), fetch_code(caught.value)) == (56, 2)
        assert "quarantined: a gap" in here.partitions.problems()[0]
        here.controller.apply(c.ReleaseStream(stream))
        await until(lambda: here.partitions.counts()["open"] == 1, "it opens when it was released")
        assert here.partitions.get("t", 0).append(memoryview(batch(b"v"))).base_offset == 0


async def test_who_asks_for_an_opening_partition_may_wait_until_it_serves_fails_or_goes() -> None:
    async with world() as here:
        here.controller.hold = held = asyncio.Event()
        record = await here.create("t", [NODE_ID])
        opening = opening_of(here, "t")
        waiting = asyncio.create_task(opening.wait(60))
        held.set()
        await waiting
        assert here.partitions.get("t", 0).topic_id == record.id

        here.controller.refusals = 1
        await here.create("fails", [NODE_ID])
        await opening_of(here, "fails").wait(60)
        with pytest.raises(LeaderNotAvailable) as refused:
            here.partitions.get("fails", 0)
        assert refused.value.opening is None, "nobody waits for one that has failed to open"

        here.controller.hold = held = asyncio.Event()
        gone = await here.create("gone", [NODE_ID])
        opening = opening_of(here, "gone")
        waiting = asyncio.create_task(opening.wait(60))
        await here.controller.delete_topic(gone.id)
        await waiting
        held.set()


async def test_who_was_told_of_the_next_leader_waits_there_until_it_leads_or_the_move_is_given_up() -> None:
    async with world() as here:
        controller = here.controller
        topic = await here.create("t", [OTHER])
        partition = next(controller.image.all_partitions())
        streams = tuple(partition.first_stream + each for each in range(4))
        term = controller.image.replica_sets[OTHER].master_epoch
        opened = await controller.open_streams(OTHER, term, [(each, 0) for each in streams])
        with pytest.raises(NotLeader):
            here.partitions.get("t", 0)

        controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 0, NODE_ID),)))
        opening = opening_of(here, "t")
        assert opening_of(here, "t") is opening
        controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 0, -1),)))
        await opening.wait(60)
        assert opening.ended
        with pytest.raises(NotLeader):
            here.partitions.get("t", 0)

        controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 0, NODE_ID),)))
        opening = opening_of(here, "t")
        await controller.close_streams(OTHER, term, [(one.stream_id, one.epoch) for one in opened])
        controller.apply(c.ElectPartitions(((topic.id, 0),)))
        await opening.wait(60)
        assert here.partitions.get("t", 0).topic_id == topic.id


async def test_who_asks_the_new_leader_waits_however_long_it_took_until_it_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openings, "OPENING_WAIT_S", 0.5)
    async with world() as here:
        controller = here.controller
        topic = await here.create("t", [OTHER])
        controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 0, NODE_ID),)))
        await opening_of(here, "t").wait(60)
        with pytest.raises(NotLeader):
            here.partitions.get("t", 0)
        controller.hold = held = asyncio.Event()
        controller.apply(c.ElectPartitions(((topic.id, 0),)))
        opening = opening_of(here, "t")
        assert opening_of(here, "t") is opening and opening.remaining_s > 0
        held.set()
        await opening.wait(60)
        assert here.partitions.get("t", 0).topic_id == topic.id


@pytest.mark.parametrize("is_in_sync", [True, False])
async def test_who_asks_a_member_during_an_election_waits_for_its_outcome(is_in_sync: bool) -> None:
    async with world() as here:
        await here.create("t", [OTHER])
        rows = here.controller.image.replication
        in_sync = (InSyncRecord(NODE_ID, "wal"),) if is_in_sync else ()
        rows[OTHER] = ReplicationRecord(OTHER, in_sync=in_sync, election=ElectionRecord("its master is silent", 0))
        if not is_in_sync:
            with pytest.raises(NotLeader):
                here.partitions.get("t", 0)
            return
        opening = opening_of(here, "t")
        rows[OTHER] = ReplicationRecord(OTHER, in_sync=in_sync)
        await here.create("another", [OTHER])  # the metadata have changed
        await opening.wait(60)
        with pytest.raises(NotLeader):
            here.partitions.get("t", 0)


async def test_a_wal_without_its_quorum_holds_up_no_retention_but_that_of_its_own_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[str] = []
    quorum = asyncio.Event()

    async def apply(log: PartitionLog) -> int:
        if log.topic == "waits":
            await quorum.wait()
        applied.append(log.topic)
        return 0

    monkeypatch.setattr(PartitionLog, "apply_retention", apply)
    async with world(defaults=LogSettings(retention_check_interval_ms=20)) as here:
        for topic in ("waits", "behind", "other"):
            await here.create(topic, [NODE_ID])
        await until(lambda: here.partitions.counts()["open"] == 3, "all are open")
        here.partitions.get("other", 0).wal = object()  # of another replica set
        applied.clear()
        await until(lambda: applied.count("other") > 2, "rounds of the other set")
        quorum.set()
        await until(lambda: {"waits", "behind"} <= set(applied), "the rest follows")


def opening_of(here: World, topic: str) -> Opening:
    with pytest.raises(LeaderNotAvailable) as refused:
        here.partitions.get(topic, 0)
    assert refused.value.opening is not None
    return refused.value.opening


async def test_each_partition_is_stored_in_the_storage_of_its_replica_set() -> None:
    """A broker that is elected in another replica set serves that one, too, until its storage is removed."""

    async with world() as here:
        topic = await here.create("t", [NODE_ID, OTHER])
        await until(lambda: len(here.open()) == 1, "that of its own set is open")
        tables = here.controller.state.tables
        row = tables.replica_sets.get(OTHER)
        assert row is not None
        tables.replica_sets.put(OTHER, msgspec.structs.replace(row, members=(NODE_ID,), sync_state_set=(NODE_ID,)))
        elected = here.controller.apply(c.Elect(OTHER, NODE_ID))
        assert elected is not None
        other = here.make_storage(OTHER)
        await other.recover()
        await other.start(here.controller.image.replica_sets[OTHER].master_epoch)
        try:
            with pytest.raises(LeaderNotAvailable):
                here.partitions.get("t", 1)
            here.storages.add(other)
            await until(lambda: len(here.open()) == 2, "both are open")
            ends = here.storage.data_end, other.data_end
            appended = here.partitions.get("t", 1).append_internal(batch(b"x"))
            assert here.storage.data_end == ends[0]
            assert other.data_end == appended.wal_end > ends[1]

            here.controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 1, NODE_ID),)))
            await until(lambda: placed_on(here, topic, 1) == NODE_ID, "it has moved to the other set")
            await until(here.is_settled, "and is open again")
            here.partitions.get("t", 1).append_internal(batch(b"y"))
            assert here.storage.data_end > ends[0]

            await here.create("u", [OTHER])
            await until(lambda: len(here.open()) == 3, "a new one of that set is open")
            here.storages.remove(OTHER)
            await until(lambda: len(here.open()) == 2, "it is closed")
        finally:
            await other.close(upload=False)


async def uploaded(partitions: int, value_bytes: int = 1) -> World:
    """A closed broker with so many partitions, whose records are in the bucket alone; half were not closed."""
    async with world() as here:
        await here.create("many", [NODE_ID] * partitions)
        await until(here.is_settled, "all are open")
        value = random.Random(1).randbytes(value_bytes)
        await append_everywhere(here, value)
        for one in list(here.partitions.all())[::2]:
            await one.write_checkpoint()
        await append_everywhere(here, value)
    return here


async def test_partitions_that_open_together_read_the_bucket_by_a_few_requests() -> None:
    before = await uploaded(200)
    before.store.gets = 0
    async with world(2, before) as here:
        await until(here.is_settled, "all are open again")
        assert [one.log_end_offset for one in here.partitions.all()] == [2] * 200
        assert here.store.gets < 20


async def test_what_lies_between_their_meta_streams_costs_no_requests() -> None:
    before = await uploaded(200, 12_000)
    before.store.gets = 0
    async with world(2, before) as here:
        await until(here.is_settled, "all are open again")
        assert [one.log_end_offset for one in here.partitions.all()] == [2] * 200
        assert here.store.gets < 40


async def test_what_is_behind_a_checkpoint_is_not_read() -> None:
    async with world() as before:
        await before.create("many", [NODE_ID] * 20)
        await until(before.is_settled, "all are open")
        for _ in range(4):
            await append_everywhere(before, random.Random(1).randbytes(30_000))
        for one in before.partitions.all():
            await one.write_checkpoint()
        await append_everywhere(before)
    before.store.read = 0
    async with world(2, before) as here:
        await until(here.is_settled, "all are open again")
        assert [one.log_end_offset for one in here.partitions.all()] == [5] * 20
        assert here.store.read < 20 * 30_000, "of 20 * 4 * 30,000"


async def test_a_slow_bucket_holds_up_no_partition_that_needs_nothing_of_it() -> None:
    before = await uploaded(3)
    gate = before.store.gate = asyncio.Event()
    async with world(2, before) as here:
        new = await here.create("new", [NODE_ID])
        await until(lambda: ("new", 0) in here.open(), "it is empty")
        assert len(here.open()) == 1
        here.partitions.get(new.name, 0).append_internal(batch(b"x"))
        gate.set()
        await until(here.is_settled, "the others are open, too")


async def test_what_was_opened_for_a_term_that_has_ended_is_not_served_in_a_later_one() -> None:
    """The controller's answer to an opening comes when this broker leads the set again, after another master."""
    async with world() as here:
        opened: list[int] = []
        here.partitions.on_opened(lambda one: opened.append(one.leader_epoch))
        answer = here.controller.hold = asyncio.Event()
        await here.create("t", [NODE_ID])
        await until(lambda: here.controller.hold is None, "its streams are opened, and the answer is on its way")
        here.storages.remove(NODE_ID)
        for _ in range(2):  # another master's term, and then this broker's next one
            here.controller.apply(c.Elect(NODE_ID, NODE_ID))
        later = here.make_storage(NODE_ID)
        await later.recover()
        await later.start(here.controller.image.replica_sets[NODE_ID].master_epoch)
        try:
            here.storages.add(later)
            answer.set()
            await until(here.is_settled, "it is open in the present term")
            assert opened == [here.partitions.get("t", 0).leader_epoch]
        finally:
            await later.close(upload=False)


async def test_a_failed_assertion_in_one_opening_holds_up_no_other_and_is_repeated_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = 0
    honest = PartitionLog.open

    async def opened(*, led: LedPartition, **inputs: Any) -> PartitionLog:
        nonlocal attempts
        if led.partition == 0:
            attempts += 1
            raise AssertionError("a rule would be broken")
        for _ in range(5):  # it reads
            await asyncio.sleep(0)
        return await honest(led=led, **inputs)

    async with world() as here:
        with monkeypatch.context() as patch:
            patch.setattr(PartitionLog, "open", opened)
            await here.create("t", [NODE_ID] * 4)
            await until(lambda: len(here.open()) == 3, "the others are open")
            assert here.partitions.counts()["failing"] == 1
            assert here.partitions.problems() == ["t-0 does not open: a check failed: a rule would be broken"]
            before = attempts
            for _ in range(200):
                await asyncio.sleep(0)
            assert attempts <= before + 1, "after a pause"
        await until(here.is_settled, "it opens when it can")


async def test_a_failed_assertion_in_a_move_ends_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as here:
        topic = await here.create("t", [NODE_ID])
        await until(here.is_settled, "it is open")

        async def close(_log: PartitionLog) -> ClosedLog:
            raise AssertionError("a rule would be broken")

        monkeypatch.setattr(PartitionLog, "close_for_move", close)
        told = here.partitions.get("t", 0).leader_epoch + 1
        here.controller.apply(c.MovePartitions((c.PartitionMove(topic.id, 0, OTHER),)))
        await until(lambda: ("t", 0) not in here.open(), "it was withdrawn")
        await until(lambda: ("t", 0) in here.open(), "it is served here again")
        assert here.partitions.get("t", 0).leader_epoch >= told, "clients know of another leader in it"
        await here.create("u", [NODE_ID])
        await until(lambda: ("u", 0) in here.open(), "others open")


async def test_an_unexpected_error_of_one_close_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    here = World(1)
    await here.start()
    await here.create("t", [NODE_ID] * 3)
    await until(here.is_settled, "all are open")
    logs = list(here.partitions.all())
    honest = PartitionLog.close

    async def close(log: PartitionLog) -> None:
        await honest(log)
        if log.partition == 0:
            raise OSError("unheard of")

    monkeypatch.setattr(PartitionLog, "close", close)
    await here.close()
    assert all(log.closed for log in logs)
