"""A removed broker whose process is alive, cut off from the controllers or paused, acknowledges nothing (rule 14)."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from tests.controller.controller_helpers import Driver, until
from tidelog.broker.admin.brokers import BrokerRoutes
from tidelog.broker.admin.losses import LossRoutes
from tidelog.broker.kafka.services import nothing_to_prepare
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import InvalidReplicationFactor, NotEligible, OutcomeUnknown
from tidelog.controller.model.records import DrainMode
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, Fenced, NotFound
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.base import WalFailed
from tidelog.storage.wal.s3.format import FENCE_BYTES
from tidelog.storage.wal.s3.removed import RemovedWal
from tidelog.storage.wal.s3.wal import S3Wal

GONE = 0
TOPIC = bytes(range(16))


class World:
    """A controller's state, a bucket, and the routes of a broker that lives."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.store = MemoryObjectStore()
        self.refuse: Exception | None = None
        for broker in (GONE, 1):
            self.register(broker)

    @property
    def image(self) -> Any:
        return self.driver.image

    def register(self, broker: int, incarnation: str = "a") -> int:
        names = (f"code{broker}", incarnation, "host")
        self.driver.run(c.RegisterBroker(broker, *names, 9092, "", "", "s3", f"host:{7000 + broker}"), int)
        return int(self.driver.run(c.Elect(broker, broker))[4])

    def epoch(self) -> int:
        return int(self.driver.image.replica_sets[GONE].master_epoch)

    def die(self) -> None:
        registration = self.driver.image.brokers[GONE].registration_epoch
        self.driver.run(c.SetBrokerAlive(GONE, registration, False))

    async def remove_broker(self, broker_id: int) -> None:
        self.driver.run(c.RemoveBroker(broker_id))
        if self.refuse is not None:
            raise self.refuse

    async def abandon(self, replica_set: int, epoch: int, keys: Any, *, force: bool) -> tuple[int, int]:
        left, following = self.driver.run(c.Abandon(replica_set, epoch, tuple(keys), force))
        if self.refuse is not None:
            raise self.refuse
        return left, following

    def removed(self, broker_id: int) -> RemovedWal:
        return RemovedWal(self.store, "cluster", broker_id, SystemClock(), random.Random(9))

    def wal(self, seed: int) -> S3Wal:
        settings = WalSettings(max_bytes=1 << 20, max_record_bytes=4096, s3_batch_bytes=200, s3_in_flight=4)
        clock = SystemClock()
        return S3Wal(
            self.store, settings, cluster_id="cluster", replica_set_id=GONE, clock=clock, rng=random.Random(seed)
        )

    async def opened(self, seed: int, epoch: int) -> S3Wal:
        wal = self.wal(seed)
        await wal.recover(lambda _record: None)
        await wal.begin_epoch(epoch)
        return wal

    async def ask(self, path: str) -> dict[str, Any]:
        controller = cast("Any", self)
        routes = [
            *BrokerRoutes(controller, self.removed, nothing_to_prepare).routes(),
            *LossRoutes(controller, self.store, cast("Any", None), self.removed).routes(),
        ]
        (handler,) = (cast("Any", each).handler for each in routes if each.path == path.partition("?")[0])
        response = await handler(make_mocked_request("POST", path))
        return cast("dict[str, Any]", msgspec.json.decode(response.body))

    async def remove(self) -> int:
        return int((await self.ask(f"/brokers/remove?id={GONE}"))["wal_objects_deleted"])

    def data(self) -> list[str]:
        keys = self.store.keys()
        return [key for key in keys if len(self.store.body(key)) != FENCE_BYTES]


async def append(wal: S3Wal) -> None:
    """One record, acknowledged. Raises `WalFailed`."""
    failures: list[Exception] = []
    wal.set_on_failed(failures.append)
    end = wal.append(StreamAppend(7, 3, 100, 1, (b"record",)))
    await until(lambda: wal.durable_offset >= end or bool(failures), 5.0)
    if wal.durable_offset < end:
        raise failures[0]


async def acknowledges_nothing(wal: S3Wal) -> None:
    before = wal.durable_offset
    with pytest.raises(WalFailed):
        await append(wal)
    assert wal.durable_offset == before
    await asyncio.gather(wal.close(), return_exceptions=True)


async def rejoins(world: World, seed: int) -> S3Wal:
    """A new process with the removed id starts a WAL where the committed WAL offset is."""
    epoch = world.register(GONE, f"process {seed}")
    wal = world.wal(seed)
    await wal.recover(lambda record: pytest.fail(f"recovered {record}"))
    assert wal.start_offset == wal.end_offset == world.image.replica_sets[GONE].committed_wal_offset
    await wal.begin_epoch(epoch)
    await append(wal)
    return wal


async def test_a_broker_that_was_taken_over_and_removed_acknowledges_nothing() -> None:
    world = World()
    old = await world.opened(1, world.epoch())
    await append(old)
    world.die()
    epoch = int(world.driver.run(c.ElectSuccessor(GONE, 1, world.epoch()))[4])
    successor = await world.opened(2, epoch)
    await successor.close()
    world.driver.run(c.PlaceTakenOver(GONE, epoch, 0, ()))
    assert await world.remove() > 0
    assert not world.data()
    await acknowledges_nothing(old)


