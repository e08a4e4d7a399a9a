"""CRC32C of concatenated bytes from the CRC32Cs of the parts, without reading the bytes again.

A CRC is linear over GF(2), so crc(A ‖ B) = shift(crc(A), len(B)) ⊕ crc(B), where shift feeds the register with that
many zero bytes: a 32 × 32 bit matrix for each length (the method of zlib's `crc32_combine`). A length is split into its
hexadecimal digits. Each digit at each position has a matrix, stored as four tables of 256 words, one for each byte of
the register. The tables are created on first use: at most 120 of 4 KiB each, 0.03 ms apiece.

The result is exact for any bytes. It also preserves error detection: a checksum derived from an earlier one reveals a
bit that flipped since, whereas a checksum computed over the current bytes would cover the error.

Entry: `combine`; `batch_crc_onward` for a record batch. `COMBINE_FROM_BYTES` is the length from which it is faster.
"""

from __future__ import annotations

from array import array
from functools import cache

from crc32c import crc32c

from tidelog.runtime.types import Buffer

COMBINE_FROM_BYTES = 64 << 10
"""For shorter parts, reading the bytes again (from the processor's cache: 10 to 20 GB/s) is as fast as the tables."""
BATCH_CRC_AT = 17
"""Position of the CRC32C of a record batch (v2), a big-endian uint32 …"""
BATCH_CRC_FROM = 21
"""… which covers all bytes from this position (see `tidelog.batch.batch`)."""

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, reversed: bit 31 of the register is the coefficient of x⁰."""
_MAX_DIGITS = 8
"""Lengths are below 2³², as are those of WAL records and blocks."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32C of two concatenated parts, from theirs (uint32) and the length of the second (0 to 2³²−1)."""
    assert 0 <= second_bytes < 1 << 4 * _MAX_DIGITS
    place = 0
    while second_bytes:
        digit = second_bytes & 15
        if digit:
            t = _table(place, digit)
            first = t[first & 255] ^ t[256 | first >> 8 & 255] ^ t[512 | first >> 16 & 255] ^ t[768 | first >> 24]
        second_bytes >>= 4
        place += 1
    return first ^ second


def batch_crc_onward(crc: int, batch: Buffer, batch_crc: int | None = None) -> int:
    """Return the CRC32C of bytes with CRC32C `crc` followed by a valid record batch, from the batch's own CRC32C.

    `batch_crc` is the value that was checked on arrival; by default the value in the batch. If the batch has changed
    since the check, the result is not the CRC32C of these bytes, so a later check detects the change. (This does not
    cover the batch's first 17 bytes, which its own CRC32C does not cover, nor a batch below `COMBINE_FROM_BYTES`.)
    """
    length = len(batch)
    if length < COMBINE_FROM_BYTES:
        return crc32c(batch, crc)
    if batch_crc is None:
        batch_crc = int.from_bytes(batch[BATCH_CRC_AT:BATCH_CRC_FROM], "big")
    crc = crc32c(bytes(batch[:BATCH_CRC_AT]) + batch_crc.to_bytes(4, "big"), crc)
    return combine(crc, batch_crc, length - BATCH_CRC_FROM)


@cache  # at most `_MAX_DIGITS` × 15
def _table(place: int, digit: int) -> array[int]:
    """Return the matrix of `digit` × 16^`place` zero bytes, by byte of the register."""
    if digit > 1:
        step = _table(place, 1)
        return _by_byte([_apply(step, column) for column in _columns(_table(place, digit - 1))])
    if place == 0:
        return _by_byte([_one_byte(1 << bit) for bit in range(32)])
    last, one = _table(place - 1, 15), _table(place - 1, 1)
    return _by_byte([_apply(one, column) for column in _columns(last)])


def _one_byte(register: int) -> int:
    for _ in range(8):
        register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register


def _apply(table: array[int], register: int) -> int:
    return (
        table[register & 255]
        ^ table[256 | register >> 8 & 255]
        ^ table[512 | register >> 16 & 255]
        ^ table[768 | register >> 24]
    )


def _columns(table: array[int]) -> list[int]:
    """Return the image of each of the 32 bits."""
    return [table[byte << 8 | 1 << bit] for byte in range(4) for bit in range(8)]


def _by_byte(columns: list[int]) -> array[int]:
    table = array("I")
    for byte in range(4):
        words = [0]
        for column in columns[8 * byte : 8 * byte + 8]:
            words += [word ^ column for word in words]
        table.extend(words)
    return table
