"""Record batches to Arrow, without a Python object for each record.

Two kernels, compiled by Numba and run without the GIL, do the work: `_scan` finds where the fields of a batch's
records lie, `_gather` copies keys or values into one buffer of an Arrow array. A batch is decompressed as a whole
before. Inside they use addresses. An array that is handed to a function, or sliced, has its users counted, which took
more time than what was done with it: 84 ns a record instead of 16, and 50 a copy instead of 9.

Invariants: every length in the input is checked against the bytes that remain before it is used; records come out in
offset order; control batches have none; what lies outside of the wanted offsets is left out.

Source of the format: KIP-98, and docs/formats.md. Entry: `RecordDecoder`; `scan_batch` for one batch, `check_batch` for
all that its records may have wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numba.core import cgutils
from numba.extending import intrinsic

from pyspark_tidelog.columns import COLUMNS, HEADERS, LAST_MS, arrow_schema
from tidelog.batch.batch import DEFAULT_MAX_DECOMPRESSED_BYTES, HEADER_BYTES, BatchHeader, check_crc, iter_batches
from tidelog.batch.compression import decompress
from tidelog.batch.errors import CorruptRecord, RecordTooLarge, UnsupportedCompression
from tidelog.runtime.types import Buffer

ROWS = 100_000
"""Rows of one Arrow batch, at most: larger ones are not faster."""
BYTES = 16 << 20
"""Bytes of keys, values and headers after which an Arrow batch is given out.

glibc reuses blocks of up to 32 MiB (`keep_freed_memory`): room for such a batch, and what is added at a time.
"""
MAGIC = 2
MIN_RECORD_BYTES = 7
"""A record of one varint byte in each field."""
NULL = -1
"""The length of a key, value or header value that is null."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_TOO_SHORT, _TOO_LONG, _NO_END, _NEGATIVE = -1, -2, -3, -4
_PROBLEMS = {
    _TOO_SHORT: "a record is cut short",
    _TOO_LONG: "a varint is longer than 10 bytes",
    _NO_END: "bytes follow the last record",
    _NEGATIVE: "a record has a negative length or count",
}


