"""`Consensus`, the fifth door: the replicated log under the controller.

What holds for every implementation: a proposal whose result was returned is durable on a majority, is applied on every
member in the same order, exactly once for each time it was accepted; a proposal that failed with `OutcomeUnknown` may
still be applied later (hence the dedupe ids above). `StateMachine` is called on one thread only, which may not be the
event loop's; results and role changes arrive on the loop, each after the machine's `flush` for it.

Leadership here is Raft's, which may be held by two members for a moment: the controller above commits a `BecomeActive`
of its term before it acts, and the state machine refuses older terms.

Entry: `controller.raft.RaftConsensus` (pysyncobj, hardened); `MemoryConsensus` (one member, nothing durable) for tests.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from controller.errors import NotController
from controller.handshake import Session
from controller.quorum_file import Members, MembershipChange
from runtime.errors import InvalidInput


class StateMachine(Protocol):
    """What the log drives. All methods are called on the consensus' own thread, one at a time."""

    def apply(self, blob: bytes, index: int) -> bytes:
        """Apply the entry at `index` and return its result. Raises only when this member must stop."""
        ...

    def flush(self) -> None:
        """Some entries have been applied and their results are about to be delivered."""
        ...

    def freeze(self) -> Callable[[], bytes]:
        """The state as it is now, quickly; the function, called once on another thread, makes a snapshot's bytes."""
        ...

    def load(self, data: bytes) -> None:
        """Replace the state by a snapshot's. Raises `CorruptData`."""
        ...


class Role(NamedTuple):
    """What this member is now."""

    is_leader: bool
    term: int
    leader: str | None
    """The leader's member id, as far as known."""


OnRole = Callable[[Role], None]
OnFailed = Callable[[Exception], None]


class Consensus(Protocol):
    """A replicated log with a leader. All methods are for the event loop's thread."""

    @property
    def role(self) -> Role:
        """As of the last role change delivered."""
        ...

    def set_on_role(self, callback: OnRole) -> None:
        """`callback(role)` on the loop at each change of leadership or term. Set before `start`."""
        ...

    def set_on_failed(self, callback: OnFailed) -> None:
        """`callback(error)` on the loop, once, when this member cannot go on (its disk failed)."""
        ...

    async def start(self, machine: StateMachine) -> None:
        """Load what is durable and take part. Raises `CorruptData`, `StorageFailed`, `ConfigError`."""
        ...

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        """Replicate `blob` and return the machine's result for it.

        Raises `NotController` (surely without effect), `OutcomeUnknown` (after `timeout_s`, or when leadership was
        lost), `Overloaded` (too many in flight), `InvalidInput` (too large).
        """
        ...

    async def barrier(self, timeout_s: float) -> None:
        """Return when everything accepted before the call has been applied here. Raises as `propose`."""
        ...

    @property
    def members(self) -> Members:
        """The quorum as this member knows it committed; empty for one that is alone."""
        ...

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """Add or remove a member; returns when the new quorum has committed it. Raises as `propose`."""
        ...

    async def transfer(self, target: int | None) -> None:
        """Hand the leadership over (None: to the member that has most); returns when it is given up.

        Raises `NotController` if that did not come about in time: this member still leads; `OutcomeUnknown` if nobody
        can tell, because this member is being closed or hangs.
        """
        ...

    def adopt_peer(self, peer_id: int, sock: socket.socket, session: Session) -> None:
        """Take over a socket on which another member, already authenticated, wants to send."""
        ...

    def status(self) -> dict[str, Any]:
        """Facts for operators: term, indexes, journal entries and bytes, and of each other member what is known."""
        ...

    async def close(self) -> None:
        """Leave cleanly; what was accepted is durable."""
        ...


class MemoryConsensus:
    """One member that is always the leader, applies at once and forgets everything at exit."""

    def __init__(self, term: int = 1) -> None:
        self._role = Role(False, term, None)
        self._index = 0
        self._machine: StateMachine | None = None
        self._on_role: OnRole = lambda role: None

    @property
    def role(self) -> Role:
        """See `Consensus.role`."""
        return self._role

    def set_on_role(self, callback: OnRole) -> None:
        """See `Consensus.set_on_role`."""
        self._on_role = callback

    def set_on_failed(self, callback: OnFailed) -> None:
        """Never fails."""

    async def start(self, machine: StateMachine) -> None:
        """See `Consensus.start`."""
        self._machine = machine
        self._role = Role(True, self._role.term, "memory")
        self._on_role(self._role)

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        """See `Consensus.propose`."""
        if self._machine is None:
            raise NotController("the controller is closed")
        self._index += 1
        result = self._machine.apply(blob, self._index)
        self._machine.flush()
        return result

    async def barrier(self, timeout_s: float) -> None:
        """See `Consensus.barrier`."""

    @property
    def members(self) -> Members:
        """See `Consensus.members`."""
        return {}

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """See `Consensus.change_membership`."""
        raise InvalidInput("a controller in memory has no quorum")

    async def transfer(self, target: int | None) -> None:
        """See `Consensus.transfer`."""
        raise InvalidInput("a controller in memory has no quorum")

    def adopt_peer(self, peer_id: int, sock: socket.socket, session: Session) -> None:
        """See `Consensus.adopt_peer`."""
        sock.close()

    def status(self) -> dict[str, Any]:
        """See `Consensus.status`."""
        return {"kind": "memory", "term": self._role.term, "last_index": self._index}

    async def close(self) -> None:
        """See `Consensus.close`."""
        self._machine = None
