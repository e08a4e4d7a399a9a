"""Duties of the active controller, derived from the image: commands out, one at a time. No I/O.

    duty          when                                                     command
    ───────────   ──────────────────────────────────────────────────────   ───────────────────────────────────────────
    `liveness`    a broker's session began or ended                        SetBrokerAlive
    `successors`  a broker is dead and its WAL is in the bucket            ElectSuccessor
    `masters`     a replica set of several members has no live master,     BeginElection
                  or another one than it should have
    `replicas`    a replica set has fewer or other replicas than wanted,   AssignReplica, RetireReplica,
                  or a broker has fewer than others                        RemoveReplica
    `members`     the quorum's members are not those in the metadata       SetControllers
    `expiry`      prepared object ids have expired                         ExpireObjects: they are deleted as orphans
    `leases`      leases of readers have expired                           ExpireLeases
    `garbage`     there is more garbage than one command sweeps            Barrier
    `drains`      a draining broker's partitions have no targets           MovePartitions, some at a time
    `elections`   a partition moves for the re-elect time-out and its      ElectPartitions: its source closed everything
                  streams are closed                                       and sent no request

docs/design/0007-failover.md describes failover, docs/design/0006-partition-moves.md moves. Objects that no
reader can find any more (`removable`) are first deleted from the bucket, then removed from the metadata (rule 6).

Invariant: commands are derived from the image each time, without state of their own but the ages of moves, elections,
dead brokers and the calm before a replica moves, so a failed command or a crash loses nothing: the next round finds the
same work. A duty is an iterator that reads the image again after each command, and so sees the effect of the previous
one.

Entry: `Duties.all`, `removable`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import islice

from tidelog.controller.active.drain_plan import plan_drains
from tidelog.controller.active.masters import MasterWatch
from tidelog.controller.active.move_ages import MoveAges
from tidelog.controller.active.replica_plan import ReplicaPlan
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.image.image import Image
from tidelog.controller.image.lost import TakeoverState, lost_replica_sets, next_successor
from tidelog.controller.model.commands import (
    MAX_MOVES_PER_COMMAND,
    MAX_OBJECTS_PER_COMMAND,
    AnyCommand,
    Barrier,
    ElectPartitions,
    ElectSuccessor,
    ExpireObjects,
    MovePartitions,
    SetBrokerAlive,
    SetControllers,
)
from tidelog.controller.model.leases import ExpireLeases
from tidelog.controller.model.overrides import SettingsInForce
from tidelog.controller.model.records import STREAMS_PER_PARTITION, StreamState
from tidelog.controller.model.settings import ControllerSettings

logger = logging.getLogger(__name__)

Duty = Callable[[float, int], Iterator[AnyCommand]]
"""`(monotonic seconds, milliseconds of cluster time)` in, commands out."""


DRAIN_SLOW_S = 10.0
"""A move of a drain that goes on for so long holds up no others: its source may not be able to open the partition."""


class Duties:
    """The duties, as methods; see the module docstring."""

    def __init__(
        self,
        image: Callable[[], Image],
        sessions: BrokerSessions,
        controllers: Callable[[], Mapping[int, str]],
        settings: ControllerSettings,
    ) -> None:
        """`controllers`: the addresses of the quorum's members by node id; `settings`: as configured here."""
        self._image = image
        self._sessions = sessions
        self._controllers = controllers
        self._settings = SettingsInForce("controller", settings, lambda: image().cluster_configs)
        self._move_ages = MoveAges()
        self._master_watch = MasterWatch(preferred=settings.preferred_master_enable)
        self._replica_plan = ReplicaPlan(
            settings.replica_repair_after_ms / 1000, balances=settings.replica_balance_enable
        )

    @property
    def all(self) -> tuple[Duty, ...]:
        """Return the duties in their order: sessions are updated before a successor is elected."""
        return (
            self.liveness,
            self.successors,
            self.masters,
            self.replicas,
            self.members,
            self.expiry,
            self.leases,
            self.garbage,
            self.drains,
            self.elections,
        )

    def liveness(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Update the liveness of brokers by their sessions."""
        for verdict in self._sessions.scan(list(self._image().brokers.values()), now):
            logger.info("broker session", extra={"broker": verdict.broker_id, "alive": verdict.alive})
            yield SetBrokerAlive(verdict.broker_id, verdict.registration_epoch, verdict.alive)

    def successors(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Elect successors for the replica sets of dead brokers."""
        for lost in lost_replica_sets(self._image()):
            absent = lost.successor if lost.successor >= 0 else lost.broker
            if lost.state is not TakeoverState.DUE or not self._sessions.stays_away(absent, now):
                continue
            broker = next_successor(self._image(), lost)
            if broker is not None:
                logger.info("successor of a dead broker elected", extra={"replica_set": lost.replica_set, "by": broker})
                yield ElectSuccessor(lost.replica_set, broker, lost.master_epoch)

    def masters(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Begin elections of replica sets with several members."""
        self._master_watch.elects_preferred = self._settings.now.preferred_master_enable
        yield from self._master_watch.due(self._image(), now)

    def hand_overs(self, broker_id: int) -> tuple[int, ...]:
        """Return the replica sets that a broker leads, and that will be handed over soon, as the newest scan found."""
        return self._master_watch.hand_overs(self._image(), broker_id)

    def replicas(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Assign and remove replicas."""
        settings = self._settings.now
        self._replica_plan.repair_after_s = settings.replica_repair_after_ms / 1000
        self._replica_plan.balance.begins = settings.replica_balance_enable
        yield from self._replica_plan.due(self._image(), now)

    def members(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Publish the quorum's members."""
        members = tuple(sorted(self._controllers().items()))
        cluster = self._image().cluster
        if cluster is not None and cluster.controllers != members:
            yield SetControllers(members)

    def expiry(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Destroy prepared object ids that have expired."""
        due = _due(self._image(), self._image().index.prepared, time_ms)
        if due:
            logger.info("prepared objects expired", extra={"count": len(due)})
            yield ExpireObjects(due)

    def leases(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """End the leases of readers that were not renewed in time."""
        due = tuple(each.id for each in self._image().leases.values() if each.expires_ms <= time_ms)
        if due:
            logger.info("leases of readers expired", extra={"leases": due})
            yield ExpireLeases(due)

    def garbage(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Sweep garbage: every command sweeps a part, and a barrier does nothing else."""
        if self._image().index.garbage:
            yield Barrier()

    def drains(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Give targets to draining brokers' partitions."""
        image = self._image()
        slow = {key for key, age_s in self._move_ages.look(image, now).items() if age_s >= DRAIN_SLOW_S}
        moves = plan_drains(image, slow=slow)
        for start in range(0, len(moves), MAX_MOVES_PER_COMMAND):
            yield MovePartitions(tuple(moves[start : start + MAX_MOVES_PER_COMMAND]))

    def elections(self, now: float, time_ms: int) -> Iterator[AnyCommand]:
        """Elect targets whose source closed everything and sent no request: the fallback of a move."""
        image = self._image()
        ages, timeout_ms = self._move_ages.look(image, now), self._settings.now.reelect_timeout_ms
        ready = [key for key, age_s in ages.items() if 1000 * age_s >= timeout_ms and _is_closed(image, key)]
        if ready:
            logger.info("electing the targets of moves without a request from the source", extra={"count": len(ready)})
            yield ElectPartitions(tuple(ready[:MAX_MOVES_PER_COMMAND]))


def removable(image: Image, time_ms: int, passed: int, without: Container[int] = ()) -> tuple[int, ...]:
    """Return destroyed objects that no reader can find any more, at most as many as one command may remove.

    Their delay is over at the cluster time `time_ms`, and they were destroyed at or before the version `passed`, which
    every reader has applied (rule 6). Those in `without` are left out.
    """
    objects = image.objects
    known = (each for each in image.index.destroyed if objects[each].destroyed_at <= passed)
    return _due(image, (each for each in known if each not in without), time_ms)


def _due(image: Image, ids: Iterable[int], time_ms: int) -> tuple[int, ...]:
    objects = image.objects
    return tuple(islice((each for each in ids if objects[each].expires_ms <= time_ms), MAX_OBJECTS_PER_COMMAND))


def _is_closed(image: Image, key: tuple[bytes, int]) -> bool:
    """Whether the streams of a moving partition are closed and its target is alive."""
    record = image.partition(*key)
    assert record is not None, key
    streams = (image.streams[record.first_stream + step] for step in range(STREAMS_PER_PARTITION))
    return image.master_of(record.target) is not None and all(stream.state == StreamState.CLOSED for stream in streams)