def _compile_byte(_typing: Any, _address: Any) -> Any:
    """Return the byte at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(numba.uint8).as_pointer())
        return builder.zext(builder.load(pointer), context.get_value_type(signature.return_type))

    return numba.uint64(numba.int64), generate


def _compile_copy(_typing: Any, _target: Any, _source: Any, _length: Any) -> Any:
    """Copy bytes from one address to another one."""
    memcpy: Any = cgutils.raw_memcpy

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = context.get_value_type(numba.uint8).as_pointer()
        target, source, length = builder.inttoptr(args[0], kind), builder.inttoptr(args[1], kind), args[2]
        memcpy(builder, target, source, length, 1)
        return context.get_dummy_value()

    return numba.void(numba.int64, numba.int64, numba.int64), generate


_byte: Any = intrinsic(_compile_byte)
_copy: Any = intrinsic(_compile_copy)


@numba.njit(cache=True, nogil=True)
def _varint(data: Any, at: Any, end: Any) -> Any:
    """Return a zig-zag varint and the position behind it, which is negative for a problem. `data`: an address."""
    value = np.uint64(0)
    shift = np.uint64(0)
    while at < end:
        byte = _byte(data + at)
        at += 1
        value |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), at
        shift += np.uint64(7)
        if shift > np.uint64(63):
            return np.int64(0), np.int64(_TOO_LONG)
    return np.int64(0), np.int64(_TOO_SHORT)


@numba.njit(cache=True, nogil=True)
def _scan(data: Any, count: int, fields: Any) -> Any:
    """Find the fields of `count` records, one row of `fields` for each; return 0, or a problem.

    A row is: offset delta, timestamp delta, key position and length, value position and length, number of headers,
    position of the first one, and the end of the record.
    """
    size = len(data)
    start = np.int64(data.ctypes.data)
    at: Any = np.int64(0)
    for row in range(count):
        length, at = _varint(start, at, size)
        if at < 0:
            return at
        if length < 1:
            return _NEGATIVE
        if length > size - at:
            return _TOO_SHORT
        end = at + length
        at += 1  # attributes
        fields[row, 1], at = _varint(start, at, end)
        if at < 0:
            return at
        fields[row, 0], at = _varint(start, at, end)
        if at < 0:
            return at
        for column in (2, 4):
            length, at = _varint(start, at, end)
            if at < 0:
                return at
            if length > end - at:
                return _TOO_SHORT
            fields[row, column], fields[row, column + 1] = at, max(length, NULL)
            if length > 0:
                at += length
        headers, at = _varint(start, at, end)
        if at < 0:
            return at
        if headers < 0:
            return _NEGATIVE
        if headers > (end - at) // 2:
            return _TOO_SHORT
        fields[row, 6], fields[row, 7], fields[row, 8] = headers, at, end
        at = end
    return 0 if at == size else _NO_END


@numba.njit(cache=True, nogil=True)
def _scan_headers(data: Any, records: Any, fields: Any) -> Any:
    """Find the headers of records; a row is: key position and length, value position and length."""
    start = np.int64(data.ctypes.data)
    row = 0
    for record in range(len(records)):
        at, end = records[record, 7], records[record, 8]
        for _ in range(records[record, 6]):
            for column in (0, 2):
                length, at = _varint(start, at, end)
                if at < 0:
                    return at
                if column == 0 and length < 0:
                    return _NEGATIVE
                if length > end - at:
                    return _TOO_SHORT
                fields[row, column], fields[row, column + 1] = at, max(length, NULL)
                if length > 0:
                    at += length
            row += 1
        if at != end:
            return _NO_END
    return 0


@numba.njit(cache=True, nogil=True)
def _gather(data: Any, positions: Any, lengths: Any, out: Any, at: int, offsets: Any, row: int) -> Any:
    """Copy pieces of `data` to `out` from `at` on, and note where each ends; return where the last one does."""
    source, target = np.int64(data.ctypes.data), np.int64(out.ctypes.data)
    for number in range(len(positions)):
        length = lengths[number]
        if length > 0:
            _copy(target + at, source + positions[number], length)
            at += length
        offsets[row + number + 1] = at
    return at


def scan_batch(header: BatchHeader, batch: memoryview, place: str = "") -> tuple[_Bytes, _Ints]:
    """Decompress a batch, and find the fields of its records, as `_scan` tells them. `place` begins errors' messages.

    Raises `CorruptRecord`, `UnsupportedCompression`, `RecordTooLarge`.
    """
    where = f"{place}batch {header.base_offset}"
    try:
        raw = decompress(batch[HEADER_BYTES:], header.compression, DEFAULT_MAX_DECOMPRESSED_BYTES)
    except (CorruptRecord, RecordTooLarge, UnsupportedCompression) as error:
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    data = np.frombuffer(raw, np.uint8)
    if not 0 <= header.count <= len(data) // MIN_RECORD_BYTES:
        raise CorruptRecord(f"{where} has {header.count} records in {len(data)} bytes")
    fields = np.empty((header.count, 9), np.int64)
    _check(_scan(data, header.count, fields), where)
    return data, fields


def _headers_of(data: _Bytes, records: _Ints, where: str) -> _Ints:
    fields = np.empty((int(records[:, 6].sum()), 4), np.int64)
    _check(_scan_headers(data, records, fields), where)
    return fields


def _check(problem: int, where: str) -> None:
    if problem < 0:
        raise CorruptRecord(f"{where}: {_PROBLEMS[problem]}")


def check_batch(header: BatchHeader, batch: memoryview) -> None:
    """Check a batch as a whole: format, CRC-32C, and that it has the records that its header tells, in order.

    Raises `CorruptRecord`, `UnsupportedCompression`, and `RecordTooLarge` for more bytes of records than are read.
    """
    where = f"batch {header.base_offset}"
    if header.magic != MAGIC:
        raise CorruptRecord(f"{where} has format {header.magic}; {MAGIC} is the only one that is stored")
    if not check_crc(batch):
        raise CorruptRecord(f"{where} fails its CRC32C")
    data, fields = scan_batch(header, batch)
    _headers_of(data, fields, where)
    deltas = fields[:, 0]
    if len(deltas) and (deltas[0] < 0 or deltas[-1] > header.last_offset_delta):
        raise CorruptRecord(f"{where} has offset deltas {deltas[0]} to {deltas[-1]}, beyond {header.last_offset_delta}")
    if (deltas[1:] <= deltas[:-1]).any():
        raise CorruptRecord(f"{where} has records whose offsets do not ascend")


class _Column:
    """One growing binary array."""

    def __init__(self) -> None:
        self._begin(1024, 1 << 16)

    def _begin(self, rows: int, size: int) -> None:
        """Begin an array with room for so many rows and bytes."""
        self.data: _Bytes = np.empty(size, np.uint8)
        self.offsets = np.empty(rows + 1, np.int32)
        self.offsets[0] = 0
        self.valid = np.empty(rows, np.bool_)
        self.rows = 0
        self.size = 0

    def add(self, data: _Bytes, positions: _Ints, lengths: _Ints) -> None:
        rows, size = self.rows + len(positions), self.size + int(np.maximum(lengths, 0).sum())
        self.data = _with_room(self.data, self.size, size)
        self.offsets = _with_room(self.offsets, self.rows + 1, rows + 1)
        self.valid = _with_room(self.valid, self.rows, rows)
        self.size = _gather(data, positions, lengths, self.data, self.size, self.offsets, self.rows)
        self.valid[self.rows : rows] = lengths != NULL
        self.rows = rows

    def take(self, kind: pa.DataType) -> pa.Array:
        """Return the array, and begin a new one with room for about as much: a scan does not grow it again."""
        rows = self.rows
        nulls = rows - int(self.valid[:rows].sum())
        validity = pa.py_buffer(np.packbits(self.valid[:rows], bitorder="little")) if nulls else None
        buffers = [validity, pa.py_buffer(self.offsets[: rows + 1]), pa.py_buffer(self.data[: self.size])]
        found = pa.Array.from_buffers(kind, rows, buffers, nulls)
        self._begin(rows + rows // 8 + 1, self.size + self.size // 8 + 1)  # the buffers belong to the array now
        return found


def _text(column: _Column) -> pa.StringArray:
    """Take a column as text. What is no UTF-8 is replaced by U+FFFD, as Kafka's Java consumers do."""
    found = column.take(pa.binary())
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([each.decode(errors="replace") for each in found.to_pylist()], pa.string())


