"""Exponential back-off with jitter (rule 11). Sans-I/O: the random generator is injected, the caller sleeps.

Entry: `Backoff`.
"""

from __future__ import annotations

import random


class Backoff:
    """Exponential delays with full jitter: the n-th is uniform in (0, min(cap, base · 2ⁿ)], in seconds."""

    def __init__(self, base_s: float, cap_s: float, rng: random.Random) -> None:
        assert 0 < base_s <= cap_s
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng
        self.attempts = 0

    def next_delay_s(self) -> float:
        """Return the next delay in seconds and count one attempt."""
        ceiling = min(self._cap_s, self._base_s * (1 << min(self.attempts, 30)))
        self.attempts += 1
        return ceiling * (1.0 - self._rng.random())

    def reset(self) -> None:
        """Start over after a success."""
        self.attempts = 0