async def test_a_drained_broker_that_was_removed_acknowledges_nothing() -> None:
    world = World()
    old = await world.opened(1, world.epoch())
    await append(old)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR, -1))
    assert await world.remove() > 0
    await acknowledges_nothing(old)


async def test_an_abandoned_broker_acknowledges_nothing_even_before_it_is_removed() -> None:
    world = World()
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    old = await world.opened(1, world.epoch())
    await append(old)
    world.die()
    await world.ask(f"/losses/accept?id={GONE}&force=true")
    await acknowledges_nothing(old)
    await world.remove()
    await (await rejoins(world, 3)).close()


async def test_a_broker_acknowledges_nothing_although_nobody_heard_that_it_was_abandoned() -> None:
    """Its partitions go on elsewhere from the moment of the command, whatever becomes of the answer."""
    world = World()
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    old = await world.opened(1, world.epoch())
    await append(old)
    world.die()
    world.refuse = OutcomeUnknown("the controller did not answer within 30 s")
    with pytest.raises(OutcomeUnknown):
        await world.ask(f"/losses/accept?id={GONE}&force=true")
    assert not world.image.owned(GONE)
    await acknowledges_nothing(old)
    world.refuse = None
    await world.remove()
    await (await rejoins(world, 3)).close()


async def test_a_broker_whose_wal_is_not_given_up_is_not_fenced() -> None:
    world = World()
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    old = await world.opened(1, world.epoch())
    world.die()
    with pytest.raises(NotEligible, match="other brokers recover all of it"):
        await world.ask(f"/losses/accept?id={GONE}")
    await append(old)
    await old.close()


async def test_a_broker_that_was_fenced_and_not_abandoned_comes_back_under_the_epoch_after_the_next() -> None:
    world = World()
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    await (await world.opened(1, world.epoch())).close()
    world.die()
    world.driver.run(c.SetBrokerAlive(1, world.image.brokers[1].registration_epoch, False))
    with pytest.raises(InvalidReplicationFactor):  # no broker is there to take them
        await world.ask(f"/losses/accept?id={GONE}&force=true")
    epoch = world.register(GONE, "again")
    with pytest.raises(Fenced):
        await world.opened(2, epoch)
    back = await world.opened(3, int(world.driver.run(c.Elect(GONE, GONE))[4]))
    await append(back)
    await back.close()


async def test_an_abandoned_broker_that_writes_all_the_time_is_shut_out() -> None:
    world = World()
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    old = await world.opened(1, world.epoch())
    world.die()

    async def write() -> None:
        while True:
            await append(old)

    writing = asyncio.ensure_future(write())
    await until(lambda: len(world.data()) > 20)
    await world.ask(f"/losses/accept?id={GONE}&force=true")
    await world.remove()
    with pytest.raises(WalFailed):
        await asyncio.wait_for(writing, 5.0)
    await asyncio.gather(old.close(), return_exceptions=True)


async def test_a_removed_id_rejoins_above_the_fence_again_and_again() -> None:
    world = World()
    old = [await world.opened(1, world.epoch())]
    await append(old[0])
    for seed in range(2, 5):
        world.die()
        await world.remove()
        old.append(await rejoins(world, seed))
    for each in old[:-1]:
        await acknowledges_nothing(each)
    await append(old[-1])
    await old[-1].close()


async def test_a_removal_is_repeated_after_a_crash_and_spares_a_broker_that_has_rejoined() -> None:
    world = World()
    old = await world.opened(1, world.epoch())
    await append(old)
    world.die()
    world.refuse = RuntimeError("the process ends here")
    with pytest.raises(RuntimeError):
        await world.remove()
    world.refuse = None
    new = world.wal(2)
    epoch = world.register(GONE, "b")
    await new.recover(lambda _record: None)
    await new.begin_epoch(epoch)
    await append(new)
    world.driver.image.brokers, brokers = {}, world.driver.image.brokers  # the broker that removes does not know yet
    with pytest.raises(NotFound):
        await world.remove()
    world.driver.image.brokers = brokers
    await append(new)
    await new.close()
    again = world.wal(3)
    records: list[Any] = []
    await again.recover(records.append)
    assert again.end_offset == new.end_offset
    await again.close()
    await acknowledges_nothing(old)


async def test_a_removed_broker_without_a_wal_in_the_bucket_leaves_nothing_there() -> None:
    world = World()
    world.die()
    assert await world.remove() == 0
    assert not world.store.keys()
    with pytest.raises(NotFound):
        await world.remove()


async def test_a_damaged_wal_is_kept_and_said_to_be_kept() -> None:
    world = World()
    old = await world.opened(1, world.epoch())
    await append(old)
    await append(old)
    world.die()
    keys = sorted(world.data())
    body = world.store.body(keys[1])
    await world.store.put(keys[1], [body[:-1], bytes([body[-1] ^ 1])])
    with pytest.raises(CorruptData, match="has been removed"):
        await world.remove()
    assert sorted(world.data()) == keys
    assert GONE not in world.image.brokers
    await old.close()
