"""Metadata over a real socket, against the controller's real state machine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import schema
from tests.support.admin_world import CLUSTER_ID
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.kafka_world import KafkaWorld, until
from tidelog.broker.kafka import election_waits
from tidelog.broker.kafka.handlers import metadata
from tidelog.broker.kafka.wire.metadata import encode_topic
from tidelog.broker.settings import KafkaSettings
from tidelog.controller.model.replica_set_commands import BeginElection
from tidelog.runtime.errors import Unavailable

METADATA = 3
VERSIONS = range(14)


@pytest.fixture
def opens_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits little for the partitions that it created: nothing opens them."""
    monkeypatch.setattr(metadata, "OPENING_WAIT_S", 0.05)


async def ask(
    client: KafkaClient, version: int, topics: list[Any] | None, *, create: bool = False, **fields: Any
) -> Any:
    """`topics`: names, or UUIDs from v10 on."""
    make = schema.request(METADATA, version).make
    asked = topics
    if topics is not None:
        asked = [
            make("MetadataRequestTopic", name=None, topic_id=topic)
            if isinstance(topic, uuid.UUID)
            else make("MetadataRequestTopic", name=topic, **({"topic_id": None} if version >= 10 else {}))
            for topic in topics
        ]
    fields = {"include_topic_authorized_operations": False, "include_cluster_authorized_operations": False, **fields}
    client.post(request_entity(METADATA, version, topics=asked, allow_auto_topic_creation=create, **fields))
    return await client.receive()


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_version_lists_all_topics_and_brokers(version: int) -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        topic = await world.topic("t", 2)
        await world.controller.create_topic("u", 1, {}, assignment=[2])
        world.controller.open_partitions("u")
        response = await ask(client, version, [] if version == 0 else None)
        assert [(b.node_id, b.host, b.port) for b in response.brokers] == [
            (1, "127.0.0.1", 9092),
            (2, "127.0.0.1", 9093),
        ]
        assert [found.name for found in response.topics] == ["t", "u"]
        assert [[p.leader_id for p in found.partitions] for found in response.topics] == [[1, 1], [2]]
        first = response.topics[0].partitions[0]
        assert (first.error_code, first.partition_index) == (0, 0)
        assert (first.replica_nodes, first.isr_nodes) == ((1,), (1,))
        if version >= 1:
            assert response.controller_id == 1 and response.topics[0].is_internal is False
        if version >= 2:
            assert response.cluster_id == CLUSTER_ID
        if version >= 5:
            assert first.offline_replicas == ()
        if version >= 7:
            assert first.leader_epoch == world.log("t").leader_epoch
        if version >= 8:
            assert response.topics[0].topic_authorized_operations == -(1 << 31)
        if version >= 10:
            assert response.topics[0].topic_id == uuid.UUID(bytes=topic.id)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_replicated_set_shows_its_members_who_is_in_sync_and_its_elections(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election_waits, "WAIT_S", 0.05)
    async with KafkaWorld(brokers=(1, 2, 3)) as world, world.client() as client:
        controller = world.controller
        controller.replicate(2, 1, 2, learner=3)
        controller.replicate(3, 1, 2, 3)
        for name, replica_set in (("t", 3), ("u", 2)):
            await controller.create_topic(name, 1, {}, assignment=[replica_set])
            controller.open_partitions(name)

        async def seen(name: str = "t") -> Any:
            topics = (await ask(client, version, [] if version == 0 else None)).topics
            return next(topic.partitions[0] for topic in topics if topic.name == name)

        assert ((await seen("u")).replica_nodes, (await seen("u")).isr_nodes) == ((2, 1), (2, 1))
        first = await seen()
        assert (first.error_code, first.leader_id) == (0, 3)
        assert (first.replica_nodes, first.isr_nodes) == ((3, 1, 2), (3, 1, 2))
        controller.set_alive(2, False)
        controller.put_in_sync(3, 1, 3)
        shrunk = await seen()
        assert (shrunk.replica_nodes, shrunk.isr_nodes) == ((3, 1, 2), (3, 1))
        controller.apply(BeginElection(3, 1, "test"))
        without = await seen()
        assert (without.error_code, without.leader_id, without.replica_nodes) == (5, -1, (3, 1, 2))
        controller.set_alive(3, False)
        controller.promise(3, 1)
        last = await seen()
        assert (last.error_code, last.leader_id, last.isr_nodes) == (0, 1, (3, 1))
        if version >= 5:
            assert [one.offline_replicas for one in (first, shrunk, last)] == [(), (2,), (3, 2)]
        if version >= 7:
            assert [one.leader_epoch for one in (first, shrunk, without, last)] == [1, 1, 2, 2]


