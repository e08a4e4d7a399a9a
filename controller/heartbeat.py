"""`Heartbeat`: tells every controller once an interval that this broker lives, on a connection of its own to each.

To all and not only to the active one (hot-tier.md C3): whichever becomes active next knows already who lives, and
which connections have closed. It never gives up: a controller that cannot be reached is asked again at the next
interval (an outage of the controllers stops no traffic). What the broker carries rides along (`controller.load`). A
registration that is no longer current means that a newer process has this broker id: that is logged loudly, told to
`on_fenced`, and ends the heartbeats.

Entry: `Heartbeat`, a part of `controller.client`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

import msgspec

from controller.errors import StaleBrokerEpoch
from controller.load import BrokerLoad, HeartbeatReply
from controller.rpc import Endpoint, HeartbeatParams, RpcChannel
from runtime.clock import Clock
from runtime.errors import TidelogError
from runtime.msgpack import DECODE_ERRORS
from runtime.tasks import TaskSet

log = logging.getLogger(__name__)

_NIL = msgspec.Raw(b"\xc0")
_replies = msgspec.msgpack.Decoder(HeartbeatReply | None)


LEAVE_S = 1.0
"""How long a stop waits for a controller to hear of it."""


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
        self._began_s = 0.0
        self._tasks: TaskSet | None = None
        self._running: dict[Endpoint, asyncio.Task[None]] = {}
        self.channels: dict[Endpoint, RpcChannel] = {}
        """The channel to each controller."""
        self.on_fenced: Callable[[TidelogError], None] | None = None
        self.measure: Callable[[], BrokerLoad] | None = None
        """What this broker carries now."""
        self.unsaved_bytes: Callable[[], int] | None = None
        """How much of its WAL is not in the bucket yet."""
        self.reply: HeartbeatReply | None = None
        """The active controller's last answer; None while none is known to be active."""
        self._active: Endpoint | None = None

    def begin(self, broker_id: int, registration_epoch: int, tasks: TaskSet) -> None:
        """Heartbeats of this registration, in place of an older one's."""
        self._broker_id = broker_id
        self._epoch = registration_epoch
        if self._tasks is None:
            self._began_s = self._clock.monotonic()
        self._tasks = tasks
        self._stop(list(self._running))
        self._follow()

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """The controllers have changed."""
        self._endpoints = list(endpoints)
        self._stop([one for one in self._running if one not in endpoints])
        self._follow()

    def _stop(self, endpoints: list[Endpoint]) -> None:
        for endpoint in endpoints:
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
                load = self.measure() if self.measure is not None else None
                unsaved = self.unsaved_bytes() if self.unsaved_bytes is not None else -1
                params = HeartbeatParams(self._broker_id, epoch, load, unsaved, age_ms=self._age_ms())
                self._answered(endpoint, await channel.call("heartbeat", params, 3 * self._interval_s))
                failing = False
            except StaleBrokerEpoch as error:
                self._fenced(error)
                return
            except (TidelogError, *DECODE_ERRORS) as error:
                self._answered(endpoint, _NIL)
                if not failing:
                    log.warning(
                        "heartbeats fail",
                        extra={"broker": self._broker_id, "to": "{}:{}".format(*endpoint), "error": str(error)},
                    )
                failing = True
            await self._clock.sleep(self._interval_s * self._rng.uniform(0.9, 1.0))

    def _age_ms(self) -> int:
        return int((self._clock.monotonic() - self._began_s) * 1000)

    def _answered(self, endpoint: Endpoint, raw: msgspec.Raw) -> None:
        reply = _replies.decode(raw)
        if reply is not None:
            self._active, self.reply = endpoint, reply
        elif endpoint == self._active:
            self._active = self.reply = None

    def _fenced(self, error: TidelogError) -> None:
        if self._epoch:
            self._epoch = 0
            log.error("this broker is fenced", extra={"broker": self._broker_id, "error": str(error)})
            if self.on_fenced is not None:
                self.on_fenced(error)

    async def leave(self) -> None:
        """Tell every controller that can be reached that this broker stops in good order.."""
        if not self._epoch:
            return
        last = HeartbeatParams(self._broker_id, self._epoch, leaving=True, age_ms=self._age_ms())
        calls = [channel.call("heartbeat", last, LEAVE_S) for channel in self.channels.values()]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, TidelogError):
                log.debug("a controller does not hear that this broker leaves", extra={"error": str(error)})
            elif isinstance(error, BaseException):
                raise error

    async def close(self) -> None:
        """Drop the connections."""
        for channel in self.channels.values():
            await channel.close()
