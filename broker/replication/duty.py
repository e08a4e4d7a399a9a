"""`ReplicaDuty`: keeps one replica of a broker doing what the metadata say: join, promise, lead or follow.

It looks at the newest metadata each time and does the one thing that is due, so what was missed, by a failed request or
a slow disk, is found by the next look. In this order: join the set with this WAL, once; promise the epoch of an
election under way, durably, before the controllers are told; lead in the epoch in which this process was elected;
follow the master. At last it tells the election priority with which its broker is configured, if the metadata have
another one.

Invariants: it does what the metadata say only while they have this process's registration; a promise is told only after
the WAL has made it durable (rule 15); the replica leads only in an epoch in which the metadata name this broker, and
only after this registration was in them: the controllers end the terms of a broker's earlier process when it registers;
who is told that the replica leads is told that it has ended before it does anything else. A replica joins only while
its broker is assigned, or for the broker's own set. One that was removed from its set does not join again by itself,
unless its broker was assigned again before it saw that.

Entry: `ReplicaDuty.start`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from tidelog.broker.replication.inputs import MasterTarget, ReplicaIdentity
from tidelog.broker.replication.master import ReplicaMaster
from tidelog.broker.replication.replica import HotReplica
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.errors import StaleBrokerEpoch, StaleCommand
from tidelog.controller.model.levels import UnsupportedLevel
from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.controller.model.replica_set_commands import PromiseEpoch
from tidelog.controller.model.replication import ElectionRecord, ReplicationRecord
from tidelog.controller.model.wal_notes import WalLost
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import Closed, CorruptData, InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.wal.base import WalFailed

logger = logging.getLogger(__name__)

RETRY_BASE_S, RETRY_CAP_S = 0.05, 2.0
"""Pauses after a request that failed, unless the metadata change first."""

LAST_BYTES_S = 0.5
"""How long a designated replica waits for the old master's last bytes before it promises."""

STUCK_S = 5.0
"""What is due and has not ended after so long is a problem: the disk, or the controllers, do not answer."""

_FOR_GOOD = (WalLost, WalFailed, CorruptData, InvalidInput, StaleBrokerEpoch)
"""What another attempt of this process does not mend, but for `_PASSING`."""
_PASSING = (UnsupportedLevel, StaleCommand)


class ReplicaRole(StrEnum):
    """What a replica is doing."""

    JOINING = "joining"
    """The metadata do not have this WAL yet."""
    WAITING = "waiting"
    """There is no master, and nothing to promise."""
    PROMISED = "promised"
    """An election is under way."""
    LEADING = "leading"
    FOLLOWING = "following"
    REMOVED = "removed"
    """From its set; it does nothing any more."""
    FAILED = "failed"
    """For good; see the problem."""


@dataclass(frozen=True, slots=True)
class DutyEvents:
    """Callbacks of a duty. They run on the event loop, must be quick, and must not raise."""

    leads: Callable[[int, ReplicaMaster], None]
    """The replica is the master of this epoch (int32) from now on."""
    ended: Callable[[int], None]
    """It is the master of this epoch no more."""
    failed: Callable[[BaseException], None]
    """The replica has stopped for good: its WAL, or what the metadata say of it, is wrong."""


