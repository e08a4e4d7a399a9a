"""pysyncobj 0.3.17's Raft core under names of our own: the one module that touches its private names.

Hence the exact pin, which is checked before a member is made (`check_version`). pysyncobj takes time and chance from
module globals; here they are replaced by ones that ask for what `inject` set in the running context, so that a
simulated member has virtual time and seeded elections. Its wake-up pipe is switched off: our own thread is woken by
other means.

`RaftCore` answers what pysyncobj asks its own private methods (`apply_entry`, `decode_change`, `change_members`,
`drop_from`, `congested_others`), and gives what the rules above it need. No properties here: pysyncobj reads every
attribute while it is being built.

Everything here runs on the consensus thread. Entry: `RaftCore`, `CoreTransport`; used by
`tidelog.controller.raft.member` and `tidelog.controller.raft.transport`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from tidelog.controller.raft.surroundings import Poller, Surroundings
from tidelog.runtime.errors import ConfigError

EXPECTED_VERSION: Final = "0.3.17"
NO_OP = b"\x01"
NEVER = 1 << 40

_monotonic: ContextVar[Callable[[], float]] = ContextVar("raft-monotonic", default=time.monotonic)
_random: ContextVar[Callable[[], float]] = ContextVar("raft-random", default=random.random)


class _Chance:
    """In the place of the module `random`."""

    @staticmethod
    def random() -> float:
        return _random.get()()


def _now() -> float:
    return _monotonic.get()()


syncobj.monotonicTime = _now
syncobj.random = _Chance
syncobj.PIPE_NOTIFIER_ENABLED = False


def inject(surroundings: Surroundings) -> None:
    """Give time and chance to the members that run in this context: a thread's own, or a simulated process's."""
    _monotonic.set(surroundings.monotonic)
    _random.set(surroundings.random)


def check_version() -> None:
    """Raises `ConfigError` if the library is not the one that this module was written for."""
    if VERSION != EXPECTED_VERSION:
        raise ConfigError(
            f"pysyncobj {VERSION} is installed; the controller needs {EXPECTED_VERSION} exactly",
            hint=f"pip install pysyncobj=={EXPECTED_VERSION}",
        )


class MemberNode(Node):  # type: ignore[misc]
    """pysyncobj's name for a member: its id. Hashes by the number, so that sets of them iterate in one order."""

    address: str

    def __init__(self, id: str, **about: str) -> None:  # the name that its base has
        super().__init__(id, **about)
        self.number = int(id)

    def __hash__(self) -> int:
        return self.number


def make_node(node_id: int, address: str) -> MemberNode:
    """The address is what it is reached by."""
    return MemberNode(str(node_id), address=address)


class CoreTransport(Transport):  # type: ignore[misc]
    """What pysyncobj sends by. As it is: of a single member, which talks to nobody and opens no port."""

    def __init__(self) -> None:
        super().__init__(None, None, [])

    def send(self, node: Any, message: Any) -> bool:
        """There is nobody."""
        return False

    def connected(self, node: MemberNode) -> None:
        """Messages can be sent to a member from now on."""
        self._onNodeConnected(node)

    def disconnected(self, node: MemberNode) -> None:
        """And no more."""
        self._onNodeDisconnected(node)

    def deliver(self, node: MemberNode, message: dict[str, Any]) -> None:
        """Hand a message of a member to the core."""
        self._onMessageReceived(node, message)


