"""`ReplicationDoor`: followers' connections, from the listener that has authenticated them to the master of their set.

A broker has one. It is given to its peer listener (`tidelog.controller.rpc.listener`, `adopt_wal`). A connection's
first frame, HELLO, names the replica set; a broker that is not its master says so, and the follower tries again.

Invariants: a connection that has sent no HELLO ends after `HELLO_S`, and at most `MAX_WAITING` of these are kept, the
newest (rule 12); a follower is the broker that it has proven to be.

Entry: `ReplicationDoor`.
"""

from __future__ import annotations

import asyncio
from functools import partial

from tidelog.broker.replication.connection import WalConnection
from tidelog.broker.replication.master import ReplicaMaster
from tidelog.controller.rpc.handshake import Session, welcome
from tidelog.storage.replication.frames import BadFrame, FollowerHello, Frame, GoodbyeCode

HELLO_S = 5.0
MAX_WAITING = 64


class ReplicationDoor:
    """Accepts followers for the masters of this broker."""

    def __init__(self) -> None:
        self._masters: dict[int, ReplicaMaster] = {}
        self._waiting: dict[WalConnection, asyncio.TimerHandle] = {}
        self._closed = False

    @property
    def waiting(self) -> int:
        """Return the number of connections that have not named their set."""
        return len(self._waiting)

    def open(self, replica_set_id: int, master: ReplicaMaster) -> None:
        """Send followers of this set to `master` from now on."""
        self._masters[replica_set_id] = master

    def shut(self, replica_set_id: int, master: ReplicaMaster) -> None:
        """Send nobody to `master` any more."""
        if self._masters.get(replica_set_id) is master:
            del self._masters[replica_set_id]

    def adopt(self, node_id: int, transport: asyncio.Transport, session: Session) -> None:
        """Take over a connection for `wal` that has proven the secret, as `AdoptPeer` says."""
        if self._closed:
            transport.abort()
            return
        if len(self._waiting) >= MAX_WAITING:
            next(iter(self._waiting)).end(BadFrame("too many connections wait to name a replica set"))
        connection = WalConnection(max_body_bytes=0)
        late = partial(connection.end, BadFrame(f"no HELLO came within {HELLO_S:.0f} s"))
        self._waiting[connection] = asyncio.get_running_loop().call_later(HELLO_S, late)
        connection.on_lost = partial(self._leave, connection)
        connection.on_frame = partial(self._first, connection, node_id)
        transport.write(welcome())
        connection.take_over(transport)

    def _leave(self, connection: WalConnection) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _first(self, connection: WalConnection, node_id: int, frame: Frame) -> None:
        self._leave(connection)
        connection.on_lost = _gone
        if not isinstance(frame, FollowerHello) or frame.broker_id != node_id:
            raise BadFrame(f"broker {node_id} begins with {frame}")
        master = self._masters.get(frame.replica_set_id)
        if master is None:
            connection.on_frame = _ignored
            text = f"this broker is not the master of replica set {frame.replica_set_id}"
            connection.say_goodbye(GoodbyeCode.NOT_MASTER, text)
            return
        master.serve(connection, frame)

    def close(self) -> None:
        """Drop the connections that wait, and accept none. Those of masters are theirs."""
        self._closed = True
        for connection in list(self._waiting):
            connection.end()


def _gone() -> None:
    """Nobody waits for the end of this connection."""


def _ignored(_frame: Frame) -> None:
    """The goodbye is on its way; what comes meanwhile is of no use."""
