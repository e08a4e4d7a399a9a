"""Cuts a byte stream into frames, copying as little as it can.

A frame is an int32 size and that many bytes; the reader hands out the bytes without the size, each frame in a bytearray
of its own. Small frames arrive in a receive buffer that all connections share (one thread: a read fills it and is
consumed before the next one) and are cut out of it. For a large frame, exactly one bytearray is allocated, and the rest
of it is received straight into place.

Bounds: a size over the limit raises before memory is spent; a large frame is allocated only once `admit(size)` says
yes. Until then the reader is `blocked` and must not be given more bytes.

Sans-IO. Entry: `FrameReader`: `buffer()` to receive into, then `received(count)`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from broker.errors import MalformedRequest

_SIZE = Struct(">i")
SIZE_BYTES = 4
SMALL_FRAME_BYTES = 16 << 10
"""Frames up to this size are put together in the shared buffer: one extra copy is cheaper than an extra read."""
RECEIVE_BUFFER_BYTES = 128 << 10
"""Larger than a small frame by enough that a burst of small frames comes in one read."""


class FrameReader:
    """The incoming half of one connection."""

    __slots__ = ("_admit", "_carry", "_filled", "_frame", "_max_bytes", "_shared", "_wanted")

    def __init__(self, shared: bytearray, max_bytes: int, admit: Callable[[int], bool]) -> None:
        assert len(shared) >= SMALL_FRAME_BYTES * 2
        self._shared = memoryview(shared)
        self._max_bytes = max_bytes
        self._admit = admit
        self._carry = b""
        self._frame: bytearray | None = None
        self._filled = 0
        self._wanted = 0

    @property
    def blocked(self) -> bool:
        """A large frame waits for `admit`; call `unblock` when that may have changed."""
        return self._wanted > 0

    @property
    def incomplete(self) -> bool:
        """Part of a frame has been received."""
        return self._frame is not None or bool(self._carry)

    @property
    def reserved_bytes(self) -> int:
        """What `admit` was told of a frame that is still incomplete."""
        return len(self._frame) if self._frame is not None else 0

    def buffer(self) -> memoryview:
        """Where the next bytes go. Valid until the next call of any method."""
        if self._frame is not None:
            return memoryview(self._frame)[self._filled :]
        carried = len(self._carry)
        if carried:
            self._shared[:carried] = self._carry
        return self._shared[carried:]

    def received(self, count: int) -> list[bytearray]:
        """`count` bytes were written into `buffer()`: the frames they complete. Raises `MalformedRequest`."""
        assert not self.blocked
        if self._frame is not None:
            self._filled += count
            if self._filled < len(self._frame):
                return []
            frame, self._frame = self._frame, None
            return [frame]
        end = len(self._carry) + count
        self._carry = b""
        return self._cut(end)

    def _cut(self, end: int) -> list[bytearray]:
        shared = self._shared
        frames: list[bytearray] = []
        at = 0
        while end - at >= SIZE_BYTES:
            (size,) = _SIZE.unpack_from(shared, at)
            if not 0 < size <= self._max_bytes:
                raise MalformedRequest(f"a frame of {size} bytes is outside 1–{self._max_bytes}")
            stop = at + SIZE_BYTES + size
            if stop > end:
                if size > SMALL_FRAME_BYTES:
                    self._carry = bytes(shared[at + SIZE_BYTES : end])
                    self._wanted = size
                    self.unblock()
                    return frames
                break
            frames.append(bytearray(shared[at + SIZE_BYTES : stop]))
            at = stop
        self._carry = bytes(shared[at:end])
        return frames

    def unblock(self) -> bool:
        """Try to admit the large frame that waits; True if reading may go on."""
        if self._wanted:
            if not self._admit(self._wanted):
                return False
            frame = bytearray(self._wanted)
            self._filled = len(self._carry)
            frame[: self._filled] = self._carry
            self._frame = frame
            self._carry = b""
            self._wanted = 0
        return True
