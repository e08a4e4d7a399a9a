"""What a broker of a test has around it: the machine's network, and a clock and a bucket that obey the test.

Entry: `outside`.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path

from tidelog.process.node_base import Outside
from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.bucket.open import open_backend
from tidelog.storage.bucket.store import Backend
from tidelog.storage.settings import S3Settings
from tidelog.testing.fault_board import FaultBoard
from tidelog.testing.faulty_backend import FaultyBackend


class SkewedClock(SystemClock):
    """The clock of a broker."""

    def __init__(self, board: FaultBoard) -> None:
        self._board = board

    def time_ms(self) -> int:
        """See `Clock.time_ms`."""
        return super().time_ms() + self._board.clock_offset_ms


def outside(board: FaultBoard, node_id: int) -> Outside:
    """Return what `NodeProcess` takes."""

    def open_faulty(s3: S3Settings, data_dir: Path, clock: Clock, rng: random.Random) -> Backend:
        backend = open_backend(s3, data_dir, clock, rng)
        return FaultyBackend(backend, board, node_id, clock, rng, s3.retry_budget_ms / 1000)

    return Outside(TcpNetwork(), SkewedClock(board), random.Random(uuid.uuid4().int), open_backend=open_faulty)
