"""Whether operations of one kind work: when the last one succeeded, and how long the oldest one has had no answer.

A part that reports itself healthy because it has not heard of a failure is silent exactly when nothing works. So health
follows two facts only: the outcome of the operation that ended last, and the age of the oldest one that has not ended
(docs/operations.md, Health). An operation that hangs is noticed after `STUCK_S`, one that fails at once.

Sans-IO: times are seconds of a monotonic clock and are passed in. Entry: `OperationHealth`, `ProgressHealth`,
`Flapping`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

STUCK_S: Final = 4.0
"""Without any success for so long, an operation that has not ended is a problem: seen within 5 s of an outage."""
FORGET_S: Final = 60.0
"""So long a failure stays a problem when nothing of its kind was attempted since, and a check has succeeded."""
FLAPS: Final = 2
FLAP_WINDOW_S: Final = 30.0
"""So many losses within so many seconds are no restart."""


class OperationHealth:
    """The operations of one kind. An error that is an answer (such as "not found") is a success."""

    def __init__(self, name: str, *, stuck_s: float = STUCK_S) -> None:
        """`stuck_s`: the silence after which it is a problem; longer for an operation that may well take long."""
        self.name = name
        self._stuck_s = stuck_s
        self.last_success_s: float | None = None
        self.last_failure_s: float | None = None
        self.last_error = ""
        self.failures_in_a_row = 0
        self._open: dict[int, float] = {}
        self._count = 0

    def begin(self, now_s: float, allowance_s: float = 0.0) -> int:
        """Note the beginning of an operation, which may take `allowance_s` longer; returns its token for the end."""
        self._count += 1
        self._open[self._count] = now_s + allowance_s
        return self._count

    def succeeded(self, now_s: float, token: int = 0) -> None:
        """Note that an operation was answered."""
        self._open.pop(token, None)
        self.last_success_s = now_s
        self.failures_in_a_row = 0

    def failed(self, now_s: float, error: BaseException, token: int = 0) -> None:
        """Note that an operation failed, and may be repeated."""
        self._open.pop(token, None)
        self.last_failure_s = now_s
        self.last_error = str(error) or type(error).__name__
        self.failures_in_a_row += 1

    def dropped(self, token: int) -> None:
        """Note that nobody waits for an operation any more: it says nothing."""
        self._open.pop(token, None)

    def forgive(self, checked_s: float, now_s: float) -> None:
        """Forget failures that are over `FORGET_S` old, and older than a check that has succeeded."""
        if self.last_failure_s is not None and self.last_failure_s < min(checked_s, now_s - FORGET_S):
            self.failures_in_a_row = 0

    def oldest_s(self, now_s: float) -> float:
        """Return the age of the oldest operation that has not ended; 0 for none."""
        return max(0.0, now_s - min(self._open.values())) if self._open else 0.0

    def silent_s(self, now_s: float) -> float:
        """Return how long an operation has been waiting without a success of any other; 0 for none."""
        oldest_s = self.oldest_s(now_s)
        return oldest_s if self.last_success_s is None else min(oldest_s, now_s - self.last_success_s)

    def quiet_s(self, now_s: float) -> float:
        """Return the time since the last outcome, whatever it was; infinite before the first."""
        return now_s - max(
            (at for at in (self.last_success_s, self.last_failure_s) if at is not None), default=float("-inf")
        )

    def problem(self, now_s: float) -> str:
        """Return what is wrong, one clause without the subject; empty if nothing is."""
        if self.failures_in_a_row:
            times = f" {self.failures_in_a_row} times in a row" if self.failures_in_a_row > 1 else ""
            return f"{self.name} fails{times}: {self.last_error}"
        silent_s = self.silent_s(now_s)
        if silent_s >= self._stuck_s:
            return f"{self.name} has had no answer for {silent_s:.0f} s"
        return ""

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the state as JSON; ages in milliseconds, None for never."""
        return {
            "healthy": not self.problem(now_s),
            "last_success_age_ms": _age_ms(self.last_success_s, now_s),
            "last_failure_age_ms": _age_ms(self.last_failure_s, now_s),
            "oldest_waiting_ms": round(1000 * self.oldest_s(now_s)),
            "failures_in_a_row": self.failures_in_a_row,
            "last_error": self.last_error or None,
        }


class ProgressHealth:
    """Operations that are known by two counters only: what was asked for, and what of it is done.

    The counters are sampled, so that the request path pays nothing. The age of the oldest unanswered operation is taken
    as the time since the done counter last moved while something was waiting.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._done = 0
        self._waiting_since_s: float | None = None

    def sample(self, now_s: float, asked: int, done: int) -> None:
        """Take both counters (any unit; they only grow, unless the part starts over)."""
        if done >= asked:
            self._waiting_since_s = None
        elif done != self._done or self._waiting_since_s is None:
            self._waiting_since_s = now_s
        self._done = done

    def silent_s(self, now_s: float) -> float:
        """Return how long something has waited without any progress; 0 for nothing."""
        return 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s

    def problem(self, now_s: float) -> str:
        """As `OperationHealth.problem`."""
        silent_s = self.silent_s(now_s)
        return f"{self.name} has made no progress for {silent_s:.0f} s" if silent_s >= STUCK_S else ""

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"healthy": not self.problem(now_s), "oldest_waiting_ms": round(1000 * self.silent_s(now_s))}


class Flapping:
    """A peer that comes back again and again: between two losses it looks well."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=FLAPS)

    def lost(self, now_s: float) -> None:
        """Note that the connection to the peer had to be opened again."""
        self._losses.append(now_s)

    def problem(self, now_s: float) -> str:
        """Return what is wrong, one clause without the subject; empty if nothing is."""
        if len(self._losses) < FLAPS or now_s - self._losses[0] > FLAP_WINDOW_S:
            return ""
        return (
            f"was lost {len(self._losses)} times or more within {now_s - self._losses[0]:.0f} s: does it keep ending?"
        )


def _age_ms(at_s: float | None, now_s: float) -> int | None:
    return None if at_s is None else round(1000 * (now_s - at_s))
