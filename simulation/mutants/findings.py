"""Sets of findings and faults that many mutations share: which findings show that a protection is gone, and under which
faults it is looked for.
"""

from __future__ import annotations

GONE = (
    "confirmed-lost",
    "lost-write",
    "unseen",
    "high-watermark-back",
    "inconsistent-offsets",
    "phantom-read",
    "epoch-back",
)
"""Rules for acknowledged or read data that is missing or replaced."""
TWICE = ("duplicate", "nonmonotonic-send", "int-nonmonotonic-send")
FORGOTTEN = (*TWICE, "producer-forgotten")
"""Rules for a partition that opens without what it knew of its producers."""
LOUD = ("liveness",)
"""Rules for violations detected by the product, which stops or quarantines: the cluster does not become idle."""
MOVES = ("kill", "pause", "stop", "slow", "isolate", "reset")
