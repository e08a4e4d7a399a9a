"""Membership and administration of groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup, Describe-, List-, DeleteGroups.

Only translation: what the versions say differently, and errors to codes. Member metadata and assignments pass through
as the bytes they are. A join or sync waits as long as the round takes; Kafka serves one request of a connection at a
time, so nothing else of this client is held up that Kafka would not hold up.

Entry: `APIS`.
"""

from __future__ import annotations

from typing import Any

from broker.groups.coordinator import GroupDescription
from broker.groups.errors import GroupError
from broker.groups.members import MemberIdentity
from broker.groups.messages import JoinRequest, JoinResult, SyncRequest, SyncResult
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from broker.wire.schema import to_ms
from runtime.errors import TidelogError

GROUP_TYPE = "classic"
DEAD = "Dead"


async def join_group(context: RequestContext, request: Any) -> Any:
    """JoinGroup v0–v9."""
    session_timeout_ms = to_ms(request.session_timeout)
    rebalance_timeout_ms = to_ms(request.rebalance_timeout) if context.api_version >= 1 else -1
    join = JoinRequest(
        MemberIdentity(request.member_id, getattr(request, "group_instance_id", None)),
        context.client_id or "",
        f"/{context.client_host}",  # as Java prints an address
        session_timeout_ms,
        rebalance_timeout_ms if rebalance_timeout_ms >= 0 else session_timeout_ms,
        request.protocol_type,
        tuple((protocol.name, bytes(protocol.metadata)) for protocol in request.protocols),
        needs_member_id=context.api_version >= 4,
        can_skip_assignment=context.api_version >= 9,
    )
    try:
        result = await context.services.groups.join(request.group_id, join)
    except TidelogError as error:
        result = JoinResult(_code(error), request.member_id)
    s = schema.response(context.api_key, context.api_version)
    nullable = context.api_version >= 7
    return s.make(
        "JoinGroupResponse",
        throttle_time=0,
        error_code=result.error,
        generation_id=result.generation,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol if nullable else result.protocol or "",
        leader=result.leader,
        skip_assignment=result.skip_assignment,
        member_id=result.member_id,
        members=[
            s.make(
                "JoinGroupResponseMember",
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                metadata=member.metadata,
            )
            for member in result.members
        ],
    )


async def sync_group(context: RequestContext, request: Any) -> Any:
    """SyncGroup v0–v5."""
    sync = SyncRequest(
        MemberIdentity(request.member_id, getattr(request, "group_instance_id", None)),
        request.generation_id,
        getattr(request, "protocol_type", None),
        getattr(request, "protocol_name", None),
        {one.member_id: bytes(one.assignment) for one in request.assignments},
    )
    if context.api_version >= 5 and (sync.protocol_type is None or sync.protocol is None):
        result = SyncResult(GroupError.INCONSISTENT_GROUP_PROTOCOL)  # KIP-559: from v5 on both are mandatory
    else:
        try:
            result = await context.services.groups.sync(request.group_id, sync)
        except TidelogError as error:
            result = SyncResult(_code(error))
    return schema.response(context.api_key, context.api_version).make(
        "SyncGroupResponse",
        throttle_time=0,
        error_code=result.error,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol,
        assignment=result.assignment,
    )


async def heartbeat(context: RequestContext, request: Any) -> Any:
    """Heartbeat v0–v4."""
    identity = MemberIdentity(request.member_id, getattr(request, "group_instance_id", None))
    await context.services.groups.arrival(request.group_id)
    try:
        error = int(context.services.groups.heartbeat(request.group_id, identity, request.generation_id))
    except TidelogError as failure:
        error = failure.kafka_code
    s = schema.response(context.api_key, context.api_version)
    return s.make("HeartbeatResponse", throttle_time=0, error_code=error)


