"""Transactions that nobody ends: when they are shown, and that their marker frees what they held."""

from __future__ import annotations

from typing import Any

from tests.support.guarded import append_guarded
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.txn.hanging import MARGIN_MS, MAX_NAMED, HangingTransactions
from tidelog.runtime.clock import SystemClock

MAX_TIMEOUT_MS = 900_000


class LaterClock(SystemClock):
    """A wall clock that a test sets on."""

    ahead_ms = 0

    def time_ms(self) -> int:
        return super().time_ms() + self.ahead_ms


async def test_what_is_open_beyond_any_time_out_is_shown_until_its_marker() -> None:
    async with KafkaWorld() as world:
        await world.topic("t")
        log, clock = world.log("t"), LaterClock()
        hanging = HangingTransactions(world.partitions.all, MAX_TIMEOUT_MS, clock)
        append_guarded(log, batch(b"plain"))
        append_guarded(log, batch(b"v", producer_id=7, producer_epoch=2, base_sequence=0, transactional=True))
        await until(lambda: log.high_watermark == 2, "confirmation")
        clock.ahead_ms = MAX_TIMEOUT_MS
        assert (hanging.count(), hanging.problems(), hanging.report()["transactions"]) == (0, [], [])
        clock.ahead_ms += MARGIN_MS + 1
        (shown,) = hanging.report()["transactions"]
        assert shown.pop("age_ms") >= MAX_TIMEOUT_MS + MARGIN_MS
        assert shown == {
            "topic": "t",
            "partition": 0,
            "producer_id": 7,
            "producer_epoch": 2,
            "first_offset": 1,
            "last_stable_offset": 1,
        }
        (problem,) = hanging.problems()
        assert "open for 20 minutes" in problem and problem.endswith("--topic t --partition 0 --start-offset 1")
        log.write_marker(7, 2, commit=False, coordinator_epoch=0, transaction_version=1)
        assert (hanging.count(), hanging.problems()) == (0, [])


async def test_many_are_counted_and_few_are_named() -> None:
    async with KafkaWorld() as world:
        await world.topic("t")
        clock = LaterClock()
        hanging = HangingTransactions(world.partitions.all, MAX_TIMEOUT_MS, clock)
        for producer in range(MAX_NAMED + 3):
            options: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
            append_guarded(world.log("t"), batch(b"v", transactional=True, **options))
        clock.ahead_ms = MAX_TIMEOUT_MS + MARGIN_MS + 1
        assert hanging.count() == MAX_NAMED + 3
        assert len(hanging.problems()) == MAX_NAMED + 1
        assert hanging.problems()[-1].startswith("3 more transactions hang")
