"""`BrokerSessions`: who is alive, by heartbeats and connections. Soft state of the active controller, never replicated.

A broker is alive while a heartbeat of its current registration is younger than the session time-out and the connection
that brought the newest one is open. Invariants: the end of an old connection says nothing about a broker that has
reconnected since (hot-tier.md C, lessons); brokers send heartbeats to every controller, so that a new active one knows
who lives, and grants whom it has never heard one full time-out, which ends when nobody listens at that broker's
address any more (`unheard`); a broker whose `alive` in the metadata differs from
what is here is reported at each scan until they agree: no event is lost.

Being dead is one thing, being taken over from another (`stays_away`). A cluster that starts or stops as a whole keeps
its placement, however long its processes take beside each other: when no broker was alive and a first one comes back,
those that have not been heard since get the start-up time, and one that said that it leaves (the last heartbeat of a
stop in good order) gets a session time-out, for the others may be about to leave, too. Controllers come and go
meanwhile. One that has heard nobody yet may have been started with its cluster or into a running one: brokers say how
long they have been registered, and the start-up time counts from the first of them.

Sans-IO: times are seconds of a monotonic clock, passed in. Entry: `BrokerSessions`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from controller.model import BrokerRecord

GRACE_S = 1.0
"""What a broker that looks dead to a new active controller gets to say otherwise: one heartbeat's time."""

UNHEARD_S = 3.0
"""After so long, or half a session, a new active controller asks at the addresses of brokers that it never heard. One
that lives and can reach it had said so several times by then."""

STARTUP_SESSIONS = 3
"""The start-up time in session time-outs, unless it is configured: brokers may come back after the first one did."""


class _Session(NamedTuple):
    registration_epoch: int
    deadline_s: float
    connection: Hashable | None


class Verdict(NamedTuple):
    """A broker whose `alive` should become what it says."""

    broker_id: int
    registration_epoch: int
    alive: bool


class BrokerSessions:
    """See the module."""

    def __init__(self, timeout_s: float, startup_s: float = 0.0) -> None:
        assert timeout_s > 0
        self._timeout_s = timeout_s
        self._startup_s = startup_s or STARTUP_SESSIONS * timeout_s
        self._sessions: dict[int, _Session] = {}
        self._unheard: set[int] = set()
        """Who has a session only because the metadata says that it lives."""
        self._seen_dead: set[int] = set()
        self._left: dict[int, float] = {}
        self._heard: set[int] = set()
        """Who was alive at some time since no broker was."""
        self._active_since_s = float("inf")
        self._startup_ends_s = float("-inf")
        self._counts_ages = False
        """Whether this controller may have missed the start, and goes by what brokers say."""

    def activated(self, now_s: float) -> None:
        """This controller became active. What it saw as a follower counts, but nobody is dead before a short grace."""
        self._seen_dead.clear()
        self._active_since_s = now_s
        for broker_id, session in self._sessions.items():
            if session.deadline_s <= now_s:
                grace_s = min(GRACE_S, self._timeout_s)
                self._sessions[broker_id] = session._replace(deadline_s=now_s + grace_s, connection=None)

    def heartbeat(
        self, broker_id: int, registration_epoch: int, connection: Hashable, now_s: float, age_s: float = 0.0
    ) -> None:
        """A heartbeat of the current registration arrived; the broker's process registered first `age_s` ago."""
        if not any(session.deadline_s > now_s for each, session in self._sessions.items() if each in self._heard):
            self._counts_ages = not self._heard
            self._startup_ends_s = float("inf") if self._counts_ages else now_s + self._startup_s
            self._seen_dead.clear()
            self._heard.clear()
        if self._counts_ages:
            self._startup_ends_s = min(self._startup_ends_s, now_s - age_s + self._startup_s)
        self._heard.add(broker_id)
        self._unheard.discard(broker_id)
        self._left.pop(broker_id, None)
        self._sessions[broker_id] = _Session(registration_epoch, now_s + self._timeout_s, connection)
        self._seen_dead.discard(broker_id)

    def leaving(self, broker_id: int, now_s: float) -> None:
        """A broker that stops in good order says so, right before its session ends."""
        self._left[broker_id] = now_s

    def stays_away(self, broker_id: int, now_s: float) -> bool:
        """Whether others may take over from a dead broker: at once if its session ended here.

        Of one that was dead already when this controller became active, nothing is known: the whole cluster may just be
        starting, and its broker with it. It gets a session time-out. See the module for what else is waited for.
        """
        if now_s < self._startup_ends_s and broker_id not in self._heard:
            return False
        if now_s < self._left.get(broker_id, float("-inf")) + self._timeout_s:
            return False
        return broker_id in self._seen_dead or now_s >= self._active_since_s + self._timeout_s

    def connection_closed(self, connection: Hashable) -> bool:
        """End the sessions whose newest heartbeat came by this connection; whether there was one."""
        mine = [broker_id for broker_id, session in self._sessions.items() if session.connection is connection]
        for broker_id in mine:
            self._sessions[broker_id] = self._sessions[broker_id]._replace(deadline_s=float("-inf"), connection=None)
        return bool(mine)

    def unheard(self, brokers: Iterable[BrokerRecord], now_s: float) -> list[BrokerRecord]:
        """Who is alive by the metadata alone. One that is dead, and was so when this controller started, never had a
        connection to it that could close."""
        if now_s < self._active_since_s + min(UNHEARD_S, self._timeout_s / 2):
            return []
        return [record for record in brokers if self._lives_unheard(record, now_s)]

    def _lives_unheard(self, record: BrokerRecord, now_s: float) -> bool:
        session = self._sessions.get(record.id)
        return (
            record.id in self._unheard
            and session is not None
            and session.registration_epoch == record.registration_epoch
            and session.deadline_s > now_s
        )

    def nobody_listens(self, record: BrokerRecord, now_s: float) -> bool:
        """End the session of a broker, unless it was heard or registered since; whether it was ended.

        To be taken for dead by mistake costs a broker a restart, never an acknowledged record (hot-tier.md C10).
        """
        if not self._lives_unheard(record, now_s):
            return False
        self._sessions[record.id] = self._sessions[record.id]._replace(deadline_s=float("-inf"))
        return True

    def scan(self, brokers: Iterable[BrokerRecord], now_s: float) -> list[Verdict]:
        """What the metadata should say otherwise. A live broker not seen before gets one full time-out."""
        verdicts: list[Verdict] = []
        for record in brokers:
            session = self._sessions.get(record.id)
            if session is None or session.registration_epoch != record.registration_epoch:
                if not record.alive:
                    continue
                session = _Session(record.registration_epoch, now_s + self._timeout_s, None)
                self._sessions[record.id] = session
                self._unheard.add(record.id)
            alive = session.deadline_s > now_s
            if not alive and record.alive:
                self._seen_dead.add(record.id)
            if alive != record.alive:
                verdicts.append(Verdict(record.id, record.registration_epoch, alive))
        return verdicts
