"""Faults of the bucket, by call: what a test asks for, without the parts that do it.

Entry: `LocalBucket`; `tidelog.testing.faulty_backend` asks it before each request.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

from tidelog.runtime.errors import InvalidInput
from tidelog.testing.options import NotPossibleHere

OPERATIONS = frozenset({"put", "get", "head", "list", "delete"})
REPEATED = (429, 500, 502, 503, 504)
REFUSED = 403


class BucketRule(NamedTuple):
    """One fault."""

    status: int
    delay_s: float
    until: float
    """By the monotonic clock."""
    operations: frozenset[str]

    def strikes(self, operation: str) -> bool:
        """Return whether a request of this kind fails now."""
        return operation in self.operations and time.monotonic() < self.until


_NONE = BucketRule(0, 0.0, 0.0, frozenset())


class LocalBucket:
    """What the bucket of a broker in this process does wrong. A new fault takes the place of the last one."""

    def __init__(self, *, possible: bool) -> None:
        self._possible = possible
        self.rule = _NONE
        self.struck = 0
        """Requests that a fault has struck, repetitions included."""

    def fail(self, status: int = 503, *, seconds: float = float("inf"), operations: Collection[str] = ()) -> None:
        """Answer requests with an HTTP status for so long: 403, 429, 500, 502, 503 or 504.

        `operations`: of "put", "get", "head", "list", "delete"; empty: all. Raises `InvalidInput`, and
        `NotPossibleHere` for a broker in a process of its own.
        """
        if status not in (*REPEATED, REFUSED):
            raise InvalidInput(f"a bucket does not fail with {status}", hint="403, 429, 500, 502, 503 or 504")
        self._set(status, 0.0, seconds, operations)

    def slow(self, delay_s: float, *, seconds: float = float("inf"), operations: Collection[str] = ()) -> None:
        """Have each request take `delay_s` longer, for so long. Raises as `fail`."""
        self._set(0, delay_s, seconds, operations)

    def heal(self) -> None:
        """End the fault."""
        self.rule = _NONE

    def _set(self, status: int, delay_s: float, seconds: float, operations: Collection[str]) -> None:
        if not self._possible:
            raise NotPossibleHere(
                "the bucket of a broker in a process of its own does not fail by call",
                hint="run the broker in this process: child=False",
            )
        unknown = sorted(set(operations) - OPERATIONS)
        if unknown:
            raise InvalidInput(f"no operation of a bucket: {unknown}", hint=", ".join(sorted(OPERATIONS)))
        self.rule = BucketRule(status, delay_s, time.monotonic() + seconds, frozenset(operations) or OPERATIONS)
