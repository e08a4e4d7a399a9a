"""The last events of a cluster as one broker's copy of the metadata showed them. Sans-I/O.

What happened is the difference between what was last seen and what the metadata say now: brokers that died or came
back, drains, replica sets without a leader and their elections, partitions that moved. How long a replica set had no
leader is measured here, by this broker's monotonic clock, from one change of the metadata to the other; clients wait
longer by what they need to hear of the new leader.

Invariants: at most `MAX_EVENTS` events and `MAX_MOVING` running moves are kept (rule 12); moves that follow one another
between the same two replica sets within `MERGE_S` are one event, so that a drain of 10,000 partitions does not push
out the election before it. Nothing is told of before the first look: a broker that starts knows no history.

Entry: `Timeline.look`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

MAX_EVENTS: Final = 100
MAX_MOVING: Final = 10_000
MERGE_S: Final = 5.0


class BrokerView(NamedTuple):
    """What the timeline follows of a broker."""

    alive: bool
    draining: bool


class LeaderView(NamedTuple):
    """What the timeline follows of a replica set."""

    leader: int
    """The master, if it is alive; else -1."""
    master_epoch: int


class MoveView(NamedTuple):
    """What the timeline follows of a partition that moves, or has just moved."""

    name: str
    owner: int
    target: int
    """-1: it does not move."""


PartitionNumber = tuple[bytes, int]


class Timeline:
    """Compares what it is shown with what it saw last, and keeps the differences."""

    def __init__(self) -> None:
        self.since_ms: int | None = None
        """Wall-clock time of the first look."""
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._brokers: dict[int, BrokerView] = {}
        self._leaders: dict[int, LeaderView] = {}
        self._lost_at: dict[int, float] = {}
        """When each replica set without a leader lost it, in monotonic seconds."""
        self._moving: dict[PartitionNumber, MoveView] = {}
        self._untracked = 0
        self._recent: dict[tuple[str, int, int], tuple[dict[str, Any], float]] = {}
        """The newest event of each kind of move between two replica sets, and when it last grew."""

    def look(
        self, now_s: float, time_ms: int, brokers: Mapping[int, BrokerView], leaders: Mapping[int, LeaderView]
    ) -> None:
        """Compare brokers and leaders with those of the last look. The first look only remembers."""
        if self.since_ms is None:
            self.since_ms = time_ms
        else:
            self._compare_brokers(time_ms, brokers)
            self._compare_leaders(now_s, time_ms, leaders)
        self._brokers, self._leaders = dict(brokers), dict(leaders)

    def partitions(
        self, now_s: float, time_ms: int, changed: Iterable[tuple[PartitionNumber, MoveView | None]]
    ) -> None:
        """Note partitions whose rows have changed; None: it is deleted."""
        for number, view in changed:
            before = self._moving.get(number)
            if view is not None and view.target >= 0:
                self._follow(now_s, time_ms, number, view)
            elif before is not None:
                del self._moving[number]
                if view is not None:
                    kind = "moved" if view.owner == before.target else "move cancelled"
                    self._moves(now_s, time_ms, kind, before)

    def _follow(self, now_s: float, time_ms: int, number: PartitionNumber, view: MoveView) -> None:
        before = self._moving.get(number)
        if before == view:
            return
        if before is None and len(self._moving) >= MAX_MOVING:
            self._untracked += 1
            return
        self._moving[number] = view
        self._moves(now_s, time_ms, "move began", view)

    def _moves(self, now_s: float, time_ms: int, kind: str, view: MoveView) -> None:
        self._recent = {key: one for key, one in self._recent.items() if now_s - one[1] < MERGE_S}
        key = (kind, view.owner, view.target)
        event = self._recent[key][0] if key in self._recent else None
        if event is None or not any(one is event for one in self._events):
            details = {"partition": view.name, "from": view.owner, "to": view.target}
            event = self._add(time_ms, kind, **details, partitions=0, until_ms=time_ms)
        event["partitions"] += 1
        event["until_ms"] = time_ms
        self._recent[key] = event, now_s

    def _compare_brokers(self, time_ms: int, brokers: Mapping[int, BrokerView]) -> None:
        for broker, view in brokers.items():
            before = self._brokers.get(broker)
            if before is None:
                self._add(time_ms, "broker joined", broker=broker)
                continue
            if before.alive != view.alive:
                self._add(time_ms, "broker back" if view.alive else "broker dead", broker=broker)
            if before.draining != view.draining:
                self._add(time_ms, "drain began" if view.draining else "drain ended", broker=broker)
        for broker in self._brokers.keys() - brokers.keys():
            self._add(time_ms, "broker removed", broker=broker)

    def _compare_leaders(self, now_s: float, time_ms: int, leaders: Mapping[int, LeaderView]) -> None:
        for replica_set, view in leaders.items():
            before = self._leaders.get(replica_set)
            if before is None:
                continue
            if view.leader < 0:
                if before.leader >= 0:
                    self._lost_at[replica_set] = now_s
                    self._add(time_ms, "leader lost", replica_set=replica_set, broker=before.leader)
                continue
            lost_at = self._lost_at.pop(replica_set, None)
            if view.leader == before.leader and view.master_epoch == before.master_epoch:
                continue
            stall_ms = round((now_s - lost_at) * 1000, 1) if lost_at is not None else None
            details = {"replica_set": replica_set, "broker": view.leader, "from": before.leader}
            self._add(time_ms, "elected", **details, master_epoch=view.master_epoch, stall_ms=stall_ms)
        for replica_set in self._lost_at.keys() - leaders.keys():
            del self._lost_at[replica_set]

    def _add(self, time_ms: int, kind: str, **details: Any) -> dict[str, Any]:
        event = {"at_ms": time_ms, "kind": kind, **details}
        self._events.append(event)
        return event

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the events, the newest first, and what goes on now."""
        return {
            "since_ms": self.since_ms,
            "events": [dict(event) for event in reversed(self._events)],
            "leaderless": [
                {"replica_set": replica_set, "for_ms": round((now_s - lost_at) * 1000)}
                for replica_set, lost_at in sorted(self._lost_at.items())
            ],
            "moving": len(self._moving),
            "not_followed": self._untracked,
        }
