"""What a slow request spent its time on is found in the stage that took it."""

from __future__ import annotations

import gc

import pytest

from tests.broker.test_handlers_fetch import fetch, fetch_request, part
from tests.broker.test_handlers_produce import outcome, produce, produce_request
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.settings import KafkaSettings
from tidelog.broker.telemetry.slow_requests import SlowRequest
from tidelog.runtime.clock import SystemClock
from tidelog.storage.settings import CacheSettings, UploadSettings

PRODUCE, FETCH, LIST_OFFSETS = 0, 1, 2
LEAP_S = 1_000.0
"""More than anything takes that the clock measures itself."""


class LeapingClock(SystemClock):
    """The system's clock; it leaps when a test says so, and each reading takes `tick_s`."""

    def __init__(self) -> None:
        self.leapt_s = self.tick_s = 0.0

    def monotonic(self) -> float:
        self.leapt_s += self.tick_s
        return SystemClock.monotonic() + self.leapt_s


def recorded(world: KafkaWorld, api_key: int) -> list[SlowRequest]:
    recorder = world.services.slow_requests
    assert recorder is not None
    return recorder.slowest(world.services.clock.monotonic(), 100, api_key)


def slowest(world: KafkaWorld, api_key: int) -> SlowRequest:
    return recorded(world, api_key)[0]


def whole(found: SlowRequest) -> None:
    """The stages account for the duration."""
    assert sum(found.stages) == pytest.approx(found.duration_s, abs=0.01)


async def test_a_slow_disk_is_the_stage_sync() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t", 2)
        await produce(client, 9, {"t": {1: batch(b"quick")}})
        world.hold()
        client.post(produce_request(9, {"t": {1: batch(b"a")}}))
        await until(lambda: world.log("t", 1).log_end_offset == 2, "append")
        clock.leapt_s += LEAP_S
        world.release()
        assert outcome(await client.receive()).error_code == 0
        found = slowest(world, PRODUCE)
        assert found.stages.sync == pytest.approx(LEAP_S, abs=10) and found.duration_s >= LEAP_S
        assert (found.topic, found.partition, found.partitions, found.error_code) == ("t", 1, 1, 0)
        assert (found.client_id, found.client_host) == ("test", "127.0.0.1")
        assert found.stages.queue < 10 and found.stages.response < 10
        whole(found)
        assert recorded(world, PRODUCE)[1].duration_s < 10


async def test_a_request_that_times_out_while_the_disk_hangs_waited_for_the_disk() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t")
        world.hold()
        client.post(produce_request(9, {"t": {0: batch(b"a")}}, timeout=100))
        await until(lambda: world.log("t").log_end_offset == 1, "append")
        clock.leapt_s += LEAP_S
        assert outcome(await client.receive()).error_code == 7
        found = slowest(world, PRODUCE)
        assert found.stages.sync >= LEAP_S and found.error_code == 7
        whole(found)


async def test_a_request_behind_a_slow_one_of_its_connection_was_in_the_queue() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t")
        world.hold()
        client.post(produce_request(9, {"t": {0: batch(b"a")}}))
        await until(lambda: world.log("t").log_end_offset == 1, "append")
        client.post(request_entity(LIST_OFFSETS, 5, replica_id=-1, isolation_level=0, topics=()))
        await until(lambda: sum(world.server.held_bytes) > 600, "the second request has arrived")
        clock.leapt_s += LEAP_S
        world.release()
        await client.receive()
        await client.receive()
        found = slowest(world, LIST_OFFSETS)
        assert found.stages.queue == pytest.approx(LEAP_S, abs=10)
        whole(found)


async def test_responses_wait_for_earlier_ones_of_their_connection() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t")
        world.hold()
        client.post(produce_request(9, {"t": {0: batch(b"a")}}))
        await until(lambda: world.log("t").log_end_offset == 1, "append")
        client.post(produce_request(9, {"nowhere": {0: batch(b"a")}}))
        recorder = world.services.slow_requests
        assert recorder is not None
        await until(lambda: sum(world.server.held_bytes) > 600, "the second request has arrived")
        clock.leapt_s += LEAP_S
        world.release()
        await client.receive()
        assert outcome(await client.receive()).error_code == 3
        (found,) = [one for one in recorded(world, PRODUCE) if one.topic == "nowhere"]
        assert found.stages.response == pytest.approx(LEAP_S, abs=10)
        whole(found)


