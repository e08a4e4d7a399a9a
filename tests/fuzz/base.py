"""What a fuzz target is, and pieces that several share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol

MAX_INPUT_BYTES = 4096
MOST_MUTATIONS = 5
"""Of a fixed input, one upon another; libFuzzer's own `mutate_depth`."""
Mutate = Callable[[bytes, int], bytes]
"""libFuzzer's own mutation of some bytes, to at most that many."""


class Target(Protocol):
    """One input format and what must hold for every input."""

    def seeds(self) -> list[bytes]:
        """Valid inputs to begin with."""
        ...

    def mutate(self, data: bytes, limit: int, rng: random.Random, mutate: Mutate) -> bytes:
        """A neighbour of `data` that gets past the outer checks more often than blind changes would."""
        ...

    def one(self, data: bytes) -> None:
        """Run one input. Raises whatever must not happen."""
        ...

    def close(self) -> None:
        """Let go of what the target holds; the last checks are made here."""
        ...


def flip(data: bytes, rng: random.Random, most: int = 4) -> bytes:
    """`data` with a few bits flipped, bytes overwritten, or a piece cut out or doubled."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        if not out:
            return bytes(out)
        at = rng.randrange(len(out))
        kind = rng.randrange(6)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
        elif kind == 2:
            size = rng.choice((2, 4, 8))
            out[at : at + size] = rng.choice((b"\xff", b"\x7f", b"\x80", b"\x00"))[:1] + bytes(size - 1)
        elif kind == 3:
            del out[at : at + rng.randint(1, 8)]
        elif kind == 4:
            out[at:at] = out[at : at + rng.randint(1, 16)]
        else:
            del out[at:]
    return bytes(out)


def fixed_inputs(target: Target, seed: int, runs: int) -> Iterator[bytes]:
    """The samples, then mutations of them: the same for a seed, whatever the code under test does with them."""
    rng = random.Random(seed)
    samples = target.seeds()
    yield from samples[:runs]
    for _ in range(len(samples), runs):
        data = rng.choice(samples)
        for _ in range(rng.randint(1, MOST_MUTATIONS)):
            data = target.mutate(data, MAX_INPUT_BYTES, rng, lambda data, limit: flip(data, rng)[:limit])
        yield data
