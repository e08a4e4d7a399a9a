"""`ImageFollower`: keeps a local `Image` current by long-polling a controller, and wakes who waits for a version.
`LocalFollower` does the same with the image of a controller in this process, and copies nothing.

Invariants: the local version never goes back; a delta is applied whole, subscribers are told, then waiters wake. After
a reload (too far behind, or another controller) subscribers get the difference as one delta. A controller of another
cluster is never followed. Failures are retried for ever, with back-off and jitter.

Entry: `ImageFollower`, `LocalFollower`, parts of `controller.client`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from controller.feed import DeltaFeed
from controller.image import Delta, Image
from controller.rpc import DELTA_VERSION, ImageChunk, PollParams, PollReply, RpcChannel
from controller.state import decode_mutation
from controller.tables import Mutation
from runtime.clock import Clock
from runtime.errors import CorruptData, TidelogError, Unavailable
from runtime.log_limit import LogLimiter
from runtime.msgpack import DECODE_ERRORS
from runtime.tasks import Backoff

log = logging.getLogger(__name__)

POLL_MS = 2_000
"""Short, because a controller that hangs is noticed only when a poll fails."""
CALL_S = 10.0
"""One part of an image."""
FAILURE_LOG_S = 10.0
"""A kind of failure is logged once in so long: an outage lasts, and is no news each time."""
POLL_GRACE_S = 3.0
"""Beyond the time a poll waits by itself."""

Callback = Callable[[Delta], None]

_replies = msgspec.msgpack.Decoder(PollReply)
_chunks = msgspec.msgpack.Decoder(ImageChunk)
_deltas = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, msgspec.Raw, msgspec.Raw]]])


class Follower(ABC):
    """Who is told of changes of an image, and who waits for them."""

    def __init__(self) -> None:
        self._subscribers: dict[int, Callback] = {}
        self._numbers = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._loaded = asyncio.Event()

    @property
    @abstractmethod
    def image(self) -> Image:
        """The local copy."""

    @abstractmethod
    async def run(self) -> None:
        """Follow until cancelled."""

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """`callback(delta)` on the loop after each change; returns a remover. A callback must not raise."""
        number = next(self._numbers)
        self._subscribers[number] = callback

        def remove() -> None:
            self._subscribers.pop(number, None)

        return remove

    async def wait_loaded(self) -> None:
        """Return when the first image is here."""
        await self._loaded.wait()

    async def wait_version(self, version: int) -> None:
        """Return when the image contains `version`."""
        if self.image.version >= version:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (version, next(self._numbers), future))
        await future

    def _tell(self, delta: Delta) -> None:
        """The image has taken `delta`."""
        for callback in list(self._subscribers.values()):
            try:
                callback(delta)
            except Exception:
                log.exception("a metadata subscriber failed", extra={"version": delta.version})
        while self._waiters and self._waiters[0][0] <= delta.version:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)


class LocalFollower(Follower):
    """See the module. Of a controller without a quorum: it knows its leader, and it is not cut off from us."""

    def __init__(self, feed: DeltaFeed) -> None:
        super().__init__()
        self._feed = feed

    @property
    def image(self) -> Image:
        """The controller's own."""
        return self._feed.image

    async def run(self) -> None:
        """Follow until cancelled."""
        remove = self._feed.listen(self._tell)
        try:
            while not self.image.cluster_id:
                await self._feed.wait_newer(self.image.version, POLL_MS / 1000)
            self._loaded.set()
            await asyncio.get_running_loop().create_future()
        finally:
            remove()


class ImageFollower(Follower):
    """See the module."""

    def __init__(self, channel: RpcChannel, clock: Clock, rng: random.Random) -> None:
        super().__init__()
        self._image = Image()
        self._channel = channel
        self._clock = clock
        self._backoff = Backoff(rng=rng)
        self._limiter = LogLimiter(log, clock, burst=1, period_s=FAILURE_LOG_S)

    @property
    def image(self) -> Image:
        """The local copy."""
        return self._image

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._poll()
                self._backoff.reset()
            except (TidelogError, *DECODE_ERRORS) as error:
                level = logging.INFO if isinstance(error, Unavailable) else logging.ERROR
                event = "cannot follow the controller; trying again"
                self._limiter.line(type(error).__name__, level, event, {"error": str(error)})
                await self._clock.sleep(self._backoff.next_delay_s())

    async def _poll(self) -> None:
        wait_ms = POLL_MS if self._loaded.is_set() else 0
        params = PollParams(self.image.version, wait_ms, self.image.cluster_id, DELTA_VERSION)
        raw = await self._channel.call("poll", params, wait_ms / 1000 + POLL_GRACE_S)
        reply = _replies.decode(raw)
        if not reply.cluster_id:
            raise Unavailable("the controller has no cluster yet")
        if reply.reload:
            await self._reload()
        for encoded in reply.deltas:
            version, rows = _deltas.decode(encoded)
            if version <= self.image.version:
                raise CorruptData(f"delta {version} arrived at version {self.image.version}")
            self._take(Delta(version, [decode_mutation(*row) for row in rows]))
        if self.image.version >= reply.version:
            self._loaded.set()

    async def _reload(self) -> None:
        rows: list[Mutation] = []
        while True:
            chunk = _chunks.decode(await self._channel.call("image", None, CALL_S))
            rows += [decode_mutation(*row) for row in chunk.rows]
            if chunk.last:
                break
        if chunk.version < self.image.version:
            raise Unavailable(f"that controller is behind: {chunk.version} < {self.image.version}")
        fresh = Image()
        fresh.apply(Delta(chunk.version, rows))
        if self.image.cluster_id and fresh.cluster_id != self.image.cluster_id:
            raise CorruptData(f"the image is of cluster {fresh.cluster_id}, not {self.image.cluster_id}")
        log.info("metadata loaded", extra={"version": chunk.version, "rows": len(rows)})
        self._take(Delta(chunk.version, self.image.difference(fresh)))

    def _take(self, delta: Delta) -> None:
        self._image.apply(delta)
        self._tell(delta)
