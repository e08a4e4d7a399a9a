"""The `Consensus` door: a small Raft of its own over the simulated network (Raft paper, figure 2, with snapshots).

It is a model of what pysyncobj is to the controller, and not of pysyncobj: terms, votes, a log that is durable at each
member after `SYNC_S`, elections, a leader that steps down when it has not heard of a majority, entries that are
overwritten when their leader was cut off, results that nobody hears of. What the real one does wrong is for the tests
over real processes to find.

`RaftRecord` is what survives a crash of its member: term, vote, snapshot, log. Messages are dropped by cuts and
crashes; they come late to a member that is paused.

Entry: `RaftMail` (one of a cluster), `SimConsensus` (one of each life of a controller).
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from controller.consensus import OnFailed, OnRole, Role, StateMachine
from controller.errors import NotController, OutcomeUnknown
from controller.handshake import Session
from controller.quorum_file import Members, MembershipChange
from runtime.errors import InvalidInput, Overloaded
from simulation.loop import VirtualLoop, current_life
from simulation.network import SimNetwork

SYNC_S = 0.0008
HEARTBEAT_S = 0.2
ELECTION_MIN_S = 0.6
ELECTION_MAX_S = 1.2
MAX_IN_FLIGHT = 1_024
MAX_BATCH = 256
"""Entries in one message."""
TRANSFER_S = 2.0


class _Entry(NamedTuple):
    term: int
    blob: bytes
    """Empty: a new leader's first one, or a barrier; the machine never sees it."""


@dataclass(slots=True)
class RaftRecord:
    """A member's disk."""

    term: int = 0
    voted_for: int | None = None
    base: int = 0
    """Index of the last entry in the snapshot."""
    base_term: int = 0
    snapshot: bytes | None = None
    log: list[_Entry] = field(default_factory=list)
    """Entries after `base`."""

    @property
    def last(self) -> int:
        """Index of the last entry."""
        return self.base + len(self.log)

    def term_at(self, index: int) -> int:
        """Term of an entry from `base` on."""
        return self.base_term if index == self.base else self.log[index - self.base - 1].term


class _Append(NamedTuple):
    term: int
    leader: int
    previous: int
    previous_term: int
    entries: list[_Entry]
    commit: int


class _Appended(NamedTuple):
    term: int
    ok: bool
    match: int


class _Ask(NamedTuple):
    term: int
    last: int
    last_term: int
    forced: bool
    """A transfer: the old leader wants it."""


class _Vote(NamedTuple):
    term: int
    granted: bool


class _Install(NamedTuple):
    term: int
    leader: int
    base: int
    base_term: int
    snapshot: bytes


class _TakeOver(NamedTuple):
    term: int


class RaftMail:
    """Carries messages between the members of one quorum."""

    def __init__(self, loop: VirtualLoop, network: SimNetwork, hosts: dict[int, str]) -> None:
        self.loop = loop
        self._network = network
        self._hosts = hosts
        self.members: dict[int, SimConsensus] = {}
        """The living ones."""
        self._world = contextvars.Context()

    def send(self, source: int, target: int, message: Any) -> None:
        """Deliver `message` some time later, or never."""
        delay_s = self._network.latency_s(self._hosts[source], self._hosts[target])
        self.loop.call_later(delay_s, self._deliver, source, target, message, context=self._world)

    def _deliver(self, source: int, target: int, message: Any) -> None:
        member = self.members.get(target)
        if member is not None and not self._network.is_cut(self._hosts[source], self._hosts[target]):
            if member.life is not None and member.life.halted:
                self.loop.call_soon(member.receive, source, message, context=member.context)
            else:
                member.context.run(member.receive, source, message)


