"""Questions to other processes of the cluster, each directly and without the replicated log.

Entry: `Peers`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.network import Network, refuses

STATUS_S = 3.0
"""Time-out of a question for a controller's status."""
CONNECT_S = 1.0
"""Time-out of a connection attempt; a reachable host refuses at once."""


class Peers:
    """Asks the processes at addresses `host:port`."""

    def __init__(self, network: Network, credentials: Credentials | None) -> None:
        self._network = network
        self._credentials = credentials

    async def ask_status(self, address: str) -> dict[str, Any]:
        """Return what the controller at the address says of itself. Raises `TidelogError`."""
        channel = RpcChannel([split_address(address)], self._network, self._credentials)
        try:
            raw = await channel.call("status", None, STATUS_S)
        finally:
            await channel.close()
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def refuses(self, address: str) -> bool:
        """Whether the host is there and nothing listens at the address."""
        return await refuses(self._network, *split_address(address), CONNECT_S)
