"""Transactional batches in Produce: the question to the coordinator, its errors, guards, the order of a connection."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.broker.test_handlers_produce import outcome, produce, produce_request
from tests.broker.test_slow_stages import LeapingClock
from tests.support.kafka_world import KafkaWorld, batch, until
from tests.support.scripted_transactions import Question
from tidelog.broker.kafka.handlers.produce_transactions import produce_error
from tidelog.broker.kafka.services import NoCoordinators
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.runtime.errors import Overloaded
from tidelog.stream.admission import EARLIER_BATCH_S

VERIFIES, ADDS = 11, 12
PID = 7


def transactional(sequence: int = 0, *, epoch: int = 0, pid: int = PID, value: bytes = b"v") -> bytes:
    return batch(value, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, transactional=True)


def codes(response: Any) -> list[int]:
    return [part.error_code for topic in response.responses for part in topic.partition_responses]


@pytest.mark.parametrize("version", [3, 8, 9, VERIFIES, ADDS, 13])
async def test_only_the_first_batch_of_a_transaction_in_a_partition_is_asked_about(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t", 3)
        key = uuid.UUID(bytes=topic.id) if version >= 13 else "t"

        async def send(parts: dict[int, int], epoch: int = 0) -> list[int]:
            sent: dict[int, bytes | None] = {
                part: transactional(sequence, epoch=epoch) for part, sequence in parts.items()
            }
            return codes(await produce(client, version, {key: sent}, transactional_id="tx"))

        asked = world.transactions.questions
        assert await send({0: 0, 2: 0}) == [0, 0]
        assert asked == [Question("tx", PID, 0, [("t", 0), ("t", 2)], version >= ADDS)], "all in one question"
        assert await send({0: 1, 2: 1}) == [0, 0]
        assert len(asked) == 1
        assert await send({0: 2, 1: 0}) == [0, 0]
        assert asked[1:] == [Question("tx", PID, 0, [("t", 1)], version >= ADDS)]
        world.log("t", 0).write_marker(PID, 1, commit=True, coordinator_epoch=1, transaction_version=2)
        assert await send({0: 0, 1: 1}, epoch=1) == [0, 45], "of a new epoch in partition 1, where sequences start at 0"
        assert [question.partitions for question in asked[2:]] == [[("t", 0), ("t", 1)]]
        assert world.log("t", 0).log_end_offset == 5


async def test_batches_that_are_in_no_transaction_ask_nothing() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        plain = batch(b"a", producer_id=PID, producer_epoch=0, base_sequence=0)
        assert codes(await produce(client, 9, {"t": {0: plain}}, transactional_id="tx")) == [0]
        assert codes(await produce(client, 9, {"t": {0: batch(b"a")}}, transactional_id="tx")) == [0]
        assert world.transactions.questions == []


ERRORS = [
    # coordinator's, Produce v10, v11, v12
    (90, 47, 47, 47),
    (47, 47, 47, 47),
    (48, 48, 48, 48),
    (49, 49, 49, 49),
    (120, 48, 120, 120),
    (13, 19, 19, 19),
    (14, 19, 19, 19),
    (15, 19, 19, 19),
    (16, 19, 19, 19),
    (51, 19, 19, 51),
    (53, 53, 53, 53),
    (29, 29, 29, 29),
]


@pytest.mark.parametrize(("told", "v10", "v11", "v12"), ERRORS)
async def test_the_coordinators_errors_are_told_as_producers_know_them(told: int, v10: int, v11: int, v12: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        for version, expected in ((10, v10), (11, v11), (12, v12)):
            world.transactions.script = [{("t", 0): told}] * 50
            sent: dict[int, bytes | None] = {0: transactional(), 1: transactional()}
            response = await produce(client, version, {"t": sent}, transactional_id="tx")
            assert codes(response) == [expected, 0]
            assert str(told) in outcome(response).error_message and "tx" in outcome(response).error_message
            assert world.log("t", 0).log_end_offset == 0
            world.log("t", 1).write_marker(PID, 0, commit=False, coordinator_epoch=1, transaction_version=1)
            world.transactions.script = []
            assert produce_error(told, version) == expected
            first = transactional(pid=100 + version)
            assert codes(await produce(client, version, {"t": {1: first}}, transactional_id="tx")) == [0]


async def test_a_transaction_whose_last_markers_are_under_way_is_asked_again_from_version_12_on() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        world.transactions.script = [{("t", 1): 51}, 51, 0]
        sent: dict[int, bytes | None] = {0: transactional(), 1: transactional()}
        assert codes(await produce(client, ADDS, {"t": sent}, transactional_id="tx")) == [0, 0]
        asked = [question.partitions for question in world.transactions.questions]
        assert asked == [[("t", 0), ("t", 1)], [("t", 1)], [("t", 1)]]
        world.transactions.questions.clear()
        world.transactions.script = [51]
        again = transactional(pid=8)
        assert codes(await produce(client, VERIFIES, {"t": {0: again}}, transactional_id="tx")) == [19]
        assert len(world.transactions.questions) == 1


@pytest.mark.parametrize("version", [10, VERIFIES, ADDS])
async def test_a_late_yes_lets_nothing_in_behind_an_abort(version: int) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.transactions.open.clear()
        client.post(produce_request(version, {"t": {0: transactional()}}, transactional_id="tx"))
        await until(lambda: bool(world.transactions.questions), "the question")
        world.log("t").write_marker(PID, 0, commit=False, coordinator_epoch=1, transaction_version=1)
        world.transactions.open.set()
        assert codes(await client.receive()) == [120 if version >= VERIFIES else 48]
        assert world.log("t").log_end_offset == 1
        assert world.log("t").open_transactions() == []


async def test_behind_a_marker_of_version_2_the_old_epoch_is_fenced() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.transactions.open.clear()
        client.post(produce_request(ADDS, {"t": {0: transactional()}}, transactional_id="tx"))
        await until(lambda: bool(world.transactions.questions), "the question")
        world.log("t").write_marker(PID, 1, commit=False, coordinator_epoch=1, transaction_version=2)
        world.transactions.open.set()
        assert codes(await client.receive()) == [47]
        assert codes(await produce(client, ADDS, {"t": {0: transactional()}}, transactional_id="tx")) == [47]
        assert len(world.transactions.questions) == 1, "whose epoch is over is not asked about"


@pytest.mark.parametrize("told", [[0], [51, 0], [51, 51, 0]])
async def test_the_last_marker_of_the_transaction_before_lets_the_next_one_begin(told: list[int]) -> None:
    """It is written after the question was sent, or while that is asked again: the answer then is of the new epoch."""
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        assert codes(await produce(client, ADDS, {"t": {0: transactional()}}, transactional_id="tx")) == [0]
        world.transactions.script = list(told)
        world.transactions.questions.clear()

        def marker_at_the_last_question() -> None:
            if len(world.transactions.questions) == len(told):
                world.log("t").write_marker(PID, 1, commit=True, coordinator_epoch=1, transaction_version=2)

        world.transactions.on_question = marker_at_the_last_question
        again = await produce(client, ADDS, {"t": {0: transactional(epoch=1)}}, transactional_id="tx")
        assert codes(again) == [0]
        assert world.log("t").log_end_offset == 3


async def test_each_question_is_guarded_against_markers_of_older_versions() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        assert codes(await produce(client, ADDS, {"t": {0: transactional()}}, transactional_id="tx")) == [0]
        world.transactions.script = [51, 0]

        def marker_at_the_first_question() -> None:
            if len(world.transactions.questions) == 2:
                world.log("t").write_marker(PID, 1, commit=True, coordinator_epoch=1, transaction_version=1)

        world.transactions.on_question = marker_at_the_first_question
        again = await produce(client, ADDS, {"t": {0: transactional(epoch=1)}}, transactional_id="tx")
        assert codes(again) == [0]
        assert world.log("t").log_end_offset == 3


async def test_nothing_behind_a_question_on_its_connection_starts() -> None:
    async with KafkaWorld() as world, world.client() as client, world.client() as other:
        await world.topic("t", 2)
        world.transactions.open.clear()
        client.post(produce_request(ADDS, {"t": {0: transactional(0), 1: batch(b"plain")}}, transactional_id="tx"))
        for sequence in range(1, 5):
            client.post(produce_request(ADDS, {"t": {0: transactional(sequence)}}, transactional_id="tx"))
        client.post(produce_request(ADDS, {"t": {1: batch(b"behind")}}))
        await until(lambda: world.log("t", 1).log_end_offset == 1, "what needs no question is appended")
        assert codes(await produce(other, ADDS, {"t": {1: batch(b"other")}})) == [0], "other connections go on"
        assert (world.log("t", 0).log_end_offset, world.log("t", 1).log_end_offset) == (0, 2)
        world.transactions.open.set()
        answers = [await client.receive() for _ in range(6)]
        assert [codes(answer) for answer in answers] == [[0, 0], *[[0]] * 5]
        assert [outcome(answer).base_offset for answer in answers[:5]] == [0, 1, 2, 3, 4]
        assert len(world.transactions.questions) == 1


async def test_a_coordinator_that_does_not_answer_in_the_time_of_the_request_is_a_retriable_error() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 2)
        world.transactions.open.clear()
        sent: dict[int, bytes | None] = {0: transactional(), 1: batch(b"plain")}
        response = await produce(client, ADDS, {"t": sent}, transactional_id="tx", timeout=100)
        assert codes(response) == [19, 0]
        assert "coordinator" in outcome(response).error_message
        world.transactions.open.set()
        assert codes(await produce(client, ADDS, {"t": {0: transactional()}}, transactional_id="tx")) == [0]


async def test_a_marker_while_an_admitted_batch_waits_for_room_is_seen() -> None:
    """The transaction was open when the batch came, and is not any more when there is room.

    The coordinator is not asked: it would say yes for the producer's next transaction, which may have the same epoch.
    """
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        log = world.log("t")
        assert codes(await produce(client, VERIFIES, {"t": {0: transactional(0)}}, transactional_id="tx")) == [0]
        room = asyncio.Event()
        refused: list[int] = []

        async def writable() -> None:
            await room.wait()

        original = world.storage.append

        def full_once(record: Any) -> int:
            if not refused:
                refused.append(1)
                raise Overloaded("full")
            return original(record)

        world.storage.append = full_once  # type: ignore[method-assign]
        world.storage.writable = writable  # type: ignore[method-assign]
        client.post(produce_request(VERIFIES, {"t": {0: transactional(1)}}, transactional_id="tx"))
        await until(lambda: bool(refused), "a refusal for want of room")
        log.write_marker(PID, 0, commit=False, coordinator_epoch=1, transaction_version=1)
        room.set()
        assert codes(await client.receive()) == [120]
        assert len(world.transactions.questions) == 1
        assert log.log_end_offset == 2
        assert log.open_transactions() == []


async def test_a_log_that_was_opened_anew_during_the_question_is_asked_about_again() -> None:
    async with KafkaWorld() as world, world.client() as client:
        topic = await world.topic("t")
        world.transactions.open.clear()
        client.post(produce_request(ADDS, {"t": {0: transactional()}}, transactional_id="tx"))
        await until(lambda: bool(world.transactions.questions), "the question")
        await world.log("t").close()
        await world.open(topic, 0, leader_epoch=world.log("t").leader_epoch + 1)
        world.transactions.open.set()
        assert codes(await client.receive()) == [0]
        assert len(world.transactions.questions) == 2


async def test_a_batch_without_a_transactional_id_ends_the_request() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 3)
        for sent in ({0: transactional(), 1: batch(b"x")}, {1: transactional(), 2: transactional()}):
            assert codes(await produce(client, ADDS, {"t": dict(sent)})) == [53, 53]
        assert codes(await produce(client, ADDS, {"t": {0: batch(b"x"), 1: transactional(), 2: batch(b"y")}})) == [
            0,
            53,
            53,
        ]
        assert [world.log("t", index).log_end_offset for index in range(3)] == [1, 0, 0]
        assert world.transactions.questions == []


async def test_two_producers_in_one_request_are_refused() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t", 3)
        for other in (transactional(pid=8), transactional(epoch=1)):
            sent: dict[int, bytes | None] = {0: transactional(), 1: other, 2: batch(b"x")}
            assert codes(await produce(client, ADDS, {"t": sent}, transactional_id="tx")) == [49, 49, 49]
        assert [world.log("t", index).log_end_offset for index in range(3)] == [0, 0, 0]


async def test_a_batch_that_would_be_refused_anyway_adds_nothing_to_a_transaction() -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t", max_message_bytes="1000")
        clock.leapt_s += EARLIER_BATCH_S + 1
        damaged = bytearray(transactional())
        damaged[-1] ^= 1
        for sent, code in ((bytes(damaged), 2), (transactional(value=bytes(2000)), 10)):
            assert codes(await produce(client, ADDS, {"t": {0: sent}}, transactional_id="tx")) == [code]
        assert world.transactions.questions == []
        second = await produce(client, ADDS, {"t": {0: transactional(1)}}, transactional_id="tx")
        assert codes(second) == [6], "the first one is sent again"


@pytest.mark.parametrize("version", [VERIFIES, ADDS])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("coordinators", [15, 51])
async def test_a_batch_whose_coordinator_was_away_is_not_overtaken(
    version: int, is_known: bool, coordinators: int
) -> None:
    """Were the second batch taken, librdkafka would take the first one for written; or the second for a loss."""
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t")
        if is_known:
            assert codes(await produce(client, version, {"t": {0: transactional()}}, transactional_id="tx")) == [0]
            world.log("t").write_marker(PID, 0, commit=True, coordinator_epoch=1, transaction_version=1)
        clock.leapt_s += EARLIER_BATCH_S + 1
        world.transactions.script = [coordinators] * (1 if version < ADDS else 50)
        refused = codes(
            await produce(client, version, {"t": {0: transactional(is_known)}}, transactional_id="tx", timeout=1_000)
        )
        assert refused == [19 if (coordinators, version) != (51, ADDS) else 51]
        world.transactions.script.clear()
        for sequence, code in ((is_known + 1, 6), (is_known, 0), (is_known + 1, 0)):
            sent: dict[int, bytes | None] = {0: transactional(sequence)}
            assert codes(await produce(client, version, {"t": sent}, transactional_id="tx")) == [code]


@pytest.mark.parametrize(("version", "code"), [(VERIFIES, 0), (ADDS, 45)])
async def test_a_producer_that_is_new_here_starts_at_zero_from_version_12_on(version: int, code: int) -> None:
    clock = LeapingClock()
    async with KafkaWorld(clock=clock) as world, world.client() as client:
        await world.topic("t")
        assert codes(await produce(client, version, {"t": {0: transactional(5)}}, transactional_id="tx")) == [6]
        clock.leapt_s += EARLIER_BATCH_S + 1
        assert codes(await produce(client, version, {"t": {0: transactional(5)}}, transactional_id="tx")) == [code]


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
async def test_internal_topics_take_no_transactional_batches(name: str) -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic(name)
        assert codes(await produce(client, ADDS, {name: {0: transactional()}}, transactional_id="tx")) == [17]
        assert world.transactions.questions == [] and world.log(name).log_end_offset == 0


async def test_below_the_feature_level_of_transactions_the_upgrade_is_named() -> None:
    async with KafkaWorld(level=TRANSACTIONS_LEVEL - 1) as world, world.client() as client:
        await world.topic("t", 2)
        for fields in ({}, {"transactional_id": "tx"}):
            response = await produce(client, ADDS, {"t": {0: transactional()}}, **fields)
            assert codes(response) == [48]
            assert "tidelog cluster upgrade" in outcome(response).error_message
        assert codes(await produce(client, ADDS, {"t": {0: batch(b"x")}}, transactional_id="tx")) == [48]
        assert codes(await produce(client, ADDS, {"t": {0: transactional(), 1: batch(b"x")}})) == [48, 0]
        assert world.transactions.questions == []


async def test_a_failed_transactional_produce_with_acks_0_closes_the_connection() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.transactions.script = [90]
        client.post(produce_request(ADDS, {"t": {0: transactional()}}, transactional_id="tx", acks=0))
        assert await client.closed_by_broker()


async def test_a_broker_without_coordinators_is_asked_again_later() -> None:
    async with KafkaWorld() as world, world.client() as client:
        await world.topic("t")
        world.services.transactions = NoCoordinators()
        assert codes(await produce(client, ADDS, {"t": {0: transactional()}}, transactional_id="tx")) == [19]
