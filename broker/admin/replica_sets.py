"""Replica sets over admin HTTP: their members and masters, elections, and replication policies.

    GET  /replica-sets                each with `state`: led, electing (replicas promise), recovering (another broker
                                      takes the WAL over from the bucket) or leaderless; `joining`: assigned brokers
                                      that have not joined
    GET  /replica-sets/describe       ?id=ID: also its replicas, its policy, the last election and the one under way
                                      with its promises; `live`, what its master knows: confirm offset, members in sync,
                                      and how far each is behind. Null unless this broker leads it: `master_admin_url`
                                      names the one that does
    POST /replica-sets/elect          ?id=ID&broker=B: begins an election; `broker` is elected if it has all that may be
                                      confirmed. &accept_loss=true: elects it in the election under way, although it may
                                      lack confirmed records; the loss is recorded (`/losses/accepted`)
    POST /replica-sets/policy         ?id=ID and fields of the policy; those that are not named stay
    POST /replica-sets/add-member     ?id=ID&broker=B: assigns a replica to the broker, which joins by itself; a learner
                                      becomes a member. &learner=true: as a learner, which is never counted
    POST /replica-sets/remove-member  ?id=ID&broker=B: removes its replica, or its assignment. One in sync leaves when
                                      the master has let go of it
    POST /replica-sets/priority       ?id=ID&broker=B&priority=N: sets the member's election priority in this set.
                                      Without `priority`: what the broker is configured with counts again

Any broker accepts the requests. Entry: `ReplicaSetRoutes.routes`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tidelog.broker.admin.answers import flag, integer, json_answer, number
from tidelog.controller.client.configs import until_based
from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.controller.model.replication import (
    PolicyRecord,
    ReplicationRecord,
    has_several,
    replicas_without,
    voting,
)
from tidelog.runtime.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Image

logger = logging.getLogger(__name__)

MAX_ID = 0x7FFF_FFFF
MAX_SECONDS = 86_400.0
POLICY_FIELDS = PolicyRecord.__struct_fields__


class ReplicaSetRoutes:
    """The handlers."""

    def __init__(
        self,
        controller: ControllerClient,
        prepare: Callable[[int], Awaitable[None]],
        led: Callable[[], Mapping[int, Mapping[str, Any]]],
    ) -> None:
        """`prepare` is called with a replica set of which another broker may become the master, and never fails.
        `led`: what this broker knows of the sets that it leads, by replica set (`ReplicaMaster.status`).
        """
        self._controller = controller
        self._prepare = prepare
        self._led = led

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/replica-sets", self._list),
            web.get("/replica-sets/describe", self._describe),
            web.post("/replica-sets/elect", self._elect),
            web.post("/replica-sets/policy", self._policy),
            web.post("/replica-sets/add-member", self._add_member),
            web.post("/replica-sets/remove-member", self._remove_member),
            web.post("/replica-sets/priority", self._priority),
        ]

    def _found(self, request: web.Request) -> ReplicaSetRecord:
        replica_set = integer(request.query.get("id", ""), "id", 0, MAX_ID)
        record = self._controller.image.replica_sets.get(replica_set)
        if record is None:
            raise NotFound(f"there is no replica set {replica_set}", hint="`tidelog replica-set list` shows them")
        return record

    async def _list(self, request: web.Request) -> web.Response:
        image = self._controller.image
        rows = [_row(image, record) for _, record in sorted(image.replica_sets.items())]
        return json_answer({"replica_sets": rows})

    async def _describe(self, request: web.Request) -> web.Response:
        record = self._found(request)
        return json_answer({**describe_set(self._controller.image, record), "live": self._led().get(record.id)})

    async def _elect(self, request: web.Request) -> web.Response:
        record, broker = self._found(request), number(request, "broker", NO_BROKER, 0, MAX_ID)
        if not has_several(record):
            raise InvalidInput(
                f"replica set {record.id} has one member, broker {record.members[0]}, which is elected when it starts",
                hint="another master can be elected when the set has several members",
            )
        client = self._controller.replica_sets
        if flag(request, "accept_loss"):
            if broker == NO_BROKER:
                raise InvalidInput("broker is missing: an election that may lose records names the one to elect")
            after = await client.elect_unclean(record.id, record.master_epoch, broker)
            logger.warning(
                "an operator elected a replica that may lack confirmed records",
                extra={"replica_set": record.id, "broker": broker},
            )
        else:
            await self._prepare(record.id)
            after = await client.begin_election(record.id, record.master_epoch, "an operator", designated=broker)
            logger.info("an operator began an election", extra={"replica_set": record.id, "designated": broker})
        return json_answer({"id": record.id, "master_epoch": after.master_epoch})

    async def _policy(self, request: web.Request) -> web.Response:
        record = self._found(request)
        unknown = [name for name in request.query if name not in ("id", *POLICY_FIELDS)]
        if unknown:
            raise InvalidInput(f"a replication policy has no {unknown[0]!r}", hint=f"it has {', '.join(POLICY_FIELDS)}")
        changes = {name: _value(request, name) for name in POLICY_FIELDS if name in request.query}
        if not changes:
            raise InvalidInput(f"nothing is to be changed: give one of {', '.join(POLICY_FIELDS)}")
        policy = await until_based(lambda: self._change_policy(record.id, changes))
        logger.info(
            "replication policy set", extra={"replica_set": record.id, "policy": msgspec.structs.asdict(policy)}
        )
        return json_answer({"id": record.id, "policy": msgspec.structs.asdict(policy)})

    async def _change_policy(self, replica_set_id: int, changes: Mapping[str, Any]) -> PolicyRecord:
        row = self._controller.image.replication.get(replica_set_id) or ReplicationRecord(replica_set_id)
        policy = msgspec.structs.replace(row.policy, **changes)
        await self._controller.replica_sets.set_policy(replica_set_id, policy, base=row.policy)
        return policy

    async def _add_member(self, request: web.Request) -> web.Response:
        record, broker = self._found(request), _broker(request)
        learner = flag(request, "learner")
        await self._controller.replica_sets.assign_replica(record.id, broker, is_learner=learner)
        extra = {"replica_set": record.id, "broker": broker, "learner": learner}
        logger.info("an operator added a replica", extra=extra)
        return json_answer({"id": record.id, "broker": broker})

    async def _remove_member(self, request: web.Request) -> web.Response:
        record, broker = self._found(request), _broker(request)
        row = self._controller.image.replication.get(record.id) or ReplicationRecord(record.id)
        left = replicas_without(record, row, broker)
        wanted = row.policy.total_replicas
        if broker in row.assigned and broker not in row.learning and len(left) < wanted:
            raise InvalidInput(
                f"replica set {record.id} shall have {wanted} replicas: without broker {broker} it would be given"
                " another one",
                hint=f"`tidelog replica-set add-member {record.id} --broker B` names the other one; or lower its"
                f" total_replicas: `tidelog replica-set set-policy {record.id} --total-replicas {len(left)}`",
            )
        if broker == record.master:
            await self._prepare(record.id)
        if broker in record.sync_state_set:
            await self._controller.replica_sets.retire_replica(record.id, broker)
        else:
            await self._controller.replica_sets.remove_replica(record.id, broker)
        logger.info("an operator removed a member", extra={"replica_set": record.id, "broker": broker})
        return json_answer({"id": record.id, "broker": broker})

    async def _priority(self, request: web.Request) -> web.Response:
        record, broker = self._found(request), _broker(request)
        text = request.query.get("priority")
        priority = integer(text, "priority", -MAX_ID - 1, MAX_ID) if text is not None else None
        await self._controller.replica_sets.set_priority(record.id, broker, priority)
        extra = {"replica_set": record.id, "broker": broker, "priority": priority}
        logger.info("an operator set an election priority", extra=extra)
        return json_answer({"id": record.id, "broker": broker, "priority": priority})


def _broker(request: web.Request) -> int:
    return integer(request.query.get("broker", ""), "broker", 0, MAX_ID)


def _value(request: web.Request, name: str) -> int | bool | float:
    default = getattr(PolicyRecord(), name)
    text = request.query[name]
    if isinstance(default, bool):
        return flag(request, name)
    if isinstance(default, int):
        return integer(text, name, 0, (1 << 62) if name.endswith("_bytes") else MAX_ID)
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= MAX_SECONDS:
        raise InvalidInput(f"{name} is {text!r}: seconds, above 0 and at most {MAX_SECONDS:g}, are expected")
    return found


def _state(image: Image, record: ReplicaSetRecord) -> str:
    if image.election(record.id) is not None:
        return "electing"
    if record.successor != NO_BROKER:
        return "recovering"
    return "led" if image.master_of(record.id) is not None else "leaderless"


def _row(image: Image, record: ReplicaSetRecord) -> dict[str, Any]:
    row = image.replication.get(record.id)
    return {
        "id": record.id,
        "state": _state(image, record),
        "master": record.master if record.master != NO_BROKER else None,
        "master_epoch": record.master_epoch,
        "members": list(record.members),
        "learners": list(record.learners),
        "joining": _joining(record, row),
        "in_sync": list(record.sync_state_set),
        "quorum": row.quorum if row is not None else 1,
        "partitions": image.index.partition_counts.get(record.id, 0),
    }


def _joining(record: ReplicaSetRecord, row: ReplicationRecord | None) -> list[int]:
    """Return the assigned brokers that have not joined."""
    return sorted({*(row.assigned if row is not None else ())} - {*record.members, *record.learners})


def describe_set(image: Image, record: ReplicaSetRecord) -> dict[str, Any]:
    """Return what `GET /replica-sets/describe` tells from the metadata."""
    row = image.replication.get(record.id) or ReplicationRecord(record.id)
    master = image.master_of(record.id)
    return {
        **_row(image, record),
        "master_admin_url": master.admin_url if master is not None else None,
        "sync_state_set_epoch": record.sync_state_set_epoch,
        "committed_offset": record.committed_wal_offset,
        "policy": msgspec.structs.asdict(row.policy),
        "replicas": [
            _replica(image, record, row, each)
            for each in sorted((*record.members, *record.learners, *_joining(record, row)))
        ],
        "exchange": _exchange(row),
        "election": _election(image, record, row),
        "last_election": _last_election(row),
    }


def _replica(image: Image, record: ReplicaSetRecord, row: ReplicationRecord, broker_id: int) -> dict[str, Any]:
    broker, joined = image.brokers.get(broker_id), row.replica(broker_id)
    member = next((each for each in row.in_sync if each.broker_id == broker_id), None)
    role = "follower"
    if broker_id == record.master:
        role = "master"
    elif broker_id in record.learners:
        role = "learner"
    elif broker_id not in record.members:
        role = "joining"
    elif broker_id in row.leaving:
        role = "leaving"
    return {
        "broker": broker_id,
        "role": role,
        "alive": broker is not None and broker.alive,
        "in_sync": broker_id in record.sync_state_set,
        "wal": joined.wal_id if joined is not None else None,
        "in_sync_wal": member.wal_id if member is not None else None,
        "priority": row.priority_of(broker_id),
        "set_priority": dict(row.priorities).get(broker_id),
        "known_end": member.known_end if member is not None and member.known_end >= 0 else None,
    }


def _exchange(row: ReplicationRecord) -> dict[str, Any] | None:
    """Return the replica that the active controller has added in place of another one, to even replicas out."""
    if row.newcomer == NO_BROKER:
        return None
    return {"newcomer": row.newcomer, "replaced": row.replaced}


def _last_election(row: ReplicationRecord) -> dict[str, Any] | None:
    ended = row.last_election
    if ended is None:
        return None
    return {
        "master_epoch": ended.master_epoch,
        "master": ended.master,
        "reason": ended.reason,
        "began_ms": ended.began_ms,
        "elected_ms": ended.elected_ms,
        "last_master": ended.last_master if ended.last_master != NO_BROKER else None,
        "designated": ended.designated if ended.designated != NO_BROKER else None,
        "accepted_loss": ended.accepted_loss,
    }


def _election(image: Image, record: ReplicaSetRecord, row: ReplicationRecord) -> dict[str, Any] | None:
    election = row.election
    if election is None:
        return None
    configuration = row.configuration(record.sync_state_set_epoch)
    votes = voting(image.level, record, row, election.promises)
    promises = [
        {
            "broker": each.broker_id,
            "last_epoch": each.last_epoch,
            "end_offset": each.end_offset,
            "confirm_offset": each.confirm_offset,
            "counts": each.replica in configuration.members and each in votes,
        }
        for each in election.promises
    ]
    told = {each.broker_id for each in election.promises}
    return {
        "reason": election.reason,
        "began_ms": election.began_ms,
        "designated": election.designated if election.designated != NO_BROKER else None,
        "needed": configuration.promises_needed,
        "promises": promises,
        "silent": [each for each in record.sync_state_set if each not in told],
    }
