"""The members of a classic group: identities, supported protocols, leader. Sans-I/O, independent of the group's state.

Metadata and assignments are opaque bytes: Connect, Schema Registry and others use their own protocol types. Only
`subscribed_topics` parses them, for protocol type `consumer`, because offset expiry depends on the subscribed topics.

Invariants: a static member is reachable by its instance id, and by only one member id; the leader is a member, or None
if there are no members; members keep the order in which they joined.

Entry: `Members`.
"""

from __future__ import annotations

import random
import struct
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.records import GroupValue, MemberValue

CONSUMER_PROTOCOL_TYPE = "consumer"

Protocols = tuple[tuple[str, bytes], ...]
"""`(name, metadata)` in the member's order of preference."""

MEMBER_BYTES = 2048
"""Memory of a member, or of an assigned id, besides what its client chose."""
PROTOCOL_BYTES = 128
"""Memory of a protocol, besides the characters of its name and its metadata."""
MAX_SUBSCRIBED = 131_072
"""Topics that are read of all subscriptions of a group, some 0.1 s: a request has room for eight million names."""

_INT16 = Struct(">h")
_INT32 = Struct(">i")


class MemberIdentity(NamedTuple):
    """The identification of a member in a request."""

    member_id: str
    """Empty: not yet assigned, or (LeaveGroup) identified by instance id."""
    instance_id: str | None = None
    """Set for a static member (KIP-345)."""


@dataclass(slots=True)
class Member:
    """One member. A waiter is the number of a pending request in `tidelog.broker.groups.shards`."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    join_waiter: int | None = None
    sync_waiter: int | None = None
    is_new: bool = False
    """The member does not know its member id yet, so it cannot send heartbeats."""
    counted_bytes: int = 0
    """What it counts for in `Members.held_bytes`."""

    def metadata(self, protocol: str | None) -> bytes:
        """The member's metadata for a protocol; empty if it does not support it."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")

    def own_bytes(self) -> int:
        """The memory that it takes."""
        texts = _text_bytes(self.member_id) + _text_bytes(self.client_id) + _text_bytes(self.instance_id or "")
        return MEMBER_BYTES + texts + protocols_bytes(self.protocols) + len(self.assignment)


def protocols_bytes(protocols: Protocols) -> int:
    """The memory that protocols and their metadata take."""
    return sum(PROTOCOL_BYTES + _text_bytes(name) + len(metadata) for name, metadata in protocols)


def _text_bytes(text: str) -> int:
    return 4 * len(text)


