"""First stage of a broker's start: connect to the controllers, learn the cluster id, then create the components.

Start, first stage: controller session and identity → the bucket is probed. Second stage, with all components created at
once (`tidelog.broker.parts`): `tidelog.broker.running`. A start with an existing data directory does not need the
bucket, unless the WAL lives there: reads that fail meanwhile are retried and reported (rule 11).

Stop: the components in their order, then the probe and the controller session. A failed WAL or a deposed master ends
the process: its clients' connections are closed at once, `failed` is set, and the caller restarts the node.

Entry: `BrokerNode.start`.
"""

from __future__ import annotations

import asyncio

from tidelog.broker.base import BrokerBase
from tidelog.broker.bucket_probe import BucketProbe
from tidelog.broker.failure import BrokerFailure
from tidelog.broker.inputs import BrokerIdentity, BrokerSettings, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.parts import BrokerParts, build_parts
from tidelog.broker.running import RunningBroker
from tidelog.broker.telemetry.health import HealthMonitor
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.broker.telemetry.tracing_setup import open_tracing
from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.image.objects import newest_objects
from tidelog.runtime.task_errors import expected


class BrokerNode:
    """A broker. All its interfaces to the outside are passed in."""

    def __init__(
        self,
        *,
        identity: BrokerIdentity,
        settings: BrokerSettings,
        controllers: ControllerAccess,
        wal: WalAccess,
        world: BrokerWorld,
    ) -> None:
        self._failure = BrokerFailure()
        self.controller = ControllerClient(
            controllers.endpoints,
            world.network,
            world.clock,
            world.rng,
            timing=ClientTiming(heartbeat_interval_s=controllers.heartbeat_interval_s),
            credentials=controllers.credentials,
            follows_image=controllers.follows_controllers,
            local=controllers.local,
        )
        self.controller.on_fenced(self._failure.fail)
        self._base = BrokerBase(
            identity=identity,
            settings=settings,
            controllers=controllers,
            wal=wal,
            world=world,
            controller=self.controller,
            failure=self._failure,
            probe=BucketProbe(world.store, world.clock, world.rng, self._failure.fail),
            registry=PartRegistry(),
            health=HealthMonitor(world.clock, self._failure.fail),
            ask_restart=self._ask_restart,
            tracing=open_tracing(settings.tracing, world.clock, world.rng),
        )
        self.restart_asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when an operator has asked for a restart, which the controllers have allowed: the owner drains this
        broker, stops it, and lets another process be started."""
        self._running: RunningBroker | None = None
        """None until the cluster is known."""

    async def start(self) -> None:
        """Start and serve. Raises errors that a restart cannot fix; all others are retried.

        An exception that nobody expected is raised as `Unavailable`: the process ends, and another start may succeed.
        """
        try:
            await self._start()
        except Exception as error:
            raise expected("the broker's start", error) from error

    async def _start(self) -> None:
        base = self._base
        await self.controller.start()
        base.identity.bind(self.controller.image.cluster_id)
        await base.probe.meet(
            self._prove_bucket, first_start=base.identity.first_start, must_fence=base.wal.is_in_bucket
        )
        running = self._running = RunningBroker(base, build_parts(base))
        await running.start()

    def _ask_restart(self) -> None:
        if not self.restart_asked.done():
            self.restart_asked.set_result(None)

    async def _prove_bucket(self) -> None:
        """Find the cluster's objects in the bucket. Raises `WrongBucket`, and the errors of the bucket."""
        store, controller = self._base.world.store, self.controller
        if store.proof is not None:
            await store.proof.prove(
                store, controller.image.cluster_id, lambda count: newest_objects(controller.image, count)
            )

    @property
    def failed(self) -> asyncio.Future[None]:
        """Return a future that is set to the error that ended this broker."""
        return self._failure.future

    @property
    def parts(self) -> BrokerParts:
        """Return the broker's components, once its cluster is known."""
        assert self._running is not None, "the broker has not been started"
        return self._running.parts

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Return the host and port for clients."""
        return self.parts.servers.kafka.address

    @property
    def accounted_bytes(self) -> int:
        """Return the bytes held by bounded caches and buffers."""
        return self._running.accounted_bytes if self._running is not None else 0

    async def drain(self, budget_s: float) -> None:
        """Move the partitions to other living brokers before a stop, as far as `budget_s` allows. Never raises."""
        if self._running is not None:
            await self._running.drain(budget_s)

    async def stop(self, grace_s: float, *, returns: bool = False) -> None:
        """Finish requests in flight, close the partitions, upload, and release resources. Valid after a failed start.

        `returns`: the broker, perhaps the whole cluster, will restart: others must not take over from it at once.
        """
        if self._running is not None:
            await self._running.stop(grace_s)
        await self._base.health.close()
        await self._base.probe.close()
        await self.controller.close(leaving=returns and not self._failure.happened)
        self._failure.close()
