"""`BrokerSessions`: liveness of brokers, by heartbeats and connections. Soft state, never replicated.

A broker is alive while a heartbeat of its current registration is younger than the session time-out and the connection
that carried the newest one is open. Invariants: the close of an old connection does not end the session of a broker
that has reconnected (docs/protocols.md); brokers send heartbeats to every controller, so a new active controller knows
which are alive, and gives a broker without any heartbeat one full time-out, and one that looks dead a short grace; both
end early when its address has no listener (`unheard`); a broker whose `alive` in the metadata differs from its session
is reported at each scan until both agree, so no event is lost.

A dead broker is not taken over at once in every case (`stays_away`). A cluster that starts or stops as a whole keeps
its placement, however much the starts and stops of its processes are spread. When no broker was alive and a first one
comes back, brokers without a heartbeat since then get the start-up time. After a broker that announced its stop (in the
last heartbeat of a clean shutdown) takeovers wait for a session time-out, because the other brokers may be stopping,
too. Controllers may restart meanwhile: a controller without any heartbeat so far may have been started with its cluster
or into a running one. Brokers therefore report how long they have been registered, and the start-up time counts from
the first registration.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `BrokerSessions`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from tidelog.controller.model.records import BrokerRecord

GRACE_S = 1.0
"""Time for a broker that looks dead to a new active controller to send a heartbeat."""

UNHEARD_S = 3.0
"""Time, or half a session if that is less, after which a new active controller probes the addresses of brokers without
any heartbeat. A broker that is alive and can reach it would have sent several by then."""

STARTUP_SESSIONS = 3
"""The start-up time in session time-outs, unless configured: others may return that long after the first broker."""


class _Session(NamedTuple):
    registration_epoch: int
    deadline_s: float
    connection: Hashable | None


class Verdict(NamedTuple):
    """A broker whose `alive` in the metadata should change to this value."""

    broker_id: int
    registration_epoch: int
    alive: bool


class BrokerSessions:
    """Liveness of all brokers; see the module docstring."""

    def __init__(self, timeout_s: float, startup_s: float = 0.0) -> None:
        assert timeout_s > 0
        self._timeout_s = timeout_s
        self._configured_startup_s = startup_s
        self._sessions: dict[int, _Session] = {}
        self._unheard: set[int] = set()
        """Brokers that have a session only because the metadata has them alive, or by the grace of a new controller."""
        self._suspects: set[int] = set()
        """Those that look dead to this new active controller: their connection was closed, or their session over."""
        self._seen_dead: set[int] = set()
        self._left: dict[int, float] = {}
        self._heard: set[int] = set()
        """Brokers that have been alive since the last time when none was."""
        self._active_since_s = float("inf")
        self._startup_ends_s = float("-inf")
        self._counts_ages = False
        """Whether this controller may have missed the start of the cluster, and uses the ages that brokers report."""

    @property
    def _startup_s(self) -> float:
        return self._configured_startup_s or STARTUP_SESSIONS * self._timeout_s

    def use_timeout(self, timeout_s: float) -> None:
        """Use another session time-out, from each broker's next heartbeat on.

        Those that are silent keep the deadline that they have: a longer time-out brings no dead broker back.
        """
        assert timeout_s > 0
        self._timeout_s = timeout_s

    def activated(self, now_s: float) -> None:
        """Start over: this controller became active. Sessions known as a follower are kept, with a short grace."""
        self._seen_dead.clear()
        self._suspects.clear()
        self._active_since_s = now_s
        for broker_id, session in self._sessions.items():
            if session.deadline_s <= now_s:
                grace_s = min(GRACE_S, self._timeout_s)
                self._unheard.add(broker_id)
                self._suspects.add(broker_id)
                self._sessions[broker_id] = session._replace(deadline_s=now_s + grace_s, connection=None)

    def heartbeat(
        self, broker_id: int, registration_epoch: int, connection: Hashable, now_s: float, age_s: float = 0.0
    ) -> None:
        """Record a heartbeat of the current registration; the broker's process first registered `age_s` ago."""
        if not any(session.deadline_s > now_s for each, session in self._sessions.items() if each in self._heard):
            self._counts_ages = not self._heard
            self._startup_ends_s = float("inf") if self._counts_ages else now_s + self._startup_s
            self._seen_dead.clear()
            self._heard.clear()
        if self._counts_ages:
            self._startup_ends_s = min(self._startup_ends_s, now_s - age_s + self._startup_s)
        self._heard.add(broker_id)
        self._unheard.discard(broker_id)
        self._suspects.discard(broker_id)
        self._left.pop(broker_id, None)
        self._sessions[broker_id] = _Session(registration_epoch, now_s + self._timeout_s, connection)
        self._seen_dead.discard(broker_id)

    def leaving(self, broker_id: int, now_s: float) -> None:
        """Record that a broker announced its clean stop, right before its session ends."""
        self._left[broker_id] = now_s

    def stays_away(self, broker_id: int, now_s: float) -> bool:
        """Whether other brokers may take over from a dead broker: at once if its session ended here.

        A broker that was already dead when this controller became active may be starting with the whole cluster; it
        gets a session time-out. The module docstring lists the other delays.
        """
        if now_s < self._startup_ends_s and broker_id not in self._heard:
            return False
        if now_s < self._left.get(broker_id, float("-inf")) + self._timeout_s:
            return False
        return broker_id in self._seen_dead or now_s >= self._active_since_s + self._timeout_s

    def hears(self, broker_id: int) -> bool:
        """Whether the broker has sent a heartbeat by a connection that is not known to be closed."""
        session = self._sessions.get(broker_id)
        return session is not None and session.connection is not None

    def connection_closed(self, connection: Hashable) -> bool:
        """End the sessions whose newest heartbeat came by this connection. Returns whether there was one."""
        mine = [broker_id for broker_id, session in self._sessions.items() if session.connection is connection]
        for broker_id in mine:
            self._sessions[broker_id] = self._sessions[broker_id]._replace(deadline_s=float("-inf"), connection=None)
        return bool(mine)

    def unheard(self, brokers: Iterable[BrokerRecord], now_s: float) -> list[BrokerRecord]:
        """Return the brokers that are alive by the metadata alone, and are to be probed now.

        A broker that died before this controller started never had a connection to it that could close; one whose
        connection closed before this controller became active may have died with the one that was active.
        """
        is_early = now_s < self._active_since_s + min(UNHEARD_S, self._timeout_s / 2)
        return [
            record
            for record in brokers
            if self._lives_unheard(record, now_s) and (record.id in self._suspects or not is_early)
        ]

    def _lives_unheard(self, record: BrokerRecord, now_s: float) -> bool:
        session = self._sessions.get(record.id)
        return (
            record.id in self._unheard
            and session is not None
            and session.registration_epoch == record.registration_epoch
            and session.deadline_s > now_s
        )

    def nobody_listens(self, record: BrokerRecord, now_s: float) -> bool:
        """End a broker's session unless a heartbeat or a registration has arrived since. Returns whether it was ended.

        A broker that is declared dead by mistake has to restart; no acknowledged record is lost (docs/protocols.md).
        """
        if not self._lives_unheard(record, now_s):
            return False
        self._sessions[record.id] = self._sessions[record.id]._replace(deadline_s=float("-inf"))
        return True

    def scan(self, brokers: Iterable[BrokerRecord], now_s: float) -> list[Verdict]:
        """Return the changes that the metadata needs. A live broker without a session gets one full time-out."""
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
            if alive and not record.alive and record.id in self._suspects:
                continue  # nothing was heard of it: the grace is for those that may be alive
            if alive != record.alive:
                verdicts.append(Verdict(record.id, record.registration_epoch, alive))
        return verdicts
