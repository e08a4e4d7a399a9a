"""`DamageLog`: the known damage in the bucket, for operators. Sans-IO.

A reader that finds an object to fail its check twice (the second time read from the bucket again) records it here; a
reader that finds it intact later removes the entry. So the log shows the *current* damage, and reading an object that
was restored clears it. Safety does not depend on it: damaged bytes are refused on every read, recorded or not,
and a new process detects them again when it reads them.

Bounded: `MAX_ENTRIES` entries; further damage is refused all the same, and recorded when there is room.

Entry: `DamageLog`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from tidelog.runtime.errors import TidelogError

logger = logging.getLogger(__name__)

MAX_ENTRIES = 1_000


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place of an object."""

    object_id: int
    key: str
    position: int
    """Byte of the object; -1: the whole object (an unreadable index, a missing object)."""
    stream_id: int
    """Stream whose data cannot be read because of it; -1: every stream in the object."""
    start_offset: int
    """First stream offset that cannot be read; -1 with `stream_id`."""
    end_offset: int
    message: str


class DamageLog:
    """The known damage; see the module."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], Damage] = {}
        self.failed_checks = 0
        """Blocks and indexes that failed their first check since the start; some passed the second: a transfer
        error."""
        self.refused = 0
        """Reads refused because of damage since the start."""

    def __len__(self) -> int:
        return len(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def all(self) -> Iterable[Damage]:
        """Return the known damage, in the order of discovery."""
        return tuple(self._places.values())

    def note(self, damage: Damage) -> None:
        """Record damage; it is logged once for as long as it persists."""
        place = (damage.object_id, damage.position)
        if place in self._places or len(self._places) >= MAX_ENTRIES:
            return
        self._places[place] = damage
        fields = {
            "key": damage.key,
            "position": damage.position,
            "stream": damage.stream_id,
            "start_offset": damage.start_offset,
            "end_offset": damage.end_offset,
        }
        logger.error("damaged data in the bucket is not served", extra={**fields, "error": damage.message})

    def note_whole(self, object_id: int, key: str, error: TidelogError) -> None:
        """Record that nothing of this object can be read."""
        self.note(Damage(object_id, key, -1, -1, -1, -1, error.message))

    def heal(self, object_id: int, position: int) -> None:
        """Remove a place that was read and found intact."""
        if self._places:
            found = self._places.pop((object_id, position), None)
            if found is not None:
                logger.info("damaged data in the bucket was restored", extra={"key": found.key, "position": position})

    def forget_object(self, object_id: int) -> None:
        """Remove an object that is intact as a whole, or no longer committed."""
        for place in [place for place in self._places if place[0] == object_id]:
            self.heal(*place)
