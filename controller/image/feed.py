"""`DeltaFeed`: the newest deltas, for followers that long-poll, and whole images for those too far behind.

It holds the controller's own `Image`, which a broker of the same process may use too, a bounded ring of encoded deltas
and, for each follower that is loading an image, the transfer of a consistent image. Invariant: a follower at version v
gets all deltas after v, in order and without a gap, or has to reload.

Entry: `DeltaFeed`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec

from tidelog.controller.image.image import Delta, Image
from tidelog.controller.image.transfer import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    START,
    ImageChunk,
    ImageParams,
    ImageSender,
    PlainChunk,
)
from tidelog.controller.model.errors import ImageTransferLost
from tidelog.runtime.errors import Overloaded
from tidelog.runtime.waiting import within

RING_BYTES = 2 << 20
"""Bytes of encoded deltas. For a follower further behind, an image of ten thousand partitions is not much larger."""
REPLY_BYTES = 4 << 20
"""Bytes of deltas in one reply (at least one delta of any size)."""
TRANSFER_IDLE_S = 30.0
"""A transfer that was not continued for so long gives way to a new one if there are too many."""

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Bounds of a feed. Simulated clusters have small ones, so that small images are loaded in several chunks."""

    ring_deltas: int = 4_096
    chunk_rows: int = CHUNK_ROWS
    chunk_bytes: int = CHUNK_BYTES
    transfers: int = 256
    """Images being sent at the same time."""


DEFAULT_LIMITS = FeedLimits()


class DeltaFeed:
    """The newest deltas and the image. Use it on the event loop's thread only."""

    def __init__(self, *, finds_objects: bool = False, limits: FeedLimits = DEFAULT_LIMITS) -> None:
        """`finds_objects`: a broker of this process uses the image (`tidelog.controller.image.image`)."""
        self._finds_objects = finds_objects
        self._limits = limits
        self._listeners: list[Callable[[Delta], None]] = []
        self.image = self.new_image()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._base = 0
        """Version from which the ring serves a follower."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Of those who wait for a newer image."""
        self._transfers: dict[Hashable, ImageSender] = {}
        """Least recently used first."""
        self._numbers = itertools.count(START + 1)

    def new_image(self) -> Image:
        """Return an empty image with the same indexes as the one held here."""
        return Image(finds_objects=self._finds_objects)

    def listen(self, listener: Callable[[Delta], None]) -> Callable[[], None]:
        """Call `listener(delta)` after each change of the image. Returns a remover. A listener must not raise."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def reset(self, image: Image) -> None:
        """Replace the image by that of a snapshot. Followers behind it reload; listeners get the difference."""
        old, self.image = self.image, image
        self._ring.clear()
        self._ring_bytes = 0
        self._base = image.version
        self._wake()
        if self._listeners:
            self._tell(Delta(image.version, old.difference(image)))

    def append(self, delta: Delta) -> None:
        """Add the delta of an applied command."""
        self.image.apply(delta)
        encoded = _encoder.encode((delta.version, delta.mutations))
        self._ring.append((delta.version, encoded))
        self._ring_bytes += len(encoded)
        while len(self._ring) > self._limits.ring_deltas or self._ring_bytes > RING_BYTES:
            self._base, dropped = self._ring.popleft()
            self._ring_bytes -= len(dropped)
        self._wake()
        self._tell(delta)

    def _tell(self, delta: Delta) -> None:
        for listener in list(self._listeners):
            listener(delta)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_newer(self, version: int, timeout_s: float) -> None:
        """Return when the image is newer than `version`, or after `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.image.version <= version and (left_s := end_s - loop.time()) > 0:
            future: asyncio.Future[None] = loop.create_future()
            self._waiting[future] = None
            try:
                await within(future, left_s)
            except TimeoutError:
                return
            finally:
                self._waiting.pop(future, None)

    def after(self, version: int) -> list[msgspec.Raw] | None:
        """Return encoded deltas after `version`, a bounded number; None if the follower must reload the image."""
        if version < self._base:
            return None
        found: list[msgspec.Raw] = []
        size = 0
        for at in range(self._position(version), len(self._ring)):
            encoded = self._ring[at][1]
            if found and size + len(encoded) > REPLY_BYTES:
                break
            found.append(msgspec.Raw(encoded))
            size += len(encoded)
        return found

    def _position(self, version: int) -> int:
        """Return the ring position of the first delta after `version`, searching from the newest."""
        at = len(self._ring)
        while at and self._ring[at - 1][0] > version:
            at -= 1
        return at

    def image_chunk(self, follower: Hashable, params: ImageParams) -> ImageChunk:
        """Return the next chunk of this follower's transfer, or the first one of a new transfer.

        Raises `ImageTransferLost` if the request does not continue where the transfer is: the follower starts over.
        Raises `Overloaded` if too many others load images.
        """
        now_s = asyncio.get_running_loop().time()
        sender = self._transfers.get(follower)
        if params.transfer == START:
            sender = self._new_transfer(follower, now_s)
        elif sender is None or (sender.transfer, sender.position) != (params.transfer, params.position):
            raise ImageTransferLost(
                f"image transfer {params.transfer} does not continue at row {params.position} on this connection"
            )
        return self._next_chunk(follower, sender, now_s)

    def plain_image_chunk(self, follower: Hashable) -> PlainChunk:
        """As `image_chunk`, for a member before feature levels: continues where this connection's transfer is."""
        now_s = asyncio.get_running_loop().time()
        sender = self._transfers.get(follower) or self._new_transfer(follower, now_s)
        chunk = self._next_chunk(follower, sender, now_s)
        return PlainChunk(chunk.version, chunk.rows, chunk.end is not None)

    def _next_chunk(self, follower: Hashable, sender: ImageSender, now_s: float) -> ImageChunk:
        self._transfers.pop(follower, None)  # an error ends the transfer
        chunk = sender.next_chunk()
        if chunk.end is None:
            sender.used_s = now_s
            self._transfers[follower] = sender
        return chunk

    def _new_transfer(self, follower: Hashable, now_s: float) -> ImageSender:
        """Return a transfer of the current image. It ends one that was abandoned, never one that makes progress."""
        self._transfers.pop(follower, None)
        if len(self._transfers) >= self._limits.transfers:
            oldest, sender = next(iter(self._transfers.items()))
            if now_s - sender.used_s < TRANSFER_IDLE_S:
                raise Overloaded(f"{len(self._transfers)} followers load an image already; try again later")
            del self._transfers[oldest]
        limits = self._limits
        return ImageSender(
            next(self._numbers), self.image, chunk_rows=limits.chunk_rows, chunk_bytes=limits.chunk_bytes
        )

    def forget(self, follower: Hashable) -> None:
        """Drop the transfer of a disconnected follower."""
        self._transfers.pop(follower, None)
