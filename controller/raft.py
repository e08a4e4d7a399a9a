"""`RaftConsensus`: the `Consensus` door over pysyncobj, on a thread of its own.

The event loop hands proposals over by a queue and an eventfd; the thread ticks pysyncobj, and between taking a command
and counting it as held by this member lies one fdatasync for all that arrived meanwhile (group commit). Results go back
in batches by `call_soon_threadsafe`, after the state machine's `flush`.

Order in one turn of the thread, which durability rests on: take proposals → tick (commit what was durable *before* this
turn, apply, append new entries) → fdatasync → release held acknowledgements → deliver results → sleep if idle.

A disk that is full stalls the member (it neither commits nor acknowledges until a write works); a failed fdatasync, a
damaged file or an error that repeats ends it, and says so once through `set_on_failed`. A watchdog on the loop reports
a thread that died or hangs. Entry: `RaftConsensus`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pysyncobj import FAIL_REASON

from controller.consensus import OnFailed, OnRole, Role, StateMachine
from controller.errors import NotController, OutcomeUnknown
from controller.handshake import Credentials, Session
from controller.journal import JournalStalled
from controller.quorum_file import Members, MembershipChange
from controller.raft_member import RaftMember
from runtime.clock import Clock
from runtime.errors import (
    Closed,
    ConfigError,
    CorruptData,
    InvalidInput,
    Overloaded,
    StorageFailed,
    TidelogError,
    Unavailable,
)
from runtime.scheduling import wake_promptly
from runtime.tasks import TaskSet

log = logging.getLogger(__name__)

MAX_PROPOSAL_BYTES = 4 << 20
MAX_IN_FLIGHT = 1_024
IDLE_S = 0.25
"""A single member's tick when nothing happens; proposals wake it at once."""
STALL_RETRY_S = 0.2
SNAPSHOT_RETRY_S = 10.0
MAX_REPEATED_ERRORS = 10
HUNG_S = 5.0
TRANSFER_S = 2.0
"""How long commands wait while the leadership is handed over; then the old leader goes on."""
_TRANSFER_SLACK_S = 5.0
"""After that the thread that hands over is taken to hang."""


@dataclass(slots=True)
class RaftSettings:
    """How a member takes part. Without credentials it is alone and talks to nobody."""

    directory: Path
    """Journal and snapshot; of this member only."""
    credentials: Credentials | None = None
    """Its id, and what it authenticates itself and others with."""
    members: Members = field(default_factory=dict)
    """The quorum, this member included, where the directory does not know it."""
    snapshot_entries: int = 10_000
    election_min_s: float = 0.4
    election_max_s: float = 0.8
    heartbeat_s: float = 0.05

    def check(self) -> None:
        """Raises `ConfigError` for what would be unsafe."""
        if self.credentials is None:
            if self.members:
                raise ConfigError("controllers need a secret", hint="set controller.secret_file")
        elif self.credentials.node_id not in self.members:
            raise ConfigError(
                f"node {self.credentials.node_id} is not in controller.members",
                hint='add it, or leave "controller" out of node.roles',
            )

    def pysyncobj(self) -> dict[str, Any]:
        """The options for pysyncobj."""
        return {
            "raftMinTimeout": self.election_min_s,
            "raftMaxTimeout": self.election_max_s,
            "appendEntriesPeriod": self.heartbeat_s,
            "leaderFallbackTimeout": max(1.0, 2 * self.heartbeat_s),
            "connectionTimeout": max(1.5, self.election_max_s),
            "connectionRetryTime": 0.2,
        }


class _Done(NamedTuple):
    future: asyncio.Future[bytes]
    result: Any
    reason: int


@dataclass(slots=True)
class _Transfer:
    target: int | None
    future: asyncio.Future[bytes]
    deadline: float
    asked: bool = False


