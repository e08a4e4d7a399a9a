"""CRC32C of bytes laid end to end, from the CRC32Cs of the parts: what was checked once need not be read again.

A CRC is linear over GF(2), so crc(A ‖ B) = shift(crc(A), len(B)) ⊕ crc(B), where shift runs the register over so many
zero bytes: a 32 × 32 bit matrix for each length (the method of zlib's `crc32_combine`). A length is taken apart into
its hexadecimal digits, and each digit at each place has a matrix, kept as four tables of 256 words, one for each byte
of the register. They are made when they are first needed: at most 120 of 4 KiB each, 0.03 ms apiece.

This is exact for any bytes. What it buys besides time: a checksum that follows from an earlier one still tells of a bit
that flipped in between, where a checksum over the bytes as they are by then would vouch for it.

Entry: `combine`; `batch_crc_onward` for a record batch. `COMBINE_FROM_BYTES` says from which length it is the quicker.
"""

from __future__ import annotations

from array import array
from functools import cache

from crc32c import crc32c

from storage.object_store import Buffer

COMBINE_FROM_BYTES = 64 << 10
"""Below it, to read the bytes again (from the processor's cache: 10 to 20 GB/s) takes no longer than the tables."""
BATCH_CRC_AT = 17
"""Where a record batch (v2) has its CRC32C, a big-endian uint32 …"""
BATCH_CRC_FROM = 21
"""… which covers everything from here on (see `storage.record_batch`)."""

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, reversed: bit 31 of the register is the coefficient of x⁰."""
_MAX_DIGITS = 8
"""Lengths are below 2³²: so are those of WAL records and blocks."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two parts laid end to end, from theirs (uint32) and the length of the second (0 to 2³²−1)."""
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
    """The CRC32C of what has `crc` followed by a sound record batch, from the batch's own CRC32C.

    `batch_crc` is what it was checked against on arrival; without it, what stands in the batch now. If the batch is not
    what was checked any more, the result is not the CRC32C of these bytes, so whoever checks them will find that. (Not
    for the batch's first 17 bytes, which its own CRC32C does not cover, nor for a batch below `COMBINE_FROM_BYTES`.)
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
    """The matrix of `digit` × 16^`place` zero bytes, by byte of the register."""
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
    """What becomes of each of the 32 bits."""
    return [table[byte << 8 | 1 << bit] for byte in range(4) for bit in range(8)]


def _by_byte(columns: list[int]) -> array[int]:
    table = array("I")
    for byte in range(4):
        words = [0]
        for column in columns[8 * byte : 8 * byte + 8]:
            words += [word ^ column for word in words]
        table.extend(words)
    return table
