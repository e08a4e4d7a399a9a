"""Run by test_wal_kill.py: appends to the WAL in argv[1] until it is killed, printing each durable base offset."""

from __future__ import annotations

import asyncio
import random
import sys

from tests.storage.wal_harness import SEGMENT, make_wal, recovered
from tests.storage.wal_kill_payload import payload_of
from tidelog.runtime.disk import FileDisk
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFull, WalRecordType


async def main(path: str, epoch: int) -> None:
    wal = make_wal(FileDisk(path), max_bytes=16 * SEGMENT)
    records = await recovered(wal)
    base = max((r.base_offset for r in records if r.type is WalRecordType.DATA), default=-1) + 1
    waiting: list[tuple[int, int]] = []

    def on_durable(offset: int) -> None:
        wal.note_confirmed(offset)
        while waiting and waiting[0][0] <= offset:
            print(waiting.pop(0)[1], flush=True)

    wal.set_on_durable(on_durable)
    await wal.begin_epoch(epoch)
    print("ready", flush=True)
    trims = random.Random(epoch)
    while True:
        try:
            waiting.append((wal.append(StreamAppend(1, epoch, base, 1, [payload_of(base)])), base))
            base += 1
        except WalFull:
            await wal.trim(max(wal.start_offset, wal.durable_offset - 6 * SEGMENT))
            await wal.writable(3000)
        if trims.random() < 0.3:
            await asyncio.sleep(0)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
