"""`Consensus`, the fifth interface: the replicated log of the controllers.

Every implementation guarantees: a proposal whose result was returned is durable on a majority and is applied on every
member in the same order, exactly once for each time it was accepted; a proposal that failed with `OutcomeUnknown` may
still be applied later (hence the dedupe ids of commands). `StateMachine` is called on one thread only, which need not
be the event loop's; results and role changes are delivered on the loop, each after the `flush` of the machine.

Leadership here is Raft's, which two members may hold for a short time. The controller therefore commits a
`BecomeActive` of its term before it acts, and the state machine refuses older terms.

Entry: `tidelog.controller.raft.thread.RaftConsensus` (pysyncobj, hardened); `MemoryConsensus` (one member, not durable)
for tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tidelog.controller.model.errors import NotController
from tidelog.controller.raft.quorum import Members, MembershipChange
from tidelog.controller.rpc.handshake import Session
from tidelog.runtime.errors import InvalidInput


class StateMachine(Protocol):
    """The application of the log. All methods are called on the consensus' own thread, one at a time."""

    def apply(self, blob: bytes, index: int) -> bytes:
        """Apply the entry at `index` and return its result. Raises only if this member must stop."""
        ...

    def flush(self) -> None:
        """Deliver the effects of the applied entries. Called before their results are delivered."""
        ...

    def freeze(self) -> Callable[[], bytes]:
        """Copy the state quickly. The returned function, called once on another thread, encodes it as a snapshot."""
        ...

    def load(self, data: bytes) -> None:
        """Replace the state by that of a snapshot. Raises `CorruptData`."""
        ...

    def level(self) -> int:
        """Return the feature level of the state (`tidelog.controller.model.levels`)."""
        ...


class Role(NamedTuple):
    """Current role of this member."""

    is_leader: bool
    term: int
    leader: str | None
    """The leader's member id, if known."""


OnRole = Callable[[Role], None]
OnFailed = Callable[[Exception], None]


class Consensus(Protocol):
    """A replicated log with a leader. Use it on the event loop's thread only."""

    @property
    def role(self) -> Role:
        """Return the role as of the last role change that was delivered."""
        ...

    def set_on_role(self, callback: OnRole) -> None:
        """Call `callback(role)` on the loop at each change of leadership or term. Set before `start`."""
        ...

    def set_on_failed(self, callback: OnFailed) -> None:
        """Call `callback(error)` on the loop, once, when this member cannot continue (its disk failed)."""
        ...

    async def start(self, machine: StateMachine) -> None:
        """Load the durable state and join the quorum. Raises `CorruptData`, `StorageFailed`, `ConfigError`."""
        ...

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        """Replicate `blob` and return the machine's result for it.

        Raises `NotController` (certainly without effect), `OutcomeUnknown` (after `timeout_s`, or when leadership was
        lost), `Overloaded` (too many in flight), `InvalidInput` (too large).
        """
        ...

    async def barrier(self, timeout_s: float) -> None:
        """Return when everything accepted before the call has been applied here. Raises as `propose`."""
        ...

    @property
    def members(self) -> Members:
        """Return the quorum that this member knows as committed; empty for a member without a quorum."""
        ...

    @property
    def directories(self) -> dict[int, str]:
        """The ids of the members' directories, as far as they are committed."""
        ...

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """Add or remove a member. Returns when the new quorum has committed the change. Raises as `propose`."""
        ...

    async def transfer(self, target: int | None) -> None:
        """Transfer the leadership (None: to the most current member). Returns when it is transferred.

        Raises `NotController` after a time-out, when this member still leads; `OutcomeUnknown` if the outcome cannot be
        determined because this member is being closed or hangs.
        """
        ...

    def adopt_peer(self, peer_id: int, transport: asyncio.Transport, session: Session) -> None:
        """Take over a connection on which another member, already authenticated, wants to send."""
        ...

    def status(self) -> dict[str, Any]:
        """Return facts for operators: term, indexes, size of the journal, and the known state of each other member."""
        ...

    async def close(self) -> None:
        """Leave the quorum cleanly. Accepted entries are durable."""
        ...


class MemoryConsensus:
    """A single member that is always the leader, applies at once and keeps nothing after exit."""

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
        """Do nothing: this implementation never fails."""

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

    @property
    def directories(self) -> dict[int, str]:
        """See `Consensus.directories`."""
        return {}

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        """See `Consensus.change_membership`."""
        raise InvalidInput("a controller in memory has no quorum")

    async def transfer(self, target: int | None) -> None:
        """See `Consensus.transfer`."""
        raise InvalidInput("a controller in memory has no quorum")

    def adopt_peer(self, peer_id: int, transport: asyncio.Transport, session: Session) -> None:
        """See `Consensus.adopt_peer`."""
        transport.abort()

    def status(self) -> dict[str, Any]:
        """See `Consensus.status`."""
        return {"kind": "memory", "term": self._role.term, "last_index": self._index}

    async def close(self) -> None:
        """See `Consensus.close`."""
        self._machine = None
