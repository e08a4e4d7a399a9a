"""The newest offset of each key in the part of a log that was not cleaned yet.

Keys are kept as digests of 16 bytes: of 2^40 keys two have the same one with a probability of 2^-49. The memory is
bounded (Kafka: `log.cleaner.dedupe.buffer.size`); what does not fit is left to the next round.

The table is open addressing over three arrays, 24 bytes a slot, as Kafka's OffsetMap. It is divided into `PARTS` by the
digests, and each part grows by half when three quarters of it are taken: so it takes 32 to 48 bytes a key, and while a
part grows, that part twice.

Entry: `KeyMap`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import compress
from struct import Struct

DIGEST_BYTES = 16
ENTRY_BYTES = 48
"""Memory of one key, at most: 24 bytes in a part that has just grown to 1.5 times its size."""
PARTS = 64
_LEAST_SLOTS = 12
_unpack = Struct("<QQ").unpack

Slots = tuple["array[int]", "array[int]", "array[int]"]
"""High and low halves of digests (uint64; 0 in the first: the slot is free), offsets (int64)."""


def digests_of(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the two halves of the 16 bytes that stand for each key; the first one is never 0."""
    found = []
    for key in keys:
        high, low = _unpack(blake2b(key, digest_size=DIGEST_BYTES).digest())
        found.append((high or 1, low))
    return found


class KeyMap:
    """Digest of a key → its last offset."""

    __slots__ = ("_capacity", "_count", "_parts", "_room")

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` (≥ `ENTRY_BYTES`) bounds the memory that it takes, but for some 20 KB."""
        self._capacity = max(1, limit_bytes // ENTRY_BYTES)
        self._count = 0
        self._parts: list[Slots] = [_empty(_LEAST_SLOTS) for _ in range(PARTS)]
        self._room = [_LEAST_SLOTS * 3 // 4] * PARTS
        """Keys that each part takes before it grows."""

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """Return how many keys fit."""
        return self._capacity

    @property
    def size_bytes(self) -> int:
        """Return the memory that its arrays take."""
        return sum(24 * len(highs) for highs, _, _ in self._parts)

    def add(self, keys: Sequence[bytes], offsets: Sequence[int]) -> bool:
        """Note the keys and offsets of a batch, in the log's order; return False, unchanged, if they do not all fit."""
        digests = digests_of(keys)
        if self._count + len(digests) > self._capacity:
            new = sum(self._offset(high, low) < 0 for high, low in set(digests))
            if self._count + new > self._capacity:
                return False
        parts = self._parts
        for (high, low), offset in zip(digests, offsets, strict=True):
            highs, lows, lasts = parts[high % PARTS]
            size = len(highs)
            slot = (high >> 6) % size
            while (found := highs[slot]) and (found != high or lows[slot] != low):
                slot = slot + 1 if slot + 1 < size else 0
            lasts[slot] = offset
            if not found:
                highs[slot], lows[slot] = high, low
                self._taken(high % PARTS)
        return True

    def _taken(self, number: int) -> None:
        self._count += 1
        self._room[number] -= 1
        if self._room[number] > 0:
            return
        before = self._parts[number]
        size = len(before[0]) * 3 // 2
        after = self._parts[number] = _empty(size)
        highs, lows, lasts = after
        taken = 0
        for high, low, offset in zip(*before, strict=True):
            if high:
                slot = (high >> 6) % size
                while highs[slot]:
                    slot = slot + 1 if slot + 1 < size else 0
                highs[slot], lows[slot], lasts[slot] = high, low, offset
                taken += 1
        self._room[number] = size * 3 // 4 - taken

    def _offset(self, high: int, low: int) -> int:
        highs, lows, lasts = self._parts[high % PARTS]
        size = len(highs)
        slot = (high >> 6) % size
        while (found := highs[slot]) and (found != high or lows[slot] != low):
            slot = slot + 1 if slot + 1 < size else 0
        return lasts[slot] if found else -1

    def last_offsets(self, keys: Sequence[bytes]) -> list[int]:
        """Return the offset noted last of each key; -1: none."""
        return [self._offset(high, low) for high, low in digests_of(keys)]

    def offsets(self) -> Iterator[int]:
        """Iterate over the offsets in it, in no order."""
        for highs, _, lasts in self._parts:
            yield from compress(lasts, highs)


def _empty(size: int) -> Slots:
    return array("Q", bytes(8 * size)), array("Q", bytes(8 * size)), array("q", bytes(8 * size))
