"""The four codecs of Kafka record batches, with a bound on the decompressed size.

Invariant: `decompress` neither returns nor holds in memory much more than `max_bytes`, whatever the input declares, so
a small batch cannot exhaust a broker's memory (rule 12). Snappy is written as the xerial stream of Java clients, and
read in that form and raw (librdkafka, franz-go). LZ4 is the frame format with independent blocks (KIP-57).

Entry: `compress`, `decompress`; `decompress_start` for whoever needs the first records only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from struct import Struct
from struct import error as struct_error

import cramjam
import lz4.frame
import zstandard

from tidelog.batch.errors import CorruptRecord, RecordTooLarge, UnsupportedCompression


class Compression(IntEnum):
    """Bits 0–2 of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_CHUNK_BYTES = 1 << 20
_FIRST_FED_BYTES = 16 << 10
"""Input that zlib and lz4 get at the start of a member or frame, and then twice as much each time: at its end they copy
what they have and did not use. With all of it at once, many small ones would take the square of a batch's size. The
first frame of lz4, the only one as a rule, gets `_CHUNK_BYTES` at once: in pieces it takes 1.7 times as long."""
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
"""Magic, version 1, compatible with 1."""
_XERIAL_BLOCK_BYTES = 32 * 1024
_LENGTH = Struct(">i")
_MALFORMED = (zlib.error, zstandard.ZstdError, cramjam.DecompressionError, RuntimeError, struct_error)
"""What the libraries raise for data that do not parse: lz4.frame a RuntimeError for every malformed frame."""


LZ4_DEFAULT_LEVEL = 9
"""Kafka's default for lz4. It stands for the fast compressor there; all other levels are those of the slower one."""


def compress(data: bytes | bytearray, codec: int, level: int | None = None) -> bytes:
    """Compress `data` with `codec` (a `Compression`), at a level as in KIP-390; None: the codec's default in Kafka.

    gzip has levels 1 to 9, and -1 for the default; lz4 1 to 17; zstd -131,072 to 22. The other codecs have none.
    """
    if codec == Compression.NONE:
        return bytes(data)
    if codec == Compression.GZIP:
        packer = zlib.compressobj(-1 if level is None else level, wbits=31)
        return packer.compress(data) + packer.flush()
    if codec == Compression.SNAPPY:
        return _compress_xerial(data)
    if codec == Compression.LZ4:
        step = 0 if level is None or level == LZ4_DEFAULT_LEVEL else level
        size = lz4.frame.BLOCKSIZE_MAX64KB
        return bytes(lz4.frame.compress(data, compression_level=step, block_linked=False, block_size=size))
    if codec == Compression.ZSTD:
        return bytes(zstandard.ZstdCompressor(3 if level is None else level).compress(data))
    raise UnsupportedCompression(f"no compression codec has the number {codec}")


def decompress(data: memoryview, codec: int, max_bytes: int) -> bytes | memoryview:
    """Return the decompressed data, at most `max_bytes` (≥ 0) long; `data` itself for NONE.

    Raises `RecordTooLarge` above the bound, `CorruptRecord` for bytes that do not parse, `UnsupportedCompression`.
    """
    if codec == Compression.NONE:
        return data
    unpack = _DECOMPRESSORS.get(codec)
    if unpack is None:
        raise UnsupportedCompression(f"no compression codec has the number {codec}")
    try:
        return unpack(data, max_bytes)
    except _MALFORMED as error:
        raise CorruptRecord(f"{Compression(codec).name.lower()} data do not decompress: {error}") from error


def decompress_start(data: memoryview, codec: int, max_bytes: int) -> bytes | memoryview:
    """Return the first `max_bytes` (> 0) decompressed bytes, or all if there are fewer; `data` itself for NONE.

    The work is bounded by `max_bytes`, whatever follows. A raw snappy block, which unpacks as a whole, gives nothing if
    it is larger; neither does a zstd frame whose window is larger than 8 MiB. Raises as `decompress` does.
    """
    if codec == Compression.NONE:
        return data
    try:
        if codec == Compression.GZIP:
            return zlib.decompressobj(wbits=31).decompress(data, max_bytes)
        if codec == Compression.LZ4:
            return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=max_bytes))
        if codec == Compression.ZSTD:
            with zstandard.ZstdDecompressor(max_window_size=1 << 23).stream_reader(data) as reader:
                return reader.read(max_bytes)
        if codec == Compression.SNAPPY:
            return _snappy_start(data, max_bytes)
    except _MALFORMED as error:
        raise CorruptRecord(f"{Compression(codec).name.lower()} data do not decompress: {error}") from error
    raise UnsupportedCompression(f"no compression codec has the number {codec}")


