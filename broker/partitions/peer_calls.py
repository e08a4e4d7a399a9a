"""Calls from this broker to others, over the brokers' own RPC: a connection to each, opened on demand and kept.

Who is called is named by its broker id; its address is what the image says at the call. A broker that was replaced
answers at another address, and one that is not what the caller takes it for refuses the call itself: every method
checks what its receiver leads.

Invariants: at most one connection to each broker; one to a broker that has left the image is closed. Entry:
`PeerCalls.call`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.image import Delta
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import Network
from tidelog.runtime.tasks import TaskSet


class PeerCalls:
    """The connections of one broker to the others."""

    def __init__(self, controller: ControllerClient, network: Network, credentials: Credentials | None) -> None:
        self._controller = controller
        self._network = network
        self._credentials = credentials
        self._channels: dict[int, tuple[str, RpcChannel]] = {}
        self._tasks = TaskSet("peer-calls")
        self._unsubscribe = controller.subscribe(self._image_changed)

    async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        """Call a method of a broker and return its result, encoded.

        Raises `Unavailable` if it does not answer in time, cannot be reached or has no address for other brokers, and
        the errors that the method answers with.
        """
        broker = self._controller.image.brokers.get(broker_id)
        if broker is None or not broker.peer_address:
            raise Unavailable(
                f"broker {broker_id} has no address for calls of other brokers",
                hint="without a cluster secret brokers call each other only on the loopback interface",
            )
        return await self._channel(broker_id, broker.peer_address).call(method, params, timeout_s)

    def _channel(self, broker_id: int, address: str) -> RpcChannel:
        known = self._channels.get(broker_id)
        if known is not None and known[0] == address:
            return known[1]
        channel = RpcChannel([split_address(address)], self._network, self._credentials, cluster_id=self._own_cluster)
        self._channels[broker_id] = (address, channel)
        if known is not None:
            self._tasks.spawn(known[1].close(), "close")
        return channel

    def _own_cluster(self) -> str:
        return self._controller.image.cluster_id

    def _image_changed(self, delta: Delta) -> None:
        for _, broker_id, record in delta.of("brokers"):
            if record is None and broker_id in self._channels:
                self._tasks.spawn(self._channels.pop(broker_id)[1].close(), "close")

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        self._unsubscribe()
        await self._tasks.close()
        for _, channel in self._channels.values():
            await channel.close()
        self._channels.clear()
