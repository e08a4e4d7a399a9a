"""`Heartbeat`: sends heartbeats of this broker to every controller, on a separate connection to each.

Every controller gets them, not only the active one (docs/protocols.md), so that the next active one already knows the
live brokers and the connections that have closed. Failures are retried at the next interval indefinitely: an outage of
the controllers stops no traffic. The heartbeats carry the broker's load (`tidelog.controller.model.load`). A
registration that is no longer current means that a newer process has this broker id; that is logged as an error,
reported to `on_fenced`, and ends the heartbeats.

Each heartbeat tells the metadata version that the broker has applied; the active controller deletes no object that the
broker's metadata may name. Its answer says for how long that lasts without another one (`readable_until_s`), counted by
this process's monotonic clock from the time of the question.

Entry: `Heartbeat`, a part of `tidelog.controller.client.client`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from tidelog.controller.model.errors import StaleBrokerEpoch
from tidelog.controller.model.load import BrokerLoad, HeartbeatReply
from tidelog.controller.rpc.connection import Endpoint, HeartbeatParams, RpcChannel
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.health import STUCK_S, Flapping
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NIL = msgspec.Raw(b"\xc0")
_replies = msgspec.msgpack.Decoder(HeartbeatReply | None)


FIRST_GRACE_S = 10.0
"""Time after a registration in which a broker reads without an answer to a heartbeat."""
BEHIND_S = 0.9
"""The metadata may stay behind for so long before another controller is followed: a heartbeat's interval or so."""
LEAVE_S = 1.0
"""Time for which a stop waits until a controller has been informed."""


def _figure(measure: Callable[[], T] | None, otherwise: T) -> T:
    """Return what is measured. A broker that cannot tell it is alive nevertheless, and must be heard of."""
    if measure is None:
        return otherwise
    try:
        return measure()
    except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
        expected("heartbeat", failure)
        return otherwise


class BehindWatch:
    """Whether the local metadata stay where they are, behind those of the active controller. Sans-I/O.

    What has been told once stays so: a controller that does not know yet that another one is active, because its disk
    hangs, tells the version that it had.
    """

    def __init__(self) -> None:
        self.told = 0
        """The newest version that an active controller has told; 0: none has."""
        self._behind: tuple[int, float] | None = None
        """The local version that was behind, and the monotonic time at which it was first."""

    def is_stuck(self, version: int, told: int, now_s: float) -> bool:
        """Note the local version and the one that was told (0: none); True once in `BEHIND_S` without progress."""
        self.told = max(self.told, told)
        if version >= self.told:
            self._behind = None
        elif self._behind is None or self._behind[0] != version:
            self._behind = (version, now_s)
        elif now_s - self._behind[1] >= BEHIND_S:
            self._behind = None
            return True
        return False


