"""`ReplicaFollower`: a follower's side of the replication of one WAL.

    the epoch that is followed promised, durably → connect, HELLO → WELCOME → cut or start over → ACK →
    RECORDS → into the WAL and the warm tail → ACK when durable

It goes through this again whenever a connection ends, with growing pauses, until it is told to stop. A newer master is
followed at once, an older one never. It stops by itself when its WAL has failed, and when its WAL and its master's
contradict each other; the latter until there is a master of a newer epoch. A full disk makes it wait: nothing more is
read from the connection, and the master, which still hears of it, counts it as behind. That what fills it is confirmed,
and may be freed, is told behind the records for which there is no room: it connects again then, and WELCOME says so.

Where a cancelled step may have changed the WAL, the next connection begins by looking at it; nothing is remembered of a
step that was not completed.

Invariants: nothing is acknowledged to a master of an older epoch than the WAL has promised; received and not written
bytes are bounded by `ReplicationLimits.inbox_bytes` and one batch.

Entry: `ReplicaFollower`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable

from tidelog.broker.replication.connection import WalConnection, connect_wal
from tidelog.broker.replication.inputs import (
    MasterTarget,
    ReplicaEvents,
    ReplicaIdentity,
    ReplicationLimits,
    ReplicationWorld,
)
from tidelog.broker.replication.warm import WarmTail
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import Closed, CorruptData, Fenced, NotFound, TidelogError, Unavailable
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.replication.following import Diverged, LocalWal, Step, WalFollower
from tidelog.storage.replication.frames import (
    Ack,
    BadFrame,
    FollowerHello,
    Frame,
    Goodbye,
    GoodbyeCode,
    Records,
    Welcome,
    trimmed_history,
)
from tidelog.storage.wal.base import ReplicatedWal, WalFailed, WalFull

logger = logging.getLogger(__name__)

_FRAME_BYTES = 64
"""What a frame without records counts for in the inbox."""


class MasterGone(Unavailable):
    """The connection to the master has ended, or the master says that it is none."""


class ReplicaFollower:
    """A WAL that follows masters. It has the WAL's callback for durable bytes until it is stopped."""

    def __init__(
        self,
        wal: ReplicatedWal,
        identity: ReplicaIdentity,
        tail: WarmTail,
        *,
        world: ReplicationWorld,
        limits: ReplicationLimits,
        events: ReplicaEvents,
    ) -> None:
        self._wal = wal
        self._identity = identity
        self._tail = tail
        self._world = world
        self._limits = limits
        self._events = events
        self._target: MasterTarget | None = None
        self._changed = asyncio.Event()
        """There is another target."""
        self._told_readable = wal.confirm_offset
        """WAL offset up to which `ReplicaEvents.readable` was told."""
        self._trimmable = asyncio.Event()
        self._fillable = asyncio.Event()
        """The tail may lack what the WAL has."""
        self._connection: WalConnection | None = None
        self._following: WalFollower | None = None
        self._is_matched = False
        """Whether the WAL is a prefix of the master's, and acknowledgements count."""
        self._matched_at = 0.0
        """When it began to be. Whether the master can go on from there is only known by what follows."""
        self._is_tail_true = False
        """Whether what the WAL knows to be confirmed says so of the tail's records: they are the WAL's."""
        self._inbox: deque[Frame] = deque()
        self._inbox_bytes = 0
        self._arrived = asyncio.Event()
        self._heard_at = self._told_at = 0.0
        self._tasks = TaskSet("replica-follower")
        self._session: asyncio.Task[None] | None = None
        self._backoff = Backoff(limits.retry_base_s, limits.retry_cap_s, world.rng)
        self.problem = ""
        """Why it is not following now; empty while it is, or before it tries."""
        self.failing_since: float | None = None
        """Since when it could not follow anybody, or has had no room for what its master sends (monotonic seconds);
        None while it does, or before it tries."""
        self.disk_since: float | None = None
        """Since when it waits for its disk, to promise, cut, or start over (monotonic seconds); None: it does not."""
        self.lost_at: float | None = None
        """When it lost the connection to its present master (monotonic seconds); None while it has one."""
        self.stopped: TidelogError | None = None
        """What has stopped it by itself."""

    def start(self) -> None:
        """Begin; it connects as soon as it is told whom to follow."""
        self._wal.set_on_durable(self._on_durable)
        self._tasks.keep(self._follow_forever, "follow")
        self._tasks.keep(self._tick_forever, "tick")
        self._tasks.keep(self._trim_forever, "trim")
        self._tasks.keep(self._fill_forever, "fill")

    # --- what the owner tells ------------------------------------------------------------------------------------

    @property
    def target(self) -> MasterTarget | None:
        """Return the master that it follows or tries to follow."""
        return self._target

    @property
    def is_following(self) -> bool:
        """Return whether it receives from its master, or waits for what the master appends next."""
        return self._is_matched

    def follow(self, target: MasterTarget) -> bool:
        """Follow this master from now on; return False, and change nothing, for one of an older epoch."""
        known = self._target.epoch if self._target is not None else -1
        if target.epoch < max(known, self._wal.promised_epoch):
            return False
        if target == self._target:
            return True
        if target.epoch > known and not isinstance(self.stopped, WalFailed):
            self.stopped = None
        self._target = target
        self.lost_at = None
        self._backoff.reset()
        self._changed.set()
        if self._session is not None:
            self._session.cancel()
        return True

    def note_committed(self, offset: int) -> None:
        """Everything before this WAL offset is in committed objects, as this broker's own metadata says."""
        if self._is_tail_true:
            self._tail.note_committed(offset, self._wal.confirm_offset)
        else:
            self._tail.committed_offset = max(self._tail.committed_offset, offset)
        self._trimmable.set()

    def fail(self, error: WalFailed) -> None:
        """Stop for good: the WAL has failed."""
        self.stopped, self.problem = error, str(error)
        if self._session is not None:
            self._session.cancel()

    async def stop(self) -> None:
        """Receive nothing more. The WAL stays open, and is without a callback."""
        await self._tasks.close()
        self._wal.set_on_durable(_ignore_offset)

    # --- the loop ------------------------------------------------------------------------------------------------

    async def _follow_forever(self) -> None:
        while True:
            self._changed.clear()
            target = self._target
            if target is None or self.stopped is not None:
                await self._changed.wait()
                continue
            self._session = asyncio.get_running_loop().create_task(self._follow(target))
            try:
                await asyncio.wait([self._session])
            finally:
                self._session.cancel()  # if this loop was cancelled
                await asyncio.wait([self._session])
            if not self._session.cancelled():
                self._note(target, self._session.exception())
            self._session = None
            if not self._changed.is_set() and self.stopped is None:
                await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._backoff.next_delay_s()):
                await self._changed.wait()
        except TimeoutError:
            return

    def _note(self, target: MasterTarget, error: BaseException | None) -> None:
        """Take note of how a connection has ended."""
        extra = {"master": target.broker_id, "epoch": target.epoch, "error": str(error)}
        text = str(error)
        if isinstance(error, WalFailed):
            self.stopped = error  # whoever has the WAL's callback for failures hears of it
        elif isinstance(error, Diverged):
            self.stopped = error
            logger.error("this replica and its master's contradict each other; it has stopped", extra=extra)
            self._events.diverged(error)
        elif isinstance(error, TidelogError):
            if text != self.problem:
                logger.info("not following", extra=extra)
        elif error is not None:
            raise error
        self._note_failing(text)

    def _note_well(self) -> None:
        """Take note that it follows, and may connect again at once if that ends."""
        self.problem, self.failing_since = "", None
        self._backoff.reset()

    def _note_failing(self, problem: str) -> None:
        self.problem = problem
        if self.failing_since is None:
            self.failing_since = self._world.clock.monotonic()

    async def _follow(self, target: MasterTarget) -> None:
        """Follow a master until the connection ends, which raises."""
        await self._on_disk(self._wal.promise(target.epoch))
        self._reconcile()
        max_body = max(self._limits.link.batch_bytes, 0) + self._limits.max_record_bytes + 4096
        connection = await connect_wal(
            self._world, target, max_body_bytes=max_body, timeout_s=self._limits.connect_timeout_s
        )
        self._inbox.clear()
        self._inbox_bytes = 0
        self._arrived.clear()
        self._heard_at = self._told_at = self._world.clock.monotonic()
        self._following = following = WalFollower()
        self._connection = connection
        connection.on_frame = self._on_frame
        connection.on_lost = self._arrived.set
        try:
            connection.send(self._hello())
            while True:
                await self._take(following, connection, await self._next(connection))
        except (CorruptData, Fenced) as error:
            connection.say_goodbye(_code_of(error), str(error))
            raise
        finally:
            self._is_matched = False
            self._following = self._connection = None
            self._events.following()
            if connection.is_open:
                connection.end()

    async def _on_disk(self, work: Awaitable[None]) -> None:
        self.disk_since = self._world.clock.monotonic()
        try:
            await work
        finally:
            self.disk_since = None

    def _hello(self) -> FollowerHello:
        wal, identity = self._wal, self._identity
        return FollowerHello(
            identity.replica_set_id,
            identity.replica.broker_id,
            identity.registration_epoch,
            identity.learner,
            wal.promised_epoch,
            wal.start_offset,
            wal.durable_offset,
            wal.confirm_offset,
            identity.replica.wal_id,
            trimmed_history(wal.epoch_history),
        )

    # --- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        self._heard_at = self._world.clock.monotonic()
        self._inbox.append(frame)
        self._inbox_bytes += _size(frame)
        if self._inbox_bytes > self._limits.inbox_bytes and self._connection is not None:
            self._connection.pause_receiving()
        self._arrived.set()

    async def _next(self, connection: WalConnection) -> Frame:
        while not self._inbox:
            if not connection.is_open:
                self.lost_at = self._world.clock.monotonic()
                raise MasterGone(f"the connection to the master was lost: {connection.problem or 'closed'}")
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._inbox.popleft()
        self._inbox_bytes -= _size(frame)
        if self._inbox_bytes <= self._limits.inbox_bytes // 2:
            connection.resume_receiving()
        return frame

    async def _take(self, following: WalFollower, connection: WalConnection, frame: Frame) -> None:
        if isinstance(frame, Records):
            if not self._is_matched:
                raise BadFrame("RECORDS before a WELCOME")
            if following.fits(frame, self._wal.end_offset):
                await self._receive(following, frame)
            self._note_confirmed(following, self._wal.durable_offset)
            if len(frame.body) or self._heard_at - self._matched_at >= self._limits.link.heartbeat_s / 2:
                self._note_well()
        elif isinstance(frame, Welcome):
            await self._match(following, connection, frame)
        elif isinstance(frame, Goodbye):
            raise MasterGone(f"the master says goodbye: {frame.text} ({frame.code})")
        else:
            raise BadFrame(f"a master sent {type(frame).__name__}")

    async def _match(self, following: WalFollower, connection: WalConnection, welcome: Welcome) -> None:
        """Make this WAL a prefix of the master's, durably, and say where it ends."""
        wal, tail = self._wal, self._tail
        self._is_matched = False
        await self._on_disk(wal.promise(wal.promised_epoch))  # nothing new; everything is durable then
        mine = LocalWal(wal.start_offset, wal.end_offset, wal.confirm_offset, wal.promised_epoch, wal.epoch_history)
        committed = max(tail.committed_offset, wal.start_offset)
        try:
            match = following.matched(mine, welcome, committed, given_up=self._events.has_given_up())
        except Diverged as error:
            if welcome.committed_offset > tail.committed_offset:
                raise Unavailable(f"the metadata here is behind the master's: {error}") from error
            raise
        epoch = welcome.master_epoch
        if match.step in (Step.KEEP, Step.TRUNCATE):
            if match.step is Step.TRUNCATE:
                extra = {"from": mine.end_offset, "to": match.offset, "epoch": epoch}
                logger.warning("this replica's unconfirmed bytes that its master does not have are cut", extra=extra)
            try:
                await self._on_disk(wal.truncate(match.offset, master_epoch=epoch))  # epochs without a byte go, too
            except CorruptData as error:
                raise Diverged(str(error)) from error
        else:
            kept_as = f".replaced-{epoch}-{mine.end_offset}" if match.step is Step.REPLACE else ""
            places = {"from": mine.end_offset, "at": match.offset, "epoch": epoch, "suffix": kept_as}
            logger.warning("this replica starts over at its master's first offset", extra=places)
            self._is_tail_true = False  # to a WAL that has started over, all before its first byte is confirmed
            await self._on_disk(wal.restart_at(match.offset, master_epoch=epoch, kept_as=kept_as))
        self._reconcile()
        self._told_readable = wal.confirm_offset
        self._is_matched = True
        self._matched_at = self._world.clock.monotonic()
        self.lost_at = None
        if wal.end_offset >= welcome.end_offset:  # the master need not read anything to go on
            self._note_well()
        self._acknowledge(wal.durable_offset)
        self._fillable.set()
        self._events.following()

    def _reconcile(self) -> None:
        """Let the tail have the WAL's records alone, after every step that may have changed the WAL."""
        self._tail.reconcile(self._wal)
        self._is_tail_true = True
        self._tail.note_committed(self._tail.committed_offset, self._wal.confirm_offset)

    async def _receive(self, following: WalFollower, frame: Records) -> None:
        """Put a frame's records into the WAL, as there is room."""
        wal, rest = self._wal, memoryview(frame.body)
        waited = False
        while len(rest):
            at = wal.end_offset
            try:
                accepted = await wal.receive(
                    at, frame.epoch, frame.epoch_start, rest, master_epoch=following.master_epoch
                )
            except WalFull as error:
                self._note_failing(str(error))
                if waited:  # there is room for records, and none for the epoch file
                    await self._world.clock.sleep(self._limits.tick_s)
                await self._wait_for_room(rest)
                waited = True
                continue
            self.problem, self.failing_since, waited = "", None, False
            rest = rest[wal.end_offset - at :]
            try:
                await asyncio.sleep(0)  # the WAL passes them to its disk: the master waits for that, not for the tail
            finally:
                for record in accepted:
                    self._tail.add(record)

    async def _wait_for_room(self, records: memoryview) -> None:
        """Wait until the first record fits, or it is to be tried again: then the reason may be another one.

        Raises `MasterGone` if room depends on what the master tells meanwhile.
        """
        wal = self._wal
        try:
            async with asyncio.timeout(self._limits.link.silence_s):
                await wal.receivable(records)
        except TimeoutError:
            if min(self._tail.committed_offset, wal.durable_offset) > wal.confirm_offset:
                raise MasterGone(
                    f"{self.problem}; the bucket has what is not known to be confirmed: the master is asked anew"
                ) from None

    # --- acknowledgements, and time ------------------------------------------------------------------------------

    def _on_durable(self, offset: int) -> None:
        if self._is_matched:
            self._acknowledge(offset)

    def _acknowledge(self, offset: int) -> None:
        following, connection = self._following, self._connection
        if following is None or connection is None or following.master_epoch < self._wal.promised_epoch:
            return  # promised to a newer master meanwhile
        connection.send(Ack(following.master_epoch, offset))
        self._told_at = self._world.clock.monotonic()
        self._note_confirmed(following, offset)

    def _note_confirmed(self, following: WalFollower, durable_offset: int) -> None:
        self._wal.note_confirmed(following.confirmed(durable_offset))
        if self._tail.committed_offset > self._wal.start_offset:
            self._trimmable.set()
        end = min(self._wal.confirm_offset, self._tail.end_offset)  # the tail gets them after the disk
        if end > self._told_readable:
            start, self._told_readable = self._told_readable, end
            self._events.readable(start, end)

    async def _tick_forever(self) -> None:
        link, clock = self._limits.link, self._world.clock
        while True:
            await clock.sleep(self._limits.tick_s)
            connection, now = self._connection, clock.monotonic()
            if connection is None:
                continue
            if self._is_matched and now - self._told_at >= link.heartbeat_s:
                self._acknowledge(self._wal.durable_offset)
            limit_s = link.silence_s if self._is_matched else self._limits.connect_timeout_s
            if not self._inbox and now - self._heard_at > limit_s:
                connection.end(MasterGone(f"the master was silent for {limit_s} s"))

    async def _trim_forever(self) -> None:
        """Free what is in the bucket and known to be confirmed here."""
        while True:
            await self._trimmable.wait()
            self._trimmable.clear()
            wal = self._wal
            offset = min(self._tail.committed_offset, wal.confirm_offset, wal.durable_offset)
            if self._is_matched and offset > wal.start_offset:
                try:
                    await wal.trim(offset)
                except (WalFailed, Closed) as error:
                    logger.info("the WAL is not trimmed", extra={"error": str(error)})

    async def _fill_forever(self) -> None:
        """Let the tail have what another role has written, for those who read here, and for a promotion."""
        while True:
            await self._fillable.wait()
            self._fillable.clear()
            try:
                start = await self._tail.fill(self._wal)
            except NotFound:  # trimmed meanwhile: less is missing now
                await self._world.clock.sleep(self._limits.tick_s)
                self._fillable.set()
                continue
            except TidelogError as error:
                logger.info("the WAL is not read into memory", extra={"error": str(error)})
                continue
            if start >= 0:
                self._events.readable(start, min(self._wal.confirm_offset, self._tail.end_offset))


def _size(frame: Frame) -> int:
    return _FRAME_BYTES + (len(frame.body) if isinstance(frame, Records) else 0)


def _code_of(error: CorruptData | Fenced) -> GoodbyeCode:
    if isinstance(error, Fenced):
        return GoodbyeCode.STALE_EPOCH
    return GoodbyeCode.DIVERGED if isinstance(error, Diverged) else GoodbyeCode.PROTOCOL


def _ignore_offset(_offset: int) -> None:
    """The WAL follows nobody any more."""
