"""The leader of a partition in error responses of Produce and Fetch (KIP-951).

A client that gets the new leader with the error connects to it at once instead of requesting metadata first. While a
partition is being handed over, this is its next leader, under its future epoch: clients use the larger
epoch, so the old leader in metadata from the next leader or any other broker does not lead them back until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.broker.kafka.wire.endpoints import LeaderIdAndEpoch, NodeEndpoint

if TYPE_CHECKING:
    from tidelog.broker.kafka.services import Services
    from tidelog.controller.image.image import Image


def current_leader(services: Services, name: str, topic_id: bytes, partition: int) -> LeaderIdAndEpoch | None:
    """Return the leader of a partition by topic name or, where that is empty, by id; None if there is none."""
    image = services.controller.image
    if name:
        topic_id = image.topic_ids.get(name, b"")
    next_leader = services.partitions.next_leader(topic_id, partition)
    if next_leader is not None:
        return LeaderIdAndEpoch(*next_leader)
    record = image.partition(topic_id, partition)
    if record is None:
        return None
    leader, epoch = image.leader(record)
    return LeaderIdAndEpoch(leader, epoch) if leader >= 0 else None


def endpoints(image: Image, broker_ids: Iterable[int]) -> list[NodeEndpoint]:
    """Return the endpoints of these brokers, without duplicates, by id."""
    found = []
    for broker_id in sorted(set(broker_ids)):
        broker = image.brokers.get(broker_id)
        if broker is not None:
            found.append(NodeEndpoint(broker.id, broker.host, broker.port, broker.rack or None))
    return found
