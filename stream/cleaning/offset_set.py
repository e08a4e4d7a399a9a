"""A set of offsets of a log, as bits: in chunks, so that stretches without any take no memory.

Entry: `OffsetSet`; `Remains` for what it says of a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

CHUNK_OFFSETS = 1 << 16
CHUNK_BYTES = CHUNK_OFFSETS // 8
_SHIFT = CHUNK_OFFSETS.bit_length() - 1


class OffsetSet:
    """Offsets (int64, ≥ 0)."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Mapping[int, bytes] | None = None) -> None:
        """Empty, or what another one's `chunks` are."""
        self._chunks = {number: bytearray(bits) for number, bits in (chunks or {}).items()}

    def chunks(self) -> Mapping[int, bytearray]:
        """Return its parts that are not empty, by their numbers."""
        return self._chunks

    def add(self, offset: int) -> None:
        """Put an offset in."""
        chunk = self._chunks.get(offset >> _SHIFT)
        if chunk is None:
            chunk = self._chunks[offset >> _SHIFT] = bytearray(CHUNK_BYTES)
        chunk[offset >> 3 & CHUNK_BYTES - 1] |= 1 << (offset & 7)

    def any(self, start: int, end: int) -> bool:
        """Return whether it has an offset of `[start, end)`."""
        numbers: range | list[int] = range(start >> _SHIFT, ((end - 1) >> _SHIFT) + 1)
        if len(numbers) > len(self._chunks):
            numbers = [number for number in self._chunks if number in numbers]
        return any(self._bits(number, start, end) for number in numbers)

    def flags(self, start: int, end: int) -> str:
        """Return a character for each offset of `[start, end)`, at least one: "1" if it has it, else "0"."""
        bits = 0
        for number in range(start >> _SHIFT, ((end - 1) >> _SHIFT) + 1):
            bits |= self._bits(number, start, end) << max(0, (number << _SHIFT) - start)
        return f"{bits:0{end - start}b}"[::-1]

    def _bits(self, number: int, start: int, end: int) -> int:
        """Return the bits of what a chunk has of `[start, end)`; the lowest one is the first of these offsets."""
        chunk = self._chunks.get(number)
        if chunk is None:
            return 0
        low = max(0, start - (number << _SHIFT))
        high = min(CHUNK_OFFSETS, end - (number << _SHIFT))
        bits = int.from_bytes(chunk[low >> 3 : (high + 7) >> 3], "little") >> (low & 7)
        return bits & (1 << (high - low)) - 1


class Remains(NamedTuple):
    """What a round leaves of the dirty part, as far as it is known when the map is sealed."""

    first_dirty: int
    end: int
    left: OffsetSet
    """The offsets of its keys' last records, and of batches to look at whatever is left of them."""

    def is_gone(self, start: int, end: int) -> bool:
        """Return whether a round leaves only holes of offsets `[start, end)`, whole batches.

        Callers may then pass a hole in their place to `Cleaning.clean`, without having read them.
        """
        return self.first_dirty <= start and end < self.end and not self.left.any(start, end)