class RaftCore(SyncObj):  # type: ignore[misc]
    """See the module."""

    def __init__(
        self,
        me: MemberNode | None,
        others: Sequence[MemberNode],
        options: dict[str, Any],
        poller: Poller,
        transport: Callable[[RaftCore], CoreTransport],
    ) -> None:
        check_version()
        settings = SyncObjConf(
            autoTick=False,
            appendEntriesUseBatch=False,
            commandsWaitLeader=False,
            dynamicMembershipChange=me is not None,
            fullDumpFile=None,
            journalFile=None,
            useFork=False,
            logCompactionMinEntries=NEVER,
            logCompactionMinTime=NEVER,
            **options,
        )
        node = me if me is not None else Node("single")
        super().__init__(
            node, others, settings, nodeClass=Node, transportClass=lambda core, _me, _nodes: transport(core)
        )
        self._poller = poller

    def use_journal(self, log: Any, term: int, voted_for: str | None, commit_index: int) -> None:
        """Put a journal in the place of the memory journal that the constructor made, and its term and vote."""
        if len(log) == 0:
            log.add(NO_OP, 1, 0)
        self._SyncObj__raftLog = log
        self._SyncObj__raftCurrentTerm = max(term, log[-1][2])
        self._SyncObj__votedForNodeId = voted_for
        self._SyncObj__raftCommitIndex = min(commit_index, log[-1][1])

    def use_snapshots(self, snapshots: Any) -> None:
        """Put something in the place of pysyncobj's serializer."""
        self._SyncObj__serializer = snapshots

    def take_state(self, index: int, others: Sequence[MemberNode]) -> None:
        """The machine has been given the state that it has after an entry, and the other members are these."""
        self._SyncObj__raftLastApplied = index
        if self.raftCommitIndex < index:
            self._SyncObj__raftCommitIndex = index
            self._SyncObj__raftLog.setRaftCommitIndex(index)
        self._SyncObj__updateClusterConfiguration(list(others))

    def answer(self, node: MemberNode, next_index: int, *, holds: bool) -> None:
        """Tell a leader that this member is there and, if it `holds` them, that it has all entries before that one."""
        self._SyncObj__sendNextNodeIdx(node, nextNodeIdx=next_index, success=holds)

    # What pysyncobj asks

    def apply_entry(self, command: bytes) -> Any:
        """Apply the entry after `raftLastApplied`; the result is for who proposed it."""
        raise NotImplementedError

    def decode_change(self, command: bytes) -> Any:
        """The change of members in an entry, or None."""
        raise NotImplementedError

    def change_members(self, change: Any, reverse: bool = False) -> bool:
        """Take a change from the log into force; `reverse`: the entry is being truncated."""
        raise NotImplementedError

    def drop_from(self, index: int) -> None:
        """A follower's conflict: this entry and all after it go."""
        raise NotImplementedError

    def congested_others(self) -> set[MemberNode]:
        """As leader: members that are sent nothing for now, because they have not taken what was sent before."""
        return set()

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        """pysyncobj sends at its own pace: a snapshot or a long log as a whole, however slowly a member takes it."""
        others, congested = self.others(), self.congested_others()
        if not congested:
            super()._SyncObj__sendAppendEntries()
            return
        self._SyncObj__otherNodes = others - congested
        try:
            super()._SyncObj__sendAppendEntries()
        finally:
            self._SyncObj__otherNodes = others

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # noqa: N802
        return self.apply_entry(command)

    def _SyncObj__parseChangeClusterRequest(self, command: bytes) -> Any:  # noqa: N802
        return self.decode_change(command)

    def _SyncObj__doChangeCluster(self, change: Any, reverse: bool = False) -> bool:  # noqa: N802
        return self.change_members(change, reverse)

    def _SyncObj__deleteEntriesFrom(self, index: int) -> None:  # noqa: N802
        self.drop_from(index)

    # Elections

    def is_leader(self) -> bool:
        """Whether this member leads, as far as it knows."""
        return bool(self._isLeader())

    def leader(self) -> MemberNode | None:
        """The leader that was heard last."""
        node: MemberNode | None = self._getLeader()
        return node

    def forget_leader(self) -> None:
        """It has been silent for too long."""
        self._SyncObj__raftLeader = None
        self._SyncObj__onLeaderChanged()

    def set_term(self, term: int) -> None:
        """A larger term was heard of; durable at the end of the turn."""
        self._SyncObj__setCurrentTerm(term, None)

    def election_deadline(self) -> float:
        """When an election begins, if nobody is heard until then."""
        deadline: float = self._SyncObj__raftElectionDeadline
        return deadline

    def postpone_election(self) -> None:
        """Start the election time-out over."""
        self._SyncObj__raftElectionDeadline = _now() + self._SyncObj__generateRaftTimeout()

    def force_election(self) -> None:
        """Make the election due now."""
        self._SyncObj__raftElectionDeadline = 0.0

    def is_asked_to_lead(self) -> bool:
        """Whether the leader has handed over to this member, which has not begun its election yet."""
        asked: bool = self._SyncObj__transferInProgress
        return asked

    # Other members

    def others(self) -> set[MemberNode]:
        """All but this one; not to be changed."""
        nodes: set[MemberNode] = self._SyncObj__otherNodes
        return nodes

    def connected_others(self) -> set[MemberNode]:
        """Those that messages can be sent to."""
        nodes: set[MemberNode] = self.others() & self._SyncObj__connectedNodes
        return nodes

    def match_index(self, node: MemberNode) -> int:
        """As leader: the last entry that a member is known to hold."""
        index: int = self._SyncObj__raftMatchIndex.get(node, 0)
        return index

    def heard_at(self, node: MemberNode) -> float | None:
        """As leader: when a member answered last."""
        at: float | None = self._SyncObj__lastResponseTime.get(node)
        return at

    def forget_answer(self, node: MemberNode, heard_at: float | None) -> None:
        """As leader: what a member answered last does not count; before that it was heard at `heard_at`."""
        if heard_at is not None:
            self._SyncObj__lastResponseTime[node] = heard_at

    def add_other(self, node: MemberNode, next_index: int) -> None:
        """A member more: entries from `next_index` on are sent to it."""
        self.others().add(node)
        self._SyncObj__raftNextIndex[node] = next_index
        self._SyncObj__raftMatchIndex[node] = 0
        self._SyncObj__lastResponseTime[node] = _now()
        self._SyncObj__transport.addNode(node)

    def drop_other(self, node: MemberNode) -> None:
        """A member less, under whatever address it was known."""
        if node not in self.others():
            return
        self.others().discard(node)
        self._SyncObj__raftNextIndex.pop(node, None)
        self._SyncObj__raftMatchIndex.pop(node, None)
        self._SyncObj__connectedNodes.discard(node)
        self._SyncObj__transport.dropNode(node)
