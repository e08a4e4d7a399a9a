"""Which connections an RPC listener keeps: proven ones are never displaced by those that have not proven themselves.

A connection is *unproven* until it has proven the cluster's secret or, at a listener without a secret, has sent a
request. Unproven connections are bounded apart from the others, in total and for each address. At a bound the oldest
unproven one of the address is dropped for the new one (at the total bound: of the address that has the most), so a
flood from one address neither shuts out other addresses nor a peer of the same address whose handshake takes one
round-trip. A proven connection of a tool, which has no node id, is refused in the last `reserve` of `limit` places;
those are kept for nodes. Connections for `raft` and `wal` leave the listener when they are proven and
take no place.

Sans-I/O: a connection is any hashable object, and the caller closes what is returned. Entry: `ConnectionDoors`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

MAX_UNPROVEN: Final = 512
"""Unproven connections of one listener. Each holds a socket and at most one frame of the handshake."""
MAX_UNPROVEN_PER_ADDRESS: Final = 128
"""Unproven connections of one address: more than the nodes on one machine open in the time of a handshake."""
IPV6_HOST_BITS: Final = 64
"""A host may take any address of its /64, so all of them count as one."""
RESERVED_SHARE: Final = 4
"""One in so many places is kept for nodes."""

C = TypeVar("C", bound=Hashable)


def address_group(host: str) -> str:
    """Return what counts as one address: an IPv4 address, the /64 of an IPv6 address, or the text itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> IPV6_HOST_BITS << IPV6_HOST_BITS, IPV6_HOST_BITS)))
    return str(address)


class ConnectionDoors(Generic[C]):
    """The connections of one listener, by what they have proven."""

    def __init__(
        self,
        limit: int,
        *,
        max_unproven: int = MAX_UNPROVEN,
        max_unproven_per_address: int = MAX_UNPROVEN_PER_ADDRESS,
    ) -> None:
        """`limit`: proven connections, a `RESERVED_SHARE`-th of which is for nodes only."""
        self._limit = limit
        self._tools_limit = limit - limit // RESERVED_SHARE
        self._max_unproven = max_unproven
        self._max_unproven_per_address = max_unproven_per_address
        self._waiting: dict[str, dict[C, None]] = {}
        """Unproven connections by address, the oldest first."""
        self._group_of: dict[C, str] = {}
        self._proven: dict[C, None] = {}

    @property
    def unproven(self) -> int:
        """Number of unproven connections."""
        return len(self._group_of)

    @property
    def proven(self) -> int:
        """Number of proven connections."""
        return len(self._proven)

    def enter(self, connection: C, host: str) -> C | None:
        """Note a new connection. Returns the unproven one to drop for it, or None."""
        group = address_group(host)
        waiting = self._waiting.setdefault(group, {})
        waiting[connection] = None
        self._group_of[connection] = group
        if len(waiting) > self._max_unproven_per_address:
            crowded = waiting
        elif self.unproven > self._max_unproven:
            crowded = max(self._waiting.values(), key=len)
        else:
            return None
        dropped = next(iter(crowded))
        self.leave(dropped)
        return dropped

    def prove(self, connection: C, *, is_node: bool) -> bool:
        """Note that an unproven connection has proven itself. Returns whether there is a place for it; else close it.

        A connection that is proven already keeps its place.
        """
        if connection in self._proven:
            return True
        self.leave(connection)
        if len(self._proven) >= (self._limit if is_node else self._tools_limit):
            return False
        self._proven[connection] = None
        return True

    def leave(self, connection: C) -> None:
        """Note that a connection has ended. Harmless for one that is not known."""
        self._proven.pop(connection, None)
        group = self._group_of.pop(connection, None)
        if group is None:
            return
        waiting = self._waiting[group]
        del waiting[connection]
        if not waiting:
            del self._waiting[group]
