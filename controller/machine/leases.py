"""Commands about leases of readers outside the cluster (`tidelog.controller.model.leases`).

Invariants: the version of a lease never decreases and is never newer than the log; a lease is removed only by its
reader, by an operator, or when it has expired in cluster time.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.leases import (
    MAX_HOLDER_CHARS,
    MAX_LEASES,
    MAX_TTL_MS,
    MIN_TTL_MS,
    EndLease,
    ExpireLeases,
    LeaseOver,
    LeaseRecord,
    RenewLease,
    TakeLease,
)
from tidelog.runtime.errors import InvalidInput, Overloaded


def take_lease(tables: Tables, command: TakeLease) -> LeaseRecord:
    """See `TakeLease`. Raises `InvalidInput`, `Overloaded`."""
    if not 0 < len(command.holder) <= MAX_HOLDER_CHARS:
        raise InvalidInput(f"the holder of a lease is named by 1 to {MAX_HOLDER_CHARS} characters")
    _check_ttl(command.ttl_ms)
    if command.hold_ms <= 0:
        raise InvalidInput(f"a lease cannot hold a version for {command.hold_ms} ms")
    if len(tables.leases) >= MAX_LEASES:
        raise Overloaded(
            f"there are {len(tables.leases)} leases of readers, and may be {MAX_LEASES}",
            hint="`tidelog lease list` shows them; `tidelog lease end ID` ends one",
        )
    lease_id = tables.take_ids("lease", 1, 1)
    ends_ms = tables.time_ms + command.hold_ms
    expires_ms = min(tables.time_ms + command.ttl_ms, ends_ms)
    version = tables.log_index
    lease = LeaseRecord(lease_id, command.holder, version, tables.now_ms, expires_ms, ends_ms, command.hold_ms)
    tables.leases.put(lease_id, lease)
    return lease


def renew_lease(tables: Tables, command: RenewLease) -> LeaseRecord:
    """See `RenewLease`. Raises `LeaseOver`, `InvalidInput`."""
    _check_ttl(command.ttl_ms)
    if command.version > tables.log_index:
        raise InvalidInput(f"the metadata has not reached version {command.version}: it is at {tables.log_index}")
    lease = tables.leases.get(command.lease_id)
    if lease is None:
        raise LeaseOver(f"lease {command.lease_id} has ended", hint="take another lease, and look the objects up again")
    version, ends_ms = lease.version, lease.ends_ms
    if command.version > version:
        version, ends_ms = command.version, tables.time_ms + lease.hold_ms
    if ends_ms <= tables.time_ms:
        raise LeaseOver(
            f"lease {lease.id} of {lease.holder} has held version {version} for {lease.hold_ms / 1000:g} s, its bound",
            hint="take another lease, and look the objects up again; controller.lease_max_hold_ms is the bound",
        )
    expires_ms = max(lease.expires_ms, min(tables.time_ms + command.ttl_ms, ends_ms))
    renewed = msgspec.structs.replace(lease, version=version, ends_ms=ends_ms, expires_ms=expires_ms)
    tables.leases.put(lease.id, renewed)
    return renewed


def end_lease(tables: Tables, command: EndLease) -> None:
    """See `EndLease`."""
    if command.lease_id in tables.leases:
        tables.leases.delete(command.lease_id)


def expire_leases(tables: Tables, command: ExpireLeases) -> None:
    """See `ExpireLeases`."""
    for lease_id in command.lease_ids[:MAX_LEASES]:
        lease = tables.leases.get(lease_id)
        if lease is not None and lease.expires_ms <= tables.time_ms:
            tables.leases.delete(lease_id)


def _check_ttl(ttl_ms: int) -> None:
    if not MIN_TTL_MS <= ttl_ms <= MAX_TTL_MS:
        raise InvalidInput(f"the time to live of a lease is {MIN_TTL_MS} to {MAX_TTL_MS} ms, not {ttl_ms}")