class Members:
    """The members of one group."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Memory of all members and assigned ids."""
        self.leader: str | None = None
        self.pending: set[str] = set()
        """Member ids assigned with MEMBER_ID_REQUIRED whose clients have not rejoined (KIP-394)."""
        self._members: dict[str, Member] = {}
        self._static: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._members

    def get(self, member_id: str) -> Member | None:
        """Return a member; pending members are excluded."""
        return self._members.get(member_id)

    def static_member_id(self, instance_id: str | None) -> str | None:
        """The current member id of a static member."""
        return self._static.get(instance_id) if instance_id is not None else None

    def assign_id(self, member_id: str) -> None:
        """Note an id that a client was told to join with."""
        if member_id not in self.pending:
            self.pending.add(member_id)
            self.held_bytes += MEMBER_BYTES + _text_bytes(member_id)

    def _forget_id(self, member_id: str) -> None:
        if member_id in self.pending:
            self.pending.remove(member_id)
            self.held_bytes -= MEMBER_BYTES + _text_bytes(member_id)

    def count(self, member: Member) -> None:
        """Count the memory of a member anew; after each change of its protocols or its assignment."""
        own = member.own_bytes()
        self.held_bytes += own - member.counted_bytes
        member.counted_bytes = own

    def add(self, member: Member) -> None:
        """Add a member; the first member becomes the leader."""
        assert member.member_id not in self._members
        self._members[member.member_id] = member
        self._forget_id(member.member_id)
        self.count(member)
        if member.instance_id is not None:
            assert member.instance_id not in self._static
            self._static[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def remove(self, member_id: str) -> Member | None:
        """Remove a member. If it was the leader, the member that joined first replaces it."""
        self._forget_id(member_id)
        member = self._members.pop(member_id, None)
        if member is None:
            return None
        self.held_bytes -= member.counted_bytes
        if member.instance_id is not None:
            del self._static[member.instance_id]
        if self.leader == member_id:
            self.leader = next(iter(self._members), None)
        return member

    def rename(self, member: Member, new_id: str) -> None:
        """Assign a new member id to a restarted static member, which keeps its position and leadership."""
        assert member.instance_id is not None
        old_id = member.member_id
        self._members = {new_id if key == old_id else key: value for key, value in self._members.items()}
        self._static[member.instance_id] = new_id
        member.member_id = new_id
        if self.leader == old_id:
            self.leader = new_id
        self.count(member)

    def check(self, identity: MemberIdentity) -> GroupError:
        """Whether a request comes from a current member, and from the latest owner of its instance id."""
        if identity.instance_id is not None:
            current = self._static.get(identity.instance_id)
            if current is None:
                return GroupError.UNKNOWN_MEMBER_ID
            if current != identity.member_id:
                return GroupError.FENCED_INSTANCE_ID
        return GroupError.NONE if identity.member_id in self._members else GroupError.UNKNOWN_MEMBER_ID

    @property
    def awaiting_join(self) -> int:
        """How many members have joined the round in preparation."""
        return sum(member.join_waiter is not None for member in self._members.values())

    @property
    def rebalance_timeout_ms(self) -> int:
        """The maximum of the members' rebalance time-outs."""
        return max((member.rebalance_timeout_ms for member in self._members.values()), default=0)

    def elect_joined_leader(self) -> bool:
        """Elect a leader that has joined this round; False if no member has joined."""
        leader = self._members.get(self.leader) if self.leader is not None else None
        if leader is not None and leader.join_waiter is not None:
            return True
        for member in self._members.values():
            if member.join_waiter is not None:
                self.leader = member.member_id
                return True
        return False

    def common_protocols(self) -> set[str]:
        """The protocols that every member supports."""
        counts = Counter(name for member in self._members.values() for name in {name for name, _ in member.protocols})
        return {name for name, count in counts.items() if count == len(self._members)}

    def select_protocol(self) -> str:
        """Elect a protocol: each member votes for its preferred common one; a tie goes to the one voted for first."""
        common = self.common_protocols()
        assert common, "a member without a common protocol was admitted"
        votes = Counter(
            next(name for name, _ in member.protocols if name in common) for member in self._members.values()
        )
        return max(votes, key=votes.__getitem__)

    def values(self, protocol: str | None, assignments: dict[str, bytes] | None = None) -> tuple[MemberValue, ...]:
        """Return the members for the group's record, with `assignments` in place of the current assignments."""
        return tuple(
            MemberValue(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.session_timeout_ms,
                member.metadata(protocol),
                member.assignment if assignments is None else assignments.get(member.member_id, b""),
            )
            for member in self._members.values()
        )

    @classmethod
    def load(cls, value: GroupValue) -> Members:
        """Restore the members from a group's record."""
        members = cls()
        for one in value.members:
            members.add(
                Member(
                    one.member_id,
                    one.instance_id,
                    one.client_id,
                    one.client_host,
                    one.session_timeout_ms,
                    one.rebalance_timeout_ms,
                    ((value.protocol or "", one.subscription),),
                    one.assignment,
                )
            )
        if value.leader in members:
            members.leader = value.leader
        return members


def generate_member_id(prefix: str, rng: random.Random) -> str:
    """`<client or instance id>-<random UUID>`, as in Kafka."""
    return f"{prefix}-{uuid.UUID(int=rng.getrandbits(128), version=4)}"


def subscribed_topics(metadata: Sequence[bytes]) -> frozenset[str] | None:
    """All topics that members of protocol type `consumer` subscribe to; None if a subscription cannot be parsed, or if
    there are more than `MAX_SUBSCRIBED` in all that differ.

    Layout of a subscription (ConsumerProtocolSubscription): version int16, topics (int32 count, then strings of int16
    length), and further fields, which are ignored.
    """
    topics: set[str] = set()
    left = MAX_SUBSCRIBED
    try:
        for data in dict.fromkeys(metadata):
            (count,) = _INT32.unpack_from(data, _INT16.size)
            left -= max(count, 0)
            if left < 0:
                return None
            at = _INT16.size + _INT32.size
            for _ in range(count):
                (length,) = _INT16.unpack_from(data, at)
                at += _INT16.size
                if length < 0 or at + length > len(data):
                    return None
                topics.add(data[at : at + length].decode())
                at += length
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)
