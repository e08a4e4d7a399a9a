"""Leases of readers outside the cluster, and their commands (docs/design/0018-readers-outside.md), from level 3 on.

A lease says that its reader uses metadata of `LeaseRecord.version` or newer: objects that were destroyed later stay in
the bucket, and in the metadata, until the lease has ended (rule 6). Times are cluster time
(`tidelog.controller.machine.tables`), so no wall clock ends a lease.

What holds for all commands is in `tidelog.controller.model.commands`, which lists these, too.

Entry: `LeaseRecord`, `held_version`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidelog.controller.model.command import Command
from tidelog.runtime.errors import NotFound

MAX_LEASES = 1_000
"""Leases at a time. Each is one row of 100 bytes or so, and each renewal a command."""
MAX_HOLDER_CHARS = 256
MIN_TTL_MS = 1_000
MAX_TTL_MS = 3_600_000
NOTHING_HELD = (1 << 63) - 1
"""The version that is held while there is no lease: no object was destroyed after it."""


class LeaseOver(NotFound):
    """The lease has ended: objects that its reader knows may be deleted. Take another one, and look them up again."""


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `leases`, key: lease id (int64, never used again)."""

    id: int
    holder: str
    """Who reads, for operators."""
    version: int
    """The metadata version (log index) that the reader uses, or a newer one."""
    since_ms: int
    """When it was taken, by the proposer's wall clock."""
    expires_ms: int
    """Cluster time from which it may be ended, unless it is renewed."""
    ends_ms: int
    """Cluster time up to which `version` may be held: no renewal goes beyond it."""
    hold_ms: int
    """For how long one version may be held."""


def held_version(leases: Iterable[LeaseRecord]) -> int:
    """Return the oldest version that a lease holds: what was destroyed later stays. `NOTHING_HELD` without leases."""
    return min((lease.version for lease in leases), default=NOTHING_HELD)


class TakeLease(Command, frozen=True, array_like=True, tag=100):
    """Hold the present version. Value: the `LeaseRecord`.

    The reader looks objects up in metadata of that version or newer.
    """

    holder: str
    """1 to `MAX_HOLDER_CHARS` characters."""
    ttl_ms: int
    """Time without a renewal after which the lease may end: `MIN_TTL_MS` to `MAX_TTL_MS`."""
    hold_ms: int
    """For how long one version may be held. The active controller lowers it to its setting."""


class RenewLease(Command, frozen=True, array_like=True, tag=101):
    """Keep a lease for `ttl_ms` from now on, within its bound. Value: the `LeaseRecord`.

    Refused with `LeaseOver` when it has ended, or when its bound leaves no time.
    """

    lease_id: int
    ttl_ms: int
    version: int = 0
    """The version that the reader uses from now on, from which the bound counts anew; 0, or an older one: the same."""


class EndLease(Command, frozen=True, array_like=True, tag=102):
    """End a lease. Succeeds if it has ended."""

    lease_id: int


class ExpireLeases(Command, frozen=True, array_like=True, tag=103):
    """End those of the leases that have expired."""

    lease_ids: tuple[int, ...]


LeaseCommand = TakeLease | RenewLease | EndLease | ExpireLeases