@pytest.mark.parametrize("version", range(1, 14))
async def test_an_empty_list_asks_for_no_topic(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        response = await ask(client, version, [])
        assert response.topics == () and len(response.brokers) == 1


@pytest.mark.usefixtures("opens_late")
async def test_a_topic_is_created_only_if_the_request_and_the_broker_allow_it() -> None:
    async with KafkaWorld() as world, world.client() as client:
        (refused,) = (await ask(client, 12, ["new"])).topics
        assert (refused.error_code, refused.name, refused.partitions) == (3, "new", ())
        (created,) = (await ask(client, 12, ["new"], create=True)).topics
        assert created.error_code == 0 and len(created.partitions) == 4
        (old,) = (await ask(client, 3, ["older"])).topics  # before v4 there is no flag
        assert old.error_code == 0 and len(old.partitions) == 4
    settings = KafkaSettings(port=0, auto_create_topics=False)
    async with KafkaWorld(kafka=settings) as world, world.client() as client:
        (refused,) = (await ask(client, 12, ["new"], create=True)).topics
        assert refused.error_code == 3 and "new" not in world.controller.image.topic_ids


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "x" * 250, "ü"])
async def test_an_illegal_name_is_told_and_not_created(name: str) -> None:
    async with KafkaWorld() as world, world.client() as client:
        (found,) = (await ask(client, 12, [name], create=True)).topics
        assert found.error_code == 17 and not world.controller.image.topics


@pytest.mark.usefixtures("opens_late")
@pytest.mark.parametrize(("name", "partitions"), [("__consumer_offsets", 2), ("__transaction_state", 50)])
async def test_the_topics_of_coordinators_are_internal_compacted_and_have_their_own_sizes(
    name: str, partitions: int
) -> None:
    async with KafkaWorld() as world, world.client() as client:
        (found,) = (await ask(client, 12, [name], create=True)).topics
        assert found.is_internal and len(found.partitions) == partitions
        record = world.controller.image.topic(name)
        assert record is not None and record.configs["cleanup.policy"] == "compact"


