"""Who leads a partition, as error responses of Produce and Fetch say it (KIP-951).

A client that is told the new leader inside the error goes there at once instead of asking for metadata first. While a
partition is being handed over that is its heir, under the epoch that it will have: clients believe the larger epoch, so
what the heir, or anybody's metadata, says of the old one until then does not lead them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from broker.wire.endpoints import LeaderIdAndEpoch, NodeEndpoint

if TYPE_CHECKING:
    from broker.services import Services
    from controller.image import Image


def current_leader(services: Services, name: str, topic_id: bytes, partition: int) -> LeaderIdAndEpoch | None:
    """The leader of a partition named by topic name or, where that is empty, by id; None if nobody leads it."""
    image = services.controller.image
    if name:
        topic_id = image.topic_ids.get(name, b"")
    heir = services.partitions.heir(topic_id, partition)
    if heir is not None:
        return LeaderIdAndEpoch(*heir)
    record = image.partition(topic_id, partition)
    if record is None:
        return None
    leader, epoch = image.leader(record)
    return LeaderIdAndEpoch(leader, epoch) if leader >= 0 else None


def endpoints(image: Image, broker_ids: Iterable[int]) -> list[NodeEndpoint]:
    """Where these brokers listen, each once, by id."""
    found = []
    for broker_id in sorted(set(broker_ids)):
        broker = image.brokers.get(broker_id)
        if broker is not None:
            found.append(NodeEndpoint(broker.id, broker.host, broker.port, broker.rack or None))
    return found
