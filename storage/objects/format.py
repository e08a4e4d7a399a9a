"""The format of an object in the bucket: data blocks, an index, a footer.

    object = block* index footer            all integers big-endian, all offsets int64 (rule 9)

    block  = magic "TLBK" 4 | version 1 | flags 1 | zero 2 | stream id 8 | start offset 8 | end offset 8 |
             record count 4 | body length 4 | crc32c 4 | body             (header: 44 bytes)
    body   = record*          record = base offset 8 | count 4 | payload length 4 | payload
    index  = magic "TLIX" 4 | version 1 | zero 3 | entry count 4 | entry* | crc32c 4
    entry  = stream id 8 | start offset 8 | end offset 8 | block position 8 | block length 4 | record count 4 |
             block's crc32c 4                                              (44 bytes)
    footer = index position 8 | index length 4 | block count 4 | record count 8 | object id 8 | created ms 8 |
             cluster fingerprint 16 | kind 1 | version 1 | zero 2 | crc32c 4 | magic "TIDELOG1" 8   (72 bytes)

Invariants, each checked when bytes are read, before memory is allocated for the announced sizes (rule 10):
- every byte of an object is covered by exactly one checksum: a block's covers its header (without the checksum) and
  body, likewise those of index and footer; a flipped bit anywhere is detected;
- blocks tile the object from byte 0 to the index, which ends where the footer begins;
- blocks are sorted by stream id, then offset, and are contiguous within a stream; so are the records of a block;
- the footer names the object and its cluster: an object served under a wrong key is detected.

Flags are zero (no compression). Index and footer have version 1. A block has version 2 if it holds a *hole*, a record
with an empty payload (docs/design/0025), else version 1. A reader refuses an unknown version.

Docs: docs/formats/objects.md. Entry: `tidelog.storage.objects.writer.build_object`,
`tidelog.storage.objects.reader.load_index`.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator
from operator import sub
from typing import NamedTuple

from crc32c import crc32c

from tidelog.runtime.errors import CorruptData
from tidelog.runtime.types import Buffer
from tidelog.storage.commits import ObjectKind
from tidelog.storage.records import StreamEntry

VERSION = 1
HOLES_VERSION = 2
"""Version of a block that holds a hole: versions that know none would serve it as an empty record batch."""
BLOCK_VERSIONS = (VERSION, HOLES_VERSION)
BLOCK_MAGIC = 0x544C424B
INDEX_MAGIC = 0x544C4958
FOOTER_MAGIC = b"TIDELOG1"

BLOCK_HEADER = struct.Struct(">IBBHqqqIII")
RECORD_HEADER = struct.Struct(">qII")
INDEX_HEADER = struct.Struct(">IB3sI")
INDEX_ENTRY = struct.Struct(">qqqqIII")
_STREAM_AND_OFFSETS = struct.Struct(">qqq")
"""The first fields of an index entry."""
FOOTER = struct.Struct(">qIIqqq16sBBHI8s")
CRC = struct.Struct(">I")

BLOCK_CRC_AT = BLOCK_HEADER.size - CRC.size
FOOTER_CRC_AT = FOOTER.size - CRC.size - len(FOOTER_MAGIC)
INDEX_OVERHEAD = INDEX_HEADER.size + CRC.size
MAX_BODY_BYTES = (1 << 32) - 1
MAX_COUNT = (1 << 32) - 1
MANIFEST_KIND = 3
"""The kind in the footer of a manifest (`tidelog.storage.objects.manifest`), which no commit takes."""
DATA_KINDS = frozenset(int(kind) for kind in ObjectKind)
ALL_KINDS = DATA_KINDS | {MANIFEST_KIND}
QUARANTINE_OBJECT_ID = -1
"""The object id in the footer of quarantined data, which no metadata names."""


class DamagedObject(CorruptData):
    """Bytes of object `key` at byte `position` are not as expected."""

    def __init__(self, key: str, position: int, problem: str) -> None:
        super().__init__(f"object {key} at byte {position}: {problem}", hint="run `tidelog object verify` on it")
        self.key = key
        self.position = position


def corrupt(key: str, position: int, what: str, expected: object, actual: object) -> DamagedObject:
    """Return the error for unexpected bytes of object `key` at byte `position`."""
    return DamagedObject(key, position, f"{what}: expected {expected}, found {actual}")


def cluster_fingerprint(cluster_id: str) -> bytes:
    """Return the 16 bytes that identify a cluster in footers."""
    return hashlib.sha256(cluster_id.encode()).digest()[:16]


def _check_version(key: str, position: int, what: str, version: int, known: Collection[int] = (VERSION,)) -> None:
    if version not in known:
        error = corrupt(key, position, f"{what} format version", " or ".join(map(str, known)), version)
        error.hint = "written by a newer version of Tidelog? upgrade this one"
        raise error


class Footer(NamedTuple):
    """The last 72 bytes of an object."""

    index_position: int
    """Byte position of the index (int64); the data blocks lie before it."""
    index_length: int
    block_count: int
    record_count: int
    object_id: int
    created_ms: int
    cluster: bytes
    kind: int

    def encode(self) -> bytes:
        """Return the footer as 72 bytes."""
        fields = (*self[:7], self.kind, VERSION, 0)
        crc = crc32c(FOOTER.pack(*fields, 0, FOOTER_MAGIC)[:FOOTER_CRC_AT])
        return FOOTER.pack(*fields, crc, FOOTER_MAGIC)

    @classmethod
    def decode(cls, data: Buffer, *, object_size: int, key: str, kinds: Collection[int] = DATA_KINDS) -> Footer:
        """Check and read a footer: the last 72 of `object_size` bytes. Raises `CorruptData`, also for other `kinds`."""
        at = object_size - FOOTER.size
        if at < INDEX_OVERHEAD or len(data) != FOOTER.size:
            raise corrupt(key, 0, "object size", f"at least {FOOTER.size + INDEX_OVERHEAD} bytes", object_size)
        fields = FOOTER.unpack(data)
        kind, version, zero, crc, magic = fields[7:]
        if magic != FOOTER_MAGIC:
            raise corrupt(key, at, "footer magic", FOOTER_MAGIC.hex(), magic.hex())
        actual = crc32c(bytes(data[:FOOTER_CRC_AT]))
        if crc != actual:
            raise corrupt(key, at, "footer crc32c", f"{crc:08x}", f"{actual:08x}")
        _check_version(key, at, "footer", version)
        footer = cls._make(fields[:8])
        if zero != 0 or kind not in kinds:
            known = " or ".join(map(str, sorted(kinds)))
            raise corrupt(key, at, "footer kind and reserved bytes", f"{known}, and 0", f"{kind}, {zero}")
        if footer.index_position < 0 or footer.index_position + footer.index_length != at:
            raise corrupt(key, at, "end of index", at, footer.index_position + footer.index_length)
        if footer.index_length != INDEX_OVERHEAD + footer.block_count * INDEX_ENTRY.size:
            wanted = INDEX_OVERHEAD + footer.block_count * INDEX_ENTRY.size
            raise corrupt(key, at, f"index length for {footer.block_count} blocks", wanted, footer.index_length)
        return footer


class IndexEntry(NamedTuple):
    """The position and the contents of one block."""

    stream_id: int
    start_offset: int
    end_offset: int
    position: int
    """Byte position of the block in the object (int64)."""
    length: int
    """Bytes of the block, header included."""
    record_count: int
    crc: int

    @property
    def end_position(self) -> int:
        """Return the position of the byte after the block."""
        return self.position + self.length


def encode_index(entries: list[IndexEntry]) -> bytes:
    """Return the index of an object, checksum included."""
    head = INDEX_HEADER.pack(INDEX_MAGIC, VERSION, b"\0\0\0", len(entries))
    body = b"".join([head, *(INDEX_ENTRY.pack(*entry) for entry in entries)])
    return body + CRC.pack(crc32c(body))


class ObjectIndex:
    """A checked index. It stays in its packed form (44 bytes per block) and is searched there."""

    __slots__ = ("_raw", "footer", "key")

    def __init__(self, raw: bytes, footer: Footer, key: str) -> None:
        self._raw = raw
        self.footer = footer
        self.key = key

    @classmethod
    def decode(cls, data: Buffer, footer: Footer, *, key: str) -> ObjectIndex:
        """Check `data`, the index according to `footer`, and keep it. Raises `CorruptData`."""
        at = footer.index_position
        raw = bytes(data)
        if len(raw) != footer.index_length:
            raise corrupt(key, at, "index length", footer.index_length, len(raw))
        magic, version, zero, count = INDEX_HEADER.unpack_from(raw)
        if magic != INDEX_MAGIC:
            raise corrupt(key, at, "index magic", f"{INDEX_MAGIC:08x}", f"{magic:08x}")
        (crc,) = CRC.unpack_from(raw, len(raw) - CRC.size)
        actual = crc32c(memoryview(raw)[: -CRC.size])
        if crc != actual:
            raise corrupt(key, at, "index crc32c", f"{crc:08x}", f"{actual:08x}")
        _check_version(key, at, "index", version)
        if count != footer.block_count or zero != b"\0\0\0":
            raise corrupt(key, at, "index entry count", footer.block_count, count)
        index = cls(raw, footer, key)
        index._check_order()
        return index

    def _check_order(self) -> None:
        """Check that blocks tile the object, are sorted, and are contiguous within a stream."""
        position, records = 0, 0
        stream_id, end = -(1 << 63), 0
        for entry in self:
            if entry.position != position or entry.length < BLOCK_HEADER.size + RECORD_HEADER.size:
                raise corrupt(self.key, position, "block position in index", position, entry.position)
            if not 0 <= entry.start_offset < entry.end_offset or entry.record_count < 1:
                offsets = f"{entry.start_offset}..{entry.end_offset}"
                raise corrupt(self.key, position, "offsets of block", "start < end", offsets)
            if entry.stream_id < stream_id:
                raise corrupt(self.key, position, "order of streams", f"> {stream_id}", entry.stream_id)
            if entry.stream_id == stream_id and entry.start_offset != end:
                raise corrupt(self.key, position, f"start offset in stream {stream_id}", end, entry.start_offset)
            stream_id, end = entry.stream_id, entry.end_offset
            position = entry.end_position
            records += entry.record_count
        if position != self.footer.index_position or records != self.footer.record_count:
            wanted = (self.footer.index_position, self.footer.record_count)
            raise corrupt(self.key, position, "end of blocks and record count", wanted, (position, records))

    def __len__(self) -> int:
        return self.footer.block_count

    def __getitem__(self, number: int) -> IndexEntry:
        """Return the entry of block `number` (0 ≤ number < len)."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return IndexEntry._make(INDEX_ENTRY.unpack_from(self._raw, INDEX_HEADER.size + number * INDEX_ENTRY.size))

    def __iter__(self) -> Iterator[IndexEntry]:
        return self.entries_from(0)

    def entries_from(self, number: int) -> Iterator[IndexEntry]:
        """Yield the entries from block `number` (0 ≤ number ≤ len) on."""
        entries = memoryview(self._raw)[INDEX_HEADER.size + number * INDEX_ENTRY.size : -CRC.size]
        return map(IndexEntry._make, INDEX_ENTRY.iter_unpack(entries))

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return stream id, start and end offset of each stream's blocks, which are contiguous, in order."""
        found: list[tuple[int, int, int]] = []
        for entry in self:
            if found and found[-1][0] == entry.stream_id:
                found[-1] = (entry.stream_id, found[-1][1], entry.end_offset)
            else:
                found.append((entry.stream_id, entry.start_offset, entry.end_offset))
        return found

    def find(self, stream_id: int, offset: int) -> int:
        """Return the number of the stream's first block ending after `offset`, else of a later stream's, or `len`."""
        raw, unpack, at, step = self._raw, _STREAM_AND_OFFSETS.unpack_from, INDEX_HEADER.size, INDEX_ENTRY.size
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            stream, _, end_offset = unpack(raw, at + middle * step)
            if stream < stream_id or (stream == stream_id and end_offset <= offset):
                low = middle + 1
            else:
                high = middle
        return low

    @property
    def memory_bytes(self) -> int:
        """Return the memory it occupies, Python's overhead included."""
        return len(self._raw) + 512


