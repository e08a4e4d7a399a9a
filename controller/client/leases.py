"""`LeaseClient`: leases of readers outside the cluster (docs/design/0018-readers-outside.md).

Each request is one command, sent as `ControllerClient` sends all of them: effective at most once, and in the local
image when it returns. All raise `UnsupportedLevel` below feature level 3, and `OutcomeUnknown`.

Entry: `LeaseClient`, as `ControllerClient.leases`.
"""

from __future__ import annotations

from tidelog.controller.client.replica_sets import SendCommand
from tidelog.controller.model.leases import EndLease, LeaseRecord, RenewLease, TakeLease

AS_LONG_AS_ALLOWED_MS = (1 << 63) - 1
"""The active controller lowers it to its setting."""


class LeaseClient:
    """Requests about leases; see the module docstring."""

    def __init__(self, send: SendCommand) -> None:
        self._send = send

    async def take(self, holder: str, ttl_ms: int, hold_ms: int = AS_LONG_AS_ALLOWED_MS) -> LeaseRecord:
        """Hold the present version; see `TakeLease`. Raises `InvalidInput`, `Overloaded` when there are too many."""
        found: LeaseRecord = await self._send(TakeLease(holder, ttl_ms, hold_ms), LeaseRecord)
        return found

    async def renew(self, lease_id: int, ttl_ms: int, version: int = 0) -> LeaseRecord:
        """Keep a lease, and move it on to a newer version; see `RenewLease`. Raises `LeaseOver`, `InvalidInput`."""
        found: LeaseRecord = await self._send(RenewLease(lease_id, ttl_ms, version), LeaseRecord)
        return found

    async def end(self, lease_id: int) -> None:
        """End a lease, if it has not ended."""
        await self._send(EndLease(lease_id), None)
