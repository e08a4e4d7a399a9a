"""The framing of Tidelog's own RPC: length-prefixed, versioned, CRC32C-checked frames that carry msgpack.

One frame, big-endian, is a header of 12 bytes and a payload:

| bytes | field |
|---|---|
| 2 | magic, 0x544C ("TL") |
| 1 | version of the framing, 1 |
| 1 | kind (uint8), the protocol's own |
| 4 | payload length in bytes (uint32) |
| 4 | CRC32C of the first 8 header bytes and the payload |

Invariants: the length is compared with the limit before any byte of the payload is buffered, so a peer can make us
buffer at most the limit and one read; a frame with a wrong magic, version or checksum ends the stream (`CorruptData`),
because the following bytes cannot be trusted.

The decoder is sans-I/O: bytes in, frames out. Entry: `FrameDecoder`, `encode_frame`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from tidelog.runtime.errors import CorruptData, InvalidInput
from tidelog.runtime.types import Buffer

MAGIC: Final = 0x544C
TLS_HANDSHAKE: Final = 0x16
"""First byte of a connection that begins with TLS (RFC 8446, section 5.1)."""
VERSION: Final = 1
MAX_FRAME_BYTES: Final = 32 << 20
"""Default bound on a payload. The largest message is one delta of a 10,000-partition topic (about 3 MB)."""

_PREFIX = struct.Struct(">HBBI")
_HEADER = struct.Struct(">HBBII")
_CRC = struct.Struct(">I")
HEADER_BYTES: Final = _PREFIX.size + _CRC.size


class FrameTooLarge(InvalidInput):
    """A payload exceeds the limit of the connection. Kafka: MESSAGE_TOO_LARGE (10)."""

    kafka_code = 10


class Frame(NamedTuple):
    """One received frame."""

    kind: int
    payload: bytes


def encode_frame(kind: int, payload: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Encode one frame. `kind` is a uint8. Raises `FrameTooLarge`."""
    assert 0 <= kind <= 0xFF, kind
    if len(payload) > max_bytes:
        raise FrameTooLarge(f"a message of {len(payload)} bytes exceeds the limit of {max_bytes} bytes")
    prefix = _PREFIX.pack(MAGIC, VERSION, kind, len(payload))
    return b"".join((prefix, _CRC.pack(crc32c(payload, crc32c(prefix))), payload))


class FrameDecoder:
    """Splits a byte stream into frames. One for each connection; unusable after an error."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        assert 0 < max_bytes <= 0xFFFF_FFFF
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of an unfinished frame: at most header, limit and one read."""
        return len(self._buffer)

    def feed(self, data: Buffer) -> list[Frame]:
        """Add received bytes and return the completed frames. Raises `CorruptData`, `FrameTooLarge`."""
        if not self._buffer and (frame := self._whole(data)) is not None:
            return [frame]
        self._buffer += data
        frames: list[Frame] = []
        position = 0
        with memoryview(self._buffer) as view:
            while len(view) - position >= HEADER_BYTES:
                kind, length, crc = self._header(view, position)
                end = position + HEADER_BYTES + length
                if end > len(view):
                    break
                with view[position + HEADER_BYTES : end] as payload:
                    frames.append(_check(kind, bytes(payload), view[position : position + _PREFIX.size], crc))
                position = end
        del self._buffer[:position]
        return frames

    def _whole(self, data: Buffer) -> Frame | None:
        """Return the frame if `data` is exactly one, as it mostly is: then nothing needs to be kept."""
        size = len(data)
        if size < HEADER_BYTES:
            return None
        kind, length, crc = self._header(data, 0)
        if size != HEADER_BYTES + length:
            return None
        return _check(kind, bytes(data[HEADER_BYTES:]), data[: _PREFIX.size], crc)

    def _header(self, view: Buffer, position: int) -> tuple[int, int, int]:
        magic, version, kind, length, crc = _HEADER.unpack_from(view, position)
        if magic >> 8 == TLS_HANDSHAKE:
            raise CorruptData("the peer begins with TLS, and this listener has none", hint="set TLS on all or on none")
        if magic != MAGIC:
            raise CorruptData(
                f"frame magic is {magic:#06x}, not {MAGIC:#06x}", hint="the peer does not use Tidelog's RPC"
            )
        if version != VERSION:
            raise CorruptData(f"frame version is {version}; this process supports {VERSION}")
        if length > self._max_bytes:
            raise FrameTooLarge(f"the peer announces {length} bytes; the limit is {self._max_bytes} bytes")
        return kind, length, crc


def _check(kind: int, payload: bytes, prefix: Buffer, crc: int) -> Frame:
    actual = crc32c(payload, crc32c(bytes(prefix)))
    if actual != crc:
        raise CorruptData(f"frame checksum is {actual:#010x}, the header has {crc:#010x}")
    return Frame(kind, payload)
