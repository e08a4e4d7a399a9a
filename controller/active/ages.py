"""`Ages`: for how long something has been seen, by the monotonic clock of the active controller.

Nothing is decided by wall clocks (rule 16). A new active controller counts from when it sees a thing first; so does one
that is active again, in a later term.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `Ages`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from tidelog.controller.image.image import Image

Key = TypeVar("Key", bound=Hashable)


class Ages(Generic[Key]):
    """When each thing was seen first, of those that have been seen each time since."""

    def __init__(self) -> None:
        self._term = -1
        self._since: dict[Key, float] = {}

    def look(self, image: Image, present: Iterable[Key], now_s: float) -> dict[Key, float]:
        """Return the seconds for which each of the present things has been there."""
        term = image.cluster.active_term if image.cluster is not None else -1
        known = self._since if term == self._term else {}
        self._term = term
        self._since = {each: known.get(each, now_s) for each in present}
        return {each: now_s - since_s for each, since_s in self._since.items()}