def _with_room(array: Any, used: int, needed: int) -> Any:
    if needed <= len(array):
        return array
    grown = np.empty(max(needed, 2 * len(array)), array.dtype)
    grown[:used] = array[:used]
    return grown


class RecordDecoder:
    """Collects `columns` of the records of one partition, and gives them out as Arrow batches."""

    def __init__(self, topic: str, partition: int, columns: Sequence[str] = COLUMNS) -> None:
        self._topic = topic
        self._partition = partition
        self._schema = arrow_schema(columns)
        self._keys = _Column() if "key" in columns else None
        self._values = _Column() if "value" in columns else None
        self._offsets: list[_Ints] = []
        self._timestamps: list[_Ints] = []
        self._types: list[tuple[int, int]] = []
        self._headers = (_Column(), _Column()) if HEADERS in columns else None
        self._header_counts: list[_Ints] = []
        self.rows = 0
        """Rows that were not given out yet."""

    @property
    def is_full(self) -> bool:
        """Whether `take` is due."""
        collected = (self._keys, self._values, *(self._headers or ()))
        return self.rows >= ROWS or sum(each.size for each in collected if each is not None) >= BYTES

    def add(self, batches: Buffer, start: int, end: int) -> int:
        """Add the records of consecutive batches whose offsets lie in `[start, end)`; return the offset after them.

        Raises `CorruptRecord`, `UnsupportedCompression`.
        """
        reached = start
        for header, batch in iter_batches(batches):
            if not check_crc(batch):
                raise CorruptRecord(f"{self._topic}-{self._partition}: batch {header.base_offset} fails its CRC32C")
            last = header.last_offset
            reached = max(reached, min(last + 1, end))
            if last < start or header.base_offset >= end or header.is_control or not header.count:
                continue
            self._add_batch(header, batch, start, end)
        return reached

    def _add_batch(self, header: Any, batch: memoryview, start: int, end: int) -> None:
        data, fields = scan_batch(header, batch, f"{self._topic}-{self._partition}: ")
        offsets = fields[:, 0] + header.base_offset
        if offsets[0] < start or offsets[-1] >= end:
            wanted = (offsets >= start) & (offsets < end)
            fields, offsets = fields[wanted], offsets[wanted]
        rows = len(fields)
        if not rows:
            return
        self._offsets.append(offsets)
        if header.is_log_append_time:
            self._timestamps.append(np.full(rows, header.max_timestamp, np.int64))
        else:
            self._timestamps.append(fields[:, 1] + header.base_timestamp)
        self._types.append((int(header.is_log_append_time), rows))
        if self._keys is not None:
            self._keys.add(data, fields[:, 2], fields[:, 3])
        if self._values is not None:
            self._values.add(data, fields[:, 4], fields[:, 5])
        if self._headers is not None:
            self._add_headers(data, fields, header.base_offset, self._headers)
        self.rows += rows

    def _add_headers(self, data: _Bytes, records: _Ints, base_offset: int, columns: tuple[_Column, _Column]) -> None:
        fields = _headers_of(data, records, f"{self._topic}-{self._partition}: batch {base_offset}")
        for column, at in zip(columns, (0, 2), strict=True):
            column.add(data, fields[:, at], fields[:, at + 1])
        self._header_counts.append(records[:, 6].copy())

    def full(self) -> Iterator[pa.RecordBatch]:
        """Give out the rows collected so far, if that is due."""
        if self.is_full:
            yield self.take()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Give out the rows that are left when all was added."""
        if self.rows:
            yield self.take()

    def take(self) -> pa.RecordBatch:
        """Return the rows collected so far, and begin anew."""
        columns = [self._take_column(field) for field in self._schema]
        self._offsets, self._timestamps, self._types, self._header_counts, self.rows = [], [], [], [], 0
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _take_column(self, field: pa.Field) -> pa.Array:
        if field.name == "key" and self._keys is not None:
            return self._keys.take(field.type)
        if field.name == "value" and self._values is not None:
            return self._values.take(field.type)
        if field.name == HEADERS and self._headers is not None:
            return self._take_headers(self._headers)
        if field.name == "topic":
            return pa.repeat(pa.scalar(self._topic, field.type), self.rows)
        if field.name == "partition":
            return pa.array(np.full(self.rows, self._partition, np.int32))
        if field.name == "offset":
            return pa.array(np.concatenate(self._offsets))
        if field.name == "timestamp":
            return pa.array(np.concatenate(self._timestamps).clip(-LAST_MS, LAST_MS) * 1_000).cast(field.type)
        assert field.name == "timestampType", field.name
        return pa.array(np.concatenate([np.full(count, kind, np.int32) for kind, count in self._types]))

    def _take_headers(self, columns: tuple[_Column, _Column]) -> pa.Array:
        """Return one list for each record: null without headers, as in Spark's Kafka source."""
        counts = np.concatenate(self._header_counts)
        ends = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=ends[1:])
        kind = self._schema.field("headers").type
        items = kind.value_type
        pairs = pa.StructArray.from_arrays(
            [_text(columns[0]), columns[1].take(pa.binary())], fields=[items.field(0), items.field(1)]
        )
        return pa.ListArray.from_arrays(pa.array(ends), pairs, type=kind, mask=pa.array(counts == 0))
