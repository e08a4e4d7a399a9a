"""The newest offset of each key in the part of a log that was not cleaned yet.

Keys are kept as digests of 16 bytes: of 2^40 keys two have the same one with a probability of 2^-49. The memory is
bounded (Kafka: `log.cleaner.dedupe.buffer.size`); what does not fit is left to the next round.

Entry: `KeyMap`.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

DIGEST_BYTES = 16
ENTRY_BYTES = 256
"""Memory of one key: a dict's entry while it grows, the digest and the offset as Python objects."""


def digest_of(key: bytes) -> bytes:
    """Return the 16 bytes that stand for a key."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


class KeyMap:
    """Digest of a key → its last offset."""

    __slots__ = ("_capacity", "_offsets")

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` (≥ `ENTRY_BYTES`) bounds the memory that it takes."""
        self._capacity = max(1, limit_bytes // ENTRY_BYTES)
        self._offsets: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def capacity(self) -> int:
        """Return how many keys fit."""
        return self._capacity

    def add(self, records: Collection[tuple[bytes, int]]) -> bool:
        """Note the keys and offsets of a batch, in the log's order; return False, unchanged, if they do not all fit."""
        offsets = self._offsets
        found = {digest_of(key): offset for key, offset in records}
        if len(offsets) + len(found) > self._capacity:
            new = sum(digest not in offsets for digest in found)
            if len(offsets) + new > self._capacity:
                return False
        offsets.update(found)
        return True

    def is_superseded(self, key: bytes, offset: int) -> bool:
        """Return whether a record of this key with a larger offset was noted."""
        return self._offsets.get(digest_of(key), -1) > offset
