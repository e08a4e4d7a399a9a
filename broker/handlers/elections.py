"""ElectLeaders, and the two partition-reassignment APIs.

A reassignment is a move to another replica set (docs/design/0006-partition-moves.md): the brokers named must be the
members of one, its preferred master first. Partitions move with their streams and not by copying replicas, so there is
never more than one set of replicas; a listing names those of both sets, as Kafka does.

A partition's leader is the master of its replica set, so a preferred election is about the replica set: its preferred
master is the broker of the same id. Of a partition that moves, the preferred leader is where it moves to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broker.handlers.admin_errors import (
    INVALID_REQUEST,
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    PreferredLeaderNotAvailable,
    outcome,
)
from broker.services import ApiHandler, RequestContext, Services
from broker.wire import schema
from controller.commands import MAX_MOVES_PER_COMMAND, PartitionMove
from controller.errors import InvalidReplicaAssignment
from controller.image import Image
from controller.model import NO_REPLICA_SET, PartitionRecord
from runtime.errors import NotFound, TidelogError

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
    if partition.target != NO_REPLICA_SET:
        (error,) = await services.controller.elect_partitions([(partition.topic_id, index)])
        if error is not None:
            raise error
        return
    if leader == partition.replica_set:
        raise ElectionNotNeeded(f"{topic}-{index} is led by its preferred broker {leader}")
    raise PreferredLeaderNotAvailable(
        f"broker {partition.replica_set} is preferred for {topic}-{index} and cannot lead it now",
        hint="it takes its partitions back by itself when it has caught up",
    )


async def alter_partition_reassignments(context: RequestContext, request: Any) -> Any:
    """AlterPartitionReassignments v0–1: each partition by itself; null replicas cancel; the same again is success."""
    services = context.services
    s = schema.response(context.api_key, context.api_version)
    named = [(topic.name, each.partition_index, each.replicas) for topic in request.topics for each in topic.partitions]
    found = dict(zip(((name, index) for name, index, _ in named), await _reassign(services, named), strict=True))

    def result(topic: str, index: int) -> Any:
        error = found[topic, index]
        return s.make(
            "ReassignablePartitionResponse",
            partition_index=index,
            error_code=0 if error is None else error.kafka_code,
            error_message=None if error is None else str(error),
        )

    return s.make(
        "AlterPartitionReassignmentsResponse",
        throttle_time=0,
        allow_replication_factor_change=getattr(request, "allow_replication_factor_change", True),
        error_code=0,
        error_message=None,
        responses=[
            s.make(
                "ReassignableTopicResponse",
                name=topic.name,
                partitions=[result(topic.name, each.partition_index) for each in topic.partitions],
            )
            for topic in request.topics
        ],
    )


async def _reassign(services: Services, named: list[tuple[str, int, Any]]) -> list[TidelogError | None]:
    """Commit the placements that can be read, many to a command; what each of `named` was refused with."""
    errors: list[TidelogError | None] = [None] * len(named)
    moves: list[tuple[int, PartitionMove]] = []
    for at, (topic, index, replicas) in enumerate(named):
        try:
            partition = _partition(services, topic, index)
            target = NO_REPLICA_SET if replicas is None else _replica_set(services, list(replicas))
            moves.append((at, PartitionMove(partition.topic_id, index, target)))
        except TidelogError as error:
            errors[at] = error
    for start in range(0, len(moves), MAX_MOVES_PER_COMMAND):
        chunk = moves[start : start + MAX_MOVES_PER_COMMAND]
        judged: Sequence[TidelogError | None]
        try:
            judged = await services.controller.move_partitions([move for _, move in chunk])
        except TidelogError as error:
            judged = [error] * len(chunk)
        for (at, _), refused in zip(chunk, judged, strict=True):
            errors[at] = refused
    return errors


def _replica_set(services: Services, brokers: list[int]) -> int:
    """The replica set of exactly these brokers. Raises `InvalidReplicaAssignment`."""
    image = services.controller.image
    if not brokers or len(set(brokers)) != len(brokers):
        raise InvalidReplicaAssignment("replicas must be named, each once")
    unknown = [broker for broker in brokers if broker not in image.brokers]
    if unknown:
        raise InvalidReplicaAssignment(f"brokers {unknown} are not known")
    preferred = image.replica_sets.get(brokers[0])
    candidates = [*([preferred] if preferred is not None else []), *image.replica_sets.values()]
    for one in candidates:
        if set(one.members) == set(brokers):
            return one.id
    raise InvalidReplicaAssignment(
        f"no replica set has the members {brokers}",
        hint="a partition moves to a whole replica set: name its brokers, the preferred master first",
    )


async def list_partition_reassignments(context: RequestContext, request: Any) -> Any:
    """ListPartitionReassignments v0: what moves (of the partitions named), with the brokers it leaves and joins."""
    image = context.services.controller.image
    s = schema.response(context.api_key, context.api_version)
    wanted = None
    if request.topics is not None:
        wanted = {(topic.name, index) for topic in request.topics for index in topic.partition_indexes}
    topics: dict[str, list[Any]] = {}
    for partition in image.moving():
        name = image.topics[partition.topic_id].name
        if wanted is not None and (name, partition.index) not in wanted:
            continue
        old, new = _members(image, partition.replica_set), _members(image, partition.target)
        adding, removing = [each for each in new if each not in old], [each for each in old if each not in new]
        topics.setdefault(name, []).append(
            s.make(
                "OngoingPartitionReassignment",
                partition_index=partition.index,
                replicas=[*old, *adding],
                adding_replicas=adding,
                removing_replicas=removing,
            )
        )
    found = [s.make("OngoingTopicReassignment", name=name, partitions=topics[name]) for name in sorted(topics)]
    return s.make("ListPartitionReassignmentsResponse", throttle_time=0, error_code=0, error_message=None, topics=found)


def _members(image: Image, replica_set_id: int) -> list[int]:
    record = image.replica_sets.get(replica_set_id)
    return list(record.members) if record is not None else []


APIS = [
    ApiHandler(43, 0, 2, elect_leaders),
    ApiHandler(45, 0, 1, alter_partition_reassignments),
    ApiHandler(46, 0, 0, list_partition_reassignments),
]
