"""A set of offsets of a log, as bits: in chunks, so that stretches without any take no memory.

Entry: `OffsetSet`.
"""

from __future__ import annotations

CHUNK_OFFSETS = 1 << 16
CHUNK_BYTES = CHUNK_OFFSETS // 8
_SHIFT = CHUNK_OFFSETS.bit_length() - 1


class OffsetSet:
    """Offsets (int64, ≥ 0)."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: dict[int, bytearray] = {}

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
