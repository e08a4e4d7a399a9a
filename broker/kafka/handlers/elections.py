"""ElectLeaders, and the two partition-reassignment APIs.

A reassignment is a move to another replica set (docs/design/0006-partition-moves.md): the named brokers must be the
members of one, its preferred master first. Partitions move with their streams instead of copying replicas, so there is
never more than one set of replicas; a listing names those of both sets, as in Kafka.

A partition's leader is the master of its replica set, so a preferred election concerns the replica set: its preferred
master is the broker with the same id. In a set of several members it is designated in an election by promises, and
elected if it is as far as the best; with one member it takes its partitions back by itself. For a moving partition, the
preferred leader is the target's. Unclean elections are an operator's alone (`tidelog replica-set elect --accept-loss`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence

from tidelog.broker.kafka.handlers.admin_errors import (
    INVALID_REQUEST,
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    PreferredLeaderNotAvailable,
    outcome,
)
from tidelog.broker.kafka.handlers.named_topics import partitions_by_topic
from tidelog.broker.kafka.replicas import members_of, named_replica_set
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
from tidelog.controller.image.image import Delta
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND, PartitionMove
from tidelog.controller.model.errors import NotEligible
from tidelog.controller.model.records import MAX_TOPIC_CHARS, NO_BROKER, NO_REPLICA_SET, PartitionRecord
from tidelog.controller.model.replication import has_several
from tidelog.runtime.errors import Fenced, NotFound, TidelogError

PREFERRED, UNCLEAN = 0, 1


def _partition(services: Services, topic: str, index: int) -> PartitionRecord:
    image = services.controller.image
    record = image.topic(topic)
    partition = image.partition(record.id, index) if record is not None else None
    if partition is None:
        raise NotFound(f"partition {topic[:MAX_TOPIC_CHARS]}-{index} does not exist")
    return partition


async def elect_leaders(context: RequestContext, request: ElectLeadersRequest) -> ElectLeadersResponse:
    """ElectLeaders v0–2. With no partitions named, the answer has only those that needed an election, as in Kafka."""
    services = context.services
    kind = request.election_type
    code = 0 if kind in (PREFERRED, UNCLEAN) else INVALID_REQUEST
    asked = request.topic_partitions
    elections = _PreferredElections(services, request.timeout_ms)
    caught_up = await outcome(services.controller.catch_up())
    if caught_up.code:
        return ElectLeadersResponse(error_code=caught_up.code, replica_election_results=())
    wanted: Mapping[str, Iterable[int]] = (
        {topic.name: range(topic.partitions) for topic in services.controller.image.topics.values()}
        if asked is None
        else partitions_by_topic(asked)
    )
    results = []
    for topic, partitions in sorted(wanted.items()) if code == 0 else ():
        judged = []
        for index in partitions:
            done = await outcome(_elect(services, elections, topic, index, kind))
            if not (asked is None and done.code == ElectionNotNeeded.kafka_code):
                judged.append(
                    ElectLeadersPartitionResult(partition_id=index, error_code=done.code, error_message=done.message)
                )
        if judged:
            results.append(ReplicaElectionResult(topic=topic, partition_result=judged))
    return ElectLeadersResponse(error_code=code, replica_election_results=results)


async def _elect(services: Services, elections: _PreferredElections, topic: str, index: int, kind: int) -> None:
    image = services.controller.image
    partition = _partition(services, topic, index)
    leader, _ = image.leader(partition)
    record = image.replica_sets.get(partition.replica_set)
    has_promises = record is not None and has_several(record)
    if kind == UNCLEAN:
        if leader >= 0:
            raise ElectionNotNeeded(f"{topic}-{index} is led by broker {leader}")
        raise EligibleLeadersNotAvailable(
            f"no member of replica set {partition.replica_set} can lead {topic}-{index}",
            hint=f"`tidelog replica-set elect {partition.replica_set} --broker ID --accept-loss` elects one that may"
            " lack confirmed records"
            if has_promises
            else None,
        )
    if partition.target != NO_REPLICA_SET:
        (error,) = await services.controller.elect_partitions([(partition.topic_id, index)])
        if error is not None:
            raise error
        return
    if has_promises:
        await elections.elect(partition.replica_set)
        return
    if leader == partition.replica_set:
        raise ElectionNotNeeded(f"{topic}-{index} is led by its preferred broker {leader}")
    raise PreferredLeaderNotAvailable(
        f"broker {partition.replica_set} is preferred for {topic}-{index} and cannot lead it now",
        hint="it takes its partitions back automatically when it has caught up",
    )


class _PreferredElections:
    """Elections of the preferred masters for one request: one for each replica set, whose partitions share its end."""

    def __init__(self, services: Services, timeout_ms: int) -> None:
        self._controller = services.controller
        self._clock = services.clock
        self._prepare = services.prepare_hand_over
        self._deadline = services.clock.monotonic() + timeout_ms / 1000
        self._ends: dict[int, TidelogError | None] = {}

    async def elect(self, replica_set: int) -> None:
        """Elect the preferred master; return when it leads.

        Raises `ElectionNotNeeded`, `PreferredLeaderNotAvailable`, and the errors of the command.
        """
        if replica_set not in self._ends:
            try:
                await self._elect(replica_set)
                self._ends[replica_set] = None
            except TidelogError as error:
                self._ends[replica_set] = error
        end = self._ends[replica_set]
        if end is not None:
            raise end

    async def _elect(self, replica_set: int) -> None:
        image = self._controller.image
        record = image.replica_sets[replica_set]
        preferred = members_of(image, replica_set)[0]
        if record.master == preferred and image.master_of(replica_set) is not None:
            raise ElectionNotNeeded(f"replica set {replica_set} is led by its preferred master {preferred}")
        if record.master != NO_BROKER:  # else an election is under way
            with contextlib.suppress(TimeoutError):  # the rest of the time is the election's
                async with asyncio.timeout(self._left_s() / 2):
                    await self._prepare(replica_set)
            try:
                await self._controller.replica_sets.begin_election(
                    replica_set, record.master_epoch, "a client wants the preferred master", designated=preferred
                )
            except NotEligible as error:
                raise PreferredLeaderNotAvailable(error.message, hint=error.hint) from error
            except Fenced:
                pass  # somebody else's election: whom it elects is seen below
        elected = await self._wait_elected(replica_set)
        if elected != preferred:
            raise PreferredLeaderNotAvailable(
                f"broker {preferred} is preferred for replica set {replica_set}, and "
                + ("the election goes on" if elected == NO_BROKER else f"broker {elected} had more and was elected"),
                hint=f"`tidelog replica-set describe {replica_set}` shows its replicas; retry",
            )

    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._clock.monotonic())

    async def _wait_elected(self, replica_set: int) -> int:
        """Return the master of a replica set once it has one; -1 at the end of the request's time."""
        image = self._controller.image
        ended = asyncio.Event()

        def changed(_delta: Delta | None) -> None:
            record = image.replica_sets.get(replica_set)
            if record is None or record.master != NO_BROKER:
                ended.set()

        remove = self._controller.subscribe(changed)
        try:
            changed(None)
            async with asyncio.timeout(self._left_s()):
                await ended.wait()
        except TimeoutError:
            return NO_BROKER
        finally:
            remove()
        record = image.replica_sets.get(replica_set)
        return NO_BROKER if record is None else record.master


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
    try:
        await services.controller.catch_up()
    except TidelogError as error:
        return [error] * len(named)
    errors: list[TidelogError | None] = [None] * len(named)
    moves: list[tuple[int, PartitionMove]] = []
    for at, (topic, index, replicas) in enumerate(named):
        try:
            partition = _partition(services, topic, index)
            target = (
                NO_REPLICA_SET
                if replicas is None
                else named_replica_set(services.controller.image, replicas, f"{topic}-{index}")
            )
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
        old, new = members_of(image, partition.replica_set), members_of(image, partition.target)
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


APIS = [
    serve(ElectLeadersRequest, 0, 2, elect_leaders),
    serve(AlterPartitionReassignmentsRequest, 0, 1, alter_partition_reassignments),
    serve(ListPartitionReassignmentsRequest, 0, 0, list_partition_reassignments),
]