class SimConsensus:
    """See `controller.consensus.Consensus`."""

    def __init__(
        self,
        node_id: int,
        members: Members,
        record: RaftRecord,
        mail: RaftMail,
        rng: random.Random,
        snapshot_entries: int,
    ) -> None:
        self._id = node_id
        self._members = dict(members)
        self._peers = [each for each in members if each != node_id]
        self._majority = len(members) // 2 + 1
        self._record = record
        self._mail = mail
        self._loop = mail.loop
        self._rng = rng
        self._snapshot_entries = snapshot_entries
        self._role = Role(False, record.term, None)
        self._on_role: OnRole = lambda role: None
        self._machine: StateMachine | None = None
        self.context: contextvars.Context
        self.life = current_life()
        self._commit = self._applied = record.base
        self._waiting: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        """By index: the term of the proposal, and who waits for it."""
        self._durable = record.last
        self._next: dict[int, int] = {}
        self._match: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._votes: set[int] = set()
        """Of a candidate, and of the leader that it became. A follower has none: a late vote elects nobody."""
        self._leader_heard_s = float("-inf")
        self._deadline_s = 0.0
        self._syncing = False
        self._leads = False
        self.fail_next_sync = False
        self._on_failed: OnFailed = lambda error: None

    @property
    def role(self) -> Role:
        """See `Consensus.role`."""
        return self._role

    @property
    def members(self) -> Members:
        """See `Consensus.members`."""
        return self._members

    def set_on_role(self, callback: OnRole) -> None:
        """See `Consensus.set_on_role`."""
        self._on_role = callback

    def set_on_failed(self, callback: OnFailed) -> None:
        """See `Consensus.set_on_failed`."""
        self._on_failed = callback

    async def start(self, machine: StateMachine) -> None:
        """See `Consensus.start`."""
        await asyncio.sleep(SYNC_S)
        self._machine = machine
        self.context = contextvars.copy_context()
        if self._record.snapshot is not None:
            machine.load(self._record.snapshot)
        self._mail.members[self._id] = self
        self._set_deadline()
        if not self._peers:
            self._stand()
        self._loop.call_later(HEARTBEAT_S, self._tick)

    async def close(self) -> None:
        """See `Consensus.close`."""
        if self._mail.members.get(self._id) is self:
            del self._mail.members[self._id]
        self._machine = None
        self._lose(OutcomeUnknown("the controller is closed"))

    # Proposals

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        """See `Consensus.propose`."""
        assert blob
        return await self._propose(blob, timeout_s)

    async def barrier(self, timeout_s: float) -> None:
        """See `Consensus.barrier`."""
        await self._propose(b"", timeout_s)

    async def _propose(self, blob: bytes, timeout_s: float) -> bytes:
        if not self._leads or self._machine is None:
            raise NotController("this controller is not the leader", hint=f"the leader is {self._role.leader}")
        if len(self._waiting) >= MAX_IN_FLIGHT:
            raise Overloaded(f"{MAX_IN_FLIGHT} commands are in flight")
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._append(blob)
        self._waiting[self._record.last] = self._record.term, future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise OutcomeUnknown(f"the command was not committed within {timeout_s} s") from None

    def _append(self, blob: bytes) -> None:
        self._record.log.append(_Entry(self._record.term, blob))
        self._sync()

    def _sync(self) -> None:
        """What is in the log is durable, and goes out, some time later."""
        if not self._syncing:
            self._syncing = True
            self._loop.call_later(SYNC_S * (0.5 + self._rng.random()), self._synced)

    def _synced(self) -> None:
        self._syncing = False
        if self.fail_next_sync:
            self._fail(self._rng.randint(self._durable, self._record.last))
            return
        self._durable = self._record.last
        if self._leads:
            for peer in self._peers:
                self._replicate(peer)
            self._advance()

    def _fail(self, kept: int) -> None:
        """The journal cannot be synced (EIO) and holds what comes up to `kept`. The process must end."""
        record = self._record
        del record.log[kept - record.base :]
        self._mail.members.pop(self._id, None)
        self._machine = None
        self._leads = False
        self._lose(OutcomeUnknown("the journal failed"))
        self._on_failed(OSError(errno.EIO, os.strerror(errno.EIO)))

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """See `Consensus.change_membership`."""
        raise InvalidInput("the simulated quorum does not change its members")

    async def transfer(self, target: int | None) -> None:
        """See `Consensus.transfer`."""
        if not self._leads or not self._peers:
            raise NotController("this controller is not the leader")
        chosen = target if target is not None else max(self._peers, key=lambda peer: (self._match.get(peer, 0), peer))
        self._mail.send(self._id, chosen, _TakeOver(self._record.term))
        deadline = self._loop.time() + TRANSFER_S
        while self._leads:
            if self._loop.time() > deadline:
                raise NotController("the leadership could not be handed over in time")
            await asyncio.sleep(HEARTBEAT_S / 3)

    def adopt_peer(self, peer_id: int, sock: socket.socket, session: Session) -> None:
        """There are no sockets here."""
        raise InvalidInput("the simulated quorum has no sockets")

    def status(self) -> dict[str, Any]:
        """See `Consensus.status`."""
        return {
            "kind": "simulated",
            "term": self._record.term,
            "last_index": self._record.last,
            "commit_index": self._commit,
            "applied_index": self._applied,
            "peers": {},
        }

    # Time

    def _set_deadline(self) -> None:
        self._deadline_s = self._loop.time() + self._rng.uniform(ELECTION_MIN_S, ELECTION_MAX_S)

    def _tick(self) -> None:
        if self._machine is None:
            return
        self._loop.call_later(HEARTBEAT_S, self._tick)
        now = self._loop.time()
        if self._leads:
            alive = 1 + sum(now - heard <= ELECTION_MAX_S for heard in self._heard.values())
            if alive < self._majority:
                self._follow(self._record.term, None)
            else:
                for peer in self._peers:
                    self._replicate(peer)
        elif now >= self._deadline_s:
            self._stand()

    # Elections

    def _stand(self, forced: bool = False) -> None:
        record = self._record
        record.term += 1
        record.voted_for = self._id
        self._votes = {self._id}
        self._set_deadline()
        self._note_role(None)
        if len(self._votes) >= self._majority:
            self._lead()
            return
        ask = _Ask(record.term, record.last, record.term_at(record.last), forced)
        for peer in self._peers:
            self._mail.send(self._id, peer, ask)

    def _lead(self) -> None:
        record, now = self._record, self._loop.time()
        self._leads = True
        self._durable = record.last  # it has voted, or answered, with all of that
        self._next = dict.fromkeys(self._peers, record.last + 1)
        self._match = dict.fromkeys(self._peers, 0)
        self._heard = dict.fromkeys(self._peers, now)
        self._note_role(self._id)
        self._append(b"")

    def _follow(self, term: int, leader: int | None) -> None:
        record = self._record
        if term > record.term:
            record.term, record.voted_for = term, None
        self._votes.clear()
        if self._leads:
            self._leads = False
            self._lose(OutcomeUnknown("leadership was lost while the command was in flight"))
        self._set_deadline()
        self._note_role(leader)

    def _lose(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def _note_role(self, leader: int | None) -> None:
        role = Role(self._leads, self._record.term, None if leader is None else str(leader))
        if role != self._role:
            self._role = role
            self._on_role(role)

    # Messages

    def receive(self, source: int, message: Any) -> None:
        """A message of another member."""
        if self._machine is None:
            return
        handlers: dict[type, Callable[[int, Any], None]] = {
            _Append: self._on_append,
            _Appended: self._on_appended,
            _Ask: self._on_ask,
            _Vote: self._on_vote,
            _Install: self._on_install,
            _TakeOver: self._on_take_over,
        }
        handlers[type(message)](source, message)

    def _on_take_over(self, source: int, message: _TakeOver) -> None:
        if message.term == self._record.term:
            self._stand(forced=True)

    def _on_ask(self, source: int, ask: _Ask) -> None:
        record = self._record
        if not ask.forced and self._loop.time() - self._leader_heard_s < ELECTION_MIN_S:
            return  # a leader was heard: whoever was cut off shall not depose it (Raft paper, section 6)
        if ask.term > record.term:
            self._follow(ask.term, None)
        current = (ask.last_term, ask.last) >= (record.term_at(record.last), record.last)
        granted = ask.term == record.term and record.voted_for in (None, source) and current and not self._leads
        if granted:
            record.voted_for = source
            self._set_deadline()
        self._reply(source, _Vote(record.term, granted))

    def _reply(self, target: int, message: Any) -> None:
        """Answer once what it says is durable."""
        self._loop.call_later(SYNC_S * (0.5 + self._rng.random()), self._send_reply, target, message)

    def _send_reply(self, target: int, message: Any) -> None:
        if self._machine is None:
            return
        if self.fail_next_sync:
            self._fail(self._record.last)  # nobody was told of it
            return
        self._mail.send(self._id, target, message)

    def _on_vote(self, source: int, vote: _Vote) -> None:
        if vote.term > self._record.term:
            self._follow(vote.term, None)
        elif vote.term == self._record.term and vote.granted and not self._leads and self._votes:
            self._votes.add(source)
            if len(self._votes) >= self._majority:
                self._lead()

    def _accept_leader(self, term: int, leader: int) -> bool:
        if term < self._record.term:
            self._mail.send(self._id, leader, _Appended(self._record.term, False, 0))
            return False
        if term > self._record.term or self._leads or self._role.leader != str(leader):
            self._follow(term, leader)
        self._leader_heard_s = self._loop.time()
        self._set_deadline()
        return True

    def _on_append(self, source: int, message: _Append) -> None:
        if not self._accept_leader(message.term, message.leader):
            return
        record = self._record
        if message.previous > record.last:
            self._mail.send(self._id, source, _Appended(record.term, False, record.last))
            return
        if message.previous >= record.base and record.term_at(message.previous) != message.previous_term:
            self._mail.send(self._id, source, _Appended(record.term, False, min(self._commit, message.previous - 1)))
            return
        index = message.previous
        for entry in message.entries:
            index += 1
            if index <= record.base:
                continue
            if index <= record.last:
                if record.term_at(index) == entry.term:
                    continue
                assert index > self._commit, "a committed entry is overwritten"
                del record.log[index - record.base - 1 :]
                self._durable = min(self._durable, record.last)
            record.log.append(entry)
        self._apply_to(min(message.commit, index))
        if message.entries:
            self._reply(source, _Appended(record.term, True, index))
        else:
            self._mail.send(self._id, source, _Appended(record.term, True, index))

    def _on_appended(self, source: int, message: _Appended) -> None:
        if message.term > self._record.term:
            self._follow(message.term, None)
            return
        if not self._leads or message.term < self._record.term:
            return
        self._heard[source] = self._loop.time()
        if not message.ok:
            self._next[source] = max(1, min(self._next[source] - 1, message.match + 1))
            self._replicate(source)
            return
        self._match[source] = max(self._match[source], message.match)
        self._next[source] = max(self._next[source], message.match + 1)
        self._advance()
        if self._next[source] <= self._durable:
            self._replicate(source)

    def _on_install(self, source: int, message: _Install) -> None:
        if not self._accept_leader(message.term, message.leader):
            return
        record = self._record
        if message.base > self._commit:
            assert self._machine is not None
            if message.base < record.last and record.term_at(message.base) == message.base_term:
                del record.log[: message.base - record.base]
            else:
                record.log.clear()
            record.base, record.base_term, record.snapshot = message.base, message.base_term, message.snapshot
            self._durable = record.last
            self._commit = self._applied = message.base
            self._machine.load(message.snapshot)
        self._reply(source, _Appended(record.term, True, message.base))

    # Replication

    def _replicate(self, peer: int) -> None:
        """Send what `peer` is not known to have, as far as it is durable here; a heartbeat if that is nothing."""
        record = self._record
        first = self._next[peer]
        if first <= record.base:
            assert record.snapshot is not None
            install = _Install(record.term, self._id, record.base, record.base_term, record.snapshot)
            self._mail.send(self._id, peer, install)
            return
        last = min(self._durable, first + MAX_BATCH - 1)
        entries = record.log[first - record.base - 1 : last - record.base]
        previous = first - 1
        message = _Append(record.term, self._id, previous, record.term_at(previous), entries, self._commit)
        self._mail.send(self._id, peer, message)
        self._next[peer] = previous + len(entries) + 1

    def _advance(self) -> None:
        held = sorted([self._durable, *self._match.values()], reverse=True)[self._majority - 1]
        if held > self._commit and self._record.term_at(held) == self._record.term:
            self._apply_to(held)
            for peer in self._peers:  # those who follow the metadata wait for it
                self._replicate(peer)

    def _apply_to(self, commit: int) -> None:
        record, machine = self._record, self._machine
        assert machine is not None
        self._commit = max(self._commit, commit)
        done: list[tuple[asyncio.Future[bytes], bytes | None]] = []
        while self._applied < self._commit:
            self._applied += 1
            entry = record.log[self._applied - record.base - 1]
            result = machine.apply(entry.blob, self._applied) if entry.blob else b""
            term, future = self._waiting.pop(self._applied, (0, None))
            if future is not None:
                done.append((future, result if term == entry.term else None))
        machine.flush()
        for future, answer in done:
            if not future.done():
                self._loop.call_soon(_settle, future, answer)
        if len(record.log) > self._snapshot_entries:
            self._compact(machine)

    def _compact(self, machine: StateMachine) -> None:
        record = self._record
        kept = self._applied - record.base
        data = machine.freeze()()
        record.base_term = record.term_at(self._applied)
        del record.log[:kept]
        record.base, record.snapshot = self._applied, data


def _settle(future: asyncio.Future[bytes], answer: bytes | None) -> None:
    if future.done():
        return
    if answer is None:
        future.set_exception(OutcomeUnknown("another entry took its place"))
    else:
        future.set_result(answer)
