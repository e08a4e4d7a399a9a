"""Splits a byte stream into frames with minimal copying.

A frame is an int32 size and that many bytes; the reader returns the bytes without the size, each frame in a separate
bytearray. Small frames are received in a buffer shared by all connections (one thread: a read fills it and is consumed
before the next one) and copied out of it. A large frame gets its own bytearray, and the rest of it is received directly
into place.

Bounds: a size over the limit raises before memory is allocated. `grant` decides how much of a large frame is allocated:
the whole, or a part that is replaced by a larger one when it is full, so that a peer who announces much and sends
little costs little. Without a grant the reader is `blocked` and must not be given more bytes.

Sans-I/O. Entry: `FrameReader`: `buffer()` to receive into, then `received(count)`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from tidelog.broker.kafka.errors import NotKafka, OversizedRequest

_SIZE = Struct(">i")
SIZE_BYTES = 4
SMALL_FRAME_BYTES = 16 << 10
"""Frames up to this size are assembled in the shared buffer: an extra copy is cheaper than an extra read."""
RECEIVE_BUFFER_BYTES = 128 << 10
"""Large enough to receive a burst of small frames in one read."""
_TLS_HANDSHAKE, _TLS_MAJOR = 0x16, 0x03
_HTTP_STARTS = frozenset((b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"CONN", b"DELE", b"PATC", b"TRAC", b"PRI "))


Grant = Callable[[int, int, int], int]
"""`(capacity, filled, size)` of a large frame → the permitted capacity of its buffer; unchanged: wait."""


def _none_granted(capacity: int, _filled: int, _size: int) -> int:
    return capacity


class FrameReader:
    """The incoming direction of one connection."""

    __slots__ = ("_carry", "_filled", "_frame", "_grant", "_max_bytes", "_shared", "_wanted")

    def __init__(self, shared: bytearray, max_bytes: int, grant: Grant) -> None:
        assert len(shared) >= SMALL_FRAME_BYTES * 2
        self._shared = memoryview(shared)
        self._max_bytes = max_bytes
        self._grant = grant
        self._carry: bytes | memoryview = b""
        self._frame: bytearray | None = None
        self._filled = 0
        self._wanted = 0

    @property
    def blocked(self) -> bool:
        """Whether a large frame waits for `grant`; call `unblock` to try again."""
        return self._wanted > 0 and self._filled >= self.reserved_bytes

    @property
    def incomplete(self) -> bool:
        """Whether part of a frame has been received."""
        return self._wanted > 0 or bool(self._carry)

    @property
    def reserved_bytes(self) -> int:
        """Bytes granted to the incomplete frame."""
        return len(self._frame) if self._frame is not None else 0

    @property
    def partial_bytes(self) -> int:
        """Bytes received of the incomplete frame."""
        return self._filled if self._wanted else len(self._carry)

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes. Valid until the next call of any method."""
        if self._frame is not None:
            return memoryview(self._frame)[self._filled :]
        carried = len(self._carry)
        if carried:
            self._shared[:carried] = self._carry
        return self._shared[carried:]

    def received(self, count: int) -> list[bytearray]:
        """Return the frames completed by `count` bytes written into `buffer()`.

        Raises `NotKafka` and `OversizedRequest`; the reader must not be used after that.
        """
        assert not self.blocked
        frame = self._frame
        if frame is not None:
            self._filled += count
            if self._filled < len(frame):
                return []
            if self._filled < self._wanted:
                self.unblock()
                return []
            self._frame = None
            self._wanted = 0
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
                raise self._refusal(size, bytes(shared[at : min(end, at + SIZE_BYTES * 2)]))
            stop = at + SIZE_BYTES + size
            if stop > end:
                if size > SMALL_FRAME_BYTES:
                    self._carry = shared[at + SIZE_BYTES : end]
                    self._filled = len(self._carry)
                    self._wanted = size
                    if not self.unblock():
                        self._carry = bytes(self._carry)  # the buffer is reused from here on
                    return frames
                break
            frames.append(bytearray(shared[at + SIZE_BYTES : stop]))
            at = stop
        self._carry = bytes(shared[at:end])
        return frames

    def _refusal(self, size: int, start: bytes) -> NotKafka | OversizedRequest:
        """The error for an impossible size; recognises the first bytes of other protocols."""
        if start[0] == _TLS_HANDSHAKE and start[1] == _TLS_MAJOR:
            return NotKafka(
                "looks like TLS", hint="this listener speaks Kafka without TLS: security.protocol=PLAINTEXT"
            )
        if start[:SIZE_BYTES] in _HTTP_STARTS:
            return NotKafka("looks like HTTP", hint="the admin HTTP listener has another port: `tidelog status`")
        if start.startswith(b"SSH-"):
            return NotKafka("looks like SSH")
        if size <= 0:
            return NotKafka(f"a frame of {size} bytes")
        return OversizedRequest(
            f"a request of {size} bytes is over the limit of {self._max_bytes}",
            hint="raise kafka.max_request_bytes for a Kafka client; other clients do not speak Kafka",
        )

    def close(self) -> None:
        """Release the received bytes and `grant`: no more bytes follow."""
        self._frame = None
        self._carry = b""
        self._filled = self._wanted = 0
        self._grant = _none_granted

    def unblock(self) -> bool:
        """Request room if the frame needs it; True if reading may continue."""
        if not self.blocked:
            return True
        capacity = self._grant(self.reserved_bytes, self._filled, self._wanted)
        if capacity <= self._filled:
            return False
        frame = bytearray(capacity)
        frame[: self._filled] = self._carry if self._frame is None else self._frame
        self._frame = frame
        self._carry = b""
        return True
