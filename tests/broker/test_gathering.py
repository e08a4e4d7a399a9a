"""What partitions that open together read is gathered in one wave, whoever comes late, ends or is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from tidelog.broker.partitions.gathering import QUIET_S, WAVE_LOGS, Gathering
from tidelog.runtime.errors import NotFound
from tidelog.storage.commits import StreamRange

SET = 7


class Storages:
    """Records what is gathered; the storage of other sets than `SET` has gone."""

    def __init__(self) -> None:
        self.waves: list[set[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def get(self, replica_set: int) -> Storages:
        if replica_set != SET:
            raise NotFound("gone")
        return self

    async def gather(self, ranges: Iterable[StreamRange]) -> None:
        self.waves.append({each.stream_id for each in ranges})
        await self.gate.wait()


def gathering(coming: int) -> tuple[Gathering, Storages]:
    storages = Storages()
    given: Any = storages
    return Gathering(given, coming), storages


def of(stream: int) -> list[StreamRange]:
    return [StreamRange(stream, 0, 1)]


async def test_all_that_come_make_one_wave_though_some_need_nothing() -> None:
    one, storages = gathering(5)

    async def come(stream: int) -> None:
        await asyncio.sleep(QUIET_S * stream / 10)
        if stream == 3:
            one.ended()
        else:
            await one.bring(SET, of(stream))
            assert storages.waves == [{0, 1, 2, 4}]

    await asyncio.gather(*map(come, range(5)))
    assert storages.waves == [{0, 1, 2, 4}]


async def test_one_that_does_not_come_holds_up_no_other_and_makes_a_wave_of_its_own() -> None:
    one, storages = gathering(3)
    await asyncio.gather(one.bring(SET, of(1)), one.bring(SET, of(2)))
    assert storages.waves == [{1, 2}]
    await one.bring(SET, of(3))
    assert storages.waves == [{1, 2}, {3}]


async def test_the_first_of_many_do_not_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.broker.partitions.gathering.QUIET_S", 3600.0)
    one, storages = gathering(WAVE_LOGS + 2)
    some = [asyncio.create_task(one.bring(SET, of(each))) for each in range(WAVE_LOGS)]
    await asyncio.gather(*some)
    await asyncio.gather(one.bring(SET, of(-1)), one.bring(SET, of(-2)))
    assert storages.waves == [set(range(WAVE_LOGS)), {-1, -2}]


async def test_a_storage_that_has_gone_is_left_to_the_opening_and_takes_none_from_others() -> None:
    one, storages = gathering(2)
    await asyncio.gather(one.bring(SET, of(1)), one.bring(SET + 1, of(2)))
    assert storages.waves == [{1}]


async def test_who_waits_goes_on_though_the_one_that_gathers_is_cancelled() -> None:
    one, storages = gathering(2)
    storages.gate.clear()
    first = asyncio.create_task(one.bring(SET, of(1)))
    await asyncio.sleep(0)
    second = asyncio.create_task(one.bring(SET, of(2)))
    while not storages.waves:  # noqa: ASYNC110  # it is a turn of the loop at a time
        await asyncio.sleep(0)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_ranges_of_one_that_was_cancelled_before_its_wave_come_with_the_next() -> None:
    one, storages = gathering(2)
    first = asyncio.create_task(one.bring(SET, of(1)))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await one.bring(SET, of(2))
    assert storages.waves == [{1, 2}]


async def test_a_bucket_that_does_not_answer_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.broker.partitions.gathering.GATHER_S", 0.01)
    one, storages = gathering(1)
    storages.gate.clear()
    await one.bring(SET, of(1))
    assert storages.waves == [{1}]
