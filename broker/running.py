"""Second stage of a broker: starts and stops its components in a safe order.

Start: admin HTTP and the peer listener → registration → election (a new master epoch) → WAL recovery →
uploads → takeovers → partitions → groups → Kafka listener → compaction and cleaning. Until its Kafka listener is open
the broker serves nothing (docs/protocols.md).

Stop: takeovers → groups → listener closed and requests in flight finished → partitions closed cleanly → everything
uploaded → WAL closed → admin HTTP. It is valid after a start that failed at any point: a component that was never
started can be closed.

Entry: `RunningBroker.start`.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.broker.base import BrokerBase
from tidelog.broker.parts import BrokerParts
from tidelog.runtime.errors import TidelogError
from tidelog.storage.storage import Storage

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 20.0
"""How long a start waits for its partitions to open before it serves those that have."""


class RunningBroker:
    """A broker with all its components."""

    def __init__(self, base: BrokerBase, parts: BrokerParts) -> None:
        self._base = base
        self.parts = parts

    async def start(self) -> None:
        """Serve. Raises errors that a restart cannot fix."""
        data, led, servers = self.parts.data, self.parts.partitions, self.parts.servers
        self._base.health.start()
        master_epoch = await self._become_master(await servers.admin.start())
        self._base.controller.report_not_uploaded(lambda: led.storages.not_uploaded_bytes)
        led.takeovers.start(master_epoch)
        await led.manager.start()
        await self._wait_settled()
        data.storage.recovered_done()
        await led.groups.start()
        await servers.kafka.start()
        data.compactor.start(master_epoch)
        data.cleaner.start()
        led.membership.serves = True

    async def _become_master(self, admin_url: str) -> int:
        """Register, become master of the broker's replica set, and recover its WAL; return the new master epoch."""
        base, led, storage = self._base, self.parts.partitions, self.parts.data.storage
        kafka = base.settings.kafka
        peer_port = await led.peers.start(kafka.host, kafka.peer_port)
        await led.membership.register(
            led.membership.registration(
                kafka, admin_url=admin_url, wal=base.wal, peer_port=peer_port, rng=base.world.rng
            )
        )
        master_epoch = await led.membership.elect()
        await storage.recover()
        await self.parts.data.keeper.meet(master_epoch)
        await storage.start(master_epoch)
        await self.parts.data.keeper.begin(master_epoch)
        led.storages.add(storage)
        return master_epoch

    async def _wait_settled(self) -> None:
        manager = self.parts.partitions.manager
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
        return self.parts.data.storage.held_bytes + sum(self.parts.servers.kafka.held_bytes)

    async def drain(self, budget_s: float) -> None:
        """Move the partitions to other living brokers before a stop. See `BrokerMembership.drain`."""
        await self.parts.partitions.membership.drain(budget_s)

    async def stop(self, grace_s: float) -> None:
        """Finish requests in flight, close the partitions, upload, and release resources."""
        data, led, servers = self.parts.data, self.parts.partitions, self.parts.servers
        led.membership.serves = False
        await led.takeovers.close()  # first: when all brokers stop, no broker takes over from another
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await led.groups.close()  # before the listener: a waiting JoinGroup would delay its close
        await servers.kafka.close(grace_s / 4)
        await led.manager.close()
        await led.hint_sender.close()
        await led.peers.close()
        await data.compactor.close()
        await data.cleaner.close()
        await self._close_storage(data.storage, max(1.0, deadline - loop.time()))
        await data.keeper.close(report=not self._base.failure.happened)
        await servers.admin.close()
        await servers.producer_ids.close()

    async def _close_storage(self, storage: Storage, budget_s: float) -> None:
        try:
            async with asyncio.timeout(budget_s):
                await storage.close(upload=not self._base.failure.happened)
        except (TimeoutError, TidelogError) as error:
            logger.warning(
                "the last upload did not finish; the rest stays in the WAL and is uploaded after the next start",
                extra={"error": str(error) or "time is up"},
            )
            await storage.close(upload=False)
