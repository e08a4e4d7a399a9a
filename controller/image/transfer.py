"""An image in chunks: what one controller sends and one follower assembles. No I/O.

A *transfer* is one image at one version, sent in chunks in a fixed order. A chunk names its transfer, its version and
the number of rows before it; the last one also has the total and a checksum of all rows. A request names the transfer
and the number of rows that the follower has. A follower that missed a chunk starts a new transfer: chunks of two
transfers are never put together.

At feature level 0 members before feature levels may ask, or answer, in format 1. It has no positions: the server goes
on where it was on this connection. A follower that loses such a transfer must therefore close the connection.

Invariant: `ImageReceiver.is_whole` is true only if every row of one transfer was taken, once and in order.

Entry: `ImageSender`, `ImageReceiver`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from crc32c import crc32c

from tidelog.controller.image.image import Image
from tidelog.controller.machine.state import decode_mutation
from tidelog.controller.machine.tables import RowChange
from tidelog.runtime.errors import CorruptData, InvalidInput
from tidelog.runtime.wire import MAX_FRAME_BYTES, FrameTooLarge

IMAGE_FORMAT = 2
"""Format of transfers."""
PLAIN_FORMAT = 1
"""That of feature level 0, which a request without parameters implies: no positions and no checksum."""
START = 0
"""Transfer number of a request that starts a new transfer."""
CHUNK_ROWS = 5_000
CHUNK_BYTES = 1 << 20
"""Bounds on the rows of one chunk (at least one row of any size): encoding one keeps the event loop busy for some
milliseconds."""
MAX_ROW_BYTES = MAX_FRAME_BYTES - 1024
"""A row and what surrounds it fit into one frame."""


class ImageParams(msgspec.Struct, frozen=True, array_like=True):
    """`image`: returns an `ImageChunk`."""

    format: int
    """`IMAGE_FORMAT` of the caller; another one is refused, but for `PLAIN_FORMAT` at feature level 0."""
    transfer: int
    """Number of the transfer, of its first chunk; `START` begins a new one, and ends the connection's previous one."""
    position: int
    """Number of rows that the caller has of this transfer."""


class ImageEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a transfer, in its last chunk."""

    rows: int
    """Number of rows in the image."""
    checksum: int
    """CRC32C of the encoded `ImageChunk.rows` of all chunks, in order (uint32)."""


class ImageChunk(msgspec.Struct, frozen=True, array_like=True):
    """The next rows of a transfer."""

    format: int
    transfer: int
    version: int
    """The image's version, the same in all chunks."""
    position: int
    """Number of rows in the chunks before this one."""
    rows: msgspec.Raw
    """`[[table, key, record], …]`."""
    end: ImageEnd | None
    """Only in the last chunk."""


class PlainChunk(msgspec.Struct, frozen=True, array_like=True):
    """The next rows of a transfer in `PLAIN_FORMAT`."""

    version: int
    rows: msgspec.Raw
    """`[[table, key, record], …]`."""
    is_last: bool


class _Leading(msgspec.Struct, frozen=True, array_like=True):
    """The first field of a request or chunk of any format but 1."""

    format: int


_encoder = msgspec.msgpack.Encoder()
_leading = msgspec.msgpack.Decoder(_Leading)
_asked = msgspec.msgpack.Decoder(_Leading | None)
_params = msgspec.msgpack.Decoder(ImageParams)
_chunks = msgspec.msgpack.Decoder(ImageChunk)
_plain_chunks = msgspec.msgpack.Decoder(PlainChunk)
_PLAIN_HEADER = b"\x93"
"""First byte of a `PlainChunk`: an array of three. An `ImageChunk` has six."""
_rows = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw, msgspec.Raw]])


def decode_params(data: msgspec.Raw, level: int) -> ImageParams:
    """Decode a request to a cluster at a feature level. Raises `InvalidInput` for another format."""
    leading = _asked.decode(data)
    named = leading.format if leading is not None else PLAIN_FORMAT
    if named == PLAIN_FORMAT and level == 0:
        return ImageParams(PLAIN_FORMAT, START, 0)
    if named != IMAGE_FORMAT:
        raise InvalidInput(
            f"the caller reads images of format {named}; this controller sends format {IMAGE_FORMAT}",
            hint="run the caller and the controllers in the same version",
        )
    return _params.decode(data)


def _as_plain(data: msgspec.Raw) -> PlainChunk | None:
    """Return a chunk of `PLAIN_FORMAT`; None for another format."""
    if bytes(memoryview(data)[:1]) != _PLAIN_HEADER:
        return None
    try:
        return _plain_chunks.decode(data)
    except msgspec.DecodeError:
        return None


