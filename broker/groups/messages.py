"""What goes into a group's state machine and what comes out: requests, answers, effects. Plain data.

Entry: `JoinRequest` and `SyncRequest` in, `Effect` out.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.groups.errors import GroupError
from broker.groups.members import MemberIdentity, Protocols
from broker.groups.records import GroupValue

NO_GENERATION = -1


class Now(NamedTuple):
    """Both clocks at one moment."""

    mono_ms: int
    """For timers; never goes back."""
    wall_ms: int
    """For what is persisted and shown: milliseconds since the Unix epoch."""


class Limits(NamedTuple):
    """What the configuration says about every group."""

    initial_rebalance_delay_ms: int
    max_size: int
    """Members a group may have."""


class JoinRequest(NamedTuple):
    """JoinGroup, as far as a group cares."""

    identity: MemberIdentity
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    needs_member_id: bool = True
    """v4+: a dynamic member must come back with the id it was given (KIP-394)."""
    can_skip_assignment: bool = True
    """v9+: a static leader may be told the members without having to assign (KIP-814)."""


class JoinedMember(NamedTuple):
    """What the leader is told of a member."""

    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinResult(NamedTuple):
    """The answer to a join."""

    error: GroupError
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


class SyncRequest(NamedTuple):
    """SyncGroup, as far as a group cares."""

    identity: MemberIdentity
    generation: int
    protocol_type: str | None
    """None before v5: not checked."""
    protocol: str | None
    assignments: dict[str, bytes]


class SyncResult(NamedTuple):
    """The answer to a sync."""

    error: GroupError
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Reply(NamedTuple):
    """Effect: answer the request that waits under this number."""

    waiter: int
    result: JoinResult | SyncResult


class Persist(NamedTuple):
    """Effect: make this the group's record, then call `persisted(ticket, …)`. In the order given."""

    ticket: int
    value: GroupValue


Effect = Reply | Persist
