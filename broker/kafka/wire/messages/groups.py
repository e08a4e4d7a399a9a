"""Messages about groups and their members: FindCoordinator to DeleteGroups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message


class FindCoordinatorRequest(KafkaRequest):
    """FindCoordinator (10), versions 0 to 6."""

    API_KEY: ClassVar[int] = 10

    key: str = ""  # v0 to v3
    key_type: int = 0  # v1+
    coordinator_keys: tuple[str, ...] = ()  # v4+


class FoundCoordinator(Message):
    """An element of `FindCoordinatorResponse.coordinators`."""

    key: str
    node_id: int = -1
    host: str = ""
    port: int = -1
    error_code: int = 0
    error_message: str | None = None


class FindCoordinatorResponse(KafkaResponse):
    """FindCoordinator (10), versions 0 to 6."""

    error_code: int = 0  # v0 to v3
    node_id: int = -1  # v0 to v3
    host: str = ""  # v0 to v3
    port: int = -1  # v0 to v3
    error_message: str | None = None  # v1 to v3
    coordinators: Sequence[FoundCoordinator] = ()  # v4+
    throttle_time_ms: int = 0


class JoinGroupRequestProtocol(Message):
    """An element of `JoinGroupRequest.protocols`."""

    name: str
    metadata: bytes


class JoinGroupRequest(KafkaRequest):
    """JoinGroup (11), versions 0 to 9."""

    API_KEY: ClassVar[int] = 11

    group_id: str
    session_timeout_ms: int
    member_id: str
    protocol_type: str
    protocols: tuple[JoinGroupRequestProtocol, ...]
    rebalance_timeout_ms: int = -1  # v1+
    group_instance_id: str | None = None  # v5+


class JoinGroupResponseMember(Message):
    """An element of `JoinGroupResponse.members`."""

    member_id: str
    metadata: bytes
    group_instance_id: str | None = None  # v5+


class JoinGroupResponse(KafkaResponse):
    """JoinGroup (11), versions 0 to 9."""

    error_code: int
    generation_id: int
    protocol_name: str | None
    leader: str
    member_id: str
    members: Sequence[JoinGroupResponseMember]
    protocol_type: str | None = None  # v7+
    skip_assignment: bool = False  # v9+
    throttle_time_ms: int = 0


class HeartbeatRequest(KafkaRequest):
    """Heartbeat (12), versions 0 to 4."""

    API_KEY: ClassVar[int] = 12

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None = None  # v3+


class HeartbeatResponse(KafkaResponse):
    """Heartbeat (12), versions 0 to 4."""

    error_code: int
    throttle_time_ms: int = 0


class LeavingMember(Message):
    """An element of `LeaveGroupRequest.members`."""

    member_id: str
    group_instance_id: str | None


class LeaveGroupRequest(KafkaRequest):
    """LeaveGroup (13), versions 0 to 5."""

    API_KEY: ClassVar[int] = 13

    group_id: str
    member_id: str = ""  # v0 to v2
    members: tuple[LeavingMember, ...] = ()  # v3+


class LeaveGroupMemberResponse(Message):
    """An element of `LeaveGroupResponse.members`."""

    member_id: str
    group_instance_id: str | None
    error_code: int


class LeaveGroupResponse(KafkaResponse):
    """LeaveGroup (13), versions 0 to 5."""

    error_code: int
    members: Sequence[LeaveGroupMemberResponse] = ()  # v3+
    throttle_time_ms: int = 0


class SyncGroupRequestAssignment(Message):
    """An element of `SyncGroupRequest.assignments`."""

    member_id: str
    assignment: bytes


class SyncGroupRequest(KafkaRequest):
    """SyncGroup (14), versions 0 to 5."""

    API_KEY: ClassVar[int] = 14

    group_id: str
    generation_id: int
    member_id: str
    assignments: tuple[SyncGroupRequestAssignment, ...]
    group_instance_id: str | None = None  # v3+
    protocol_type: str | None = None  # v5+
    protocol_name: str | None = None  # v5+


class SyncGroupResponse(KafkaResponse):
    """SyncGroup (14), versions 0 to 5."""

    error_code: int
    assignment: bytes
    protocol_type: str | None = None  # v5+
    protocol_name: str | None = None  # v5+
    throttle_time_ms: int = 0


class DescribeGroupsRequest(KafkaRequest):
    """DescribeGroups (15), versions 0 to 6."""

    API_KEY: ClassVar[int] = 15

    groups: tuple[str, ...]
    include_authorized_operations: bool = False  # v3+


class DescribedGroupMember(Message):
    """An element of `DescribedGroup.members`."""

    member_id: str
    client_id: str
    client_host: str
    member_metadata: bytes
    member_assignment: bytes
    group_instance_id: str | None = None  # v4+


class DescribedGroup(Message):
    """An element of `DescribeGroupsResponse.groups`."""

    error_code: int
    group_id: str
    group_state: str
    protocol_type: str
    protocol_data: str
    members: Sequence[DescribedGroupMember]
    error_message: str | None = None  # v6+
    authorized_operations: int = -(1 << 31)  # v3+


class DescribeGroupsResponse(KafkaResponse):
    """DescribeGroups (15), versions 0 to 6."""

    groups: Sequence[DescribedGroup]
    throttle_time_ms: int = 0


class ListGroupsRequest(KafkaRequest):
    """ListGroups (16), versions 0 to 5."""

    API_KEY: ClassVar[int] = 16

    states_filter: tuple[str, ...] = ()  # v4+
    types_filter: tuple[str, ...] = ()  # v5+


class ListedGroup(Message):
    """An element of `ListGroupsResponse.groups`."""

    group_id: str
    protocol_type: str
    group_state: str = ""  # v4+
    group_type: str = ""  # v5+


class ListGroupsResponse(KafkaResponse):
    """ListGroups (16), versions 0 to 5."""

    error_code: int
    groups: Sequence[ListedGroup]
    throttle_time_ms: int = 0


class DeleteGroupsRequest(KafkaRequest):
    """DeleteGroups (42), versions 0 to 2."""

    API_KEY: ClassVar[int] = 42

    groups_names: tuple[str, ...]


class DeletableGroupResult(Message):
    """An element of `DeleteGroupsResponse.results`."""

    group_id: str
    error_code: int


class DeleteGroupsResponse(KafkaResponse):
    """DeleteGroups (42), versions 0 to 2."""

    results: Sequence[DeletableGroupResult]
    throttle_time_ms: int = 0
