"""The faults that a test asks for, in memory that its brokers see, whichever process they run in.

One writer, the process of the test, and any number of readers. A fault counts from the moment at which the call that
asks for it returns: nobody has to be told, and a broker that is paused, or starts again later, finds it.

Invariants: a reader sees a rule whole, or the one before it; each broker counts in a field of its own.

Entry: `FaultBoard`, `BucketRule`.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
import zlib
from struct import Struct
from typing import NamedTuple

OPERATIONS = ("put", "get", "head", "list", "delete")
NODES = 10
"""Brokers have the ids 1 to 9."""

_RULE = Struct("=IIdd")
_SUM = Struct("=I")
_COUNTERS_AT = 64
"""The rule and its checksum are before it; then the clock, and what each broker has counted."""
_CLOCK = 0
_STRUCK = 1
_BYTES = _COUNTERS_AT + 8 * (_STRUCK + NODES)


class BucketRule(NamedTuple):
    """One fault of the bucket."""

    status: int
    """The HTTP status of the answers; 0: they are right."""
    delay_s: float
    until: float
    """By the monotonic clock, which all processes of a machine share."""
    operations: frozenset[str]

    def strikes(self, operation: str) -> bool:
        """Return whether a request of this kind fails now."""
        return operation in self.operations and time.monotonic() < self.until


NO_RULE = BucketRule(0, 0.0, 0.0, frozenset())


class FaultBoard:
    """See the module."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the board that another process has made, and that this one has inherited."""
        self.descriptor = os.memfd_create("tidelog-faults", os.MFD_CLOEXEC) if descriptor is None else descriptor
        """What a child process inherits."""
        weakref.finalize(self, os.close, self.descriptor)
        if descriptor is None:
            os.ftruncate(self.descriptor, _BYTES)
        self._memory = mmap.mmap(self.descriptor, _BYTES)
        self._counters = memoryview(self._memory)[_COUNTERS_AT:].cast("q")
        self._seen = NO_RULE
        self._seen_raw = b""
        if descriptor is None:
            self.rule = NO_RULE

    @property
    def rule(self) -> BucketRule:
        """The fault of the bucket."""
        raw = self._memory[: _RULE.size + _SUM.size]
        if raw != self._seen_raw and zlib.crc32(raw[: _RULE.size]) == _SUM.unpack_from(raw, _RULE.size)[0]:
            status, mask, delay_s, until = _RULE.unpack_from(raw)
            named = frozenset(name for at, name in enumerate(OPERATIONS) if mask & 1 << at)
            self._seen, self._seen_raw = BucketRule(status, delay_s, until, named), raw
        return self._seen  # it is being written if the checksum was wrong: the last one still holds

    @rule.setter
    def rule(self, rule: BucketRule) -> None:
        mask = sum(1 << at for at, name in enumerate(OPERATIONS) if name in rule.operations)
        raw = _RULE.pack(rule.status, mask, rule.delay_s, rule.until)
        self._memory[: _RULE.size + _SUM.size] = raw + _SUM.pack(zlib.crc32(raw))

    @property
    def clock_offset_ms(self) -> int:
        """What is added to the time of day."""
        return self._counters[_CLOCK]

    @clock_offset_ms.setter
    def clock_offset_ms(self, offset_ms: int) -> None:
        self._counters[_CLOCK] = offset_ms

    def count_struck(self, node_id: int) -> None:
        """Count a request of this broker that a fault has struck."""
        self._counters[_STRUCK + node_id] += 1

    @property
    def struck(self) -> int:
        """Requests that a fault has struck, of all brokers."""
        return sum(self._counters[_STRUCK:])
