"""`Heartbeat`: tells the active controller once an interval that this broker lives, on a connection of its own.

It never gives up: a controller that cannot be reached is asked again at the next interval (a controller outage stops no
traffic). A registration that is no longer current means that a newer process has this broker id: that is logged loudly,
told to `on_fenced`, and ends the heartbeats.

Entry: `Heartbeat`, a part of `controller.client`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from controller.errors import StaleBrokerEpoch
from controller.rpc import HeartbeatParams, RpcChannel
from runtime.clock import Clock
from runtime.errors import TidelogError
from runtime.tasks import TaskSet

log = logging.getLogger(__name__)


class Heartbeat:
    """See the module."""

    def __init__(self, channel: RpcChannel, clock: Clock, rng: random.Random, interval_s: float) -> None:
        assert interval_s > 0
        self._channel = channel
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._epoch = 0
        self.on_fenced: Callable[[TidelogError], None] | None = None

    def begin(self, broker_id: int, registration_epoch: int, tasks: TaskSet) -> None:
        """Heartbeats of this registration, in place of an older one's."""
        self._epoch = registration_epoch
        tasks.spawn(self._run(broker_id, registration_epoch), "heartbeat")

    async def _run(self, broker_id: int, epoch: int) -> None:
        failing = False
        while self._epoch == epoch:
            try:
                await self._channel.call("heartbeat", HeartbeatParams(broker_id, epoch), 3 * self._interval_s)
                failing = False
            except StaleBrokerEpoch as error:
                log.error("this broker is fenced", extra={"broker": broker_id, "error": str(error)})
                if self.on_fenced is not None:
                    self.on_fenced(error)
                return
            except TidelogError as error:
                if not failing:
                    log.warning("heartbeats fail", extra={"broker": broker_id, "error": str(error)})
                failing = True
            await self._clock.sleep(self._interval_s * self._rng.uniform(0.9, 1.0))
