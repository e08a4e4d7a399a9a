"""The clock of a test's brokers: what they take for the time of day is off by as much as the test wants.

The monotonic clock is not changed: time-outs and ages do not notice, as when the clock of a machine is set.

Entry: `LocalClock`.
"""

from __future__ import annotations

from tidelog.testing.fault_board import FaultBoard


class LocalClock:
    """The time of day of a test's brokers."""

    def __init__(self, board: FaultBoard) -> None:
        self._board = board

    @property
    def offset_ms(self) -> int:
        """What is added to the time of day, in milliseconds."""
        return self._board.clock_offset_ms

    def skew(self, seconds: float) -> None:
        """Set the brokers' clock ahead by `seconds`, or back if that is negative; 0 sets it right."""
        self._board.clock_offset_ms = round(seconds * 1000)

    def heal(self) -> None:
        """Set the clock right."""
        self._board.clock_offset_ms = 0
