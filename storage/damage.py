"""`DamageLog`: which bytes in the bucket are known to be damaged, for operators. Sans-IO.

Whoever reads an object and finds that it fails its check twice (the second time from the bucket anew) notes it here;
whoever finds it right again takes it out. So the log says what is wrong *now*, and reading what a person has restored
clears it. Nothing depends on it for safety: damaged bytes are refused wherever they are read, whether noted or not,
and a new process finds them again when it reads them.

Bounded: `MAX_ENTRIES` places; what comes beyond is refused all the same, and noted when there is room.

Entry: `DamageLog`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import TidelogError

log = logging.getLogger(__name__)

MAX_ENTRIES = 1_000


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place of an object."""

    object_id: int
    key: str
    position: int
    """Byte of the object; -1: the whole of it (an index that cannot be read, an object that is not there)."""
    stream_id: int
    """Whose data cannot be read because of it; -1: that of every stream in the object."""
    start_offset: int
    """Of the stream offsets that cannot be read; -1 with `stream_id`."""
    end_offset: int
    message: str


class DamageLog:
    """See the module."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], Damage] = {}
        self.failed_checks = 0
        """Blocks and indexes that failed their check when they came, since the start; some were right at the second
        look: then the transfer was at fault."""
        self.refused = 0
        """Reads that were refused because of damage, since the start."""

    def __len__(self) -> int:
        return len(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def all(self) -> Iterable[Damage]:
        """What is known, in the order in which it was found."""
        return tuple(self._places.values())

    def note(self, damage: Damage) -> None:
        """This place is damaged; told to the log once, as long as it stays so."""
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
        log.error("damaged data in the bucket is not served", extra={**fields, "error": damage.message})

    def note_whole(self, object_id: int, key: str, error: TidelogError) -> None:
        """Nothing of this object can be read."""
        self.note(Damage(object_id, key, -1, -1, -1, -1, error.message))

    def heal(self, object_id: int, position: int) -> None:
        """This place was read and is right."""
        if self._places:
            found = self._places.pop((object_id, position), None)
            if found is not None:
                log.info("data in the bucket is right again", extra={"key": found.key, "position": position})

    def forget_object(self, object_id: int) -> None:
        """The object is right as a whole, or does not count any more."""
        for place in [place for place in self._places if place[0] == object_id]:
            self.heal(*place)
