"""Input and output of a group's state machine: requests, results, effects. Plain data.

Entry: `JoinRequest` and `SyncRequest` in, `Effect` out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.members import MemberIdentity, Protocols
from tidelog.broker.groups.records import GroupValue, OffsetKey, OffsetValue

NO_GENERATION = -1


class Limits(NamedTuple):
    """Configured limits of every group."""

    initial_rebalance_delay_ms: int
    max_size: int
    """Maximum number of members of a group."""


class JoinRequest(NamedTuple):
    """The fields of JoinGroup that the group uses."""

    identity: MemberIdentity
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    needs_member_id: bool = True
    """v4+: a dynamic member must rejoin with its assigned id (KIP-394)."""
    can_skip_assignment: bool = True
    """v9+: a static leader may get the members without computing assignments (KIP-814)."""


class JoinedMember(NamedTuple):
    """A member in the response to the leader."""

    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinResult(NamedTuple):
    """The result of a join."""

    error: GroupError
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


class SyncRequest(NamedTuple):
    """The fields of SyncGroup that the group uses."""

    identity: MemberIdentity
    generation: int
    protocol_type: str | None
    """None before v5: not checked."""
    protocol: str | None
    assignments: dict[str, bytes]


class TxnCommitRequest(NamedTuple):
    """The fields of TxnOffsetCommit that the coordinator uses."""

    producer: TxnProducer
    identity: MemberIdentity
    generation: int
    """-1: not checked for a group without members, or if the identity is empty."""
    offsets: Sequence[tuple[OffsetKey, OffsetValue]]


class SyncResult(NamedTuple):
    """The result of a sync."""

    error: GroupError
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Reply(NamedTuple):
    """Effect: complete the pending request with this number."""

    waiter: int
    result: JoinResult | SyncResult


class Persist(NamedTuple):
    """Effect: write this as the group's record, then call `persisted(ticket, …)`. Writes keep their order."""

    ticket: int
    value: GroupValue


Effect = Reply | Persist
