"""The check of a client's leader epoch (KIP-320), shared by every API with this field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.stream.errors import FencedLeaderEpoch, UnknownLeaderEpoch

if TYPE_CHECKING:
    from tidelog.broker.partitions.read_replicas import FollowedLog
    from tidelog.stream.partition_log import PartitionLog

NO_EPOCH = -1


def check_leader_epoch(log: PartitionLog | FollowedLog, epoch: int) -> None:
    """Refuse a client whose metadata is older or newer than this leader. -1 disables the check.

    Raises `FencedLeaderEpoch` (74), `UnknownLeaderEpoch` (75).
    """
    if epoch in (NO_EPOCH, log.leader_epoch):
        return
    what = f"{log.topic}-{log.partition} has leader epoch {log.leader_epoch}, the request says {epoch}"
    raise FencedLeaderEpoch(what) if epoch < log.leader_epoch else UnknownLeaderEpoch(what)