async def test_a_full_log_cache_is_the_stage_room() -> None:
    clock, small = LeapingClock(), CacheSettings(log_bytes=64 << 10)
    async with KafkaWorld(clock=clock, cache=small, upload=UploadSettings(age_ms=3_600_000)) as world:
        await world.topic("t")
        world.hold()
        async with world.client() as client:
            for _ in range(2):
                client.post(produce_request(9, {"t": {0: batch(bytes(40 << 10))}}, timeout=30_000))
            await until(lambda: len(world.server.running(9)) == 2, "both are under way")
            clock.leapt_s += LEAP_S
            world.release()
            for _ in range(2):
                assert outcome(await client.receive()).error_code == 0
        waited = [one for one in recorded(world, PRODUCE) if one.stages.room > LEAP_S / 2]
        assert len(waited) == 1
        whole(waited[0])


async def test_the_checks_of_a_large_batch_are_a_stage_of_their_own() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t", 2)
        clock.tick_s = 1.0
        await produce(client, 9, {"t": {0: batch(bytes(20 << 10)), 1: batch(bytes(20 << 10))}})
        found = slowest(world, PRODUCE)
        assert found.stages.check == pytest.approx(2.0, abs=0.5), "two readings of the clock, a batch each"
        assert found.stages.append >= 1.0
        assert found.partitions == 2
        whole(found)


async def test_a_long_poll_is_not_slow() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client, world.client() as producer:
        await world.topic("t")
        log = world.log("t")
        client.post(fetch_request(12, {"t": {0: 0}}, max_wait=30_000))
        await until(lambda: log.watermark_listeners == 1, "the request waits")
        clock.leapt_s += LEAP_S
        await produce(producer, 9, {"t": {0: batch(b"a")}})
        assert part(await client.receive()).error_code == 0
        found = slowest(world, FETCH)
        assert found.duration_s < 10 and found.waited_s == pytest.approx(LEAP_S, abs=10)
        assert (found.topic, found.partition) == ("t", 0)


async def test_a_slow_bucket_is_the_stage_read() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t")
        await produce(client, 9, {"t": {0: batch(b"a")}})
        await world.chill()
        clock.tick_s = 1.0
        assert part(await fetch(client, 12, {"t": {0: 0}}, max_wait=100)).error_code == 0
        found = slowest(world, FETCH)
        assert found.stages.read >= 2.0, "the reader reads the clock, too"
        whole(found)


async def test_nothing_is_recorded_when_it_is_switched_off() -> None:
    async with KafkaWorld(kafka=KafkaSettings(port=0, slow_requests=0)) as world, world.client() as client:
        await world.topic("t")
        assert outcome(await produce(client, 9, {"t": {0: batch(b"a")}})).error_code == 0
        assert world.services.slow_requests is None


async def test_a_request_under_way_is_seen_and_a_long_poll_is_none() -> None:
    async with KafkaWorld() as world, KafkaClient(*world.server.address, client_id="app") as client:
        await world.topic("t")
        world.hold()
        client.post(produce_request(9, {"t": {0: batch(b"a")}}))
        async with world.client() as reader:
            reader.post(fetch_request(12, {"t": {0: 0}}, max_wait=30_000))
            await until(lambda: world.log("t").watermark_listeners == 1, "the request waits")
            await until(lambda: len(world.server.running(9)) == 1, "the producer waits")
            ((age_s, api_key, client_id),) = world.server.running(9)
            assert age_s >= 0 and (api_key, client_id) == (PRODUCE, "app")
        world.release()
        await client.receive()
        assert world.server.running(9) == []


async def test_requests_that_were_answered_are_freed_without_the_cycle_collector() -> None:
    """Each holds the frame that its batches came in."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await produce(client, 9, {"t": {0: batch(b"a")}})
                assert part(await fetch(client, 12, {"t": {0: 0}}, max_wait=10)).error_code == 0
                await fetch(client, 12, {"t": {0: world.log("t").high_watermark}}, max_wait=10)
            gc.collect()
            found = {type(one).__name__ for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not found & {"_Produce", "_Fetch", "RequestContext", "_Exchange"}
