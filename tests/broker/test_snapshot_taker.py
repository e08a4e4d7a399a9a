"""`SnapshotTaker`: cuts of own partitions and of other brokers', what is tried again, what is refused at once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.broker.test_handlers_fetch import append
from tests.support.kafka_world import NODE_ID, KafkaWorld
from tidelog.broker.partitions.snapshot_taker import CUT, SnapshotTaker
from tidelog.controller.client.snapshots import SnapshotClient
from tidelog.controller.model import commands as c
from tidelog.controller.model.levels import SNAPSHOTS_LEVEL, UnsupportedLevel
from tidelog.controller.model.records import PartitionKey
from tidelog.controller.model.snapshots import Ends, SnapshotExists
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, Unavailable

OTHER = 2
BUDGET_S = 20.0


class Peers:
    """Another broker, which answers what the test says."""

    def __init__(self, answer: Callable[[list[PartitionKey]], Any]) -> None:
        self.answer = answer
        self.asked: list[list[PartitionKey]] = []
        self.methods: dict[str, Any] = {}

    async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        assert (broker_id, method) == (OTHER, CUT) and timeout_s > 0
        self.asked.append(params)
        found = self.answer(params)
        if isinstance(found, Exception):
            raise found
        return msgspec.Raw(msgspec.msgpack.encode(found))

    def serve(self, method: str, called: Any) -> None:
        self.methods[method] = called


class TakerWorld(KafkaWorld):
    """Broker 1 with topic `t`, whose second partition broker 2 leads; nothing is in that one."""

    peers: Peers
    taker: SnapshotTaker


def nothing(keys: list[PartitionKey]) -> list[Ends]:
    return [(0, 0, 0, 0) for _ in keys]


@asynccontextmanager
async def taker_world(level: int = SNAPSHOTS_LEVEL) -> AsyncIterator[TakerWorld]:
    async with TakerWorld(brokers=(NODE_ID, OTHER), level=level) as world:
        controller: Any = world.controller
        record = await controller.create_topic("t", 2, {}, assignment=[NODE_ID, OTHER])
        await world.open(record, 0)

        async def send(command: Any, kind: Any = None, **_: Any) -> Any:
            return controller.apply(command)

        controller.snapshots = SnapshotClient(send, random.Random(1))
        manager: Any = SimpleNamespace(
            get_by_id=world.partitions.get_by_id, storages=SimpleNamespace(get=lambda replica_set: world.storage)
        )
        world.peers = Peers(nothing)
        calls: Any = world.peers
        world.taker = SnapshotTaker(
            NODE_ID, controller=controller, manager=manager, calls=calls, clock=SystemClock(), rng=random.Random(2)
        )
        world.taker.serve(calls)
        yield world


async def test_a_snapshot_has_what_was_only_in_the_wal_and_asks_other_leaders() -> None:
    async with taker_world() as world:
        append(world, "t", b"one", b"two")
        record = await world.taker.take("s")
        (topic,) = record.topics
        assert [each.ends[1] for each in topic.partitions] == [2, 0]
        stream = world.controller.image.streams[topic.partitions[0].first_stream + 1]
        assert stream.end_offset == 2, "it was uploaded"
        assert world.peers.asked == [[(topic.id, 1)]]


async def test_another_broker_is_answered_as_this_one_asks() -> None:
    async with taker_world() as world:
        append(world, "t", b"one")
        topic_id = world.controller.image.topic_ids["t"]
        answer = await world.peers.methods[CUT](msgspec.Raw(msgspec.msgpack.encode([(topic_id, 0)])))
        ((_, data, _, _),) = msgspec.msgpack.decode(answer, type=list[Ends])
        assert data == 1
        for wrong in (b"\xc0", msgspec.msgpack.encode([(topic_id, 0)] * 5_000)):
            with pytest.raises(InvalidInput):
                await world.peers.methods[CUT](msgspec.Raw(wrong))


@pytest.mark.parametrize("error", [Unavailable("away"), None])
async def test_what_may_pass_is_tried_again(error: Exception | None) -> None:
    """None: the other one names an end that is not committed yet."""
    async with taker_world() as world:
        refused = [error or [(0, 5, 0, 0)]] * 3
        world.peers.answer = lambda keys: refused.pop() if refused else nothing(keys)
        record = await world.taker.take("s", ["t", "t"], budget_s=BUDGET_S)
        assert record.partition_count == 2 and len(world.peers.asked) == 4


async def test_what_does_not_pass_is_told_after_the_budget() -> None:
    async with taker_world() as world:
        world.peers.answer = lambda keys: Unavailable("away for long")
        with pytest.raises(Unavailable, match="away for long"):
            await world.taker.take("s", budget_s=0.2)
        assert not world.controller.image.snapshots
        registration = world.controller.image.brokers[OTHER].registration_epoch
        world.controller.apply(c.SetBrokerAlive(OTHER, registration, False))
        with pytest.raises(Unavailable, match="partition 1 of topic 't' has no leader"):
            await world.taker.take("s", budget_s=0.1)


async def test_what_is_wrong_is_refused_at_once() -> None:
    async with taker_world() as world:
        with pytest.raises(NotFound, match="topic 'ghost' does not exist"):
            await world.taker.take("s", ["ghost"])
        with pytest.raises(InvalidInput, match="named by"):
            await world.taker.take("a b")
        world.peers.answer = lambda keys: [(0, 0, 0)]
        with pytest.raises(CorruptData, match="no result of snapshot_cut"):
            await world.taker.take("s")
        world.peers.answer = lambda keys: []
        with pytest.raises(CorruptData, match="has cut 0 of 1"):
            await world.taker.take("s")
        world.peers.answer = nothing
        await world.taker.take("s")
        with pytest.raises(SnapshotExists):
            await world.taker.take("s")


async def test_there_are_none_below_level_5() -> None:
    async with taker_world(SNAPSHOTS_LEVEL - 1) as world:
        with pytest.raises(UnsupportedLevel, match="CreateSnapshot needs feature level 5"):
            await world.taker.take("s")
        assert not world.peers.asked
