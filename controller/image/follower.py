"""`ImageFollower`: keeps a local `Image` current by long-polling a controller, and wakes tasks that wait for a version.

`LocalFollower` does the same with the image of a controller in this process, without a copy.

Invariants: the local version never decreases; a delta is applied completely, then subscribers are called, then waiters
are woken. After a reload (too far behind, or another controller) subscribers get the difference as one delta. An image
replaces the local one only when it is whole (`tidelog.controller.image.transfer`); after a failed request it is loaded
from its beginning. It is built and compared in steps: only what differs is applied in one turn of the event loop. A
controller of another cluster is never followed. Failures are retried indefinitely, with back-off and jitter.

Entry: `ImageFollower`, `LocalFollower`, parts of `tidelog.controller.client.client`.
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

from tidelog.controller.image.feed import DeltaFeed
from tidelog.controller.image.image import STEP_ROWS, Delta, Image
from tidelog.controller.image.transfer import ImageReceiver
from tidelog.controller.machine.state import decode_mutation
from tidelog.controller.model.errors import OtherCluster
from tidelog.controller.rpc.connection import DELTA_VERSION, CallTimeout, PollParams, PollReply, RpcChannel
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, Overloaded, TidelogError, Unavailable
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.runtime.steps import Steps, in_turns
from tidelog.runtime.task_errors import ERRORS

logger = logging.getLogger(__name__)

POLL_MS = 2_000
"""Short, because a hung controller is noticed only when a poll times out."""
CALL_S = 10.0
"""Time-out of a request for one chunk of an image."""
FAILURE_LOG_S = 10.0
"""Minimum interval between log lines for the same kind of failure."""
POLL_GRACE_S = 3.0
"""Time-out of a poll beyond its own waiting time."""
RETRY_BASE_S = 0.05
RETRY_CAP_S = 1.0
"""Delays after failures; the longest is how old the metadata may still become after the controllers are back."""

Callback = Callable[[Delta], None]

_replies = msgspec.msgpack.Decoder(PollReply)
_deltas = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, msgspec.Raw, msgspec.Raw]]])


class Follower(ABC):
    """Base of followers: subscribers to changes of an image, and waiters for a version."""

    def __init__(self) -> None:
        self._subscribers: dict[int, Callback] = {}
        self._numbers = itertools.count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._loaded = asyncio.Event()
        self.is_loading = False
        """Whether an image is being loaded, which takes as long as it is large."""

    @property
    @abstractmethod
    def image(self) -> Image:
        """Return the local copy."""

    @abstractmethod
    async def run(self) -> None:
        """Follow until cancelled."""

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(delta)` on the loop after each change. Returns a remover. A callback must not raise."""
        number = next(self._numbers)
        self._subscribers[number] = callback

        def remove() -> None:
            self._subscribers.pop(number, None)

        return remove

    async def wait_loaded(self) -> None:
        """Return when the first image is loaded."""
        await self._loaded.wait()

    async def wait_version(self, version: int) -> None:
        """Return when the image contains `version`."""
        if self.image.version >= version:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (version, next(self._numbers), future))
        await future

    def _tell(self, delta: Delta) -> None:
        """Call the subscribers and wake the waiters after `delta` was applied."""
        for callback in list(self._subscribers.values()):
            try:
                callback(delta)
            except Exception as error:
                logger.exception("a metadata subscriber failed", extra={"version": delta.version})
                ERRORS.count("metadata subscribers", error, ended=False)
        while self._waiters and self._waiters[0][0] <= delta.version:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)


class LocalFollower(Follower):
    """Follower of a controller without a quorum in this process: always connected, and always the leader."""

    def __init__(self, feed: DeltaFeed) -> None:
        super().__init__()
        self._feed = feed

    @property
    def image(self) -> Image:
        """Return the controller's own image."""
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
    """Follower of a remote controller, by long polls."""

    def __init__(
        self, channel: RpcChannel, clock: Clock, rng: random.Random, *, chunk_timeout_s: float = CALL_S
    ) -> None:
        super().__init__()
        self._chunk_timeout_s = chunk_timeout_s
        self._image = Image()
        self._channel = channel
        self._clock = clock
        self._backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, rng)
        self._limiter = LogLimiter(logger, clock, burst=1, period_s=FAILURE_LOG_S)

    @property
    def image(self) -> Image:
        """Return the local copy."""
        return self._image

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._poll()
                self._backoff.reset()
            except (TidelogError, *DECODE_ERRORS) as error:
                passes = isinstance(error, Unavailable | Overloaded) and not isinstance(error, OtherCluster)
                level = logging.INFO if passes else logging.ERROR
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
            await self._reload(reply.cluster_id)
        for encoded in reply.deltas:
            version, rows = _deltas.decode(encoded)
            if version <= self.image.version:
                raise CorruptData(f"delta {version} arrived at version {self.image.version}")
            self._take(Delta(version, [decode_mutation(*row) for row in rows]))
        if self.image.version >= reply.version:
            self._loaded.set()

    async def _reload(self, cluster_id: str) -> None:
        """Replace the local image by the controller's, once all of that has arrived and is checked."""
        loading = ImageReceiver()
        self.is_loading = True
        try:
            while not loading.is_whole:
                await self._load_next(loading)
                if loading.version < self.image.version:
                    raise Unavailable(f"the controller's image is older: {loading.version} < {self.image.version}")
            fresh = await in_turns(_built(loading))
            if fresh.cluster_id != cluster_id:
                raise CorruptData(f"the image is of cluster {fresh.cluster_id}, not {cluster_id}")
            difference = await in_turns(self.image.difference_steps(fresh))
        finally:
            self.is_loading = False
        logger.info("metadata loaded", extra={"version": loading.version, "rows": len(loading.rows)})
        self._take(Delta(loading.version, difference, {}))

    async def _load_next(self, loading: ImageReceiver) -> None:
        """A transfer without positions is over with its connection only (`tidelog.controller.image.transfer`)."""
        try:
            loading.take(await self._channel.call("image", loading.request(), self._chunk_timeout_s))
        except BaseException as error:
            if loading.is_plain or (not loading.rows and isinstance(error, CallTimeout)):
                self._channel.drop()
            raise

    def _take(self, delta: Delta) -> None:
        self._image.apply(delta)
        self._tell(delta)


def _built(loaded: ImageReceiver) -> Steps[Image]:
    """Make an image of what has arrived. It has the ends of its streams."""
    fresh = Image(finds_objects=False)
    rows = iter(loaded.rows)
    while some := list(itertools.islice(rows, STEP_ROWS)):
        fresh.apply(Delta(loaded.version, some, {}))
        yield
    return fresh