async def leave_group(context: RequestContext, request: Any) -> Any:
    """LeaveGroup v0–v5: one member, from v3 on many."""
    many = context.api_version >= 3
    named = request.members if many else [request]
    identities = [MemberIdentity(one.member_id, getattr(one, "group_instance_id", None)) for one in named]
    s = schema.response(context.api_key, context.api_version)
    await context.services.groups.arrival(request.group_id)
    try:
        errors = context.services.groups.leave(request.group_id, identities)
    except TidelogError as error:
        return s.make("LeaveGroupResponse", throttle_time=0, error_code=error.kafka_code, members=[])
    if not many:
        return s.make("LeaveGroupResponse", throttle_time=0, error_code=errors[0])
    members = [
        s.make("MemberResponse", member_id=member_id, group_instance_id=instance_id, error_code=error)
        for (member_id, instance_id), error in zip(identities, errors, strict=True)
    ]
    return s.make("LeaveGroupResponse", throttle_time=0, error_code=0, members=members)


async def describe_groups(context: RequestContext, request: Any) -> Any:
    """DescribeGroups v0–v6. An unknown group is Dead; from v6 on it is GROUP_ID_NOT_FOUND as well."""
    s = schema.response(context.api_key, context.api_version)
    groups = [_described(context, s, group_id) for group_id in request.groups]
    return s.make("DescribeGroupsResponse", throttle_time=0, groups=groups)


def _described(context: RequestContext, s: schema.Schema, group_id: str) -> Any:
    group: GroupDescription | None = None
    error, message, state = 0, None, DEAD
    try:
        group = context.services.groups.describe(group_id)
    except TidelogError as failure:
        error, message, state = failure.kafka_code, str(failure), ""
    else:
        if group is not None:
            state = group.state.value
        elif context.api_version >= 6:
            error, message = GroupError.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
    return s.make(
        "DescribedGroup",
        error_code=error,
        error_message=message,
        group_id=group_id,
        group_state=state,
        protocol_type=group.protocol_type if group else "",
        protocol_data=group.protocol if group else "",
        members=[
            s.make(
                "DescribedGroupMember",
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.subscription,
                member_assignment=member.assignment,
            )
            for member in (group.members if group else ())
        ],
    )


async def list_groups(context: RequestContext, request: Any) -> Any:
    """ListGroups v0–v5, filtered by state (v4+) and type (v5+), both without regard to case."""
    s = schema.response(context.api_key, context.api_version)
    states = {state.lower() for state in getattr(request, "states_filter", ())}
    types = {kind.lower() for kind in getattr(request, "types_filter", ())}
    try:
        groups = context.services.groups.list_groups()
    except TidelogError as error:
        return s.make("ListGroupsResponse", throttle_time=0, error_code=error.kafka_code, groups=[])
    listed = [
        s.make(
            "ListedGroup",
            group_id=group.group_id,
            protocol_type=group.protocol_type,
            group_state=group.state.value,
            group_type=GROUP_TYPE,
        )
        for group in groups
        if (not states or group.state.value.lower() in states) and (not types or GROUP_TYPE in types)
    ]
    return s.make("ListGroupsResponse", throttle_time=0, error_code=0, groups=listed)


async def delete_groups(context: RequestContext, request: Any) -> Any:
    """DeleteGroups v0–v2."""
    s = schema.response(context.api_key, context.api_version)
    results = []
    for group_id in request.groups_names:
        try:
            error = int(await context.services.groups.delete_group(group_id))
        except TidelogError as failure:
            error = failure.kafka_code
        results.append(s.make("DeletableGroupResult", group_id=group_id, error_code=error))
    return s.make("DeleteGroupsResponse", throttle_time=0, results=results)


def _code(error: TidelogError) -> GroupError:
    known = {code.value for code in GroupError}
    return GroupError(error.kafka_code) if error.kafka_code in known else GroupError.UNKNOWN_SERVER_ERROR


APIS = [
    ApiHandler(11, 0, 9, join_group),
    ApiHandler(12, 0, 4, heartbeat),
    ApiHandler(13, 0, 5, leave_group),
    ApiHandler(14, 0, 5, sync_group),
    ApiHandler(15, 0, 6, describe_groups),
    ApiHandler(16, 0, 5, list_groups),
    ApiHandler(42, 0, 2, delete_groups),
]
