"""Digests of partitions: what their records come to, by Python while they are sent or consumed, and by Spark's SQL.

Two partitions have the same digest if they have the same records at the same offsets. `pairs` knows no offsets: it is
for copies in another order.

Entry: `Digest`, `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Self
from zlib import crc32

Headers = Sequence[tuple[str, bytes | None]] | None
_MASK = (1 << 24) - 1
_WEIGHTS = 1_021
"""Sums stay below 2^63 up to 2^29 records: 24 bits of a checksum, times a weight of 10 bits that the offset gives."""
NUMBER_BYTES = 16
"""Each value begins with its offset, in hexadecimal."""


@dataclass
class Digest:
    """Of one partition, or of several together."""

    records: int = 0
    offsets: int = 0
    misplaced: int = 0
    """Values that name another offset."""
    size: int = 0
    """Bytes of keys and values."""
    null_keys: int = 0
    null_values: int = 0
    keys: int = 0
    values: int = 0
    headers: int = 0
    timestamps: int = 0
    pairs: int = 0

    def add(self, offset: int, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Add a record."""
        weight = offset % _WEIGHTS + 1
        key_sum, value_sum = crc32(key or b""), crc32(value or b"")
        self.records += 1
        self.offsets += offset
        self.size += len(key or b"") + len(value or b"")
        self.null_keys += key is None
        if value is None:
            self.null_values += 1
        elif value[:NUMBER_BYTES] != b"%016x" % offset:
            self.misplaced += 1
        self.keys += (key_sum & _MASK) * weight
        self.values += (value_sum & _MASK) * weight
        self.pairs += (key_sum ^ value_sum) & _MASK
        self.timestamps += timestamp_ms % 1_000_000_007 * weight
        for name, content in headers or ():
            self.headers += (crc32(name.encode() + (content or b"")) & _MASK) * weight

    @classmethod
    def sum(cls, parts: Iterable[Digest]) -> Self:
        """The digest of several partitions together."""
        columns = zip(*(astuple(each) for each in parts), strict=True)
        return cls(*(sum(column) for column in columns))

    def unlike(self, other: Digest, *, only: Sequence[str] = ()) -> list[str]:
        """The fields that differ, of those that are compared."""
        names = only or [each.name for each in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


_WEIGHT = f"(offset % {_WEIGHTS} + 1)"
_HEADERS = (
    "aggregate(headers, 0L, (sum, each) -> sum + "
    f"(crc32(concat(cast(each.key as binary), coalesce(each.value, x''))) & {_MASK}))"
)
COLUMNS = {
    "records": "count(*)",
    "offsets": "sum(offset)",
    "misplaced": (
        f"count_if(decode(substring(value, 1, {NUMBER_BYTES}), 'UTF-8')"
        f" <> lpad(lower(hex(offset)), {NUMBER_BYTES}, '0'))"
    ),
    "size": "sum(coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0))",
    "null_keys": "count_if(key is null)",
    "null_values": "count_if(value is null)",
    "keys": f"sum((crc32(coalesce(key, x'')) & {_MASK}) * {_WEIGHT})",
    "values": f"sum((crc32(coalesce(value, x'')) & {_MASK}) * {_WEIGHT})",
    "headers": f"sum(coalesce({_HEADERS}, 0L) * {_WEIGHT})",
    "timestamps": f"sum(unix_millis(timestamp) % 1000000007L * {_WEIGHT})",
    "pairs": f"sum((crc32(coalesce(key, x'')) ^ crc32(coalesce(value, x''))) & {_MASK})",
}
"""Aggregates in Spark's SQL over the columns of the data source, by the names of `Digest`'s fields."""
