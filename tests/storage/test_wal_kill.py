"""kill -9 at random moments: everything the process had called durable is there, whole and in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.storage.wal_harness import SEGMENT, make_wal, recovered
from tests.storage.wal_kill_payload import payload_of
from tidelog.runtime.disk import FileDisk
from tidelog.storage.wal.base import WalRecord, WalRecordType
from tidelog.storage.wal.disk.wal import DiskWal

pytestmark = pytest.mark.processes

CHILD = Path(__file__).with_name("wal_kill_child.py")
ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("TIDELOG_WAL_KILL_ROUNDS", "8"))


def live_and_die(path: Path, epoch: int, rng: random.Random) -> list[int]:
    """One life of the child. Returns the base offsets it reported durable."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{CHILD.parent}"}
    with subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(epoch)], stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split(b"\n")
    return [int(line) for line in lines[:-1]]  # the last is empty or cut


async def test_what_was_durable_survives_kill_9_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random()

    async def look() -> list[WalRecord]:
        disk = FileDisk(tmp_path)
        wal = make_wal(disk, max_bytes=16 * SEGMENT)
        records = await recovered(wal)
        await disk_close(wal, disk)
        return [r for r in records if r.type is WalRecordType.DATA]

    last = -1
    for epoch in range(1, ROUNDS + 1):
        reported = live_and_die(tmp_path, epoch, rng)
        assert reported == list(range(last + 1, last + 1 + len(reported)))
        records = await look()
        bases = [record.base_offset for record in records]
        assert bases == list(range(bases[0], bases[0] + len(bases))) if bases else True
        if reported:
            assert bases[-1] >= reported[-1], "a durable record was lost"
        if bases:
            assert all(bytes(record.payload) == payload_of(record.base_offset) for record in records)
            assert bases[-1] >= last
            last = bases[-1]
    assert last > 0


async def disk_close(wal: DiskWal, disk: FileDisk) -> None:
    await wal.close()
    await disk.close()
