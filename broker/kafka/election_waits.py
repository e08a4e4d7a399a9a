"""Metadata requests that wait a little for an election of a replica set.

A client whose leader has died asks another broker at once, some milliseconds later: before the controllers know, and
before another master is elected. It would be told of the dead leader, and ask again only a second later. So the answer
waits until the replica set has a master again, for at most `WAIT_S` after this broker saw that it needs one: because
the metadata say so, or because this broker has lost its connection to the master that it follows. In a longer outage
nobody waits.

The client may be quicker than this broker: its connection to the dead leader ended at the same moment as this broker's.
So where WALs are replicated every answer waits for `GRACE_S` first.

Invariant: a wait is bounded for each replica set and outage, not for each request.

Entry: `ElectionWaits.wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import NO_BROKER
from tidelog.controller.model.replication import has_several
from tidelog.runtime.clock import Clock

WAIT_S = 2.0
"""Several times what detection, promises and an election take, also when the active controller died, too."""
GRACE_S = 0.02
"""Between two processes that wake up for the same event, on a machine that has other work."""
POLL_S = 0.02
"""Suspicions end without a change of the metadata."""


class ElectionWaits:
    """See the module. Used on the event loop's thread."""

    def __init__(self, image: Callable[[], Image], clock: Clock, suspects: Callable[[], Collection[int]]) -> None:
        """`suspects`: the brokers that this one follows, and has lost its connection to."""
        self._image = image
        self._clock = clock
        self._suspects = suspects
        self._since: dict[int, float] = {}
        """When each replica set was first seen to need a master (monotonic seconds)."""

    def pending(self) -> set[int]:
        """Return the replica sets to wait for."""
        image, now, suspects = self._image(), self._clock.monotonic(), self._suspects()
        without = {
            record.id
            for record in image.replica_sets.values()
            if has_several(record) and (record.master == NO_BROKER or record.master in suspects)
        }
        self._since = {each: self._since.get(each, now) for each in without}
        return {each for each in without if now < self._since[each] + WAIT_S}

    async def wait(self, topic_ids: Iterable[bytes] | None) -> None:
        """Return when the replica sets of these topics (None: of all) have masters, or it has taken too long."""
        pending = self.pending()
        if not pending and any(has_several(record) for record in self._image().replica_sets.values()):
            await self._clock.sleep(GRACE_S)
            pending = self.pending()
        if not pending:
            return
        wanted = self._sets_of(topic_ids)
        while pending & wanted:
            await self._clock.sleep(POLL_S)
            pending = self.pending()

    def _sets_of(self, topic_ids: Iterable[bytes] | None) -> set[int]:
        image = self._image()
        if topic_ids is None:
            return {each for each, count in image.index.partition_counts.items() if count}
        return {partition.replica_set for topic_id in topic_ids for partition in image.partitions(topic_id)}
