"""The clock of a test's broker: what the broker takes for the time of day is off by as much as the test wants.

The monotonic clock is not changed: time-outs and ages do not notice, as when the clock of a machine is set.

Entry: `LocalClock`.
"""

from __future__ import annotations

from tidelog.testing.options import NotPossibleHere


class LocalClock:
    """The time of day of a broker in this process."""

    def __init__(self, *, possible: bool) -> None:
        self._possible = possible
        self.offset_ms = 0
        """What is added to the time of day, in milliseconds."""

    def skew(self, seconds: float) -> None:
        """Set the broker's clock ahead by `seconds`, or back if that is negative; 0 sets it right.

        Raises `NotPossibleHere` for a broker in a process of its own.
        """
        if not self._possible:
            raise NotPossibleHere(
                "the clock of another process cannot be set", hint="run the broker in this process: child=False"
            )
        self.offset_ms = round(seconds * 1000)

    def heal(self) -> None:
        """Set the clock right."""
        self.offset_ms = 0