def _snappy_start(data: memoryview, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = max_bytes
    for block in _snappy_blocks(data):
        size = cramjam.snappy.decompress_raw_len(block)
        if size > left:
            break
        parts.append(bytes(cramjam.snappy.decompress_raw(block)))
        left -= size
    return b"".join(parts)


def _too_large(max_bytes: int) -> RecordTooLarge:
    return RecordTooLarge(f"a batch decompresses to more than {max_bytes} bytes")


def _gunzip(data: memoryview, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    at = 0
    while at < len(data):  # a gzip stream may have several members
        unpacker, step = zlib.decompressobj(wbits=31), _FIRST_FED_BYTES
        while not unpacker.eof:
            fed = data[at : at + step]
            if not fed:
                raise CorruptRecord("gzip data end too early")
            at, step = at + len(fed), step * 2
            part = unpacker.decompress(fed, max_bytes - total + 1)
            total += len(part)
            if total > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
        at -= len(unpacker.unused_data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _compress_xerial(data: bytes | bytearray) -> bytes:
    parts = [_XERIAL_HEADER]
    view = memoryview(data)
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(bytes(view[start : start + _XERIAL_BLOCK_BYTES])))
        parts += (_LENGTH.pack(len(block)), block)
    return b"".join(parts)


def _snappy_blocks(data: memoryview) -> Iterator[bytes]:
    """Yield the compressed blocks of a xerial stream; the data themselves if they are not one."""
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        yield bytes(data)  # cramjam does not accept sliced views
        return
    if len(data) < len(_XERIAL_HEADER):
        raise CorruptRecord("snappy data end within their header")
    at = len(_XERIAL_HEADER)
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length < 0 or length > len(data) - at:
            raise CorruptRecord(f"a snappy block of {length} bytes does not fit its batch")
        yield bytes(data[at : at + length])
        at += length


def _unsnappy(data: memoryview, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = max_bytes
    for block in _snappy_blocks(data):
        if cramjam.snappy.decompress_raw_len(block) > left:
            raise _too_large(max_bytes)
        parts.append(bytes(cramjam.snappy.decompress_raw(block)))
        left -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unlz4(data: memoryview, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    at = 0
    while at < len(data):
        unpacker, step = lz4.frame.LZ4FrameDecompressor(), _FIRST_FED_BYTES if at else _CHUNK_BYTES
        while not unpacker.eof:
            fed: memoryview | bytes = b""  # while it has more to give out than was asked for
            if unpacker.needs_input:
                fed, step = data[at : at + step], min(step * 2, _CHUNK_BYTES)
            at += len(fed)
            part = unpacker.decompress(fed, max_length=min(_CHUNK_BYTES, max_bytes - total + 1))
            total += len(part)
            if total > max_bytes:
                raise _too_large(max_bytes)
            if not part and at == len(data) and unpacker.needs_input and not unpacker.eof:
                raise CorruptRecord("lz4 data end too early")
            parts.append(part)
        at -= len(unpacker.unused_data or b"")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unzstd(data: memoryview, max_bytes: int) -> bytes:
    size = zstandard.frame_content_size(data)
    if size > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    total = 0
    # The window is bounded too: a frame may declare one of gigabytes (the format's own limit is 2**31).
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    with unpacker.stream_reader(data, read_across_frames=True) as reader:
        while part := reader.read(_CHUNK_BYTES):
            total += len(part)
            if total > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    if size > 0 and total < size:
        raise CorruptRecord("zstd data end too early")
    return parts[0] if len(parts) == 1 else b"".join(parts)


_DECOMPRESSORS: dict[int, Callable[[memoryview, int], bytes]] = {
    Compression.GZIP: _gunzip,
    Compression.SNAPPY: _unsnappy,
    Compression.LZ4: _unlz4,
    Compression.ZSTD: _unzstd,
}
