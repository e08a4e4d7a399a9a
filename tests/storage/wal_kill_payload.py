"""What record `base` of the kill test holds, so that parent and child agree."""

from __future__ import annotations

import random


def payload_of(base: int) -> bytes:
    return random.Random(base).randbytes(base % 3000)