class ImageSender:
    """One transfer to one follower."""

    def __init__(self, transfer: int, image: Image, *, chunk_rows: int, chunk_bytes: int) -> None:
        """Keep the rows that `image` has now; records are immutable."""
        assert transfer != START and chunk_rows > 0
        tables = [(name, list(rows.items())) for name, rows in image.rows()]
        self.transfer = transfer
        self.position = 0
        """Rows sent: the next chunk begins here."""
        self.used_s = 0.0
        """Time of the last request, for the owner of this transfer."""
        self._version = image.version
        self._total = sum(len(rows) for _, rows in tables)
        self._rows: Iterator[tuple[str, Any, Any]] = ((name, *row) for name, rows in tables for row in rows)
        self._chunk_rows = chunk_rows
        self._chunk_bytes = chunk_bytes
        self._checksum = 0
        self._next = self._encode_next()

    def _encode_next(self) -> bytes | None:
        row = next(self._rows, None)
        if row is None:
            return None
        encoded = _encoder.encode(row)
        if len(encoded) > MAX_ROW_BYTES:
            raise FrameTooLarge(f"row {row[1]!r} of table {row[0]} has {len(encoded)} bytes: no image can be sent")
        return encoded

    def next_chunk(self) -> ImageChunk:
        """Return the next chunk. After an error the transfer is unusable. Raises `FrameTooLarge`."""
        rows: list[msgspec.Raw] = []
        size = 0
        while self._next is not None and len(rows) < self._chunk_rows:
            if rows and size + len(self._next) > self._chunk_bytes:
                break
            rows.append(msgspec.Raw(self._next))
            size += len(self._next)
            self._next = self._encode_next()
        encoded = _encoder.encode(rows)
        self._checksum = crc32c(encoded, self._checksum)
        position, self.position = self.position, self.position + len(rows)
        assert (self._next is None) == (self.position == self._total), (self.position, self._total)
        end = ImageEnd(self._total, self._checksum) if self._next is None else None
        return ImageChunk(IMAGE_FORMAT, self.transfer, self._version, position, msgspec.Raw(encoded), end)


class ImageReceiver:
    """Assembles one image. Unusable after an error: start over with a new one."""

    def __init__(self) -> None:
        self.version = 0
        """The image's version, known after the first chunk."""
        self.rows: list[RowChange] = []
        """The rows so far; an image only if `is_whole`."""
        self.is_whole = False
        self.is_plain = False
        """Whether the controller sends `PLAIN_FORMAT`."""
        self._transfer = START
        self._checksum = 0

    def request(self) -> ImageParams:
        """Return the parameters of the next request."""
        assert not self.is_whole
        return ImageParams(IMAGE_FORMAT, self._transfer, len(self.rows))

    def take(self, data: msgspec.Raw) -> None:
        """Add the reply to `request()`. Raises `CorruptData` if it is not the next chunk of this transfer."""
        assert not self.is_whole
        plain = _as_plain(data)
        if plain is not None:
            self._take_plain(plain)
            return
        named = _leading.decode(data).format
        if named != IMAGE_FORMAT:
            raise CorruptData(
                f"the controller sends images of format {named}; this process reads format {IMAGE_FORMAT}",
                hint="run this process and the controllers in the same version",
            )
        chunk = _chunks.decode(data)
        if self._transfer == START:
            self._transfer, self.version = chunk.transfer, chunk.version
        at, expected = (chunk.transfer, chunk.version, chunk.position), (self._transfer, self.version, len(self.rows))
        if at != expected:
            raise CorruptData(f"a chunk of an image is of (transfer, version, position) {at}, not {expected}")
        rows = _rows.decode(chunk.rows)
        self.rows += [decode_mutation(*row) for row in rows]
        self._checksum = crc32c(bytes(chunk.rows), self._checksum)
        if chunk.end is not None:
            self._finish(chunk.end)
        elif not rows:
            raise CorruptData(f"a chunk of an image at version {self.version} has no rows, and is not the last one")

    def _take_plain(self, chunk: PlainChunk) -> None:
        if self._transfer != START or (self.is_plain and chunk.version != self.version):
            raise CorruptData(f"a chunk of an image is of version {chunk.version}, not of this transfer")
        self.is_plain, self.version = True, chunk.version
        self.rows += [decode_mutation(*row) for row in _rows.decode(chunk.rows)]
        self.is_whole = chunk.is_last

    def _finish(self, end: ImageEnd) -> None:
        found = ImageEnd(len(self.rows), self._checksum)
        if found != end:
            raise CorruptData(f"an image at version {self.version} has {found}; the controller sent {end}")
        self.is_whole = True
