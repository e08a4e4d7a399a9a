"""A consumer's fetch sessions, one for each broker (KIP-227): what it has told the broker, and what it tells it next.

As Java's client does: the first request of a session lists all partitions; the next ones only those that are new, that
are to be read from another offset, or that are not wanted any more. A session that a broker does not know, or whose
answer was lost, is replaced by a new one; the request names the old one, so that the broker drops it.

Entry: `ClientSessions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Place = tuple[str, int]
"""Topic and partition."""

NONE, FULL, LAST = 0, 0, -1
"""No session; the epoch that begins one; the epoch of a request without one."""
LARGEST = (1 << 31) - 1


class InSession(NamedTuple):
    """What one request says of its session."""

    session: int = NONE
    epoch: int = LAST
    forgotten: tuple[Place, ...] = ()


WITHOUT = InSession()


@dataclass(slots=True)
class _ClientSession:
    id: int = NONE
    epoch: int = FULL
    """Of the next request."""
    told: dict[Place, int] = field(default_factory=dict)
    """Place → the offset that the broker will read from."""

    def renew(self) -> None:
        """Begin a session with the next request, which ends this one."""
        self.epoch = FULL
        self.told.clear()


class ClientSessions:
    """The sessions of one consumer, by broker."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, int], _ClientSession] = {}

    def request(self, address: tuple[str, int], wanted: Mapping[Place, int]) -> tuple[InSession, dict[Place, int]]:
        """Return what the next request says of its session, and the partitions that it lists, with their offsets."""
        session = self._sessions.setdefault(address, _ClientSession())
        listed = {place: offset for place, offset in wanted.items() if session.told.get(place) != offset}
        forgotten = tuple(place for place in session.told if place not in wanted)
        session.told = dict(wanted)
        return InSession(session.id, session.epoch, forgotten), listed

    def answered(self, address: tuple[str, int], error: int, session_id: int) -> None:
        """The broker has answered. `session_id` `NONE`: there is no session, and the next request lists all again."""
        session = self._sessions[address]
        if error or session_id == NONE:
            if not error:
                session.id = NONE
            session.renew()
        else:
            session.id = session_id
            session.epoch = 1 if session.epoch == LARGEST else session.epoch + 1

    def lost(self, address: tuple[str, int]) -> None:
        """Nobody knows whether the broker has seen the request."""
        self._sessions[address].renew()
