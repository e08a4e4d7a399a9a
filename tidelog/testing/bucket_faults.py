"""Faults of the bucket, by call: what a test asks for, without the parts that do it.

Entry: `LocalBucket`; `tidelog.testing.faulty_backend` obeys, by way of `tidelog.testing.fault_board`.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from tidelog.runtime.errors import InvalidInput
from tidelog.testing.fault_board import NO_RULE, OPERATIONS, BucketRule, FaultBoard

REPEATED = (429, 500, 502, 503, 504)
REFUSED = 403


class LocalBucket:
    """What the bucket of a test's brokers does wrong. A new fault takes the place of the last one."""

    def __init__(self, board: FaultBoard) -> None:
        self._board = board

    @property
    def rule(self) -> BucketRule:
        """The last fault that was asked for."""
        return self._board.rule

    @property
    def struck(self) -> int:
        """Requests that a fault has struck, repetitions included."""
        return self._board.struck

    def fail(self, status: int = 503, *, seconds: float = float("inf"), operations: Collection[str] = ()) -> None:
        """Answer requests with an HTTP status for so long: 403, 429, 500, 502, 503 or 504.

        `operations`: of "put", "get", "head", "list", "delete"; empty: all. Raises `InvalidInput`.
        """
        if status not in (*REPEATED, REFUSED):
            raise InvalidInput(f"a bucket does not fail with {status}", hint="403, 429, 500, 502, 503 or 504")
        self._set(status, 0.0, seconds, operations)

    def slow(self, delay_s: float, *, seconds: float = float("inf"), operations: Collection[str] = ()) -> None:
        """Have each request take `delay_s` longer, for so long. Raises as `fail`."""
        self._set(0, delay_s, seconds, operations)

    def heal(self) -> None:
        """End the fault."""
        self._board.rule = NO_RULE

    def _set(self, status: int, delay_s: float, seconds: float, operations: Collection[str]) -> None:
        unknown = sorted(set(operations) - set(OPERATIONS))
        if unknown:
            raise InvalidInput(f"no operation of a bucket: {unknown}", hint=", ".join(sorted(OPERATIONS)))
        named = frozenset(operations or OPERATIONS)
        self._board.rule = BucketRule(status, delay_s, time.monotonic() + seconds, named)