@pytest.mark.parametrize("version", range(10, 14))
async def test_topics_are_found_by_id(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        unknown = uuid.UUID(int=99)
        found, missing = (await ask(client, version, [uuid.UUID(bytes=topic.id), unknown])).topics
        assert (found.error_code, found.name) == (0, "t")
        assert (missing.error_code, missing.topic_id) == (100, unknown)
        assert missing.name == (None if version >= 12 else "")


async def test_authorized_operations_are_told_when_asked_for() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        response = await ask(
            client, 8, None, include_topic_authorized_operations=True, include_cluster_authorized_operations=True
        )
        assert response.topics[0].topic_authorized_operations == 3576
        assert response.cluster_authorized_operations == 8096


async def test_a_dead_broker_is_not_listed_and_its_partitions_have_no_leader() -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        await world.controller.create_topic("u", 1, {}, assignment=[2])
        world.controller.set_alive(2, False)
        response = await ask(client, 12, ["u"])
        assert [broker.node_id for broker in response.brokers] == [1]
        (partition,) = response.topics[0].partitions
        assert (partition.error_code, partition.leader_id, partition.offline_replicas) == (5, -1, (2,))


async def test_the_controller_is_the_broker_that_answers() -> None:
    async with KafkaWorld(brokers=(0, 1, 2)) as world, world.client() as client:
        assert (await ask(client, 12, [])).controller_id == 1, "not 0, which may have died a moment ago"
        world.controller.set_alive(1, False)  # its session has ended, and it has not registered again
        assert (await ask(client, 12, [])).controller_id == 0
        world.controller.set_alive(1, True)
        assert (await ask(client, 12, [])).controller_id == 1
        world.controller.set_alive(1, False)
        world.controller.set_alive(0, False)
        assert (await ask(client, 12, [])).controller_id == 2


async def test_an_answer_follows_the_image_although_it_is_cached() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        for _ in range(2):
            assert [topic.name for topic in (await ask(client, 12, None)).topics] == ["t"]
        await world.topic("u")
        assert [topic.name for topic in (await ask(client, 12, None)).topics] == ["t", "u"]
        await world.controller.delete_topic(world.controller.image.topic_ids["t"])
        assert [topic.name for topic in (await ask(client, 12, None)).topics] == ["u"]


class Encoded:
    """In which turns of the event loop topics were encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = []
        self.at_fifth: Callable[[], None] = lambda: None
        self._turn = 0

        def encode(*args: Any, **fields: Any) -> bytes:
            self.turns.append(self._turn)
            if len(self.turns) == 5:
                asyncio.get_running_loop().call_soon(self.at_fifth)
            return encode_topic(*args, **fields)

        monkeypatch.setattr(metadata, "encode_topic", encode)
        monkeypatch.setattr(metadata, "STEP_PARTITIONS", 1, raising=False)

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._turn += 1


async def test_others_run_while_the_answer_of_all_topics_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each change of a leader, one of 100,000 partitions held all clients of a broker up for 0.3 s."""
    encoded = Encoded(monkeypatch)
    async with KafkaWorld() as world, world.client() as client:
        names = [f"t{number:02}" for number in range(20)]
        for name in names:
            await world.topic(name)
        counting = asyncio.create_task(encoded.count())
        assert [topic.name for topic in (await ask(client, 12, None)).topics] == names
        assert len(set(encoded.turns)) == len(encoded.turns) == 20, "each was encoded once, in a turn of its own"
        assert [topic.name for topic in (await ask(client, 12, names[3:5])).topics] == names[3:5]
        assert len(encoded.turns) == 20, "they were at hand"
        counting.cancel()


async def test_an_answer_is_of_one_moment_although_it_is_encoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = Encoded(monkeypatch)
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        for number in range(20):
            await world.controller.create_topic(f"t{number:02}", 1, {}, assignment=[2])
            world.controller.open_partitions(f"t{number:02}")
        encoded.at_fifth = lambda: world.controller.set_alive(2, False)
        response = await ask(client, 12, None)
        assert [broker.node_id for broker in response.brokers] == [1]
        assert {topic.partitions[0].leader_id for topic in response.topics} == {-1} and len(response.topics) == 20


async def test_without_a_controller_what_is_known_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")

        async def away(*args: Any, **fields: Any) -> Any:
            raise Unavailable("the controller does not answer")

        monkeypatch.setattr(world.controller, "create_topic", away)
        known, new = (await ask(client, 12, ["t", "new"], create=True)).topics
        assert (known.error_code, new.error_code) == (0, 5)
        monkeypatch.setattr(metadata, "CREATE_TIMEOUT_S", 0.05)
        monkeypatch.setattr(world.controller, "create_topic", lambda *args, **fields: asyncio.sleep(3600))
        known, new = (await ask(client, 12, ["t", "new"], create=True)).topics
        assert (known.error_code, new.error_code) == (0, 5)


async def test_a_topic_has_no_leader_before_it_was_opened_whoever_asks() -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        await world.controller.create_topic("u", 2, {}, assignment=[2, 1])
        (topic,) = (await ask(client, 12, None)).topics
        assert [(part.error_code, part.leader_id) for part in topic.partitions] == [(5, -1), (5, -1)]
        world.controller.open_partitions("u")
        (topic,) = (await ask(client, 12, None)).topics
        assert [(part.error_code, part.leader_id) for part in topic.partitions] == [(0, 2), (0, 1)]


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_request_that_names_a_topic_waits_until_it_was_opened(by_id: bool) -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client, world.client() as other:
        record = await world.controller.create_topic("u", 2, {}, assignment=[2, 1])
        named = uuid.UUID(bytes=record.id) if by_id else "u"
        asked = [asyncio.create_task(ask(one, 12, [named])) for one in (client, other)]
        await until(lambda: len(world.controller.subscribers) == 2, "both wait")
        world.controller.open_partitions("u")
        for response in await asyncio.gather(*asked):
            assert [part.leader_id for part in response.topics[0].partitions] == [2, 1]
        assert not world.controller.subscribers


async def test_the_wait_for_a_topic_is_bounded_and_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "OPENING_WAIT_S", 0.2)
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("u", open_logs=False)
        before = world.services.clock.monotonic()
        (topic,) = (await ask(client, 12, ["u"])).topics
        waited_s = world.services.clock.monotonic() - before
        assert (topic.partitions[0].error_code, topic.partitions[0].leader_id) == (5, -1)
        assert waited_s >= 0.2
        monkeypatch.setattr(world.controller, "subscribe", None)  # nobody waits for it any more
        (topic,) = (await ask(client, 12, ["u"])).topics
        assert topic.partitions[0].error_code == 5


async def test_nobody_waits_for_a_topic_without_a_live_leader_or_that_is_deleted() -> None:
    async with KafkaWorld(brokers=(1, 2)) as world, world.client() as client:
        world.controller.set_alive(2, False)
        await world.controller.create_topic("dead", 1, {}, assignment=[2])
        (topic,) = (await ask(client, 12, ["dead"])).topics
        assert topic.partitions[0].error_code == 5 and not world.controller.subscribers
        record = await world.controller.create_topic("gone", 1, {}, assignment=[1])
        asked = asyncio.create_task(ask(client, 12, ["gone"]))
        await until(lambda: len(world.controller.subscribers) == 1, "it waits")
        await world.controller.delete_topic(record.id)
        (topic,) = (await asked).topics
        assert topic.error_code == 3
