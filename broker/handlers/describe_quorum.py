"""DescribeQuorum: the controllers' quorum as KRaft's tools show it, read-only (KIP-595, KIP-836, KIP-853).

The quorum has one log, told as partition 0 of `__cluster_metadata`, the topic that clients ask for; none can fetch it.
Leader and epoch are the active controller and its Raft term. Offsets are those of Kafka: the next one, so an entry's
index plus 1. What each voter has is what the leader knows of it. Brokers follow by deltas and not by the log, so there
are no observers.
"""

from __future__ import annotations

from typing import Any

from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from controller.addresses import split_address

METADATA_TOPIC = "__cluster_metadata"
UNKNOWN_TOPIC_OR_PARTITION = 3
LEADER_NOT_AVAILABLE = 5
UNKNOWN = -1
LISTENER = "CONTROLLER"

Row = dict[str, Any]


async def describe_quorum(context: RequestContext, request: Any) -> Any:
    """DescribeQuorum v0–2."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    members: list[Row] = (await services.quorum())["members"]
    now_ms = services.clock.time_ms()

    def topic_result(topic: Any) -> Any:
        def describe(partition: Any) -> Any:
            if topic.topic_name != METADATA_TOPIC or partition.partition_index != 0:
                return _partition(s, partition.partition_index, UNKNOWN_TOPIC_OR_PARTITION)
            leader = next((row for row in members if row["state"] == "active"), None)
            if leader is None:
                return _partition(s, 0, LEADER_NOT_AVAILABLE, "no controller is active")
            return _partition(s, 0, 0, None, leader, [_voter(s, row, leader, now_ms) for row in members])

        return s.make("TopicData", topic_name=topic.topic_name, partitions=[describe(one) for one in topic.partitions])

    return s.make(
        "DescribeQuorumResponse",
        error_code=0,
        error_message=None,
        topics=[topic_result(one) for one in request.topics],
        nodes=[_node(s, row) for row in members],
    )


def _partition(
    s: Any,
    index: int,
    code: int,
    message: str | None = None,
    leader: Row | None = None,
    voters: list[Any] | None = None,
) -> Any:
    return s.make(
        "PartitionData",
        partition_index=index,
        error_code=code,
        error_message=message,
        leader_id=leader["id"] if leader is not None else UNKNOWN,
        leader_epoch=leader["term"] if leader is not None else UNKNOWN,
        high_watermark=leader["applied_index"] + 1 if leader is not None else UNKNOWN,
        current_voters=voters or [],
        observers=[],
    )


def _voter(s: Any, row: Row, leader: Row, now_ms: int) -> Any:
    """A member, its times in milliseconds since the epoch; what the leader does not know is -1."""
    fetched_ms = caught_up_ms = UNKNOWN
    if row["id"] == leader["id"]:
        end_offset, caught_up_ms = leader["last_index"] + 1, now_ms
    else:
        peer: Row = next((one for one in leader["peers"] or () if one["id"] == row["id"]), {})
        match, silent_s = peer.get("match_index"), peer.get("silent_s")
        end_offset = match + 1 if match is not None else UNKNOWN
        if silent_s is not None:
            fetched_ms = now_ms - int(silent_s * 1000)
            caught_up_ms = fetched_ms if peer["lag"] == 0 else UNKNOWN
    return s.make(
        "ReplicaState",
        replica_id=row["id"],
        replica_directory_id=None,
        log_end_offset=end_offset,
        last_fetch_timestamp=fetched_ms,
        last_caught_up_timestamp=caught_up_ms,
    )


def _node(s: Any, row: Row) -> Any:
    host, port = split_address(row["address"])
    return s.make("Node", node_id=row["id"], listeners=[s.make("Listener", name=LISTENER, host=host, port=port)])


APIS = [ApiHandler(55, 0, 2, describe_quorum)]
