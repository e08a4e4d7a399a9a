"""`Heartbeat`: tells every controller once an interval that this broker lives, on a connection of its own to each.

To all and not only to the active one (hot-tier.md C3): whichever becomes active next knows already who lives, and
which connections have closed. It never gives up: a controller that cannot be reached is asked again at the next
interval (an outage of the controllers stops no traffic). A registration that is no longer current means that a newer
process has this broker id: that is logged loudly, told to `on_fenced`, and ends the heartbeats.

Entry: `Heartbeat`, a part of `controller.client`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from controller.errors import StaleBrokerEpoch
from controller.rpc import Endpoint, HeartbeatParams, RpcChannel
from runtime.clock import Clock
from runtime.errors import TidelogError
from runtime.tasks import TaskSet

log = logging.getLogger(__name__)


class Heartbeat:
    """See the module. `make_channel` opens a channel to one controller."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        make_channel: Callable[[Endpoint], RpcChannel],
        clock: Clock,
        rng: random.Random,
        interval_s: float,
    ) -> None:
        assert interval_s > 0
        self._endpoints = list(endpoints)
        self._make_channel = make_channel
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._broker_id = -1
        self._epoch = 0
        self._tasks: TaskSet | None = None
        self._running: dict[Endpoint, asyncio.Task[None]] = {}
        self.channels: dict[Endpoint, RpcChannel] = {}
        """The channel to each controller."""
        self.on_fenced: Callable[[TidelogError], None] | None = None

    def begin(self, broker_id: int, registration_epoch: int, tasks: TaskSet) -> None:
        """Heartbeats of this registration, in place of an older one's."""
        self._broker_id = broker_id
        self._epoch = registration_epoch
        self._tasks = tasks
        self._stop(self._running)
        self._follow()

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """The controllers have changed."""
        self._endpoints = list(endpoints)
        self._stop(set(self._running) - set(endpoints))
        self._follow()

    def _stop(self, endpoints: set[Endpoint] | dict[Endpoint, asyncio.Task[None]]) -> None:
        for endpoint in list(endpoints):
            self._running.pop(endpoint).cancel()

    def _follow(self) -> None:
        if self._tasks is None or not self._epoch:
            return
        for endpoint in self._endpoints:
            if endpoint not in self._running:
                name = "heartbeat-{}:{}".format(*endpoint)
                self._running[endpoint] = self._tasks.spawn(self._run(endpoint, self._epoch), name)

    async def _run(self, endpoint: Endpoint, epoch: int) -> None:
        channel = self.channels.get(endpoint)
        if channel is None:
            channel = self.channels[endpoint] = self._make_channel(endpoint)
        failing = False
        while self._epoch == epoch:
            try:
                params = HeartbeatParams(self._broker_id, epoch)
                await channel.call("heartbeat", params, 3 * self._interval_s)
                failing = False
            except StaleBrokerEpoch as error:
                self._fenced(error)
                return
            except TidelogError as error:
                if not failing:
                    log.warning(
                        "heartbeats fail",
                        extra={"broker": self._broker_id, "to": "{}:{}".format(*endpoint), "error": str(error)},
                    )
                failing = True
            await self._clock.sleep(self._interval_s * self._rng.uniform(0.9, 1.0))

    def _fenced(self, error: TidelogError) -> None:
        if self._epoch:
            self._epoch = 0
            log.error("this broker is fenced", extra={"broker": self._broker_id, "error": str(error)})
            if self.on_fenced is not None:
                self.on_fenced(error)

    async def close(self) -> None:
        """Drop the connections."""
        for channel in self.channels.values():
            await channel.close()
