"""ElectLeaders, and the two partition-reassignment APIs.

A partition's leader is the master of its replica set, so a preferred election is about the replica set: its preferred
master is the broker of the same id. Partitions move with their streams and not by copying replicas; until a cluster
can move them, a real reassignment is refused with that message, and there is none to list or to cancel.
"""

from __future__ import annotations

from typing import Any

from broker.handlers.admin_errors import (
    INVALID_REQUEST,
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    PreferredLeaderNotAvailable,
    each,
    outcome,
)
from broker.services import ApiHandler, RequestContext, Services
from broker.wire import schema
from controller.errors import InvalidReplicaAssignment, NoReassignmentInProgress
from controller.model import PartitionRecord
from runtime.errors import InvalidInput, NotFound

PREFERRED, UNCLEAN = 0, 1


def _partition(services: Services, topic: str, index: int) -> PartitionRecord:
    image = services.controller.image
    record = image.topic(topic)
    partition = image.partition(record.id, index) if record is not None else None
    if partition is None:
        raise NotFound(f"partition {topic}-{index} does not exist")
    return partition


async def elect_leaders(context: RequestContext, request: Any) -> Any:
    """ElectLeaders v0–2. With no partitions named, the answer has only those that needed an election, as in Kafka."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    kind = getattr(request, "election_type", PREFERRED)
    code = 0 if kind in (PREFERRED, UNCLEAN) else INVALID_REQUEST
    everything = request.topic_partitions is None
    wanted = (
        {topic.name: range(topic.partitions) for topic in services.controller.image.topics.values()}
        if everything
        else {topic.topic: topic.partitions for topic in request.topic_partitions}
    )
    results = []
    for topic, partitions in sorted(wanted.items()) if code == 0 else ():
        judged = []
        for index in partitions:
            done = await outcome(_elect(services, topic, index, kind))
            if not (everything and done.code == ElectionNotNeeded.kafka_code):
                judged.append(
                    s.make("PartitionResult", partition_id=index, error_code=done.code, error_message=done.message)
                )
        if judged:
            results.append(s.make("ReplicaElectionResult", topic=topic, partition_result=judged))
    return s.make("ElectLeadersResponse", throttle_time=0, error_code=code, replica_election_results=results)


async def _elect(services: Services, topic: str, index: int, kind: int) -> None:
    image = services.controller.image
    partition = _partition(services, topic, index)
    leader, _ = image.leader(partition)
    if kind == UNCLEAN:
        if leader >= 0:
            raise ElectionNotNeeded(f"{topic}-{index} is led by broker {leader}")
        raise EligibleLeadersNotAvailable(f"no member of replica set {partition.replica_set} can lead {topic}-{index}")
    if leader == partition.replica_set:
        raise ElectionNotNeeded(f"{topic}-{index} is led by its preferred broker {leader}")
    raise PreferredLeaderNotAvailable(
        f"broker {partition.replica_set} is preferred for {topic}-{index} and cannot lead it now",
        hint="it takes its partitions back by itself when it has caught up",
    )


async def alter_partition_reassignments(context: RequestContext, request: Any) -> Any:
    """AlterPartitionReassignments v0–1: cancelling finds nothing, the same placement again is success."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)

    async def topic_result(topic: Any) -> Any:
        async def reassign(partition: Any) -> Any:
            done = await outcome(_reassign(services, topic.name, partition.partition_index, partition.replicas))
            return s.make(
                "ReassignablePartitionResponse",
                partition_index=partition.partition_index,
                error_code=done.code,
                error_message=done.message,
            )

        return s.make("ReassignableTopicResponse", name=topic.name, partitions=await each(topic.partitions, reassign))

    responses = await each(request.topics, topic_result)
    return s.make(
        "AlterPartitionReassignmentsResponse",
        throttle_time=0,
        allow_replication_factor_change=getattr(request, "allow_replication_factor_change", True),
        error_code=0,
        error_message=None,
        responses=responses,
    )


async def _reassign(services: Services, topic: str, index: int, replicas: Any) -> None:
    image = services.controller.image
    partition = _partition(services, topic, index)
    if replicas is None:
        raise NoReassignmentInProgress(f"{topic}-{index} is not being moved")
    wanted = list(replicas)
    if not wanted or len(set(wanted)) != len(wanted):
        raise InvalidReplicaAssignment(f"{topic}-{index}: replicas must be named, each once")
    unknown = [broker for broker in wanted if broker not in image.brokers]
    if unknown:
        raise InvalidReplicaAssignment(f"{topic}-{index}: brokers {unknown} are not known")
    replica_set = image.replica_sets.get(partition.replica_set)
    if replica_set is not None and set(wanted) == set(replica_set.members):
        return
    raise InvalidInput(f"{topic}-{index} cannot be moved: this version does not move partitions between brokers yet")


async def list_partition_reassignments(context: RequestContext, request: Any) -> Any:
    """ListPartitionReassignments v0: none are going on."""
    s = schema.response(context.api_key, context.api_version)
    return s.make("ListPartitionReassignmentsResponse", throttle_time=0, error_code=0, error_message=None, topics=[])


APIS = [
    ApiHandler(43, 0, 2, elect_leaders),
    ApiHandler(45, 0, 1, alter_partition_reassignments),
    ApiHandler(46, 0, 0, list_partition_reassignments),
]
