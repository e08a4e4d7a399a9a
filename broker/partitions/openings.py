"""Requests that wait a little for a partition that is opening here.

A client that has just been told of a leader, or that sends five batches one behind the other, must not be refused
because the log opens some milliseconds later: without retries its records would be lost, and with retries later ones
would overtake them. The wait is bounded for each opening, not for each request: `OPENING_WAIT_S` after this broker
learned that it leads a partition, requests no longer wait for it. So a partition that does not open delays others on
the same connection once and not with every request. A partition whose opening has failed is not waited for at all.

A partition that is being moved here is waited for, too, and one whose replica set elects while this broker is in its
SyncStateSet. An old leader names the next one as soon as it has closed the partition (`PartitionManager.next_leader`),
another broker may have heard first of an election, and librdkafka pauses for half a second when it is refused. This
wait is bounded as the other one, and apart from it: an election may take longer, and then the log still has to open.

Entry: `Openings`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidelog.controller.model.records import PartitionKey
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Unavailable

OPENING_WAIT_S = 2.0
"""A log opens within milliseconds, or with one reading from the bucket; the smallest time-outs of clients are 5 s."""

Opened = Callable[[], None]


class LeaderNotAvailable(Unavailable):
    """This broker leads the partition and is still opening it. Kafka: LEADER_NOT_AVAILABLE (5), retriable."""

    kafka_code = 5

    def __init__(self, message: str, *, opening: Opening | None = None) -> None:
        super().__init__(message)
        self.opening = opening
        """The opening to wait for; None if a request should not wait."""


class Opening:
    """One partition that is opening here, for the requests that wait for it."""

    def __init__(self, clock: Clock, wait_until: float, *, leads: bool) -> None:
        self._clock = clock
        self._wait_until = wait_until
        self._leads = leads
        self._listeners: dict[Opened, None] = {}
        self.ended = False
        """It has opened or failed, or is no longer to open here."""

    @property
    def remaining_s(self) -> float:
        """Return for how many seconds a request may still wait; 0: not at all."""
        return 0.0 if self.ended else max(0.0, self._wait_until - self._clock.monotonic())

    def led_until(self, wait_until: float) -> None:
        """This broker leads the partition now: from the first call on, requests may wait until then."""
        if not self._leads:
            self._leads, self._wait_until = True, wait_until

    def listen(self, heard: Opened) -> Callable[[], None]:
        """Call `heard` at the end of the opening, which is still pending. Returns a remover."""
        assert not self.ended
        self._listeners[heard] = None
        return lambda: self._listeners.pop(heard, None)

    async def wait(self, limit_s: float) -> None:
        """Return at the end of the opening, or after `limit_s` seconds, or when its time is over."""
        limit_s = min(limit_s, self.remaining_s)
        if limit_s <= 0:
            return
        ended = asyncio.Event()
        remove = self.listen(ended.set)
        try:
            async with asyncio.timeout(limit_s):
                await ended.wait()
        except TimeoutError:
            return
        finally:
            remove()

    def end(self) -> None:
        """Wake all who wait."""
        self.ended = True
        listeners, self._listeners = self._listeners, {}
        for heard in listeners:
            heard()


class Openings:
    """The openings that requests have asked for and that have not ended: few, and none without a request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[PartitionKey, Opening] = {}

    def get(self, key: PartitionKey, since: float, *, leads: bool = True) -> Opening | None:
        """Return the opening of a partition that is to open here since `since` (monotonic seconds), or None if its
        time is over. With `leads` False this broker does not lead it yet; that time counts apart."""
        opening, wait_until = self._pending.get(key), since + OPENING_WAIT_S
        if opening is None:
            if wait_until <= self._clock.monotonic():
                return None
            opening = self._pending[key] = Opening(self._clock, wait_until, leads=leads)
        elif leads:
            opening.led_until(wait_until)
        return opening if opening.remaining_s > 0 else None

    def end(self, key: PartitionKey) -> None:
        """Note that a partition has opened, has failed to open, or is no longer to open here."""
        opening = self._pending.pop(key, None)
        if opening is not None:
            opening.end()

    def pending(self) -> list[PartitionKey]:
        """Return the partitions of the pending openings."""
        return list(self._pending)

    def end_all(self) -> None:
        """End all openings: nothing opens here any more."""
        for key in self.pending():
            self.end(key)