class ReplicaDuty:
    """See the module. Used on the event loop's thread."""

    def __init__(
        self,
        replica: HotReplica,
        identity: ReplicaIdentity,
        client: ControllerClient,
        rng: random.Random,
        events: DutyEvents,
        *,
        priority: int = 0,
    ) -> None:
        """`client`: of the process that is registered as `identity` says; its metadata have that registration.

        `priority`: `replication.election_priority`.
        """
        self._replica = replica
        self._identity = identity
        self._client = client
        self._events = events
        self._priority = priority
        self._backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, rng)
        self._changed = asyncio.Event()
        self._tasks = TaskSet("replica-duty", events.failed)
        self._unsubscribe: Callable[[], None] | None = None
        self._joined = False
        self._leading = -1
        """The epoch of which `leads` was told and not `ended`; -1: none."""
        self._begins = -1
        """The newest epoch in which it was to begin to lead; -1: none."""
        self._target: MasterTarget | None = None
        self.role = ReplicaRole.JOINING
        self.problem = ""
        """Why the last attempt failed; empty if it did not."""
        self._looking_since: float | None = None
        """Since when what is due is being done (seconds of the loop's clock); None: nothing is."""
        self._now = asyncio.get_running_loop().time

    def start(self) -> None:
        """Begin."""
        self._unsubscribe = self._client.subscribe(self._image_changed)
        self._tasks.keep(self._run, f"set-{self._identity.replica_set_id}")

    async def close(self) -> None:
        """End the replica's role; the WAL is the caller's."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self._tasks.close()
        self._end_term()
        await self._replica.close()

    def problems(self) -> list[str]:
        """Return what is wrong with this replica, one sentence each."""
        where = f"the replica of replica set {self._identity.replica_set_id}"
        if self.role is ReplicaRole.REMOVED:
            return [f"{where} was removed from it, and keeps a WAL (`tidelog replica-set describe`)"]
        if self.problem:
            return [f"{where} is {self.role.value}: {self.problem}"]
        if stuck := self.stuck():
            return [f"{where} is {self.role.value}, and {stuck}"]
        master = self._replica.master
        if self.role is ReplicaRole.LEADING and master is not None and master.ended is not None:
            return [f"{where} leads no more, and the metadata know of nobody else: {master.ended}"]
        return []

    def stuck(self) -> str:
        """Return that what is due does not end, one clause; empty if it does, or has failed."""
        if self._looking_since is None:
            return ""
        taken_s = self._now() - self._looking_since
        return (
            f"what is due has taken {taken_s:.0f} s: its disk, or the controllers, do not answer"
            if taken_s >= STUCK_S
            else ""
        )

    def _image_changed(self, delta: Delta) -> None:
        record = self._client.image.replica_sets.get(self._identity.replica_set_id)
        if record is not None:
            self._replica.note_committed(record.committed_wal_offset)
        self._changed.set()

    async def _run(self) -> None:
        while self.role not in (ReplicaRole.REMOVED, ReplicaRole.FAILED):
            self._changed.clear()
            try:
                self._looking_since = self._now()
                try:
                    await self._look(self._client.image)
                finally:
                    self._looking_since = None
            except Closed:
                return
            except TidelogError as error:
                if isinstance(error, _FOR_GOOD) and not isinstance(error, _PASSING):
                    await self._give_up(error)
                    return
                self._note(error)
                await self._pause(self._backoff.next_delay_s())
                continue
            self.problem = ""
            self._backoff.reset()
            await self._changed.wait()

    async def _pause(self, seconds: float) -> None:
        """Wait for other metadata, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _note(self, error: TidelogError) -> None:
        if error.message != self.problem:
            extra = {"set": self._identity.replica_set_id, "role": self.role.value, "error": str(error)}
            logger.warning("a replica cannot do what is due yet", extra=extra)
        self.problem = error.message

    async def _give_up(self, error: TidelogError) -> None:
        self._note(error)
        self.role = ReplicaRole.FAILED
        self._end_term()
        await self._replica.close()
        self._events.failed(error)

    def _end_term(self) -> None:
        epoch, self._leading = self._leading, -1
        if epoch >= 0:
            self._events.ended(epoch)

    # --- what is due ---------------------------------------------------------------------------------------------

    async def _look(self, image: Image) -> None:
        set_id, me = self._identity.replica_set_id, self._identity.replica.broker_id
        self._check_current(image)
        record = image.replica_sets.get(set_id)
        row = image.replication.get(set_id)
        if record is None:
            raise NotFound(f"there is no replica set {set_id}")
        self._replica.note_committed(record.committed_wal_offset)
        if record.master_epoch != self._leading:
            self._end_term()
        await self._learn_or_not(row)
        if not self._is_in(row):
            if self._may_join(row):
                await self._join()
            else:
                await self._leave()
            return
        self._joined = True
        assert row is not None
        policy = row.policy.checked()
        if policy != self._replica.policy:
            self._replica.use_policy(policy)
        leaving = frozenset(row.leaving)
        if leaving != self._replica.leaving:
            self._replica.let_go(leaving)
        if row.election is not None:
            await self._promise(record, row)
        elif record.master == me:
            await self._lead(image, record)
        elif record.master != NO_BROKER:
            await self._follow(image, record)
        else:
            self.role = ReplicaRole.WAITING
        await self._tell_priority(row)

    def _check_current(self, image: Image) -> None:
        """Raise `StaleBrokerEpoch` if the metadata speak of another process: what they say is nothing for this one."""
        me, epoch = self._identity.replica.broker_id, self._identity.registration_epoch
        broker = image.brokers.get(me)
        if broker is None or broker.registration_epoch != epoch:
            raise StaleBrokerEpoch(f"registration {epoch} of broker {me} is not current")

    async def _tell_priority(self, row: ReplicationRecord) -> None:
        """Tell the priority of a replica that has joined with another one: its broker was configured anew."""
        broker_id = self._identity.replica.broker_id
        joined = row.replica(broker_id)
        if joined is not None and joined.priority != self._priority:
            set_id, registration_epoch = self._identity.replica_set_id, self._identity.registration_epoch
            await self._client.replica_sets.tell_priority(set_id, broker_id, registration_epoch, self._priority)

    async def _learn_or_not(self, row: ReplicationRecord | None) -> None:
        """Be a learner, or a member, as the metadata say; a replica that was promoted connects anew as a member."""
        learner = row is not None and self._identity.replica.broker_id in row.learning
        if learner == self._identity.learner:
            return
        extra = {"set": self._identity.replica_set_id, "learner": learner}
        logger.info("this replica becomes a learner, or is none any more", extra=extra)
        self._identity = replace(self._identity, learner=learner)
        self._target = None
        await self._replica.use_identity(self._identity)

    def _is_in(self, row: ReplicationRecord | None) -> bool:
        broker_id, wal_id = self._identity.replica
        known = row.replica(broker_id) if row is not None else None
        return known is not None and (known.wal_id, known.is_learner) == (wal_id, self._identity.learner)

    def _may_join(self, row: ReplicationRecord | None) -> bool:
        """Whether this replica is to be in its set: it may have been removed, also before this process registered."""
        broker_id = self._identity.replica.broker_id
        if not self._joined and broker_id == self._identity.replica_set_id:
            return True  # its own set begins with it
        if row is None or broker_id not in row.assigned:
            return False
        return not self._joined or row.replica(broker_id) is None

    async def _join(self) -> None:
        """Tell the controllers the WAL; the change of the metadata that follows has the next look taken."""
        self.role = ReplicaRole.JOINING
        identity = self._identity
        await self._client.replica_sets.add_replica(
            identity.replica_set_id,
            identity.replica.broker_id,
            identity.registration_epoch,
            identity.replica.wal_id,
            is_learner=identity.learner,
            priority=self._priority,
        )
        self._changed.set()

    async def _leave(self) -> None:
        logger.warning("this replica was removed from its set", extra={"set": self._identity.replica_set_id})
        self.role = ReplicaRole.REMOVED
        self._end_term()
        await self._replica.close()

    async def _promise(self, record: ReplicaSetRecord, row: ReplicationRecord) -> None:
        """Promise the epoch of the election, and tell it; once for each registration."""
        identity = self._identity
        assert row.election is not None
        self._end_term()
        if identity.learner:
            self._target = None
            self.role = ReplicaRole.WAITING
            return
        if self._takes_over(row.election):
            await self._replica.follow_to_the_end(LAST_BYTES_S)
            newer = self._client.image.replica_sets.get(record.id)
            if newer is None or newer.master_epoch != record.master_epoch:
                return  # another election has begun: the next look sees it
        self._target = None
        position = await self._replica.promise(record.master_epoch)
        if position.last_epoch >= record.master_epoch:
            self.role = ReplicaRole.WAITING  # it has followed that master already: the election is over
            return
        self.role = ReplicaRole.PROMISED
        told = next((each for each in row.election.promises if each.broker_id == identity.replica.broker_id), None)
        if told is not None and told.registration_epoch == identity.registration_epoch:
            return
        await self._client.replica_sets.promise(
            PromiseEpoch(
                record.id,
                record.master_epoch,
                identity.replica.broker_id,
                identity.registration_epoch,
                identity.replica.wal_id,
                *position,
            )
        )
        self._changed.set()

    def _takes_over(self, election: ElectionRecord) -> bool:
        """Whether this replica is designated to go on where a living master ends.

        The master ends its term when it promises, and says goodbye. Whoever promises after that has all that it sent,
        so the other replicas are not ahead, which the designated one needs to be elected.
        """
        me = self._identity.replica.broker_id
        master = self._client.image.brokers.get(election.last_master)
        return election.designated == me != election.last_master and master is not None and master.alive

    async def _lead(self, image: Image, record: ReplicaSetRecord) -> None:
        if self._leading == record.master_epoch:
            return
        configuration = image.configuration(record.id)
        assert configuration is not None, "a set with a row has a configuration"
        self._target = None
        self._watch_beginning(record.master_epoch)
        master = await self._replica.lead(record.master_epoch, configuration)
        self.role = ReplicaRole.LEADING
        self._leading = record.master_epoch
        self._events.leads(record.master_epoch, master)

    def _watch_beginning(self, epoch: int) -> None:
        """See that another replica leads if this one cannot begin a term: this duty may wait for its disk meanwhile."""
        if self._begins == epoch:
            return
        self._begins = epoch

        def is_due() -> bool:
            record = self._client.image.replica_sets.get(self._identity.replica_set_id)
            return record is not None and (record.master, record.master_epoch) == (self._identity.replica[0], epoch)

        def tell(problem: str) -> None:
            self.problem = problem

        self._tasks.spawn(self._replica.resign_if_stuck(epoch, is_due, tell), f"begins-{epoch}")

    async def _follow(self, image: Image, record: ReplicaSetRecord) -> None:
        master = image.brokers.get(record.master)
        if master is None or not master.alive:
            return  # the controllers begin an election
        if not master.peer_address:
            raise Unavailable(
                f"broker {master.id} has no listener for other brokers",
                hint="kafka.peer_port; and without controller.secret_file brokers are reached on the loopback only",
            )
        target = MasterTarget(record.master_epoch, master.id, *split_address(master.peer_address))
        if target != self._target:
            if not await self._replica.follow(target):
                self.role = ReplicaRole.WAITING
                raise Unavailable(
                    f"its WAL has promised epoch {self._replica.wal.promised_epoch}; the master, broker {master.id}, is"
                    f" of epoch {target.epoch}",
                    hint="if this stays: were the controllers' metadata set back? See `tidelog controller status`",
                )
            self._target = target
        self.role = ReplicaRole.FOLLOWING
