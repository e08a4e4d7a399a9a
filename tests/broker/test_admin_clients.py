"""The admin APIs through real clients: confluent-kafka (librdkafka) and kafka-python, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import ElectionType, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.support.admin_world import CLUSTER_ID, NODE_ID, AdminWorld
from tests.support.kafka_python import ClosingSelector
from tidelog.broker.kafka.handlers import (
    acls,
    configs,
    delete_records,
    describe_cluster,
    describe_producers,
    describe_topics,
    elections,
    features,
    log_dirs,
    metadata,
    topics,
)
from tidelog.broker.kafka.server import KafkaServer
from tidelog.broker.settings import KafkaSettings
from tidelog.controller.model import commands as c
from tidelog.controller.model.levels import FEATURE, NEWEST, SUPPORTED, level_key, told_range
from tidelog.runtime.network import TcpNetwork

MODULES = (
    acls,
    configs,
    delete_records,
    describe_cluster,
    describe_producers,
    describe_topics,
    elections,
    features,
    log_dirs,
    metadata,
    topics,
)
TIMEOUT_S = 60


def with_broker(
    client: Callable[[str, AdminWorld], None],
    level: int = NEWEST,
    *,
    replicated: bool = False,
    **broker_configs: str,
) -> None:
    """Run `client(bootstrap, world)` in a thread beside a broker that serves the admin APIs.

    `replicated`: brokers 2 and 3 are members of its replica set; 3 is not in sync.
    """

    async def run() -> None:
        world = AdminWorld((), 0, level, **broker_configs)
        world.controller.opens_at_once = True
        apis = [api for module in MODULES for api in module.APIS]
        server = KafkaServer(world.services, apis, TcpNetwork(), KafkaSettings(port=0))
        await server.start()
        host, port = server.address
        world.controller.register(NODE_ID, port=port)
        if replicated:
            for each in (2, 3):
                world.controller.register(each)
            world.controller.replicate(NODE_ID, NODE_ID, 2, 3)
            world.controller.put_in_sync(NODE_ID, NODE_ID, 2)
        try:
            await asyncio.to_thread(client, f"{host}:{port}", world)
        finally:
            await server.close(0.1)

    asyncio.run(run())


def done(futures: dict[Any, Any]) -> list[Any]:
    return [future.result(TIMEOUT_S) for future in futures.values()]


def code_of(futures: dict[Any, Any]) -> int:
    with pytest.raises(KafkaException) as failed:
        done(futures)
    return int(failed.value.args[0].code())


def test_confluent_kafka_manages_topics() -> None:
    def client(bootstrap: str, world: AdminWorld) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        done(admin.create_topics([NewTopic("t", 3, 1, config={"retention.ms": "1000"}), NewTopic("u")]))
        listed = admin.list_topics(timeout=TIMEOUT_S)
        assert str(listed.cluster_id) == CLUSTER_ID  # annotated as None
        assert {name: len(topic.partitions) for name, topic in listed.topics.items()} == {"t": 3, "u": 4}
        assert code_of(admin.create_topics([NewTopic("t", 1, 1)])) == 36
        assert code_of(admin.create_topics([NewTopic("v", 1, 3)])) == 38
        assert code_of(admin.create_topics([NewTopic("v", 1, 1, config={"retention.mss": "1"})])) == 40
        done(admin.create_partitions([NewPartitions("t", 5)]))
        assert code_of(admin.create_partitions([NewPartitions("t", 2)])) == 37
        (described,) = done(admin.describe_topics(TopicCollection(["t"]), request_timeout=TIMEOUT_S))
        assert [one.leader.id for one in described.partitions] == [NODE_ID] * 5
        done(admin.delete_topics(["t", "u"]))
        assert code_of(admin.delete_topics(["t"])) == 3
        assert not world.controller.image.topics

    with_broker(client)


def test_confluent_kafka_sees_the_replicas_of_a_replicated_set_and_that_its_preferred_master_leads() -> None:
    def client(bootstrap: str, world: AdminWorld) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        (created,) = done(admin.create_topics([NewTopic("t", 2, 3)]))
        assert created is None
        assert code_of(admin.create_topics([NewTopic("v", 1, 4)])) == 38
        (described,) = done(admin.describe_topics(TopicCollection(["t"]), request_timeout=TIMEOUT_S))
        for one in described.partitions:
            assert [node.id for node in one.replicas] == [NODE_ID, 2, 3]
            assert [node.id for node in one.isr] == [NODE_ID, 2]
            assert one.leader.id == NODE_ID
        wanted = [TopicPartition("t", index) for index in (0, 1)]
        judged = admin.elect_leaders(ElectionType.PREFERRED, wanted).result(TIMEOUT_S)
        assert {error.code() for error in judged.values() if error is not None} == {84}

    with_broker(client, replicated=True)


def test_confluent_kafka_reads_and_changes_configs() -> None:
    def client(bootstrap: str, world: AdminWorld) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        done(admin.create_topics([NewTopic("t", 1, 1)]))
        change = ConfigResource(
            ResourceType.TOPIC,
            "t",
            incremental_configs=[
                ConfigEntry("retention.ms", "5000", incremental_operation=AlterConfigOpType.SET),
                ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND),
            ],
        )
        done(admin.incremental_alter_configs([change]))
        topic = ConfigResource(ResourceType.TOPIC, "t")
        (found,) = done(admin.describe_configs([topic]))
        assert (found["retention.ms"].value, found["retention.ms"].source) == ("5000", 1)
        assert found["cleanup.policy"].value == "delete,compact"
        assert list(found["retention.ms"].synonyms) == ["retention.ms", "log.retention.ms"]
        (broker,) = done(admin.describe_configs([ConfigResource(ResourceType.BROKER, str(NODE_ID))]))
        assert broker["tidelog.admin.url"].value == "http://127.0.0.1:1"
        assert broker["num.partitions"].value == "4"

    with_broker(client, tidelog__admin__url="http://127.0.0.1:1")


def test_confluent_kafka_describes_the_cluster_deletes_records_and_is_told_of_acls() -> None:
    def client(bootstrap: str, world: AdminWorld) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        done(admin.create_topics([NewTopic("t", 1, 1)]))
        cluster = admin.describe_cluster(include_authorized_operations=True).result(TIMEOUT_S)
        assert (cluster.cluster_id, [node.id for node in cluster.nodes]) == (CLUSTER_ID, [NODE_ID])
        assert cluster.controller.id == NODE_ID
        (deleted,) = done(admin.delete_records([TopicPartition("t", 0, 40)]))
        assert deleted.low_watermark == 40
        assert code_of(admin.delete_records([TopicPartition("t", 0, 101)])) == 1
        acl = AclBinding(
            ResourceType.TOPIC,
            "t",
            ResourcePatternType.LITERAL,
            "User:a",
            "*",
            AclOperation.READ,
            AclPermissionType.ALLOW,
        )
        assert code_of(admin.create_acls([acl])) == 54

    with_broker(client)


def test_kafka_python_manages_topics_and_configs() -> None:
    from kafka import admin as kafka_admin

    def client(bootstrap: str, world: AdminWorld) -> None:
        admin = kafka_admin.KafkaAdminClient(bootstrap_servers=bootstrap, selector=ClosingSelector)
        try:
            admin.create_topics([kafka_admin.NewTopic("t", 2, 1)])
            assert set(admin.list_topics()) == {"t"}
            admin.create_partitions({"t": kafka_admin.NewPartitions(3)})
            assert len(admin.describe_topics(["t"])[0]["partitions"]) == 3
            assert admin.describe_cluster()["cluster_id"] == CLUSTER_ID
            admin.delete_topics(["t"])
            assert not world.controller.image.topics
        finally:
            admin.close()

    with_broker(client)


def test_kafka_python_shows_and_raises_the_feature_level() -> None:
    from kafka import admin as kafka_admin

    def client(bootstrap: str, world: AdminWorld) -> None:
        admin = kafka_admin.KafkaAdminClient(bootstrap_servers=bootstrap, selector=ClosingSelector)
        try:
            assert admin.describe_features()[FEATURE] == {"supported": (1, NEWEST)}
            world.controller.apply(c.PutKv(level_key(NODE_ID), told_range(1, SUPPORTED)))
            assert admin.update_features({FEATURE: 1}, validate_only=True) == {FEATURE: "OK"}
            assert "finalized" not in admin.describe_features()[FEATURE]
            assert admin.update_features({FEATURE: 1}) == {FEATURE: "OK"}
            assert admin.describe_features()[FEATURE]["finalized"] == (1, 1)
        finally:
            admin.close()

    with_broker(client, level=0)
