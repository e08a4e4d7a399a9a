"""ElectLeaders, and the two partition-reassignment APIs.

A reassignment is a move to another replica set (docs/design/0006-partition-moves.md): the named brokers must be the
members of one, its preferred master first. Partitions move with their streams instead of copying replicas, so there is
never more than one set of replicas; a listing names those of both sets, as in Kafka.

A partition's leader is the master of its replica set, so a preferred election concerns the replica set: its preferred
master is the broker with the same id. For a moving partition, the preferred leader is the target broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidelog.broker.kafka.handlers.admin_errors import (
    INVALID_REQUEST,
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    PreferredLeaderNotAvailable,
    outcome,
)
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.messages.topics import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersPartitionResult,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
    ReplicaElectionResult,
)
from tidelog.controller.image.image import Image
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND, PartitionMove
from tidelog.controller.model.errors import InvalidReplicaAssignment
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionRecord
from tidelog.runtime.errors import NotFound, TidelogError

PREFERRED, UNCLEAN = 0, 1


def _partition(services: Services, topic: str, index: int) -> PartitionRecord:
    image = services.controller.image
    record = image.topic(topic)
    partition = image.partition(record.id, index) if record is not None else None
    if partition is None:
        raise NotFound(f"partition {topic}-{index} does not exist")
    return partition


async def elect_leaders(context: RequestContext, request: ElectLeadersRequest) -> ElectLeadersResponse:
    """ElectLeaders v0–2. With no partitions named, the answer has only those that needed an election, as in Kafka."""
    services = context.services
    kind = request.election_type
    code = 0 if kind in (PREFERRED, UNCLEAN) else INVALID_REQUEST
    asked = request.topic_partitions
    wanted: dict[str, Iterable[int]] = (
        {topic.name: range(topic.partitions) for topic in services.controller.image.topics.values()}
        if asked is None
        else {topic.topic: topic.partitions for topic in asked}
    )
    results = []
    for topic, partitions in sorted(wanted.items()) if code == 0 else ():
        judged = []
        for index in partitions:
            done = await outcome(_elect(services, topic, index, kind))
            if not (asked is None and done.code == ElectionNotNeeded.kafka_code):
                judged.append(
                    ElectLeadersPartitionResult(partition_id=index, error_code=done.code, error_message=done.message)
                )
        if judged:
            results.append(ReplicaElectionResult(topic=topic, partition_result=judged))
    return ElectLeadersResponse(error_code=code, replica_election_results=results)


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
        hint="it takes its partitions back automatically when it has caught up",
    )


async def alter_partition_reassignments(
    context: RequestContext, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    """AlterPartitionReassignments v0–1: each partition separately; null replicas cancel; idempotent."""
    services = context.services
    named = [(topic.name, each.partition_index, each.replicas) for topic in request.topics for each in topic.partitions]
    found = dict(zip(((name, index) for name, index, _ in named), await _reassign(services, named), strict=True))

    def result(topic: str, index: int) -> ReassignablePartitionResponse:
        error = found[topic, index]
        return ReassignablePartitionResponse(
            partition_index=index,
            error_code=0 if error is None else error.kafka_code,
            error_message=None if error is None else str(error),
        )

    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_code=0,
        error_message=None,
        responses=[
            ReassignableTopicResponse(
                name=topic.name,
                partitions=[result(topic.name, each.partition_index) for each in topic.partitions],
            )
            for topic in request.topics
        ],
    )


async def _reassign(
    services: Services, named: list[tuple[str, int, tuple[int, ...] | None]]
) -> list[TidelogError | None]:
    """Commit the valid placements, many per command; return the error of each refused item of `named`."""
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
    """Return the replica set of exactly these brokers. Raises `InvalidReplicaAssignment`."""
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


async def list_partition_reassignments(
    context: RequestContext, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    """ListPartitionReassignments v0: moves (of the named partitions), with the brokers removed and added."""
    image = context.services.controller.image
    wanted = None
    if request.topics is not None:
        wanted = {(topic.name, index) for topic in request.topics for index in topic.partition_indexes}
    topics: dict[str, list[OngoingPartitionReassignment]] = {}
    for partition in image.moving():
        name = image.topics[partition.topic_id].name
        if wanted is not None and (name, partition.index) not in wanted:
            continue
        old, new = _members(image, partition.replica_set), _members(image, partition.target)
        adding, removing = [each for each in new if each not in old], [each for each in old if each not in new]
        topics.setdefault(name, []).append(
            OngoingPartitionReassignment(
                partition_index=partition.index,
                replicas=[*old, *adding],
                adding_replicas=adding,
                removing_replicas=removing,
            )
        )
    found = [OngoingTopicReassignment(name=name, partitions=topics[name]) for name in sorted(topics)]
    return ListPartitionReassignmentsResponse(error_code=0, error_message=None, topics=found)


def _members(image: Image, replica_set_id: int) -> list[int]:
    record = image.replica_sets.get(replica_set_id)
    return list(record.members) if record is not None else []


APIS = [
    serve(ElectLeadersRequest, 0, 2, elect_leaders),
    serve(AlterPartitionReassignmentsRequest, 0, 1, alter_partition_reassignments),
    serve(ListPartitionReassignmentsRequest, 0, 0, list_partition_reassignments),
]
