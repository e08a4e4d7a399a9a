"""Membership and administration of groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup, Describe-, List-, DeleteGroups.

Translates between the versions of the messages and the group coordinator, and errors into codes. Member metadata and
assignments are opaque bytes. A join or sync waits as long as the rebalance takes; as in Kafka, one request of a
connection is served at a time, so later requests of this client wait as they would in Kafka.

While a group is loaded, members that send heartbeats are told nothing, as in Kafka, and those that sync that they must
join again: their clients take COORDINATOR_LOAD_IN_PROGRESS there for a failure that ends the consumer (aiokafka; Java's
in SyncGroup). All other requests are answered with it.

Entry: `APIS`.
"""

from __future__ import annotations

from tidelog.broker.coordinators.errors import CoordinatorLoading
from tidelog.broker.groups.coordinator import GroupDescription
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity
from tidelog.broker.groups.messages import JoinRequest, JoinResult, SyncRequest, SyncResult
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    JoinGroupResponseMember,
    LeaveGroupMemberResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.steps import paced

_FIRST_LEAVE_OF_MANY = 3
GROUP_TYPE = "classic"
DEAD = "Dead"
GROUP_OPERATIONS = sum(1 << bit for bit in (3, 6, 8, 10, 11))
"""Everything that Kafka's ACLs allow on a group: read, delete, describe, describe and alter its configs."""


async def join_group(context: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse:
    """JoinGroup v0–v9."""
    session_timeout_ms, rebalance_timeout_ms = request.session_timeout_ms, request.rebalance_timeout_ms
    join = JoinRequest(
        MemberIdentity(request.member_id, request.group_instance_id),
        context.client_id or "",
        f"/{context.client_host}",  # the format of an address in Java
        session_timeout_ms,
        rebalance_timeout_ms if rebalance_timeout_ms >= 0 else session_timeout_ms,
        request.protocol_type,
        tuple((protocol.name, protocol.metadata) for protocol in request.protocols),
        needs_member_id=context.api_version >= 4,
        can_skip_assignment=context.api_version >= 9,
    )
    try:
        result = await context.services.groups.join(request.group_id, join)
    except TidelogError as error:
        result = JoinResult(_code(error), request.member_id)
    nullable = context.api_version >= 7
    return JoinGroupResponse(
        error_code=result.error,
        generation_id=result.generation,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol if nullable else result.protocol or "",
        leader=result.leader,
        skip_assignment=result.skip_assignment,
        member_id=result.member_id,
        members=[
            JoinGroupResponseMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                metadata=member.metadata,
            )
            for member in result.members
        ],
    )


