"""`ReplicationPolicy`: what an operator sets for a replica set, and the write quorum that follows (RIP-34).

    all_ack_in_sync_state_set   quorum                          refused before the append
    ─────────────────────────   ─────────────────────────────   ────────────────────────────────
    no                          in_sync_replicas                fewer in sync than the quorum
    no, and auto                fewer, as far as members are    fewer in sync than the quorum
                                missing; min_in_sync_replicas
                                at least
    yes                         the whole SyncStateSet          it has fewer than min_in_sync_replicas

A member is *in sync* when it is connected and has either acknowledged all but `max_gap_bytes`, or caught up within the
last `slave_timeout_s`: what is on its way at full load is no lag. (RocketMQ looks at the gap alone; with its 256 KiB a
disk that writes 300 MB/s would refuse producers whenever an acknowledgement takes a millisecond.)

Entry: `ReplicationPolicy`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.runtime.errors import InvalidInput

MAX_REPLICAS = 9
"""Bound on the members of a replica set, learners included."""


@dataclass(frozen=True, slots=True)
class ReplicationPolicy:
    """The settings of one replica set."""

    total_replicas: int = 1
    """Members wanted, 1 to `MAX_REPLICAS`."""
    in_sync_replicas: int = 1
    """Members that must hold a byte before it is acknowledged, 1 to `total_replicas`."""
    min_in_sync_replicas: int = 1
    """The least that `enable_auto_in_sync_replicas` may go down to, 1 to `in_sync_replicas`; with all-ack, the smallest
    SyncStateSet that takes writes."""
    enable_auto_in_sync_replicas: bool = False
    """Whether the quorum follows the number of members in sync (auto-degrade)."""
    all_ack_in_sync_state_set: bool = False
    """Whether every member of the SyncStateSet must acknowledge."""
    max_gap_bytes: int = 256 << 10
    """A member this far behind is not in sync unless it has caught up lately (`ha_max_gap_not_in_sync`)."""
    slave_timeout_s: float = 3.0
    """A member that had everything within this time is in sync, however far behind it is now."""
    max_behind_s: float = 15.0
    """A member that has not caught up for so long leaves the SyncStateSet (`ha_max_time_slave_not_catchup`)."""

    def check(self) -> ReplicationPolicy:
        """Return it. Raises `InvalidInput` for values that contradict each other."""
        if not 1 <= self.total_replicas <= MAX_REPLICAS:
            raise InvalidInput(f"total_replicas is {self.total_replicas}: 1 to {MAX_REPLICAS}")
        if not 1 <= self.min_in_sync_replicas <= self.in_sync_replicas <= self.total_replicas:
            raise InvalidInput(
                f"min_in_sync_replicas {self.min_in_sync_replicas}, in_sync_replicas {self.in_sync_replicas} and"
                f" total_replicas {self.total_replicas}: each must be at least 1 and no larger than the next"
            )
        if self.max_gap_bytes < 1 or self.slave_timeout_s <= 0 or self.max_behind_s <= 0:
            raise InvalidInput("max_gap_bytes, slave_timeout_s and max_behind_s must be above 0")
        return self

    def quorum(self, in_sync: int, size: int) -> int:
        """Return the write quorum for `in_sync` members in sync and a SyncStateSet of `size` members."""
        if self.all_ack_in_sync_state_set:
            return size
        if self.enable_auto_in_sync_replicas:
            return max(self.min_in_sync_replicas, min(self.in_sync_replicas, in_sync))
        return self.in_sync_replicas
