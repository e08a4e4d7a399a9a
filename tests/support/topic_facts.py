"""What a cluster tells clients of its topics: for tests of programs that create topics themselves."""

from __future__ import annotations

from typing import NamedTuple

from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from tests.e2e.backends import QUIET
from tests.support.clients import DEADLINE_S


class TopicFacts(NamedTuple):
    """A topic that somebody else has created."""

    partitions: int
    replicas: int
    """Of the partition that has the fewest."""
    cleanup_policy: str


def topic_facts(bootstrap: str, topic: str) -> TopicFacts:
    """Ask for a topic's partitions, replicas and cleanup policy."""
    admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
    found = admin.list_topics(topic, timeout=DEADLINE_S).topics[topic]
    assert found.error is None, found.error
    (future,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    policy = future.result(DEADLINE_S)["cleanup.policy"].value
    return TopicFacts(len(found.partitions), min(len(each.replicas) for each in found.partitions.values()), str(policy))
