"""`MasterWatch`: the active controller's part in elections of replica sets with several members.

It begins an election when a master is dead, or there is none; what is decided follows from the promises alone
(`tidelog.controller.machine.replica_elections`). The work is derived from the image each time, so what was missed, by a
failed command or a change of the active controller, is found by the next scan.

An election waits for the promise of a living master. One that lives and does not promise, because its disk hangs, would
stop its replica set: after `PATIENCE_S` the election begins anew, and waits for nobody who is not needed.

Sans-IO: times are seconds of a monotonic clock, given by the caller. Entry: `MasterWatch`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import NO_BROKER
from tidelog.controller.model.replica_set_commands import BeginElection
from tidelog.controller.model.replication import has_several

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long an election waits for a living master, or for the designated broker: several times a slow disk's sync."""


class MasterWatch:
    """When each election was seen first, and what is to be begun."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}
        """By replica set: the epoch of the election under way, and when it was seen."""

    def due(self, image: Image, now_s: float) -> Iterator[BeginElection]:
        """Iterate over the elections to begin."""
        seen: dict[int, tuple[int, float]] = {}
        found: list[BeginElection] = []
        for record in sorted(image.replica_sets.values(), key=lambda each: each.id):
            if not has_several(record):
                continue
            election = image.election(record.id)
            if election is None:
                if image.master_of(record.id) is None:
                    what = f"broker {record.master} is dead" if record.master != NO_BROKER else "there is no master"
                    found.append(BeginElection(record.id, record.master_epoch, what))
                continue
            known = self._since.get(record.id)
            if known is None or known[0] != record.master_epoch:
                known = record.master_epoch, now_s
            seen[record.id] = known
            if election.is_patient and now_s - known[1] >= PATIENCE_S:
                reason = f"{election.reason}; not all promised in time"
                found.append(
                    BeginElection(record.id, record.master_epoch, reason, election.designated, is_patient=False)
                )
        self._since = seen
        for command in found:
            logger.info("election begun", extra={"replica_set": command.replica_set_id, "because": command.reason})
            yield command
