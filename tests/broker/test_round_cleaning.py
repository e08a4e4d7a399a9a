"""The process that decides a round of log compaction: the same as in a thread, and nothing is lost with it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream.test_cleaning import NOW, Log, make
from tests.support.clients import wait_until
from tidelog.batch.batch import HEADER_BYTES, CorruptRecord, Record, build_batch, parse_header, set_base_offset
from tidelog.broker.partitions.round_cleaning import LocalCleaning, RoundCleaning, WorkerCleaning, WorkerLost
from tidelog.runtime.types import Offload
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.messages import Begin

pytestmark = pytest.mark.processes
PATIENCE_S = 30.0
NONE = AbortedTxns(())


async def a_round(cleaning: RoundCleaning, log: Log) -> tuple[int, int, list[StreamEntry]]:
    """The end, the keys, and what is left; each piece is cleaned twice, as after a refused commit."""
    index = AbortedTxns(log.index)
    for at in range(0, len(log.records), 7):
        await cleaning.note(log.records[at : at + 7], index)
    end = await cleaning.seal()
    after: list[StreamEntry] = []
    for at in range(0, len(log.records), 5):
        given = [
            StreamEntry(base, count, b"" if cleaning.is_gone(base, base + count) else payload)
            for base, count, payload in log.records[at : at + 5]
        ]
        mark = cleaning.mark()
        first = await cleaning.clean(given, index)
        cleaning.rewind(mark)
        after += await cleaning.clean(given, index)
        assert after[-len(first) :] == first
    return end, cleaning.keys, after


def inline() -> Offload:
    async def run(work):  # type: ignore[no-untyped-def]
        return work()

    return run


async def begun(begin: Begin | None = None, answer_s: float = PATIENCE_S) -> WorkerCleaning:
    worker = WorkerCleaning(answer_s)
    await worker.begin(begin or Begin(0, 1_000_000, 1 << 20, NOW, 1_000))
    return worker


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_process_decides_what_a_thread_does_and_ends_with_the_round() -> None:
    for seed in range(3):
        log = make(random.Random(seed), 60, 8)
        begin = Begin(0, log.stable, 1 << 20, NOW, 1_000)
        worker = await begun(begin)
        found = await a_round(worker, log)
        assert found == await a_round(LocalCleaning(begin, inline()), log)
        assert any(one.is_hole for one in found[2])
        pid = worker.pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        await worker.close()
        assert not is_running(pid)


async def test_records_in_many_pieces_come_back_in_order() -> None:
    log = Log()
    for number in range(90):
        batch = bytearray(build_batch([Record(0, NOW, b"%d" % (number % 50), bytes(200_000))]))
        set_base_offset(batch, log.end)
        log.add(bytes(batch))
    worker = await begun(Begin(0, log.end, 1 << 20, NOW, 1_000))
    assert not await worker.note(log.records, NONE)
    assert await worker.seal() == 90
    after = await worker.clean(log.records, NONE)
    assert [one.base_offset for one in after if not one.is_hole] == list(range(40, 90))
    assert after[40:] == log.records[40:]
    await worker.close()


async def test_a_batch_that_does_not_decode_is_told_and_the_process_goes_on() -> None:
    log = make(random.Random(1), 20, 8)
    worker = await begun()
    broken = bytearray(build_batch([Record(0, NOW, b"k", b"v")]))
    broken[HEADER_BYTES] ^= 2
    with pytest.raises(CorruptRecord):
        await worker.note([StreamEntry(0, 1, bytes(broken))], NONE)
    assert parse_header(broken).count == 1
    assert await worker.note(log.records, AbortedTxns(log.index))
    await worker.close()


@pytest.mark.parametrize("when", ["before a request", "during a request"])
async def test_a_killed_process_is_a_lost_round(when: str) -> None:
    log = make(random.Random(1), 20, 8)
    worker = await begun()
    if when == "before a request":
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(worker.pid), "the end of the process", PATIENCE_S)
        with pytest.raises(WorkerLost):
            await worker.note(log.records, NONE)
    else:
        os.kill(worker.pid, signal.SIGSTOP)
        asking = asyncio.create_task(worker.note(log.records, NONE))
        await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(asking, PATIENCE_S)
    await worker.close()


async def test_a_process_that_hangs_is_killed() -> None:
    log = make(random.Random(1), 20, 8)
    worker = await begun(answer_s=0.5)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="timed out"):
        await asyncio.wait_for(worker.note(log.records, NONE), PATIENCE_S)
    assert not is_running(worker.pid)
    await worker.close()


async def test_a_cancelled_round_ends_at_once_whatever_its_process_does() -> None:
    log = make(random.Random(1), 20, 8)
    worker = await begun()
    os.kill(worker.pid, signal.SIGSTOP)
    asking = asyncio.create_task(worker.note(log.records, NONE))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(worker.close(), PATIENCE_S)
    assert not is_running(worker.pid)


async def test_a_process_that_cannot_be_started_is_a_lost_round() -> None:
    worker = WorkerCleaning(command=["/nonexistent/python"])
    with pytest.raises(WorkerLost, match="can be started"):
        await worker.begin(Begin(0, 1, 1 << 20, NOW, 1))
    await worker.close()


BROKER = """
import asyncio
from tidelog.broker.partitions.round_cleaning import WorkerCleaning
from tidelog.stream.cleaning.messages import Begin

async def main():
    worker = WorkerCleaning()
    await worker.begin(Begin(0, 1, 1 << 20, 1, 1))
    print(worker.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["idle", "hung"])
def test_the_process_ends_with_its_broker(stopped: bool) -> None:
    broker = subprocess.Popen([sys.executable, "-c", BROKER], stdout=subprocess.PIPE, text=True)
    try:
        assert broker.stdout is not None
        pid = int(broker.stdout.readline())
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        assert is_running(pid)
    finally:
        broker.kill()
        broker.communicate()
    wait_until(lambda: not is_running(pid), "the end of the process", PATIENCE_S)
