"""How full a disk is, as the metrics tell it: never an old figure, and a disk that does not answer delays no scrape."""

from __future__ import annotations

import asyncio

from tests.support.kafka_world import until
from tidelog.broker.telemetry import figures
from tidelog.broker.telemetry.disk_space import MEASURE_S, DiskSpace, DiskSpaceMeter
from tidelog.runtime.clock import SystemClock


class Disk:
    """A disk that answers, fails or hangs."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def measure(self) -> DiskSpace:
        self.asked += 1
        await self.hangs.wait()
        if self.fails:
            raise OSError("no such device")
        return DiskSpace(7, 100)


class QuickClock(SystemClock):
    """Sleeps a thousandth of what is asked, and is set on by the test."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 1000)


async def test_what_was_measured_is_told_and_what_fails_is_not() -> None:
    disk, clock = Disk(), QuickClock()
    meter = DiskSpaceMeter(clock, disk.measure)
    assert meter.latest() is None and list(figures.disk_families(None)) == []
    meter.start()
    await until(lambda: meter.latest() == DiskSpace(7, 100), "a measurement")
    values = {family.name: family.samples[0].value for family in figures.disk_families(meter.latest())}
    assert values == {"tidelog_disk_free_bytes": 7, "tidelog_disk_bytes": 100}
    disk.fails = True
    await until(lambda: meter.latest() is None, "the failure")
    disk.fails = False
    await until(lambda: meter.latest() is not None, "the next measurement")
    await meter.close()


async def test_an_old_figure_is_not_told_while_the_disk_hangs() -> None:
    disk, clock = Disk(), QuickClock()
    meter = DiskSpaceMeter(clock, disk.measure)
    meter.start()
    await until(lambda: meter.latest() is not None, "a measurement")
    disk.hangs.clear()
    asked = disk.asked
    await until(lambda: disk.asked > asked, "a measurement that hangs")
    clock.ahead_s = 3 * MEASURE_S
    assert meter.latest() is None
    await meter.close()
