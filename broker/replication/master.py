"""`ReplicaMaster`: a master's side of the replication of one WAL, in one epoch.

What the WAL passes to its disk is sent at once, while the disk syncs it: a byte counts as confirmed only once it is
durable here, too, so nothing is at stake, and an acknowledgement takes the longer of the two syncs and not both. A
follower that is behind what is kept in memory is read for from the files, one read at a time over all followers. After
each read while producers append, the reader rests for as long as the read took. Followers outside the SyncStateSet are
read for at a bounded pace (`CatchUpPace`), and after those within, unless writes are refused and may wait for them.

The core (`tidelog.storage.replication.master.Master`) says what is confirmed, who is in sync, and which configuration
is wanted. The controllers are asked for it until their answer is known. While the quorum is one, this disk alone may
have what is confirmed: then they are told regularly where the WAL ends, and notice if it is set back (rule 13).

Invariants: one connection for each broker, the newest; the confirm offset is told to the WAL before anybody else; an
error on one follower's connection ends that connection only.

Entry: `ReplicaMaster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidelog.broker.replication.connection import WalConnection
from tidelog.broker.replication.disk_watch import DiskWatch
from tidelog.broker.replication.inputs import (
    AlterRefused,
    NotEnoughReplicas,
    ReplicaEvents,
    ReplicaIdentity,
    ReplicationLimits,
    ReplicationWorld,
    SetAuthority,
)
from tidelog.broker.replication.served import ServedFollower, SourceOfBytes
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import Closed, CorruptData, Fenced, NotFound, TidelogError, Unavailable
from tidelog.runtime.task_errors import ERRORS
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.ack_gate import AckGate
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.frames import Ack, BadFrame, FollowerHello, Frame, Goodbye, GoodbyeCode
from tidelog.storage.replication.master import Master
from tidelog.storage.replication.pace import CatchUpPace
from tidelog.storage.replication.policy import ReplicationPolicy
from tidelog.storage.replication.sending import FollowerLink, LinkState, NextBatch
from tidelog.storage.wal.base import ReplicatedWal, Submitted, WalFailed
from tidelog.storage.wal.live import LiveTail

logger = logging.getLogger(__name__)

TELL_S = 0.005
"""Until an idle follower is told of a new confirm offset: consumers that read there wait for it."""


@dataclass(frozen=True, slots=True)
class MasterSetup:
    """What a master gets besides its WAL."""

    identity: ReplicaIdentity
    policy: ReplicationPolicy
    authority: SetAuthority
    world: ReplicationWorld
    events: ReplicaEvents
    limits: ReplicationLimits
    pace: CatchUpPace = field(default_factory=CatchUpPace)
    """For followers that catch up, over all masters of the broker."""


class ReplicaMaster:
    """The master of one WAL. Make it right after `Wal.begin_epoch`, before anything is appended."""

    def __init__(
        self, wal: ReplicatedWal, setup: MasterSetup, configuration: SetConfiguration, committed_offset: int
    ) -> None:
        """`committed_offset`: everything in the WAL before it (int64 bytes) is in committed objects."""
        assert wal.master_epoch >= 0
        self.epoch = wal.master_epoch
        self._wal = wal
        self._setup = setup
        self._limits = setup.limits
        self._clock = setup.world.clock
        confirmed = min(wal.confirm_offset, wal.durable_offset)
        self._core = Master(
            setup.identity.replica,
            setup.policy,
            configuration,
            epoch_confirmable_at=wal.end_offset,
            durable_offset=wal.durable_offset,
            confirm_offset=confirmed,
        )
        self.confirm = ConfirmOffset(confirmed)
        """Who waits for the confirm offset."""
        self.durable = ConfirmOffset(wal.durable_offset)
        """Who waits for this broker's own disk alone (acks=1); nothing is visible because of it."""
        self.gate = AckGate()
        """Nothing is confirmed past it, or acknowledged by this disk alone: for a set of one, whose master's WAL alone
        has what was acknowledged."""
        self.gate.on_opened = self._on_opened
        self._committed = committed_offset
        self._live = LiveTail(wal.durable_offset, self._limits.live_bytes)
        self._source = SourceOfBytes(wal, self._live, self._core)
        self._followers: dict[int, ServedFollower] = {}
        """By broker id."""
        self._behind: dict[ServedFollower, None] = {}
        """Those that the files have to be read for, in the order of their turns."""
        self._wanted = asyncio.Event()
        """Somebody is behind."""
        self._review = asyncio.Event()
        """The configuration that is wanted may have changed."""
        self._disk = DiskWatch(self._limits.hung_disk_s, self._limits.tick_s)
        self._moved = asyncio.Event()
        """Followers may have to be told of the confirm offset."""
        self._unreadable: dict[int, int] = {}
        """Where the WAL could not be read last, by the broker that it was read for."""
        self._appended = 0
        self._reported: dict[WalReplica, int] = {}
        """Where the controllers were told that the members' WALs end."""
        self._reported_at = float("-inf")
        self._tasks = TaskSet("replica-master")
        self._ended: Exception | None = None

    def start(self) -> None:
        """Begin: take the WAL's callbacks, and send and confirm from now on."""
        assert self._wal.end_offset == self._live.end_offset == self._wal.durable_offset
        self._wal.set_on_submitted(self._on_submitted)
        self._wal.set_on_durable(self._on_durable)
        self._tasks.keep(self._tick_forever, "tick")
        self._tasks.keep(self._read_forever, "files")
        self._tasks.keep(self._alter_forever, "configuration")
        self._tasks.keep(self._tell_forever, "confirmations")
        self._confirm_more()

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def confirm_offset(self) -> int:
        """Return the WAL offset up to which everything is confirmed."""
        return self.confirm.value

    @property
    def configuration(self) -> SetConfiguration:
        """Return the configuration that the controllers have told last."""
        return self._core.configuration

    @property
    def ended(self) -> Exception | None:
        """Return what has ended this term: nothing more is taken or confirmed, whoever the metadata name."""
        return self._ended

    def readable(self) -> list[int]:
        """Return the brokers whose replicas are in sync and connected: consumers may read there."""
        members = self._core.configuration.members
        return [each for each, one in self._followers.items() if one.is_attached and one.replica in members]

    def refusal(self) -> str:
        """Return why nothing may be appended now, or an empty string (`Master.refusal`)."""
        return self._core.refusal(self._clock.monotonic())

    def check_writable(self, min_in_sync: int = 1) -> None:
        """Check that something may be appended now which at least `min_in_sync` members of the SyncStateSet must get.

        More than the replica set is to have count as that many, as in Kafka 4: nothing could be written otherwise.
        Raises `NotEnoughReplicas`, and the error that has ended this master.
        """
        if self._ended is not None:
            raise self._ended
        members = len(self._core.configuration.members)
        if members < min(min_in_sync, self._core.policy.total_replicas):
            raise NotEnoughReplicas(
                f"the sync-state set has {members} members; min.insync.replicas is {min_in_sync}",
                hint="are the other brokers of the replica set up?",
            )
        if refusal := self.refusal():
            raise NotEnoughReplicas(refusal, hint="are the other brokers of the replica set up?")

    def status(self) -> dict[str, Any]:
        """Return what operators see: configuration, quorum, and how far each follower is behind.

        `total_replicas`: members that the policy asks for; `need`: members that must be in sync for acks=all to be
        taken; `quorum`: those that confirm now. Ages are those of this process's monotonic clock.
        """
        core, now = self._core, self._clock.monotonic()
        end, near = self._wal.end_offset, core.in_sync(now)
        paced = {one.replica for one in self._behind if self._is_paced(one)}
        return {
            "epoch": self.epoch,
            "confirm_offset": core.confirm_offset,
            "end_offset": end,
            "durable_offset": self._wal.durable_offset,
            "committed_offset": self._committed,
            "sync_state_set": sorted(member.broker_id for member in core.configuration.members),
            "sync_state_epoch": core.configuration.number,
            "total_replicas": core.policy.total_replicas,
            "quorum": core.configuration.quorum,
            "need": core.needed(now),
            "in_sync": sorted(member.broker_id for member in near),
            "changing": core.pending is not None,
            "degraded": core.is_degraded,
            "refusal": str(self._ended or core.refusal(now)),
            "catch_up_bytes_per_s": self._setup.pace.bytes_per_s,
            "followers": [
                {
                    "broker": one.replica.broker_id,
                    "connected": one.connected,
                    "learner": one.learner,
                    "in_sync": one.replica in near,
                    "end_offset": one.end_offset,
                    "gap_bytes": lag.gap_bytes,
                    "caught_up_ms": round(lag.caught_up_s * 1000) if lag.caught_up_s is not None else None,
                    "paced": one.replica in paced,
                }
                for one in core.brokers()
                for lag in (core.lag(one, now),)
            ],
        }

    # --- what the owner tells ------------------------------------------------------------------------------------

    def told(self, configuration: SetConfiguration) -> None:
        """Note the controllers' configuration of this epoch, as the metadata has it."""
        if self._core.replica not in configuration.members:
            self._depose(-1, f"it is not in the configuration {configuration}")
        elif self._ended is None:
            self._core.told(configuration)
            self._confirm_more()

    def note_committed(self, offset: int) -> None:
        """Everything before this WAL offset is in committed objects; followers are told with the next frame."""
        self._committed = max(self._committed, offset)

    def use_policy(self, policy: ReplicationPolicy) -> None:
        """Follow this policy from now on; the configuration that it asks for is asked for."""
        self._core.policy = policy
        self._review.set()

    def let_go(self, brokers: frozenset[int]) -> None:
        """Ask for a configuration without these brokers, as soon as the policy allows it."""
        self._core.leaving = brokers
        self._review.set()

    def serve(self, connection: WalConnection, hello: FollowerHello) -> None:
        """Serve a follower that has proven to be the broker of its HELLO (`ReplicationDoor`). Raises `BadFrame`."""
        if self._ended is not None:
            connection.say_goodbye(GoodbyeCode.CLOSING, "this broker's term as master has ended")
        elif hello.broker_id == self._setup.identity.replica.broker_id or not self._setup.authority.admits(
            WalReplica(hello.broker_id, hello.wal_id), hello.registration_epoch, learner=hello.learner
        ):
            text = f"broker {hello.broker_id} has not joined with this WAL, or is registered anew"
            connection.say_goodbye(GoodbyeCode.NOT_MEMBER, text)
        elif hello.promised_epoch > self.epoch:
            connection.say_goodbye(GoodbyeCode.STALE_EPOCH, f"this master is of epoch {self.epoch}")
            self._depose(hello.promised_epoch, "a follower has promised a newer one")
        else:
            self._admit(connection, hello)

    def _admit(self, connection: WalConnection, hello: FollowerHello) -> None:
        before = self._followers.get(hello.broker_id)
        if before is not None:
            before.connection.end(BadFrame("the follower has connected again"))
            self._lost(before)
        now = self._clock.monotonic()
        link = FollowerLink(self.epoch, self._limits.link, now)
        one = ServedFollower(self._source, connection, link, hello)
        self._followers[hello.broker_id] = one
        connection.on_frame = partial(self._on_frame, one)
        connection.on_lost = partial(self._lost, one)
        connection.on_writable = partial(self._pump, one)
        one.welcome(now, hello, self._committed)
        extra = {"broker": hello.broker_id, "peer": connection.peer, "end": hello.end_offset, "epoch": self.epoch}
        logger.info("a follower has connected", extra=extra)

    # --- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, one: ServedFollower, frame: Frame) -> None:
        now = self._clock.monotonic()
        if isinstance(frame, Ack):
            self._on_ack(one, frame, now)
        elif isinstance(frame, Goodbye):
            self._on_goodbye(one, frame)
        else:
            raise BadFrame(f"a follower sent {type(frame).__name__}")

    def _on_ack(self, one: ServedFollower, ack: Ack, now: float) -> None:
        wal, link, core = self._wal, one.link, self._core
        if link.acked(ack, now, start_offset=wal.start_offset, end_offset=self._source.end_offset):
            core.attached(one.replica, ack.end_offset, now, learner=one.learner)
            one.is_attached = True
            self._review.set()
        elif link.state is LinkState.TRANSFER:
            core.acknowledged(one.replica, ack.end_offset, now)
        self._confirm_more()
        self._pump(one)

    def _on_goodbye(self, one: ServedFollower, goodbye: Goodbye) -> None:
        extra = {"broker": one.replica.broker_id, "code": goodbye.code, "text": goodbye.text}
        level = logging.ERROR if goodbye.code == GoodbyeCode.DIVERGED else logging.INFO
        logger.log(level, "a follower has said goodbye", extra=extra)
        one.connection.end()
        if goodbye.code == GoodbyeCode.STALE_EPOCH:
            self._depose(-1, "a follower says so")

    def _lost(self, one: ServedFollower) -> None:
        """A follower's connection has ended."""
        if self._followers.get(one.replica.broker_id) is not one:
            return
        del self._followers[one.replica.broker_id]
        self._behind.pop(one, None)
        one.link.shut_down()
        if not self._followers:
            self._live.clear()
        if one.is_attached and self._ended is None:
            self._core.detached(one.replica)
            self._review.set()

    # --- the WAL's callbacks -------------------------------------------------------------------------------------

    def _on_submitted(self, submitted: Submitted) -> None:
        self._core.appended(submitted.end_offset)
        self._appended += 1
        self._live.add(submitted)
        if not self._followers:
            self._live.clear()
        for one in self._served():
            self._pump(one)

    def _on_opened(self) -> None:
        """The gate has opened."""
        self._confirm_more()
        self.durable.advance(self._wal.durable_offset)

    def _on_durable(self, offset: int) -> None:
        self._core.durable(offset)
        self._confirm_more()
        self.durable.advance(self.gate.admit(offset))
        for one in self._served():
            if one.link.next_offset < self._live.start_offset:
                self._pump(one)  # the files have more for it now

    def _served(self) -> Iterable[ServedFollower]:
        return list(self._followers.values()) if self._followers else ()

    def _pump(self, one: ServedFollower) -> None:
        """Send a follower what can be sent. Never raises: the WAL's own write comes next."""
        try:
            if one.link.state is LinkState.TRANSFER and one.link.next_offset < self._wal.start_offset:
                one.connection.say_goodbye(GoodbyeCode.CLOSING, "what would follow was trimmed: connect again")
            elif one.pump(self._clock.monotonic(), self._committed):
                one.is_reading = True
                self._behind[one] = None
                self._wanted.set()
        except Exception as error:  # noqa: BLE001  # noted; it is this connection's own
            ERRORS.note("replica-master", error, ended=False)
            one.connection.end(error)

    def _confirm_more(self) -> None:
        offset = self.gate.admit(self._core.confirm_offset)
        if offset > self.confirm.value and self._ended is None:
            self._wal.note_confirmed(offset)
            self.confirm.advance(offset)
            self._setup.events.confirmed(offset)
            if self._followers:
                self._moved.set()

    # --- followers that are behind -------------------------------------------------------------------------------

    async def _read_forever(self) -> None:
        clock, pace = self._clock, self._setup.pace
        while True:
            one = await self._whose_turn()
            began, appended = clock.monotonic(), self._appended
            is_paced = self._is_paced(one)
            try:
                count = await self._read_for(one)
                if is_paced:
                    pace.took(count, clock.monotonic())
            except Exception as error:  # noqa: BLE001  # noted; it is this connection's own
                ERRORS.note("replica-master", error, ended=False)
                one.connection.end(error)
            finally:
                self._behind.pop(one, None)
                one.is_reading = False
            self._pump(one)
            if self._appended != appended:
                await clock.sleep(clock.monotonic() - began)  # producers come first

    async def _whose_turn(self) -> ServedFollower:
        """Return the follower to read for next: those that confirmations may wait for first."""
        while True:
            await self._wanted.wait()
            found = next((one for one in self._behind if not self._is_paced(one)), None)
            if found is not None:
                return found
            wait_s = self._setup.pace.wait_s(self._clock.monotonic())
            if self._behind and wait_s <= 0:
                return next(iter(self._behind))
            self._wanted.clear()
            if self._behind:  # unless somebody else is behind before that; and who is a member may change
                await _wait(self._wanted, min(wait_s, self._limits.tick_s))
                self._wanted.set()

    def _is_paced(self, one: ServedFollower) -> bool:
        """Return whether a follower is read for at the pace of catching up: nobody who writes waits for it."""
        if not self._setup.pace.bytes_per_s or one.replica in self._core.configuration.members:
            return False
        return not self.refusal()

    async def _read_for(self, one: ServedFollower) -> int:
        """Read and send one batch; return its bytes. Ends the connection if what it needs cannot be read."""
        batch = one.link.batch(self._wal.epoch_history, self._wal.durable_offset)
        if batch is None:
            return 0
        try:
            raw = await self._wal.read_raw(batch.offset, batch.max_end - batch.offset)
        except NotFound:
            one.connection.say_goodbye(GoodbyeCode.CLOSING, "what would follow was trimmed: connect again")
            return 0
        except (CorruptData, WalFailed, Closed) as error:
            one.connection.say_goodbye(GoodbyeCode.CLOSING, f"the master cannot read its WAL: {error}")
            reader = one.replica.broker_id
            if isinstance(error, CorruptData) and self._unreadable.get(reader) != batch.offset:
                self._unreadable[reader] = batch.offset  # it comes again and again
                logger.error("the WAL cannot be read for a follower", exc_info=error, extra={"offset": batch.offset})
            return 0
        if raw is None or one.link.state is not LinkState.TRANSFER or one.link.next_offset != raw.offset:
            return 0
        sent = NextBatch(raw.offset, raw.epoch, raw.epoch_start, raw.end_offset, raw.end_offset)
        one.send(sent, raw.end_offset, raw.buffers, self._clock.monotonic(), self._committed)
        return raw.end_offset - raw.offset

    # --- time, and the configuration -----------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await self._clock.sleep(self._limits.tick_s)
            now = self._clock.monotonic()
            for one in self._served():
                if one.link.is_silent(now):
                    one.connection.end(BadFrame(f"broker {one.replica.broker_id} is silent"))
                    self._lost(one)
                    continue
                self._pump(one)
                if one.link.heartbeat_due(now) and one.connection.is_writable:
                    one.heartbeat(now, self._committed)
            self._review.set()
            if self._disk.look(self._wal.durable_offset, self._wal.end_offset) and self._ended is None:
                self._tasks.spawn(self._resign(), "resign")

    async def _tell_forever(self) -> None:
        """Tell idle followers how far the master has confirmed, for those who read there."""
        while True:
            await self._moved.wait()
            await self._clock.sleep(TELL_S)
            self._moved.clear()
            now = self._clock.monotonic()
            for one in self._served():
                one.tell_confirmed(now, self._committed)

    async def _alter_forever(self) -> None:
        backoff = Backoff(self._limits.retry_base_s, self._limits.retry_cap_s, self._setup.world.rng)
        await self._clock.sleep(self._limits.tick_s)  # a new master's followers connect first, and nobody leaves
        while self._ended is None:
            await self._review.wait()
            self._review.clear()
            wanted = self._core.change(self._clock.monotonic())
            self._confirm_more()
            if wanted is None:
                backoff.reset()
                wanted = self._report_due()
            if wanted is not None and not await self._alter(wanted):
                await self._clock.sleep(backoff.next_delay_s())
                self._review.set()

    def _report_due(self) -> SetConfiguration | None:
        """Return the configuration in force, to ask for it again, if the controllers are to learn the ends now.

        Older copies of disks are told by that from the present ones, and elect nobody. Where one disk decides, because
        it alone has what was confirmed, or elects by its promise alone, the controllers need that in any case.
        """
        configuration = self._core.configuration
        decides_alone = configuration.quorum == 1 or configuration.promises_needed == 1
        if not (decides_alone or self._limits.tells_ends) or self._ends() == self._reported:
            return None
        is_due = self._clock.monotonic() - self._reported_at >= self._setup.authority.reports_every_s()
        return configuration if is_due else None

    def _ends(self) -> dict[WalReplica, int]:
        """Return where the WALs end, as the controllers may rely on it: a loss of power takes nothing of this one."""
        held = self._core.held()
        return {**held, self._core.replica: min(held[self._core.replica], self._wal.synced_offset)}

    async def _alter(self, wanted: SetConfiguration) -> bool:
        """Ask for a configuration once; return False if the outcome is not known, or nothing was changed."""
        ends = self._ends()
        self._reported_at = self._clock.monotonic()
        try:
            in_force = await self._setup.authority.alter(
                wanted,
                master_epoch=self.epoch,
                ends=ends,
                confirm_offset=self._core.confirm_offset,
            )
        except Fenced as error:
            self._depose(-1, str(error))
            return True
        except AlterRefused as error:
            logger.warning(
                "the controllers refuse a sync-state set", extra={"wanted": str(wanted), "error": str(error)}
            )
            if self._core.pending == wanted:
                self._core.refused()
            return False
        except Unavailable as error:
            if wanted != self._core.configuration:
                logger.info("a change of the sync-state set has no answer yet", extra={"error": str(error)})
            return False
        self._reported = ends
        self.told(in_force)
        if self._core.pending == wanted:
            return False
        self._review.set()
        return True

    async def _resign(self) -> None:
        """Let another replica lead: the disk of this one hangs, and nothing is confirmed before it has written."""
        core = self._core
        reason = f"the disk of broker {core.replica.broker_id} hangs"
        extra = {"epoch": self.epoch, "durable": self._wal.durable_offset, "end": self._wal.end_offset}
        others = sorted(core.in_sync(self._clock.monotonic()) - {core.replica})
        if not others:
            logger.error("the disk hangs, and no other replica is in sync", extra=extra)
            return
        held = core.held()
        designated = max(others, key=lambda replica: held[replica]).broker_id
        logger.error("the disk hangs: another replica is to lead", extra={**extra, "designated": designated})
        try:
            await self._setup.authority.resign(designated, reason, master_epoch=self.epoch)
        except TidelogError as error:
            logger.warning("no election in place of a master whose disk hangs", extra={"error": str(error)})

    # --- the end -------------------------------------------------------------------------------------------------

    def _depose(self, epoch: int, why: str) -> None:
        if self._ended is not None:
            return
        logger.warning(
            "this broker's term as master has ended", extra={"epoch": self.epoch, "newer": epoch, "why": why}
        )
        self._end(Fenced(f"master epoch {self.epoch} has ended: {why}"))
        self._setup.events.deposed(epoch)

    def fail(self, error: TidelogError) -> None:
        """End the term because the WAL has failed: nothing more is confirmed, and no follower served."""
        self._end(error)

    def _end(self, error: Exception) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self.confirm.fail(error)
        self.durable.fail(error)
        for one in self._served():
            one.connection.say_goodbye(GoodbyeCode.CLOSING, "this broker's term as master has ended")

    async def close(self) -> None:
        """End the term; waits for `confirmed` raise `Closed`. The WAL stays open, and is without callbacks."""
        self._end(Closed(f"the term of epoch {self.epoch} has ended"))
        self._wal.set_on_submitted(None)
        self._wal.set_on_durable(_ignore_offset)
        await self._tasks.close()
        for one in self._served():
            self._lost(one)


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    """Wait for an event, at most so long."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return


def _ignore_offset(_offset: int) -> None:
    """The WAL has no master here any more."""
