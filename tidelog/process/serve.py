"""One `tidelog serve` process: the configured roles on one data directory.

The process first learns who it is (`tidelog.process.node_base`); each role is then made from that with all its parts
(`tidelog.process.controller_role`, `tidelog.process.broker_role`), the controller before the broker that asks it.

Entry: `NodeProcess.start`, then `run_until`, then `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from tidelog.config import Config
from tidelog.controller.active.state_keeper import BucketSuperseded
from tidelog.process.broker_role import BrokerRole, controllers_beside, remote_controllers, tls_between_brokers
from tidelog.process.controller_role import ControllerRole
from tidelog.process.listener import fit_connections, reserve_port, warn_of_admin_address
from tidelog.process.node_base import Outside, learn
from tidelog.process.role import NodeRole
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, StorageFailed
from tidelog.runtime.network import TcpNetwork
from tidelog.runtime.tasks import unless_failed
from tidelog.storage.bucket.proof import WrongBucket

logger = logging.getLogger(__name__)


class NodeProcess:
    """A controller, a broker or both, started and stopped together."""

    def __init__(
        self, config: Config, outside: Outside | None = None, sources: Mapping[str, str] | None = None
    ) -> None:
        """`outside`: instead of the machine's own network, clock, randomness and the configured bucket. `sources`:
        where the settings came from (`tidelog.config.Loaded.sources`).
        """
        self._sources = sources
        self._config = config
        self._outside = outside or Outside(TcpNetwork(), SystemClock(), random.Random(uuid.uuid4().int))
        self._roles: list[NodeRole] = []
        """Those that have begun to start; the last one is what clients of this process use."""
        self._closing = AsyncExitStack()
        """Ends what was opened, the last first: broker, controller, bucket, data directory."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ready_line(self) -> str:
        """`bootstrap=host:port` for clients, or `controller=host:port` of a process without a broker."""
        return self._roles[-1].ready_line

    @property
    def accounted_bytes(self) -> int:
        """Bytes that the broker's caches and buffers account for."""
        return sum(role.accounted_bytes for role in self._roles)

    async def start(self) -> None:
        """Start the roles in order.

        Raises a `TidelogError` if the operator must correct something, and the controller's failure: the quorum that
        the broker waits for may need this member.
        """
        await unless_failed(self._start_roles(), self._failed)

    async def _start_roles(self) -> None:
        config = self._config
        roles = config.node.roles
        if not roles:
            raise ConfigError("node.roles is empty", hint='set it to ["controller"], ["broker"], or both')
        is_broker = "broker" in roles
        tls = tls_between_brokers(config, self._outside.clock) if is_broker else None  # before anything listens
        fit_connections(config.kafka)
        if is_broker:
            config.kafka.port = reserve_port(config.kafka.host, config.kafka.port)
            warn_of_admin_address(config.kafka, config.admin)
        base = await learn(config, self._outside, self._closing, self._sources)
        if "controller" in roles:
            controller = ControllerRole(base, self._failed)
            await self._start_role(controller)
            if is_broker:
                await self._start_role(BrokerRole(base, controllers_beside(base, controller.node), tls))
        else:
            await self._start_role(BrokerRole(base, remote_controllers(base), tls))

    async def _start_role(self, role: NodeRole) -> None:
        self._roles.append(role)
        self._closing.push_async_callback(role.close)
        await role.start()

    async def run_until(self, stop: asyncio.Task[bool]) -> bool:
        """Serve until `stop` has completed, or a restart is asked for; return whether it is to be started again.

        Raises `StorageFailed` when a role has failed permanently; `BucketSuperseded`, `WrongBucket`.
        """
        failures = [role.failed for role in self._roles]
        restarts = [role.restart_asked for role in self._roles]
        waiting: set[asyncio.Future[Any]] = {stop, *failures, *restarts}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                error = failure.exception()
                if isinstance(error, BucketSuperseded | WrongBucket):
                    for role in self._roles:  # the other controllers learn it when this one leads them no more
                        role.give_up()
                    raise error
                raise StorageFailed(f"this process cannot continue: {error}", hint="restart it") from error
        return not stop.done() and any(each.done() for each in restarts)

    async def drain(self) -> None:
        """Move the broker's partitions to other brokers, within `node.drain_timeout_ms`. May be cancelled."""
        for role in self._roles:
            await role.drain()

    async def stop_broker(self) -> None:
        """Stop the broker but not the controller in this process. A second call waits for the first."""
        for role in self._roles:
            await role.stop_broker()

    async def stop(self) -> None:
        """Stop the started parts in this order: broker, controller, bucket, lock."""
        await self._closing.aclose()
        logger.info("stopped", extra={"node": self._config.node.id})
