"""Creates the transaction components of a broker, and answers other brokers' calls.

Entry: `TxnParts`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.peers import PeerListener
from tidelog.broker.settings import GroupSettings
from tidelog.broker.txn.admission import TxnAdmission
from tidelog.broker.txn.calls import ADMIT, MARKERS, REQUEST, MarkerParams, read_admit, read_markers
from tidelog.broker.txn.coordinator import TxnCoordinator
from tidelog.broker.txn.marker_writer import MarkerWriter
from tidelog.broker.txn.markers import MarkerSender
from tidelog.broker.txn.requests import TxnRequests
from tidelog.runtime.clock import Clock

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient


class OffsetMarkers(Protocol):
    """What is needed of the group coordinator."""

    async def write_marker(
        self,
        partition: int,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        transaction_version: int,
    ) -> int:
        """Write a marker in a partition of `__consumer_offsets`; return a Kafka error code."""
        ...


class TxnParts:
    """The transaction components of one broker."""

    def __init__(
        self,
        node_id: int,
        *,
        partitions: PartitionManager,
        groups: OffsetMarkers,
        controller: ControllerClient,
        calls: PeerCalls,
        clock: Clock,
        settings: GroupSettings,
        rng: random.Random,
    ) -> None:
        self._groups = groups
        self.writer = MarkerWriter(partitions, self._write_offsets)
        sender = MarkerSender(
            node_id=node_id,
            image=lambda: controller.image,
            calls=calls,
            write_here=self.writer.write,
            clock=clock,
            rng=rng,
        )
        self.coordinator = TxnCoordinator(partitions, controller, sender, clock, settings, rng)
        self.admission = TxnAdmission(node_id, self.coordinator, calls)
        self.requests = TxnRequests(node_id, self.coordinator, calls, clock, rng)

    def serve(self, listener: PeerListener) -> None:
        """Answer the calls of other brokers; to be called before the listener starts."""
        listener.serve(ADMIT, self._admit)
        listener.serve(MARKERS, self._markers)
        listener.serve(REQUEST, self.requests.answer)

    def start(self, new_id: Callable[[], Awaitable[int]]) -> None:
        """Load the open state partitions. `new_id`: as for `TxnCoordinator.start`."""
        self.coordinator.start(new_id)

    def stats(self) -> dict[str, int]:
        """Return counts for metrics."""
        return {**self.coordinator.stats(), "forwarded": self.requests.forwarded}

    async def close(self) -> None:
        """Stop; waiting requests fail with NOT_COORDINATOR."""
        await self.coordinator.close()

    async def _admit(self, params: msgspec.Raw) -> bytes:
        return msgspec.msgpack.encode(await self.coordinator.admit(read_admit(params)))

    async def _markers(self, params: msgspec.Raw) -> bytes:
        return msgspec.msgpack.encode(await self.writer.write(read_markers(params).markers))

    async def _write_offsets(self, partition: int, marker: MarkerParams) -> int:
        return await self._groups.write_marker(
            partition,
            marker.producer_id,
            marker.producer_epoch,
            marker.coordinator_epoch,
            marker.commit,
            marker.transaction_version,
        )
