"""`MoveAges`: how long partitions have been moving, by the monotonic clock of the active controller.

The metadata has the wall-clock time at which a move was committed, for users. Nothing is decided by it: a clock that is
set back would hold a move up for as long. A new active controller counts from when it sees a move first.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `MoveAges`.
"""

from __future__ import annotations

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import PartitionKey


class MoveAges:
    """When each move was seen first."""

    def __init__(self) -> None:
        self._since: dict[PartitionKey, tuple[int, int, float]] = {}
        """Target and commit time of the move, and when it was seen."""

    def look(self, image: Image, now_s: float) -> dict[PartitionKey, float]:
        """Return the seconds for which each partition has been moving to its present target."""
        found: dict[PartitionKey, tuple[int, int, float]] = {}
        for record in image.moving():
            key = (record.topic_id, record.index)
            move = (record.target, record.moving_since_ms)
            known = self._since.get(key)
            found[key] = known if known is not None and known[:2] == move else (*move, now_s)
        self._since = found
        return {key: now_s - since_s for key, (_, _, since_s) in found.items()}
