"""Flips bits in files, at random places that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flipped(data: bytes | memoryview, bit: int) -> bytes:
    """`data` with bit number `bit` turned over."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def places(seed: int, count: int, start: int, end: int) -> Iterator[int]:
    """`count` bit numbers in bytes `[start, end)`: the first and the last bit, and random ones between."""
    rng = random.Random(seed)
    yield start * 8
    yield end * 8 - 1
    for _ in range(count - 2):
        yield rng.randrange(start * 8, end * 8)


@contextmanager
def bit_flip(file: Path, bit: int) -> Iterator[bytes]:
    """A bit of a file turned over while the block runs, in which nobody else may change the file."""
    sound = file.read_bytes()
    damaged = flipped(sound, bit)
    file.write_bytes(damaged)
    try:
        yield damaged
        assert file.read_bytes() == damaged, f"{file} was changed"
    finally:
        file.write_bytes(sound)
