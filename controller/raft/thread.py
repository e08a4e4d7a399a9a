"""`RaftConsensus`: the `Consensus` interface over pysyncobj, on a separate thread.

The event loop passes proposals by a queue and an eventfd; the thread ticks pysyncobj. Between accepting a command and
counting it as stored by this member there is one fdatasync for all commands that arrived meanwhile (group commit).
Results return in batches by `call_soon_threadsafe`, after the state machine's `flush`.

Durability depends on the order within one turn of the thread: take proposals → tick (commit what was durable *before*
this turn, apply, append new entries) → fdatasync → release held acknowledgements → deliver results → sleep if idle.

A full disk stalls the member (it neither commits nor acknowledges until a write succeeds). A failed fdatasync, a
damaged file or a repeated error ends it, which is reported once through `set_on_failed`. A watchdog on the loop reports
a thread that died or hangs; and the thread has another member lead when it sees nothing of that watchdog any more.
Entry: `RaftConsensus`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pysyncobj import FAIL_REASON

from tidelog.controller.model.errors import NotController, OutcomeUnknown
from tidelog.controller.raft.consensus import OnFailed, OnRole, Role, StateMachine
from tidelog.controller.raft.core import check_version, inject
from tidelog.controller.raft.journal import Journal, JournalStalled
from tidelog.controller.raft.member import SNAPSHOT_PIECE_BYTES, AppliedState, RaftMember
from tidelog.controller.raft.quorum import Members, MembershipChange
from tidelog.controller.raft.runner import system_surroundings
from tidelog.controller.raft.surroundings import Pause, RaftSocket, Runner, Surroundings
from tidelog.controller.rpc.handshake import Credentials, Session
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import (
    Closed,
    ConfigError,
    CorruptData,
    InvalidInput,
    Overloaded,
    StorageFailed,
    TidelogError,
    Unavailable,
)
from tidelog.runtime.health import STUCK_S
from tidelog.runtime.task_errors import ERRORS
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.waiting import within

logger = logging.getLogger(__name__)

MAX_PROPOSAL_BYTES = 4 << 20
MAX_IN_FLIGHT = 1_024
IDLE_S = 0.25
"""Tick of an idle single member; proposals wake it at once."""
STALL_RETRY_S = 0.2
SNAPSHOT_RETRY_S = 10.0
MAX_REPEATED_ERRORS = 10
HUNG_S = 5.0
LOOK_S = 1.0
"""Between two looks of the event loop at the thread, which sees by them that the loop runs."""
DEAF_S = 10.0
"""A leader whose event loop has not looked for so long answers nobody: another member is to lead."""
COUNTED_S = 0.5
"""The most that one turn counts of it: a process that was stopped as a whole has no reason to suspect its loop."""
MIN_FREE_BYTES = 16 << 20
"""Less than this on the disk of the log is a problem before a write fails: the next snapshot may not fit."""
STATUS_S = 0.1
"""How old what `status` tells may be, of a member that takes turns."""
TRANSFER_S = 2.0
"""How long commands wait during a transfer of the leadership; then the old leader continues."""
_TRANSFER_SLACK_S = 5.0
"""Time after which a transferring thread is considered hung."""


@dataclass(slots=True)
class RaftSettings:
    """Settings of a member. Without credentials it is a single member without connections."""

    directory: Path
    """Directory of journal and snapshot, used by this member only."""
    credentials: Credentials | None = None
    """The node id, and the secret for authentication in both directions."""
    members: Members = field(default_factory=dict)
    """The quorum, this member included, if the directory has not recorded it."""
    snapshot_entries: int = 10_000
    snapshot_bytes: int = 64 << 20
    snapshot_piece_bytes: int = SNAPSHOT_PIECE_BYTES
    election_min_s: float = 0.4
    election_max_s: float = 0.8
    heartbeat_s: float = 0.05

    def check(self) -> None:
        """Raises `ConfigError` for an unsafe configuration."""
        if self.credentials is None:
            if self.members:
                raise ConfigError("controllers need a secret", hint="set controller.secret_file")
        elif self.credentials.node_id not in self.members:
            raise ConfigError(
                f"node {self.credentials.node_id} is not in controller.members",
                hint='add it, or leave "controller" out of node.roles',
            )

    def pysyncobj(self) -> dict[str, Any]:
        """Return the options for pysyncobj."""
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
    """See `tidelog.controller.raft.consensus.Consensus`."""

    def __init__(self, settings: RaftSettings, clock: Clock, surroundings: Surroundings | None = None) -> None:
        settings.check()
        check_version()
        self._settings = settings
        self._clock = clock
        self._surroundings = surroundings or system_surroundings()
        self._now = self._surroundings.monotonic
        self._role = Role(False, 0, None)
        self._seen_role = self._role
        self._on_role: OnRole = lambda role: None
        self._on_failed: OnFailed = lambda error: None
        self._inbox: deque[tuple[bytes | MembershipChange, asyncio.Future[bytes]]] = deque()
        self._orders: deque[Callable[[RaftMember], None]] = deque()
        self._adopted: deque[tuple[int, RaftSocket, Session]] = deque()
        self._transfer: _Transfer | None = None
        self._pending: set[asyncio.Future[bytes]] = set()
        self._done: list[_Done] = []
        self.stopping = threading.Event()
        self._runner: Runner | None = None
        self._member: RaftMember | None = None
        self._ready = False
        self._is_over = False
        self._unheard: Exception | None = None
        """What a message led to between two turns."""
        self._repeated = 0
        self._tasks = TaskSet("raft")
        self._error: Exception | None = None
        self._last_turn = clock.monotonic()
        self._turned_at = self._now()
        self._deaf_s = 0.0
        """For how long turns were taken since the event loop looked last."""
        self._ask_again_at = 0.0
        self._snapshot_after = 0.0
        self._stalled = ""
        """Why the log cannot be written at present; empty when it can."""
        self._status: dict[str, Any] = {}
        self._status_due = 0.0
        self.members: Members = dict(settings.members)
        """The quorum as this member has it committed."""
        self.directories: dict[int, str] = {}
        """And the ids of its members' directories."""

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
        assert self._runner is None
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._runner = self._surroundings.runner(self)
        self._runner.start()
        try:
            await self._opened
        except TidelogError:
            await self._runner.join()
            self._runner = None
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
        """See `Consensus.barrier`. Implemented as an empty entry, which the machine never sees."""
        await self._propose(b"", timeout_s)

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """See `Consensus.change_membership`."""
        await self._propose(change, timeout_s)

    async def transfer(self, target: int | None, timeout_s: float = TRANSFER_S) -> None:
        """See `Consensus.transfer`."""
        if self._runner is None or not self._role.is_leader:
            raise NotController("this controller is not the leader")
        future: asyncio.Future[bytes] = self._loop.create_future()
        wanted = _Transfer(target, future, self._now() + timeout_s)

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
            raise OutcomeUnknown("this controller ended or hung during a transfer of the leadership") from None

    def adopt_peer(self, peer_id: int, transport: asyncio.Transport, session: Session) -> None:
        """See `Consensus.adopt_peer`."""
        if self._runner is None or self.stopping.is_set() or self._error is not None:
            transport.abort()
            return
        self._adopted.append((peer_id, self._surroundings.sockets.take_over(transport), session))
        self._runner.wake()

    def _drop_adopted(self) -> None:
        """Close adopted sockets when the thread takes no more turns."""
        while self._adopted:
            self._adopted.popleft()[1].close()

    def _order(self, order: Callable[[RaftMember], None]) -> None:
        assert self._runner is not None
        self._orders.append(order)
        self._runner.wake()

    async def _propose(self, blob: bytes | MembershipChange, timeout_s: float) -> bytes:
        if self._error is not None:
            raise NotController(f"this controller has failed: {self._error}")
        if self._runner is None or self.stopping.is_set() or not self._role.is_leader:
            raise NotController("this controller is not the leader", hint=f"the leader is {self._role.leader}")
        if len(self._pending) >= MAX_IN_FLIGHT:
            raise Overloaded(f"{MAX_IN_FLIGHT} commands are in flight")
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._inbox.append((blob, future))
        self._runner.wake()
        try:
            return await within(future, timeout_s)
        except TimeoutError:
            raise OutcomeUnknown(f"the command was not committed within {timeout_s} s") from None

    def status(self) -> dict[str, Any]:
        """See `Consensus.status`."""
        age_s = round(self._clock.monotonic() - self._last_turn, 3)
        common = {"tick_age_s": age_s, "in_flight": len(self._pending), "problem": self._problem(age_s)}
        return {"kind": "raft", **self._status, **common}

    def _problem(self, age_s: float) -> str:
        """What is wrong with this member, one clause; empty if nothing is."""
        if self._error is not None:
            return f"has failed: {self._error}"
        if age_s >= STUCK_S:
            return f"has not taken a turn for {age_s:.0f} s: its disk or its processor does not answer"
        if self._stalled:
            return f"cannot write its log, and waits: {self._stalled}"
        if "disk_error" in self._status:
            return f"cannot find its directory: {self._status['disk_error']}"
        free_bytes = self._status.get("free_bytes", MIN_FREE_BYTES)
        if free_bytes < MIN_FREE_BYTES:
            return f"has {free_bytes:,} bytes left on the disk of {self._settings.directory}"
        return ""

    async def close(self) -> None:
        """See `Consensus.close`."""
        if self._runner is None:
            return
        await self._tasks.close()
        self.stopping.set()
        self._runner.wake()
        await self._runner.join()
        self._runner = None
        self._drop_adopted()
        self._fail_pending(Closed("the controller is closed"))
        await asyncio.sleep(0)  # let the last deliveries run

    # On the loop

    def _deliver(self, done: list[_Done]) -> None:
        for future, result, reason in done:
            if future.done():
                continue  # timed out or was cancelled
            if reason == FAIL_REASON.SUCCESS:
                future.set_result(result)
            elif reason == FAIL_REASON.QUEUE_FULL:
                future.set_exception(Overloaded("the controller's command queue is full"))
            elif reason == FAIL_REASON.REQUEST_DENIED:
                future.set_exception(Unavailable("another change of the quorum is in progress", hint="retry"))
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
            await self._clock.sleep(LOOK_S)
            deaf_s, self._deaf_s = self._deaf_s, 0.0
            if deaf_s >= DEAF_S:
                logger.error("the event loop hung, and led nobody", extra={"seconds": round(deaf_s, 1)})
            runner = self._runner
            if runner is not None and not runner.is_alive() and not self.stopping.is_set():
                self._take_failure(StorageFailed("the Raft thread died"))
            age_s = self._clock.monotonic() - self._last_turn
            if age_s > HUNG_S:
                logger.error("the Raft thread hangs", extra={"seconds": round(age_s, 1)})

    # On the consensus thread

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._runner is not None
        self._runner.post(callback, *args)

    def begin(self) -> bool:
        """See `Turns.begin`."""
        inject(self._surroundings)
        settings = self._settings
        try:
            self._member = RaftMember(
                credentials=settings.credentials,
                members=settings.members,
                conf=settings.pysyncobj(),
                directory=settings.directory,
                surroundings=self._surroundings,
                state=AppliedState(self._apply, self._machine.freeze, self._machine.load, self._machine.level),
                piece_bytes=settings.snapshot_piece_bytes,
            )
        except Exception as error:  # noqa: BLE001  # whoever started this member waits until it is open, or has failed
            failure = error
            if not isinstance(error, TidelogError):
                said = error if isinstance(error, OSError) else repr(error)
                failure = StorageFailed(f"cannot open the Raft log: {said}")
                failure.__cause__ = error
            self._post(_set_exception_once, self._opened, failure)
            return False
        return True

    def watch(self, fd: int, callback: Callable[[int, int], None]) -> None:
        """See `Turns.watch`."""
        assert self._member is not None
        self._member.watch(fd, callback)

    def listen(self, seconds: float) -> None:
        """See `Turns.listen`."""
        assert self._member is not None
        try:
            self._member.wait(seconds)
        except Exception as error:  # noqa: BLE001  # of a message's handler: the next turn begins with it
            self._unheard = error

    def end(self) -> None:
        """See `Turns.end`."""
        if self._member is None:
            return
        self._flush()
        try:
            self._member.close()
        except (TidelogError, OSError) as error:
            logger.error("closing the Raft log failed", extra={"error": str(error)})

    def _apply(self, blob: bytes, index: int) -> bytes:
        return self._machine.apply(blob, index) if blob else b""

    def take(self) -> Pause | None:
        """See `Turns.take`."""
        member = self._member
        assert member is not None
        if self.stopping.is_set() or self._is_over:
            return None
        self._last_turn = self._clock.monotonic()
        try:
            self._raise_unheard()
            self._turn(member)
        except JournalStalled as error:
            logger.error("the Raft log cannot be written; waiting", extra={"error": str(error)})
            self._stalled = str(error)
            return Pause(STALL_RETRY_S, listens=False)
        except (TidelogError, MemoryError, RecursionError) as error:
            self._give_up(error)
            return None
        except Exception as error:
            self._repeated += 1
            logger.exception("a Raft tick failed", extra={"times": self._repeated})
            self._post(partial(ERRORS.count, "the Raft thread", error, ended=False))
            if self._repeated >= MAX_REPEATED_ERRORS:
                failure = StorageFailed(f"Raft ticks keep failing: {error!r}")
                failure.__cause__ = error
                self._give_up(failure)
                return None
            return Pause(0.05, listens=False)
        self._repeated = 0
        self._stalled = ""
        if not self._ready:
            self._ready = True
            self._post(self._opened.set_result, None)
        asked = (self._inbox and self._transfer is None) or self._orders or self._adopted
        if asked or member.has_work():
            return Pause(0.0)
        return Pause(IDLE_S if member.is_alone() else self._settings.heartbeat_s / 2)

    def _raise_unheard(self) -> None:
        if self._unheard is not None:
            error, self._unheard = self._unheard, None
            raise error

    def _give_up(self, error: Exception) -> None:
        logger.critical("this controller member stops", exc_info=error)
        self._is_over = True
        self._post(self._take_failure, error)
        if not self._ready:
            self._post(_set_exception_once, self._opened, error)

    def _turn(self, member: RaftMember) -> None:
        member.after_tick()  # the rest of a stalled turn must be durable before the next commit
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
        if self._transfer is None:  # the member that is to lead must have everything
            member.record_directories()
        member.before_tick()
        member.doTick(0.0)
        if member.failure is not None:
            failure = member.failure
            raise failure if isinstance(failure, TidelogError) else CorruptData(f"a snapshot failed: {failure}")
        member.after_tick()
        self._note_members(member)
        self._flush()
        self._note_role(member)
        self._note_status(member)
        self._end_transfer(member)
        self._leave_if_deaf(member)
        self._maybe_snapshot(member)

    def _hand_over(self, member: RaftMember, transfer: _Transfer) -> None:
        """Commands wait until the target has everything, was told, and has taken over; or until time is up."""
        if not member.is_leader():
            return
        if self._now() > transfer.deadline:
            self._transfer = None
            self._note_done(transfer.future, None, FAIL_REASON.MISSING_LEADER)
        elif not transfer.asked:
            transfer.asked = member.hand_over(transfer.target)

    def _end_transfer(self, member: RaftMember) -> None:
        """Only after the role was told: whoever asked for the transfer finds that this is no leader any more."""
        if self._transfer is not None and not member.is_leader():
            future, self._transfer = self._transfer.future, None
            self._post(self._deliver, [_Done(future, b"", FAIL_REASON.SUCCESS)])

    def _leave_if_deaf(self, member: RaftMember) -> None:
        """Have another member lead when the event loop of this one hangs: brokers and operators get no answer here.

        It is asked once a second until it does; nothing is logged meanwhile, for that may be what hangs.
        """
        now = self._now()
        self._deaf_s += min(now - self._turned_at, COUNTED_S)
        self._turned_at = now
        if self._deaf_s >= DEAF_S and member.is_leader() and now >= self._ask_again_at:
            self._ask_again_at = now + 1.0
            member.hand_over(None)

    def _note_done(self, future: asyncio.Future[bytes], result: Any, reason: int) -> None:
        self._done.append(_Done(future, result, reason))

    def _flush(self) -> None:
        self._machine.flush()
        if self._done:
            done, self._done = self._done, []
            self._post(self._deliver, done)

    def _note_status(self, member: RaftMember) -> None:
        now = self._now()
        if now < self._status_due:
            return
        self._status_due = now + STATUS_S
        self._status = {
            "directory": member.directory.id,
            "term": member.raftCurrentTerm,
            "last_index": member.journal.last_index,
            "commit_index": member.raftCommitIndex,
            "applied_index": member.raftLastApplied,
            "journal_entries": len(member.journal.entries),
            "journal_bytes": member.journal.size_bytes,
            "syncs": member.journal.syncs,
            "peers": member.peers(now),
            **self._disk(),
        }

    def _disk(self) -> dict[str, Any]:
        try:
            return {"free_bytes": self._surroundings.files.free_bytes(self._settings.directory)}
        except OSError as error:
            return {"disk_error": str(error)}

    def _note_members(self, member: RaftMember) -> None:
        """Before the results: whoever hears that a change is committed finds it here."""
        if self.members != member.applied.members:
            self.members = dict(member.applied.members)
        if self.directories != member.applied.directories:
            self.directories = dict(member.applied.directories)

    def _note_role(self, member: RaftMember) -> None:
        role = Role(member.is_leader(), member.raftCurrentTerm, member.leader_id())
        if role != self._seen_role:
            self._seen_role = role
            self._status_due = 0.0
            self._post(self._take_role, role)

    def _maybe_snapshot(self, member: RaftMember) -> None:
        now = self._now()
        if member.take_snapshot_failed():
            self._snapshot_after = now + SNAPSHOT_RETRY_S
        elif self._is_long(member.journal) and now >= self._snapshot_after:
            self._snapshot_after = now + 1.0  # the next ticks write it and rewrite the journal
            member.forceLogCompaction()

    def _is_long(self, journal: Journal) -> bool:
        """Whether the journal has reached a bound: it is kept in memory, and read as a whole at start."""
        return (
            len(journal.entries) > self._settings.snapshot_entries or journal.size_bytes > self._settings.snapshot_bytes
        )


def _set_exception_once(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
