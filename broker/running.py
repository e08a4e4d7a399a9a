"""Second stage of a broker: starts and stops its components in a safe order.

Start: admin HTTP and the peer listener → recovery of replicated WALs → registration → of a replica set with one member:
election (a new master epoch), WAL recovery, uploads → takeovers → what the metadata say of the other replica sets →
partitions → groups → Kafka listener → compaction and cleaning. Until its Kafka listener is open the broker serves
nothing (docs/protocols.md).

Stop: takeovers → groups → listener closed and requests in flight finished → partitions closed cleanly → everything
uploaded → WALs closed → admin HTTP. It is valid after a start that failed at any point: a component that was never
started can be closed.

Entry: `RunningBroker.start`.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.broker.base import BrokerBase
from tidelog.broker.partitions.checkpoints import write_checkpoints
from tidelog.broker.parts import BrokerParts

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 20.0
"""How long a start waits for its partitions to open before it serves those that have."""
SETTLED_TIMEOUT_S = 5.0
"""How long a start waits for its replicas to lead or to follow: an election may wait for brokers that are not up."""


class RunningBroker:
    """A broker with all its components."""

    def __init__(self, base: BrokerBase, parts: BrokerParts) -> None:
        self._base = base
        self.parts = parts

    async def start(self) -> None:
        """Serve. Raises errors that a restart cannot fix."""
        data, led, servers = self.parts.data, self.parts.partitions, self.parts.servers
        if self._base.tracing is not None:
            self._base.tracing.start(self._base.image().cluster_id, self._base.broker_id)
        self._base.health.start()
        if servers.disk_space is not None:
            servers.disk_space.start()
        await self._become_member(await servers.admin.start())
        self._base.controller.report_not_uploaded(lambda: data.storages.not_uploaded_bytes)
        await led.manager.start()
        await self._wait_settled()
        if data.single is not None:
            data.single.storage.recovered_done()
        await led.groups.start()
        led.txn.start(servers.producer_ids.next_id)
        data.read_replicas.start()
        data.prefetch.start()
        await servers.kafka.start()
        data.compactor.start()
        led.log_cleaner.start()
        data.cleaner.start()
        led.membership.serves = True

    async def _become_member(self, admin_url: str) -> None:
        """Register, and begin to lead or follow in the broker's replica sets."""
        base, data, led = self._base, self.parts.data, self.parts.partitions
        kafka = base.settings.kafka
        peer_port = await led.peers.start(kafka.host, kafka.peer_port)
        await data.hot_sets.prepare()
        await led.membership.register(
            led.membership.registration(
                kafka, admin_url=admin_url, wal=base.wal, peer_port=peer_port, rng=base.world.rng
            )
        )
        led.takeovers.start(await data.single.begin(led.membership) if data.single is not None else None)
        await data.hot_sets.begin(led.membership)

    async def _wait_settled(self) -> None:
        manager, hot_sets = self.parts.partitions.manager, self.parts.data.hot_sets
        try:
            async with asyncio.timeout(SETTLED_TIMEOUT_S):
                await hot_sets.wait_settled()
        except TimeoutError:
            logger.warning("some replicas neither lead nor follow yet", extra={"waiting": hot_sets.unsettled()})
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await manager.wait_settled()
        except TimeoutError:
            logger.warning(
                "some partitions are still opening; serving the others", extra={"waiting": manager.unsettled()}
            )

    @property
    def accounted_bytes(self) -> int:
        """Return the bytes held by bounded caches and buffers."""
        return self.parts.data.reports.held_bytes + sum(self.parts.servers.kafka.held_bytes)

    async def drain(self, budget_s: float) -> None:
        """Move the partitions to other living brokers before a stop. See `BrokerMembership.drain`."""
        led = self.parts.partitions
        if led.membership.is_to_drain(budget_s):
            await write_checkpoints(led.manager.all())
        await led.membership.drain(budget_s)

    async def stop(self, grace_s: float) -> None:
        """Finish requests in flight, close the partitions, upload, and release resources."""
        data, led, servers = self.parts.data, self.parts.partitions, self.parts.servers
        led.membership.serves = False
        await led.takeovers.close()  # first: when all brokers stop, no broker takes over from another
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await led.log_cleaner.close()
        await led.groups.close()  # before the listener: a waiting JoinGroup would delay its close
        await led.txn.close()
        await servers.kafka.close(grace_s / 4)
        await self._close_partitions(grace_s / 2)
        await led.hand_overs.close()
        await led.hint_sender.close()
        await led.peer_calls.close()
        await led.peers.close()
        await data.compactor.close()
        await data.cleaner.close()
        data.read_replicas.close()
        await data.prefetch.close()
        uploads = not self._base.failure.happened
        if data.single is not None:
            await data.single.close(max(1.0, deadline - loop.time()), upload=uploads)
        await data.hot_sets.close(max(1.0, deadline - loop.time()), upload=uploads)
        await data.reader.close()
        if servers.disk_space is not None:
            await servers.disk_space.close()
        if self._base.tracing is not None:
            await self._base.tracing.close()
        await servers.checkup.close()
        await servers.admin.close()
        await servers.producer_ids.close()

    async def _close_partitions(self, budget_s: float) -> None:
        """Close the partitions cleanly, if that is confirmed in time; otherwise the next open scans them."""
        try:
            async with asyncio.timeout(budget_s):
                await self.parts.partitions.manager.close()
        except TimeoutError:
            logger.warning(
                "not all partitions were closed cleanly, the next open scans them: no quorum has confirmed it",
                extra={"waited_s": budget_s},
            )
