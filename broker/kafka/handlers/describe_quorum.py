"""DescribeQuorum: the controllers' quorum in the form of KRaft's tools, read-only (KIP-595, KIP-836, KIP-853).

The quorum has one log, reported as partition 0 of `__cluster_metadata`, the topic that clients name; clients cannot
fetch it. Leader and epoch are the active controller and its Raft term. Offsets are those of Kafka: the next one, so an
entry's index plus 1. The voters' offsets are those known to the leader. Brokers follow by deltas instead of the log, so
there are no observers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.cluster import (
    DescribeQuorumPartition,
    DescribeQuorumRequest,
    DescribeQuorumRequestPartition,
    DescribeQuorumRequestTopic,
    DescribeQuorumResponse,
    DescribeQuorumTopic,
    QuorumListener,
    QuorumNode,
    QuorumVoter,
)
from tidelog.controller.model.addresses import split_address

METADATA_TOPIC = "__cluster_metadata"
UNKNOWN_TOPIC_OR_PARTITION = 3
LEADER_NOT_AVAILABLE = 5
UNKNOWN = -1
LISTENER = "CONTROLLER"

Row = dict[str, Any]
"""A controller, as reported by `Services.quorum`."""


async def describe_quorum(context: RequestContext, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    """DescribeQuorum v0–2. A partition that is named several times is described once."""
    services = context.services
    members: list[Row] = (await services.quorum())["members"]
    now_ms = services.clock.time_ms()

    def topic_result(topic: DescribeQuorumRequestTopic) -> DescribeQuorumTopic:
        def describe(partition: DescribeQuorumRequestPartition) -> DescribeQuorumPartition:
            if topic.topic_name != METADATA_TOPIC or partition.partition_index != 0:
                return _partition(partition.partition_index, UNKNOWN_TOPIC_OR_PARTITION)
            leader = next((row for row in members if row["state"] == "active"), None)
            if leader is None:
                return _partition(0, LEADER_NOT_AVAILABLE, "no controller is active")
            return _partition(0, 0, None, leader, [_voter(row, leader, now_ms) for row in members])

        partitions = [describe(one) for one in dict.fromkeys(topic.partitions)]
        return DescribeQuorumTopic(topic_name=topic.topic_name, partitions=partitions)

    return DescribeQuorumResponse(
        error_code=0,
        error_message=None,
        topics=[topic_result(one) for one in dict.fromkeys(request.topics)],
        nodes=[_node(row) for row in members],
    )


def _partition(
    index: int,
    code: int,
    message: str | None = None,
    leader: Row | None = None,
    voters: Sequence[QuorumVoter] = (),
) -> DescribeQuorumPartition:
    return DescribeQuorumPartition(
        partition_index=index,
        error_code=code,
        error_message=message,
        leader_id=leader["id"] if leader is not None else UNKNOWN,
        leader_epoch=leader["term"] if leader is not None else UNKNOWN,
        high_watermark=leader["applied_index"] + 1 if leader is not None else UNKNOWN,
        current_voters=voters,
    )


def _voter(row: Row, leader: Row, now_ms: int) -> QuorumVoter:
    """Return a voter, its times in milliseconds since the epoch; values unknown to the leader are -1."""
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
    return QuorumVoter(
        replica_id=row["id"],
        replica_directory_id=None,
        log_end_offset=end_offset,
        last_fetch_timestamp=fetched_ms,
        last_caught_up_timestamp=caught_up_ms,
    )


def _node(row: Row) -> QuorumNode:
    host, port = split_address(row["address"])
    return QuorumNode(node_id=row["id"], listeners=[QuorumListener(name=LISTENER, host=host, port=port)])


APIS = [serve(DescribeQuorumRequest, 0, 2, describe_quorum)]