class Block:
    """A checked data block: its bytes, and the positions of its records."""

    __slots__ = ("_bases", "_data", "_ends", "end_offset", "start_offset", "stream_id")

    def __init__(self, stream_id: int, start_offset: int, end_offset: int, data: bytes | memoryview) -> None:
        self.stream_id = stream_id
        self.start_offset = start_offset
        self.end_offset = end_offset
        self._data = data
        self._bases = array("q")
        self._ends = array("Q")

    @classmethod
    def decode(cls, data: bytes | memoryview, entry: IndexEntry, *, key: str) -> Block:
        """Check a block against its checksum and its index entry; it keeps `data`. Raises `CorruptData`."""
        at = entry.position
        if len(data) != entry.length:
            raise corrupt(key, at, "block length", entry.length, len(data))
        magic, version, flags, zero, stream_id, start, end, count, length, crc = BLOCK_HEADER.unpack_from(data)
        if magic != BLOCK_MAGIC:
            raise corrupt(key, at, "block magic", f"{BLOCK_MAGIC:08x}", f"{magic:08x}")
        view = memoryview(data)
        # The GIL is kept: at 20 GB/s a block takes less time than reacquiring the GIL may (the switch interval, 5 ms).
        actual = crc32c(view[BLOCK_HEADER.size :], crc32c(view[:BLOCK_CRC_AT]), gil_release_mode=0)
        if crc != actual or crc != entry.crc:
            raise corrupt(key, at, "block crc32c", f"{entry.crc:08x}", f"{actual:08x} (header says {crc:08x})")
        _check_version(key, at, "block", version, BLOCK_VERSIONS)
        if flags != 0 or zero != 0 or length != len(data) - BLOCK_HEADER.size:
            raise corrupt(key, at, "flags, reserved bytes, body length", (0, 0, len(data) - BLOCK_HEADER.size), length)
        if (stream_id, start, end, count) != (*entry[:3], entry.record_count):
            raise corrupt(key, at, "block header", (*entry[:3], entry.record_count), (stream_id, start, end, count))
        block = cls(stream_id, start, end, data)
        block._scan(count, key, at)
        return block

    def _scan(self, count: int, key: str, block_at: int) -> None:
        """Store the positions of the records; they must be contiguous in offsets and fill the body."""
        data, size = self._data, len(self._data)
        position, offset = BLOCK_HEADER.size, self.start_offset
        bases, ends, unpack = self._bases, self._ends, RECORD_HEADER.unpack_from
        for _ in range(count):
            if position + RECORD_HEADER.size > size:
                raise corrupt(key, block_at + position, "record header", "inside the block", "past its end")
            base, covered, length = unpack(data, position)
            position += RECORD_HEADER.size + length
            if base != offset or covered < 1 or position > size:
                raise corrupt(key, block_at + position - length, "record", f"base {offset}", f"{base}+{covered}")
            offset += covered
            bases.append(base)
            ends.append(position)
        if position != size or offset != self.end_offset:
            raise corrupt(key, block_at, "end of records", (size, self.end_offset), (position, offset))

    def __len__(self) -> int:
        return len(self._bases)

    def find(self, offset: int) -> int:
        """Return the number of the record that contains `offset`, which lies in the block."""
        assert self.start_offset <= offset < self.end_offset
        return bisect_right(self._bases, offset) - 1

    def __getitem__(self, number: int) -> StreamEntry:
        """Return record `number` (0 ≤ number < len); its payload is a view on the block."""
        bases, ends = self._bases, self._ends
        base, end = bases[number], ends[number]
        start = (ends[number - 1] if number else BLOCK_HEADER.size) + RECORD_HEADER.size
        next_base = bases[number + 1] if number + 1 < len(bases) else self.end_offset
        return StreamEntry(base, next_base - base, memoryview(self._data)[start:end])

    def __iter__(self) -> Iterator[StreamEntry]:
        return map(self.__getitem__, range(len(self._bases)))

    def take(self, first: int, end_offset: int, max_bytes: int) -> tuple[list[StreamEntry], int]:
        """Return records from `first` that begin before `end_offset`, up to `max_bytes`, and their size in bytes."""
        bases, ends, count, skip = self._bases, self._ends, len(self._bases), RECORD_HEADER.size
        start = ends[first - 1] if first else BLOCK_HEADER.size
        last = first
        if end_offset >= self.end_offset and ends[-1] - start - (count - first) * skip <= max_bytes:
            last = count
        while last < count and bases[last] < end_offset:
            if ends[last] - start - (last + 1 - first) * skip > max_bytes:
                break
            last += 1
        if last == first:
            return [], 0
        view = memoryview(self._data)
        offsets = [*bases[first:last], bases[last] if last < count else self.end_offset]
        stops = ends[first:last].tolist()
        payloads = [view[begin + skip : end] for begin, end in zip([start, *stops], stops, strict=False)]
        counts = map(sub, offsets[1:], offsets)
        taken = list(map(StreamEntry._make, zip(offsets, counts, payloads, strict=False)))
        return taken, stops[-1] - start - (last - first) * skip

    @property
    def overhead_bytes(self) -> int:
        """Return the memory it occupies in addition to its bytes."""
        return 16 * len(self._bases) + 640

    @property
    def memory_bytes(self) -> int:
        """Return the memory it occupies, Python's overhead included."""
        return len(self._data) + self.overhead_bytes
