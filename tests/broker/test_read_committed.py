"""What read_committed clients see of open and decided transactions: Fetch, ListOffsets, DescribeProducers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.broker.test_handlers_fetch import BIG, fetch, fetch_request, part, values
from tests.broker.test_handlers_offsets_lookup import list_offsets
from tests.support.guarded import append_guarded
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.partitions.read_replicas import LeaderOnly

COMMITTED = 1
NEAR = 2


def send(world: KafkaWorld, value: bytes, sequence: int | None = None, *, epoch: int = 0) -> None:
    """Append one batch: plain, or with a sequence, of the transactional producer 7."""
    if sequence is None:
        append_guarded(world.log("t"), batch(value))
    else:
        one = batch(value, producer_id=7, producer_epoch=epoch, base_sequence=sequence, transactional=True)
        append_guarded(world.log("t"), one)


def end(world: KafkaWorld, *, commit: bool, epoch: int = 0) -> None:
    world.log("t").write_marker(7, epoch, commit=commit, coordinator_epoch=1, transaction_version=1)


async def confirmed(world: KafkaWorld) -> None:
    log = world.log("t")
    await until(lambda: log.high_watermark == log.log_end_offset, "confirmation")


@pytest.mark.parametrize("session", [False, True])
async def test_a_marker_wakes_a_reader_that_waits_at_the_last_stable_offset(session: bool) -> None:
    fields: dict[str, Any] = {"session_epoch": 0} if session else {}
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        send(world, b"a", 0)
        send(world, b"plain")
        await confirmed(world)
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000, isolation_level=COMMITTED, **fields))
        waiting = asyncio.ensure_future(client.receive())
        await until(lambda: world.log("t").watermark_listeners > 0, "a reader that waits")
        assert not waiting.done(), "there are bytes, but none that count"
        end(world, commit=False)
        found = part(await waiting)
        assert (found.high_watermark, found.last_stable_offset) == (3, 3)
        assert [(one.producer_id, one.first_offset) for one in found.aborted_transactions] == [(7, 0)]
        assert [offset for offset, _ in values(found.records)] == [0, 1, 2]


async def test_the_session_of_a_reader_that_rests_hears_of_a_marker() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        send(world, b"a", 0)
        await confirmed(world)
        first = await fetch(client, 11, {"t": {0: 0}}, isolation_level=COMMITTED, session_epoch=0)
        assert part(first).records in (None, b"") and part(first).last_stable_offset == 0
        client.post(
            fetch_request(
                11, {}, max_wait=60_000, isolation_level=COMMITTED, session_id=first.session_id, session_epoch=1
            )
        )
        await until(lambda: world.log("t").watermark_listeners > 0, "a session that rests")
        end(world, commit=True)
        found = part(await client.receive())
        assert values(found.records)[0] == (0, b"a") and found.last_stable_offset == 2


async def test_min_bytes_counts_only_what_is_decided() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        send(world, b"decided")
        send(world, bytes(5000), 0)
        send(world, bytes(5000))
        await confirmed(world)
        client.post(fetch_request(11, {"t": {0: 0}}, max_wait=60_000, min_bytes=2000, isolation_level=COMMITTED))
        waiting = asyncio.ensure_future(client.receive())
        await until(lambda: world.log("t").watermark_listeners > 0, "a reader that waits")
        assert not waiting.done()
        end(world, commit=True)
        assert [offset for offset, _ in values(part(await waiting).records)] == [0, 1, 2, 3]


@pytest.mark.parametrize("cold", [False, True])
async def test_all_aborted_transactions_of_a_range_are_listed_whether_it_is_in_memory_or_not(cold: bool) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        for number in range(6):
            send(world, b"%d" % number, number)
            send(world, b"plain")
            end(world, commit=number % 3 == 0)
        await confirmed(world)
        if cold:
            await world.chill()
            assert world.log("t").read_hot(0, BIG, committed=True) is None
        found = part(await fetch(client, 11, {"t": {0: 0}}, isolation_level=COMMITTED))
        assert len(values(found.records)) == 18
        aborted = [(7, 3 * number) for number in range(6) if number % 3]
        assert [(one.producer_id, one.first_offset) for one in found.aborted_transactions] == aborted
        later = part(await fetch(client, 11, {"t": {0: 8}}, isolation_level=COMMITTED))
        assert [(one.producer_id, one.first_offset) for one in later.aborted_transactions] == aborted[1:]


async def test_latest_is_never_before_earliest() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        for number in range(4):
            send(world, b"x", number)
        await confirmed(world)
        assert await list_offsets(client, 5, -1, isolation_level=COMMITTED) == [(0, 0, -1)]
        await world.log("t").delete_records(3)
        assert await list_offsets(client, 5, -2, isolation_level=COMMITTED) == [(0, 3, -1)]
        assert await list_offsets(client, 5, -1, isolation_level=COMMITTED) == [(0, 3, -1)]
        assert await list_offsets(client, 5, -1) == [(0, 4, -1)]
        found = part(await fetch(client, 11, {"t": {0: 3}}, isolation_level=COMMITTED))
        assert (found.error_code, found.last_stable_offset, found.records) == (0, 3, b"")


async def test_the_largest_timestamp_is_looked_up_among_decided_records() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        append_guarded(world.log("t"), batch(b"a", timestamp=1000))
        send(world, b"later", 0)
        await confirmed(world)
        assert await list_offsets(client, 7, -3, isolation_level=COMMITTED) == [(0, 0, 1000)]
        ((_, offset, _),) = await list_offsets(client, 7, -3)
        assert offset == 1


async def test_producers_are_described_with_their_open_transaction_and_after_its_marker() -> None:
    async with KafkaWorld() as world:
        await world.topic("t")
        send(world, b"plain")
        send(world, b"a", 0, epoch=2)
        (one,) = world.log("t").producers()
        assert (one.producer_id, one.producer_epoch, one.last_sequence) == (7, 2, 0)
        assert (one.coordinator_epoch, one.current_txn_start_offset) == (-1, 1)
        before = one.last_timestamp
        world.log("t").write_marker(7, 3, commit=True, coordinator_epoch=5, transaction_version=2)
        (one,) = world.log("t").producers()
        assert (one.producer_id, one.producer_epoch, one.last_sequence) == (7, 3, -1)
        assert (one.coordinator_epoch, one.current_txn_start_offset) == (5, -1)
        assert one.last_timestamp >= before > 0, "of the marker, where the epoch has no batch"


class OneIsNear(LeaderOnly):
    """Broker 2 follows whatever it is asked about."""

    def nearest(self, _topic_id: bytes, _index: int, _rack: str) -> int:
        return NEAR


async def test_a_reader_of_decided_records_is_sent_to_a_follower_only_for_batches_in_no_transaction() -> None:
    """The follower refuses the others, and its reader comes back: it must not be sent there again."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.services.read_replicas = OneIsNear()
        send(world, b"plain")
        send(world, b"a", 0)
        end(world, commit=True)
        send(world, b"plain")
        send(world, b"open", 1)
        await confirmed(world)

        async def named(offset: int, isolation: int) -> tuple[int, int]:
            found = part(await fetch(client, 11, {"t": {0: offset}}, isolation_level=isolation, rack_id="r"))
            return found.preferred_read_replica, len(values(found.records or b""))

        assert [await named(offset, 0) for offset in range(6)] == [(NEAR, 0)] * 6
        expected = [(NEAR, 0), (-1, 3), (-1, 2), (NEAR, 0), (-1, 0), (-1, 0)]
        assert [await named(offset, COMMITTED) for offset in range(6)] == expected
        await world.chill()
        assert await named(0, COMMITTED) == (-1, 4), "what is not in memory is not known to be in no transaction"
