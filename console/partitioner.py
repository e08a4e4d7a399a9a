"""The partition that Java's clients choose for a key: murmur2. Sans-I/O.

Entry: `partition_of`.
"""

from __future__ import annotations

from typing import Final

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFF_FFFF


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a record with this key in a topic of so many partitions."""
    return (_murmur2(key) & 0x7FFF_FFFF) % partitions


def _murmur2(data: bytes) -> int:
    size = len(data)
    found = _SEED ^ size
    whole = size - size % 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        found = (found * _M & _MASK) ^ k
    if size % 4:
        found = (found ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    found = (found ^ found >> 13) * _M & _MASK
    return found ^ found >> 15
