"""`RpcListener`: a port for RPC connections, of controllers' clients or of other brokers.

Invariants: connections are bounded by `tidelog.controller.rpc.doors`, so those that have not proven the secret do not
use up the places of those that have, and each that is dropped is logged; all share one `RpcLimits`, which bounds
incomplete frames; `close` returns when no request is being served any more, including those of lost
connections.

Entry: `RpcListener.start`, `close`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidelog.controller.rpc.connection import AdoptPeer, Handler, RpcConnection, RpcLimits
from tidelog.controller.rpc.doors import ConnectionDoors
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import Clock
from tidelog.runtime.network import Listener, Network
from tidelog.runtime.tasks import TaskSet


class RpcListener:
    """A listening port. `on_lost` is called for each connection that ends.

    `adopt_peer` takes over connections for `raft`, `adopt_wal` those for `wal`, the replication between brokers.
    `max_connections`: connections that have proven the secret, or sent a request where there is none.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        network: Network,
        clock: Clock,
        credentials: Credentials | None,
        max_connections: int,
        on_lost: Callable[[RpcConnection], None] = lambda connection: None,
        adopt_peer: AdoptPeer | None = None,
        adopt_wal: AdoptPeer | None = None,
    ) -> None:
        self._handler = handler
        self._network = network
        self._credentials = credentials
        self._max_connections = max_connections
        self._doors: ConnectionDoors[RpcConnection] = ConnectionDoors(max_connections)
        self._on_lost = on_lost
        self._adopt_peer = adopt_peer
        self._adopt_wal = adopt_wal
        self._limits = RpcLimits(clock)
        self._listener: Listener | None = None
        self._connections: dict[RpcConnection, None] = {}
        self._ending: dict[RpcConnection, None] = {}
        """Lost connections with requests that may still be served; `close` waits for them."""
        self._tasks = TaskSet("rpc-listener")
        self._closing = False

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 selects a free port. Raises `AddressInUse`."""
        self._listener = await self._network.listen(self._accept, host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Return the listening address."""
        assert self._listener is not None, "not started"
        return self._listener.address

    @property
    def connections(self) -> tuple[RpcConnection, ...]:
        """Return the open connections."""
        return tuple(self._connections)

    @property
    def receiving_bytes(self) -> int:
        """Return the bytes of incomplete frames over all connections."""
        return self._limits.receiving_bytes

    def _accept(self) -> RpcConnection:
        return RpcConnection(
            handler=self._handler,
            on_made=self._made,
            on_proven=self._proven,
            on_lost=self._lost,
            credentials=self._credentials,
            adopt_peer=self._adopt_peer,
            adopt_wal=self._adopt_wal,
            limits=self._limits,
        )

    def _made(self, connection: RpcConnection) -> None:
        self._connections[connection] = None
        dropped = self._doors.enter(connection, connection.host)
        if dropped is not None:
            extra = {"peer": dropped.peer, "unproven": self._doors.unproven}
            event = "too many connections that prove nothing; the oldest of an address is dropped"
            self._limits.logs.line("unproven", logging.WARNING, event, extra)
            dropped.abort()

    def _proven(self, connection: RpcConnection, is_node: bool) -> bool:
        has_place = self._doors.prove(connection, is_node=is_node)
        if not has_place:
            extra = {"peer": connection.peer, "limit": self._max_connections}
            self._limits.logs.line("connections", logging.WARNING, "too many connections; one is refused", extra)
        return has_place

    def _lost(self, connection: RpcConnection) -> None:
        self._connections.pop(connection, None)
        self._doors.leave(connection)
        self._on_lost(connection)
        self._ending[connection] = None
        if not self._closing:
            self._tasks.spawn(self._end(connection), "closed-connection")

    async def _end(self, connection: RpcConnection) -> None:
        await connection.close()
        self._ending.pop(connection, None)

    async def close(self) -> None:
        """Stop listening, drop the connections, and cancel their requests."""
        self._closing = True
        if self._listener is not None:
            await self._listener.close()
        await self._tasks.close()
        closed: set[RpcConnection] = set()
        while left := [one for one in self._connections | self._ending if one not in closed]:
            for connection in left:
                await connection.close()
            closed.update(left)