class Heartbeat:
    """Periodic heartbeats. `make_channel` opens a channel to one controller."""

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
        """Returns the current load of this broker."""
        self.not_uploaded_bytes: Callable[[], int] | None = None
        """Returns the bytes of its WAL that are not uploaded."""
        self.reply: HeartbeatReply | None = None
        """The active controller's last reply; None while none is known to be active."""
        self.version: Callable[[], int] | None = None
        """Returns the metadata version that this process has applied."""
        self.on_behind: Callable[[], None] | None = None
        """Called when the metadata stay where they are, behind what the active controller has told: whoever is
        followed is silent."""
        self.on_hand_overs: Callable[[tuple[int, ...]], None] | None = None
        """Called with the replica sets that this broker leads and that will be handed over, at each answer."""
        self._behind = BehindWatch()
        self.readable_until_s = float("inf")
        """Monotonic time until which objects that the local metadata names may be read: the active controller's last
        answer allows it. Without heartbeats there is no limit."""
        self._is_granted = False
        """Whether an active controller has set that time."""
        self._active: Endpoint | None = None
        self._heard_s = 0.0
        self._flapping: dict[Endpoint, Flapping] = {}

    def begin(self, broker_id: int, registration_epoch: int, tasks: TaskSet) -> None:
        """Send heartbeats of this registration, and stop those of an older one."""
        self._broker_id = broker_id
        self._epoch = registration_epoch
        if self._tasks is None:
            self._began_s = self._heard_s = self._clock.monotonic()
        self._tasks = tasks
        self.readable_until_s, self._is_granted = self._clock.monotonic() + FIRST_GRACE_S, False
        self._stop(list(self._running))
        self._follow()

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the list of controllers."""
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
                self._running[endpoint] = self._tasks.keep(partial(self._run, endpoint, self._epoch), name)

    async def _run(self, endpoint: Endpoint, epoch: int) -> None:
        channel = self.channels.get(endpoint)
        if channel is None:
            channel = self.channels[endpoint] = self._make_channel(endpoint)
        failing, asked_s = False, 0.0
        opened = channel.opened
        flapping = self._flapping.setdefault(endpoint, Flapping())
        while self._epoch == epoch:
            try:
                load = _figure(self.measure, None)
                not_uploaded = _figure(self.not_uploaded_bytes, -1)
                version = self.version() if self.version is not None else -1
                params = HeartbeatParams(
                    self._broker_id, epoch, load, not_uploaded, age_ms=self._age_ms(), version=version
                )
                asked_s = self._clock.monotonic()
                self._answered(endpoint, await channel.call("heartbeat", params, 3 * self._interval_s), asked_s)
                failing = False
            except StaleBrokerEpoch as error:
                self._fenced(error)
                return
            except (TidelogError, *DECODE_ERRORS) as error:
                self._answered(endpoint, _NIL, asked_s)
                if not failing:
                    logger.warning(
                        "heartbeats fail",
                        extra={"broker": self._broker_id, "to": "{}:{}".format(*endpoint), "error": str(error)},
                    )
                failing = True
            if opened and channel.opened > opened:
                flapping.lost(self._clock.monotonic())
            opened = channel.opened
            await self._clock.sleep(self._interval_s * self._rng.uniform(0.9, 1.0))

    @property
    def told_version(self) -> int:
        """Return the newest metadata version that an active controller has told; 0: none has."""
        return self._behind.told

    def _age_ms(self) -> int:
        return int((self._clock.monotonic() - self._began_s) * 1000)

    def _answered(self, endpoint: Endpoint, raw: msgspec.Raw, asked_s: float) -> None:
        reply = _replies.decode(raw)
        if reply is not None:
            self._active, self.reply = endpoint, reply if reply.wanted_brokers else None
            until_s = asked_s + reply.read_grace_ms / 1000 if reply.read_grace_ms else float("inf")
            self.readable_until_s = max(self.readable_until_s, until_s) if self._is_granted else until_s
            self._is_granted = reply.read_grace_ms > 0
            self._heard_s = self._clock.monotonic()
            version = self.version() if self.version is not None else reply.version
            if self._behind.is_stuck(version, reply.version, self._heard_s) and self.on_behind is not None:
                self.on_behind()
            if self.on_hand_overs is not None:
                self.on_hand_overs(reply.hand_overs)
        elif endpoint == self._active:
            self._active = self.reply = None

    def problems(self) -> list[str]:
        """Return what is wrong with the controllers as this broker hears them, one sentence each."""
        if self._tasks is None or not self._epoch:
            return []
        now_s = self._clock.monotonic()
        found = [
            "controller {}:{} ".format(*endpoint) + problem
            for endpoint in self._endpoints
            if endpoint in self._flapping and (problem := self._flapping[endpoint].problem(now_s))
        ]
        silent_s = now_s - self._heard_s
        if silent_s >= STUCK_S:
            found.append(f"no active controller has answered this broker's heartbeats for {silent_s:.0f} s")
        return found

    def _fenced(self, error: TidelogError) -> None:
        if self._epoch:
            self._epoch = 0
            logger.error("this broker is fenced", extra={"broker": self._broker_id, "error": str(error)})
            if self.on_fenced is not None:
                self.on_fenced(error)

    async def leave(self) -> None:
        """Report a clean stop of this broker to every controller that can be reached."""
        if not self._epoch:
            return
        last = HeartbeatParams(self._broker_id, self._epoch, leaving=True, age_ms=self._age_ms())
        calls = [channel.call("heartbeat", last, LEAVE_S) for channel in self.channels.values()]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, TidelogError):
                logger.debug("cannot report a clean stop to a controller", extra={"error": str(error)})
            elif isinstance(error, BaseException):
                raise error

    async def close(self) -> None:
        """Drop the connections."""
        for channel in self.channels.values():
            await channel.close()
