"""`DeltaFeed`: the newest deltas, for followers that long-poll, and whole images for those too far behind.

It holds the controller's own `Image`, which a broker of the same process may use too, a bounded ring of encoded deltas
and, for each follower that is loading one, the cursor of a consistent image. Invariant: a follower at version v is
given all deltas after v, in order and without a hole, or is told to reload; never a part.

Entry: `DeltaFeed`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import msgspec

from controller.image import Delta, Image
from controller.rpc import ImageChunk

RING_DELTAS = 4_096
RING_BYTES = 2 << 20
"""A follower that is further behind loads the image, which is not much larger for ten thousand partitions."""
REPLY_BYTES = 4 << 20
"""Deltas in one reply (at least one, whatever its size)."""
CHUNK_ROWS = 5_000
MAX_CURSORS = 256

_encoder = msgspec.msgpack.Encoder()


class _Cursor(NamedTuple):
    version: int
    rows: Iterator[tuple[str, Any, Any]]


class DeltaFeed:
    """See the module. All methods are for the event loop's thread."""

    def __init__(self, *, finds_objects: bool = False) -> None:
        """`finds_objects` if a broker of this process is to use the image (`controller.image`)."""
        self._finds_objects = finds_objects
        self._listeners: list[Callable[[Delta], None]] = []
        self.image = self.new_image()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._base = 0
        """Version that a follower must have reached to be served from the ring."""
        self._news = asyncio.Event()
        self._cursors: dict[Hashable, _Cursor] = {}

    def new_image(self) -> Image:
        """An empty image of the kind that is held here."""
        return Image(finds_objects=self._finds_objects)

    def listen(self, listener: Callable[[Delta], None]) -> Callable[[], None]:
        """`listener(delta)` after each change of the image; returns a remover. A listener must not raise."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def reset(self, image: Image) -> None:
        """Start over from a snapshot; followers behind it will reload. Listeners get the difference."""
        old, self.image = self.image, image
        self._ring.clear()
        self._ring_bytes = 0
        self._base = image.version
        self._wake()
        if self._listeners:
            self._tell(Delta(image.version, old.difference(image)))

    def append(self, delta: Delta) -> None:
        """A command took effect."""
        self.image.apply(delta)
        encoded = _encoder.encode((delta.version, delta.mutations))
        self._ring.append((delta.version, encoded))
        self._ring_bytes += len(encoded)
        while len(self._ring) > RING_DELTAS or self._ring_bytes > RING_BYTES:
            self._base, dropped = self._ring.popleft()
            self._ring_bytes -= len(dropped)
        self._wake()
        self._tell(delta)

    def _tell(self, delta: Delta) -> None:
        for listener in list(self._listeners):
            listener(delta)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait_newer(self, version: int, timeout_s: float) -> None:
        """Return when the image is newer than `version`, or after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.image.version <= version:
                    await self._news.wait()
        except TimeoutError:
            return

    def after(self, version: int) -> list[msgspec.Raw] | None:
        """Encoded deltas after `version`, a bounded number; None: the follower must reload the image."""
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
        """Ring position of the first delta after `version`; the newest are asked for most."""
        at = len(self._ring)
        while at and self._ring[at - 1][0] > version:
            at -= 1
        return at

    def image_chunk(self, follower: Hashable) -> ImageChunk:
        """The next part of a consistent image for this follower; the first call fixes the version."""
        cursor = self._cursors.pop(follower, None)
        if cursor is None:
            tables = [(name, list(rows.items())) for name, rows in self.image.rows()]
            cursor = _Cursor(self.image.version, ((name, key, row) for name, rows in tables for key, row in rows))
        rows: list[tuple[str, msgspec.Raw, msgspec.Raw]] = []
        for name, key, record in cursor.rows:
            rows.append((name, msgspec.Raw(_encoder.encode(key)), msgspec.Raw(_encoder.encode(record))))
            if len(rows) == CHUNK_ROWS:
                self._cursors[follower] = cursor
                while len(self._cursors) > MAX_CURSORS:
                    del self._cursors[next(iter(self._cursors))]
                return ImageChunk(cursor.version, rows, False)
        return ImageChunk(cursor.version, rows, True)

    def forget(self, follower: Hashable) -> None:
        """The follower is gone."""
        self._cursors.pop(follower, None)
