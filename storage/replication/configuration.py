"""`SetConfiguration`: the SyncStateSet of a replica set and its write quorum, one value that changes as a whole.

With S members of which q must hold a byte before it is confirmed, a master is elected by |S| - q + 1 promises: any q
and any |S| - q + 1 of the same S members have one in common (docs/design/0015-hot-tier.md, section 1). The controller
keeps the configuration; its `number` is the SyncStateSet epoch, which grows with each change.

A member is a `WalReplica`: a broker *and* the WAL that it had when it joined. A broker that comes back with another
disk, or an empty one, is another replica, which holds nothing that was counted (rule 13; KIP-853 does so for voters).

Invariants: 1 <= quorum <= number of members; a broker is a member once.

Entry: `SetConfiguration`, `confirmable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class WalReplica(NamedTuple):
    """One copy of the WAL of a replica set."""

    broker_id: int
    """int32."""
    wal_id: str
    """Random, made with the copy; another disk, or a copy that begins anew after it was refused, has another one."""


class SetConfiguration(NamedTuple):
    """The members that count, and how many of them must hold a byte."""

    number: int
    """The SyncStateSet epoch (int32, >= 0)."""
    members: frozenset[WalReplica]
    """The master's replica included. Learners are never in it."""
    quorum: int
    """Members, 1 to all, that must hold a byte durably before it is confirmed."""

    def check(self) -> SetConfiguration:
        """Return it; assert the invariants."""
        assert 1 <= self.quorum <= len(self.members), self
        assert len({member.broker_id for member in self.members}) == len(self.members), self
        return self

    @property
    def promises_needed(self) -> int:
        """Return the number of promises that elect a master."""
        return len(self.members) - self.quorum + 1

    def held_by_quorum(self, held: Mapping[WalReplica, int]) -> int:
        """Return the largest offset up to which `quorum` members hold the WAL; -1 if fewer hold anything.

        `held` has the offset up to which each replica has the master's bytes durably.
        """
        ends = sorted((held.get(member, -1) for member in self.members), reverse=True)
        return ends[self.quorum - 1]

    def same_terms(self, other: SetConfiguration) -> bool:
        """Return whether members and quorum are equal, whatever the numbers."""
        return self.members == other.members and self.quorum == other.quorum


def confirmable(configurations: Iterable[SetConfiguration], held: Mapping[WalReplica, int]) -> int:
    """Return the offset up to which every configuration that may be in force has its quorum."""
    return min(configuration.held_by_quorum(held) for configuration in configurations)