class RaftConsensus:
    """See `controller.consensus.Consensus`."""

    def __init__(self, settings: RaftSettings, clock: Clock) -> None:
        settings.check()
        self._settings = settings
        self._clock = clock
        self._role = Role(False, 0, None)
        self._seen_role = self._role
        self._on_role: OnRole = lambda role: None
        self._on_failed: OnFailed = lambda error: None
        self._inbox: deque[tuple[bytes | MembershipChange, asyncio.Future[bytes]]] = deque()
        self._orders: deque[Callable[[RaftMember], None]] = deque()
        self._adopted: deque[tuple[int, socket.socket, Session]] = deque()
        self._transfer: _Transfer | None = None
        self._pending: set[asyncio.Future[bytes]] = set()
        self._done: list[_Done] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._tasks = TaskSet("raft")
        self._error: Exception | None = None
        self._last_turn = clock.monotonic()
        self._snapshot_after = 0.0
        self._status: dict[str, Any] = {}
        self.members: Members = dict(settings.members)
        """The quorum as this member has it committed."""

    @property
    def role(self) -> Role:
        """See `Consensus.role`."""
        return self._role

    def set_on_role(self, callback: OnRole) -> None:
        """See `Consensus.set_on_role`."""
        self._on_role = callback

    def set_on_failed(self, callback: OnFailed) -> None:
        """See `Consensus.set_on_failed`."""
        self._on_failed = callback

    async def start(self, machine: StateMachine) -> None:
        """See `Consensus.start`."""
        assert self._thread is None
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="tidelog-raft", daemon=True)
        self._thread.start()
        try:
            await opened
        except TidelogError:
            self._thread.join()
            os.close(self._wake_fd)
            self._thread = None
            self._drop_adopted()
            raise
        self._tasks.spawn(self._watchdog(), "watchdog")

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        """See `Consensus.propose`."""
        if len(blob) > MAX_PROPOSAL_BYTES:
            raise InvalidInput(f"a command of {len(blob)} bytes exceeds the limit of {MAX_PROPOSAL_BYTES} bytes")
        assert blob, "an empty entry is a barrier"
        return await self._propose(blob, timeout_s)

    async def barrier(self, timeout_s: float) -> None:
        """See `Consensus.barrier`: an empty entry, which the machine never sees."""
        await self._propose(b"", timeout_s)

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """See `Consensus.change_membership`."""
        await self._propose(change, timeout_s)

    async def transfer(self, target: int | None, timeout_s: float = TRANSFER_S) -> None:
        """See `Consensus.transfer`."""
        if self._thread is None or not self._role.is_leader:
            raise NotController("this controller is not the leader")
        future: asyncio.Future[bytes] = self._loop.create_future()
        wanted = _Transfer(target, future, self._clock.monotonic() + timeout_s)

        def begin(member: RaftMember) -> None:
            if self._transfer is None:
                self._transfer = wanted
            else:
                self._note_done(future, None, FAIL_REASON.REQUEST_DENIED)

        self._order(begin)
        try:
            async with asyncio.timeout(timeout_s + _TRANSFER_SLACK_S):
                await future
        except TimeoutError:
            raise OutcomeUnknown("this controller ended, or hung, while it handed leadership over") from None

    def adopt_peer(self, peer_id: int, sock: socket.socket, session: Session) -> None:
        """See `Consensus.adopt_peer`."""
        if self._thread is None or self._stop.is_set() or self._error is not None:
            sock.close()
            return
        self._adopted.append((peer_id, sock, session))
        os.eventfd_write(self._wake_fd, 1)

    def _drop_adopted(self) -> None:
        """When the thread takes no more turns: nobody else closes them."""
        while self._adopted:
            self._adopted.popleft()[1].close()

    def _order(self, order: Callable[[RaftMember], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._wake_fd, 1)

    async def _propose(self, blob: bytes | MembershipChange, timeout_s: float) -> bytes:
        if self._error is not None:
            raise NotController(f"this controller has failed: {self._error}")
        if self._thread is None or self._stop.is_set() or not self._role.is_leader:
            raise NotController("this controller is not the leader", hint=f"the leader is {self._role.leader}")
        if len(self._pending) >= MAX_IN_FLIGHT:
            raise Overloaded(f"{MAX_IN_FLIGHT} commands are in flight")
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._inbox.append((blob, future))
        os.eventfd_write(self._wake_fd, 1)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise OutcomeUnknown(f"the command was not committed within {timeout_s} s") from None

    def status(self) -> dict[str, Any]:
        """See `Consensus.status`."""
        age_s = round(self._clock.monotonic() - self._last_turn, 3)
        return {"kind": "raft", **self._status, "tick_age_s": age_s, "in_flight": len(self._pending)}

    async def close(self) -> None:
        """See `Consensus.close`."""
        if self._thread is None:
            return
        await self._tasks.close()
        self._stop.set()
        os.eventfd_write(self._wake_fd, 1)
        await asyncio.to_thread(self._thread.join)
        self._thread = None
        os.close(self._wake_fd)
        self._drop_adopted()
        self._fail_pending(Closed("the controller is closed"))
        await asyncio.sleep(0)  # let the last deliveries run

    # On the loop

    def _deliver(self, done: list[_Done]) -> None:
        for future, result, reason in done:
            if future.done():
                continue  # timed out or cancelled meanwhile
            if reason == FAIL_REASON.SUCCESS:
                future.set_result(result)
            elif reason == FAIL_REASON.QUEUE_FULL:
                future.set_exception(Overloaded("the controller's command queue is full"))
            elif reason == FAIL_REASON.REQUEST_DENIED:
                future.set_exception(Unavailable("another change of the quorum is under way", hint="try again"))
            elif reason in (FAIL_REASON.MISSING_LEADER, FAIL_REASON.NOT_LEADER, FAIL_REASON.DISCARDED):
                future.set_exception(NotController("leadership changed before the command was accepted"))
            else:
                future.set_exception(OutcomeUnknown("leadership changed while the command was in flight"))

    def _take_role(self, role: Role) -> None:
        was_leader, self._role = self._role.is_leader, role
        if was_leader and not role.is_leader:
            self._fail_pending(OutcomeUnknown("leadership was lost while the command was in flight"))
        self._on_role(role)

    def _fail_pending(self, error: TidelogError) -> None:
        for future in list(self._pending):
            if not future.done():
                future.set_exception(error)

    def _take_failure(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._role = Role(False, self._role.term, None)
        self._fail_pending(OutcomeUnknown(f"this controller has failed: {error}"))
        self._drop_adopted()
        self._on_failed(error)

    async def _watchdog(self) -> None:
        while self._error is None:
            await self._clock.sleep(1.0)
            thread = self._thread
            if thread is not None and not thread.is_alive() and not self._stop.is_set():
                self._take_failure(StorageFailed("the Raft thread died"))
            age_s = self._clock.monotonic() - self._last_turn
            if age_s > HUNG_S:
                log.error("the Raft thread hangs", extra={"seconds": round(age_s, 1)})

    # On the consensus thread

    def _post(self, callback: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *args)

    def _run(self, opened: asyncio.Future[None]) -> None:
        wake_promptly()  # a commit waits for three members to wake up, one after the other
        try:
            member = self._open()
        except (TidelogError, OSError) as error:
            failure = error if isinstance(error, TidelogError) else StorageFailed(f"cannot open the Raft log: {error}")
            self._post(opened.set_exception, failure)
            return
        try:
            self._turns(member, opened)
        except (TidelogError, MemoryError, RecursionError) as error:
            log.critical("this controller member stops", exc_info=error)
            self._post(self._take_failure, error)
            if not opened.done():
                self._post(_set_exception_once, opened, error)
        finally:
            self._flush()
            try:
                member.close()
            except (TidelogError, OSError) as error:
                log.error("closing the Raft log failed", extra={"error": str(error)})

    def _open(self) -> RaftMember:
        settings = self._settings
        member = RaftMember(
            credentials=settings.credentials,
            members=settings.members,
            conf=settings.pysyncobj(),
            directory=settings.directory,
            apply=self._apply,
            freeze=self._machine.freeze,
            load=self._machine.load,
        )
        member.watch(self._wake_fd, self._woken)
        return member

    def _woken(self, fd: int, event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)

    def _apply(self, blob: bytes, index: int) -> bytes:
        return self._machine.apply(blob, index) if blob else b""

    def _turns(self, member: RaftMember, opened: asyncio.Future[None]) -> None:
        repeated = 0
        ready = False
        while not self._stop.is_set():
            self._last_turn = self._clock.monotonic()
            try:
                self._turn(member)
                repeated = 0
            except JournalStalled as error:
                log.error("the Raft log cannot be written; waiting", extra={"error": str(error)})
                self._stop.wait(STALL_RETRY_S)
                continue
            except (TidelogError, MemoryError, RecursionError):
                raise
            except Exception as error:
                repeated += 1
                log.exception("a Raft tick failed", extra={"times": repeated})
                if repeated >= MAX_REPEATED_ERRORS:
                    raise StorageFailed(f"Raft ticks keep failing: {error!r}") from error
                self._stop.wait(0.05)
                continue
            if not ready:
                ready = True
                self._post(opened.set_result, None)
            asked = (self._inbox and self._transfer is None) or self._orders or self._adopted
            if not asked and not member.has_work():
                member.wait(IDLE_S if member.is_alone() else self._settings.heartbeat_s / 2)

    def _turn(self, member: RaftMember) -> None:
        member.after_tick()  # what a stalled turn left behind must be durable before the next commit
        while self._orders:
            self._orders.popleft()(member)
        while self._adopted:
            member.adopt(*self._adopted.popleft())
        if self._transfer is not None:
            self._hand_over(member, self._transfer)
        while self._inbox and self._transfer is None:
            item, future = self._inbox.popleft()
            if isinstance(item, MembershipChange):
                member.submit_change(item, partial(self._note_done, future))
            else:
                member.submit(item, partial(self._note_done, future))
        member.before_tick()
        member.doTick(0.0)
        if member.failure is not None:
            failure = member.failure
            raise failure if isinstance(failure, TidelogError) else CorruptData(f"a snapshot failed: {failure}")
        member.after_tick()
        self._flush()
        self._note_role(member)
        self._end_transfer(member)
        self._maybe_snapshot(member)

    def _hand_over(self, member: RaftMember, transfer: _Transfer) -> None:
        """Commands wait until the target has everything, was told, and has taken over; or until time is up."""
        if not member._isLeader():
            return
        if self._clock.monotonic() > transfer.deadline:
            self._transfer = None
            self._note_done(transfer.future, None, FAIL_REASON.MISSING_LEADER)
        elif not transfer.asked:
            transfer.asked = member.hand_over(transfer.target)

    def _end_transfer(self, member: RaftMember) -> None:
        """Only after the role was told: whoever asked for the transfer finds that this is no leader any more."""
        if self._transfer is not None and not member._isLeader():
            future, self._transfer = self._transfer.future, None
            self._post(self._deliver, [_Done(future, b"", FAIL_REASON.SUCCESS)])

    def _note_done(self, future: asyncio.Future[bytes], result: Any, reason: int) -> None:
        self._done.append(_Done(future, result, reason))

    def _flush(self) -> None:
        self._machine.flush()
        if self._done:
            done, self._done = self._done, []
            self._post(self._deliver, done)

    def _note_role(self, member: RaftMember) -> None:
        self._status = {
            "term": member.raftCurrentTerm,
            "last_index": member.journal.last_index,
            "commit_index": member.raftCommitIndex,
            "applied_index": member.raftLastApplied,
            "journal_entries": len(member.journal.entries),
            "journal_bytes": member.journal.size_bytes,
            "syncs": member.journal.syncs,
            "peers": member.peers(self._clock.monotonic()),
        }
        if self.members != member.applied_members:
            self.members = dict(member.applied_members)
        role = Role(bool(member._isLeader()), member.raftCurrentTerm, member.leader_id())
        if role != self._seen_role:
            self._seen_role = role
            self._post(self._take_role, role)

    def _maybe_snapshot(self, member: RaftMember) -> None:
        now = self._clock.monotonic()
        if member.take_snapshot_failed():
            self._snapshot_after = now + SNAPSHOT_RETRY_S
        elif len(member.journal.entries) > self._settings.snapshot_entries and now >= self._snapshot_after:
            self._snapshot_after = now + 1.0  # the next ticks write it and rewrite the journal
            member.forceLogCompaction()


def _set_exception_once(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