async def sync_group(context: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse:
    """SyncGroup v0–v5."""
    sync = SyncRequest(
        MemberIdentity(request.member_id, request.group_instance_id),
        request.generation_id,
        request.protocol_type,
        request.protocol_name,
        {one.member_id: one.assignment for one in request.assignments},
    )
    if context.api_version >= 5 and (sync.protocol_type is None or sync.protocol is None):
        result = SyncResult(GroupError.INCONSISTENT_GROUP_PROTOCOL)  # KIP-559: from v5 on both are mandatory
    else:
        try:
            result = await context.services.groups.sync(request.group_id, sync)
        except CoordinatorLoading:
            result = SyncResult(GroupError.REBALANCE_IN_PROGRESS)
        except TidelogError as error:
            result = SyncResult(_code(error))
    return SyncGroupResponse(
        error_code=result.error,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol,
        assignment=result.assignment,
    )


async def heartbeat(context: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse:
    """Heartbeat v0–v4."""
    identity = MemberIdentity(request.member_id, request.group_instance_id)
    await context.services.groups.arrival(request.group_id)
    try:
        error = int(context.services.groups.heartbeat(request.group_id, identity, request.generation_id))
    except CoordinatorLoading:
        error = int(GroupError.NONE)
    except TidelogError as failure:
        error = failure.kafka_code
    return HeartbeatResponse(error_code=error)


async def leave_group(context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse:
    """LeaveGroup v0–v5: one member, from v3 on several."""
    many = context.api_version >= _FIRST_LEAVE_OF_MANY
    if many:
        identities = [MemberIdentity(one.member_id, one.group_instance_id) for one in request.members]
    else:
        identities = [MemberIdentity(request.member_id, None)]
    await context.services.groups.arrival(request.group_id)
    try:
        errors = context.services.groups.leave(request.group_id, identities)
    except TidelogError as error:
        return LeaveGroupResponse(error_code=error.kafka_code, members=[])
    if not many:
        return LeaveGroupResponse(error_code=errors[0])
    members = [
        LeaveGroupMemberResponse(member_id=member_id, group_instance_id=instance_id, error_code=error)
        for (member_id, instance_id), error in zip(identities, errors, strict=True)
    ]
    return LeaveGroupResponse(error_code=0, members=members)


async def describe_groups(context: RequestContext, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    """DescribeGroups v0–v6. An unknown group is Dead; from v6 on it is GROUP_ID_NOT_FOUND as well.

    A group that is named several times is described once: its members may be long.
    """
    names = dict.fromkeys(request.groups)
    tells_operations = request.include_authorized_operations
    groups = [_described(context, group_id, tells_operations) async for group_id in paced(names)]
    return DescribeGroupsResponse(groups=groups)


def _described(context: RequestContext, group_id: str, tells_operations: bool) -> DescribedGroup:
    group: GroupDescription | None = None
    error, message, state = 0, None, DEAD
    try:
        group = context.services.groups.describe(group_id)
    except TidelogError as failure:
        error, message, state = failure.kafka_code, str(failure), ""
    else:
        if group is not None:
            state = group.state.value
        elif not group_id:
            error, message, state = GroupError.INVALID_GROUP_ID, "the group id is empty", ""
        elif context.api_version >= 6:
            error, message = GroupError.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
    return DescribedGroup(
        error_code=error,
        error_message=message,
        group_id=group_id,
        group_state=state,
        protocol_type=group.protocol_type if group else "",
        protocol_data=group.protocol if group else "",
        members=[
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.subscription,
                member_assignment=member.assignment,
            )
            for member in (group.members if group else ())
        ],
        authorized_operations=GROUP_OPERATIONS if tells_operations and error == 0 else -(1 << 31),
    )


async def list_groups(context: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    """ListGroups v0–v5, filtered by state (v4+) and type (v5+), both case-insensitive."""
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    try:
        groups = context.services.groups.list_groups()
    except TidelogError as error:
        return ListGroupsResponse(error_code=error.kafka_code, groups=[])
    listed = [
        ListedGroup(
            group_id=group.group_id,
            protocol_type=group.protocol_type,
            group_state=group.state.value,
            group_type=GROUP_TYPE,
        )
        for group in groups
        if (not states or group.state.value.lower() in states) and (not types or GROUP_TYPE in types)
    ]
    return ListGroupsResponse(error_code=0, groups=listed)


async def delete_groups(context: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    """DeleteGroups v0–v2."""
    results = []
    async for group_id in paced(request.groups_names):
        try:
            error = int(await context.services.groups.delete_group(group_id))
        except TidelogError as failure:
            error = failure.kafka_code
        results.append(DeletableGroupResult(group_id=group_id, error_code=error))
    return DeleteGroupsResponse(results=results)


def _code(error: TidelogError) -> GroupError:
    known = {code.value for code in GroupError}
    return GroupError(error.kafka_code) if error.kafka_code in known else GroupError.UNKNOWN_SERVER_ERROR


APIS = [
    serve(JoinGroupRequest, 0, 9, join_group),
    serve(HeartbeatRequest, 0, 4, heartbeat),
    serve(LeaveGroupRequest, 0, 5, leave_group),
    serve(SyncGroupRequest, 0, 5, sync_group),
    serve(DescribeGroupsRequest, 0, 6, describe_groups),
    serve(ListGroupsRequest, 0, 5, list_groups),
    serve(DeleteGroupsRequest, 0, 2, delete_groups),
]
