"""The APIs of transactions over the wire, in every version, against a real coordinator and real partition logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.broker.test_handlers_produce import produce
from tests.support import schema
from tests.support.kafka_client import DESCRIBE_TRANSACTIONS, KafkaClient
from tests.support.kafka_world import KafkaWorld, batch
from tidelog.broker.coordinators.topic import OFFSETS_TOPIC, TRANSACTION_TOPIC
from tidelog.broker.kafka.apis import all_apis
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL

FIND, INIT, ADD, ADD_OFFSETS, END, MARKERS, LIST = 10, 22, 24, 25, 26, 27, 66
VERSIONS = {api.api_key: range(api.min_version, api.max_version + 1) for api in all_apis()}
PING_PONG_VERSION = 11
"""The last version of Produce whose clients add partitions themselves."""


@asynccontextmanager
async def transactions(level: int = TRANSACTIONS_LEVEL) -> AsyncIterator[tuple[KafkaWorld, KafkaClient]]:
    """A broker with topics `a` (2 partitions) and `b` (1), and a connection to it."""
    async with KafkaWorld(groups=True, apis=all_apis(), level=level) as world, world.client() as client:
        for name, partitions in ((OFFSETS_TOPIC, 2), (TRANSACTION_TOPIC, 2), ("a", 2), ("b", 1)):
            await world.topic(name, partitions)
        yield world, client


async def init(client: KafkaClient, version: int = 4, **fields: Any) -> Any:
    """InitProducerId, asked again while the transaction before is being ended."""
    of = {
        "transactional_id": "tx",
        "transaction_timeout": 60_000,
        "producer_id": -1,
        "producer_epoch": -1,
        "enable2_pc": False,
        "keep_prepared_txn": False,
    } | fields
    async with asyncio.timeout(60):
        while True:
            answer = await client.send(INIT, version, **of)
            if answer.error_code not in (14, 15, 16, 51):
                return answer
            await asyncio.sleep(0.01)


async def add(
    client: KafkaClient,
    version: int,
    producer: tuple[int, int],
    *,
    verify: bool = False,
    named: Sequence[str] = (),
) -> dict[Any, int]:
    """Add `a` 0 and 1, and `b` 0, or 0 and 1 of the topics that are named; the error of each."""

    def made(message: str, **fields: Any) -> Any:
        return schema.request(ADD, version).make(message, **fields)

    wanted: list[tuple[str, tuple[int, ...]]] = [(name, (0, 1)) for name in named]
    wanted = wanted or [("a", (0, 1)), ("b", (0,))]
    topics = [made("AddPartitionsToTxnTopic", name=name, partitions=partitions) for name, partitions in wanted]
    if version >= 4:
        one = made(
            "AddPartitionsToTxnTransaction",
            transactional_id="tx",
            producer_id=producer[0],
            producer_epoch=producer[1],
            verify_only=verify,
            topics=topics,
        )
        answer = await client.send(ADD, version, transactions=[one])
        assert answer.error_code == 0
        (result,) = answer.results_by_transaction
        assert result.transactional_id == "tx"
        found = result.topic_results
    else:
        answer = await client.send(
            ADD,
            version,
            v3_and_below_transactional_id="tx",
            v3_and_below_producer_id=producer[0],
            v3_and_below_producer_epoch=producer[1],
            v3_and_below_topics=topics,
        )
        found = answer.results_by_topic_v3_and_below
    return {
        (topic.name, part.partition_index): part.partition_error_code
        for topic in found
        for part in topic.results_by_partition
    }


async def end(client: KafkaClient, version: int, producer: tuple[int, int], *, commit: bool = True) -> Any:
    return await client.send(
        END,
        version,
        transactional_id="tx",
        producer_id=producer[0],
        producer_epoch=producer[1],
        committed=commit,
    )


async def describe(client: KafkaClient, *names: str) -> dict[str, Any]:
    answer = await client.send(DESCRIBE_TRANSACTIONS, 0, transactional_ids=list(names))
    return {one.transactional_id: one for one in answer.transaction_states}


async def until_state(client: KafkaClient, state: str) -> None:
    async with asyncio.timeout(60):
        while (await describe(client, "tx"))["tx"].transaction_state != state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def record(producer: tuple[int, int], sequence: int = 0) -> bytes:
    return batch(b"v", producer_id=producer[0], producer_epoch=producer[1], base_sequence=sequence, transactional=True)


async def send(client: KafkaClient, producer: tuple[int, int], topic: str, partition: int, version: int = 11) -> int:
    answer = await produce(client, version, {topic: {partition: record(producer)}}, transactional_id="tx")
    return int(answer.responses[0].partition_responses[0].error_code)


@pytest.mark.parametrize("version", VERSIONS[INIT])
async def test_every_version_of_init_gives_the_id_and_fences_the_producer_before(version: int) -> None:
    async with transactions() as (_, client):
        first = await init(client, version)
        again = await init(client, version)
        assert (first.error_code, again.error_code, first.producer_epoch) == (0, 0, 0)
        assert (again.producer_id, again.producer_epoch) == (first.producer_id, 1)
        refused = await add(client, 3, (first.producer_id, 0))
        assert set(refused.values()) == {90}, "a producer of an older epoch"
        if version >= 6:
            assert (again.ongoing_txn_producer_id, again.ongoing_txn_producer_epoch) == (-1, -1)
        if version >= 3:
            kept = await init(client, version, producer_id=again.producer_id, producer_epoch=1)
            assert (kept.error_code, kept.producer_epoch) == (0, 2), "KIP-360: the producer goes on with its own id"


@pytest.mark.parametrize("version", VERSIONS[ADD])
@pytest.mark.parametrize("end_version", VERSIONS[END])
async def test_partitions_are_added_and_the_transaction_ends(version: int, end_version: int) -> None:
    async with transactions() as (world, client):
        answer = await init(client)
        producer = (answer.producer_id, answer.producer_epoch)
        assert await add(client, version, producer) == {("a", 0): 0, ("a", 1): 0, ("b", 0): 0}
        assert await send(client, producer, "a", 1) == 0
        assert await send(client, producer, "b", 0) == 0
        shown = (await describe(client, "tx"))["tx"]
        assert (shown.transaction_state, shown.producer_id, shown.producer_epoch) == ("Ongoing", *producer)
        assert {one.topic: tuple(one.partitions) for one in shown.topics} == {"a": (0, 1), "b": (0,)}
        assert world.log("a", 1).last_stable_offset == 0
        ended = await end(client, end_version, producer)
        assert ended.error_code == 0
        await until_state(client, "CompleteCommit")
        assert world.log("a", 1).last_stable_offset == world.log("b", 0).last_stable_offset == 2
        next_epoch = producer[1] + (end_version >= 5)
        if end_version >= 5:
            assert (ended.producer_id, ended.producer_epoch) == (producer[0], next_epoch), "KIP-890"
        again = await end(client, end_version, producer)
        assert again.error_code == 0, "an answer that was lost is asked for again"
        shown = (await describe(client, "tx"))["tx"]
        assert (shown.producer_epoch, shown.topics) == (next_epoch, ())
        assert shown.transaction_start_time is None, "-1 on the wire"


@pytest.mark.parametrize("version", [4, 5])
async def test_brokers_may_ask_whether_partitions_were_added(version: int) -> None:
    async with transactions() as (_, client):
        answer = await init(client)
        producer = (answer.producer_id, answer.producer_epoch)
        missing = 120 if version >= 5 else 48
        assert set((await add(client, version, producer, verify=True)).values()) == {missing}
        await add(client, version, producer)
        assert set((await add(client, version, producer, verify=True)).values()) == {0}


async def test_none_is_added_if_one_partition_does_not_exist() -> None:
    async with transactions() as (_, client):
        answer = await init(client)
        topic = schema.request(ADD, 3).make("AddPartitionsToTxnTopic", name="a", partitions=(0, 7))
        refused = await client.send(
            ADD,
            3,
            v3_and_below_transactional_id="tx",
            v3_and_below_producer_id=answer.producer_id,
            v3_and_below_producer_epoch=answer.producer_epoch,
            v3_and_below_topics=[topic],
        )
        codes = [one.partition_error_code for one in refused.results_by_topic_v3_and_below[0].results_by_partition]
        assert codes == [55, 3]
        assert (await describe(client, "tx"))["tx"].transaction_state == "Empty"


@pytest.mark.parametrize("internal", [OFFSETS_TOPIC, TRANSACTION_TOPIC])
@pytest.mark.parametrize("version", [3, 5])
async def test_no_client_adds_partitions_of_internal_topics(version: int, internal: str) -> None:
    """A marker in `__transaction_state` would be a record that its coordinator cannot read: all its ids were lost."""
    async with transactions() as (_, client):
        answer = await init(client)
        refused = await add(client, version, (answer.producer_id, answer.producer_epoch), named=("a", internal))
        assert refused == {("a", 0): 55, ("a", 1): 55, (internal, 0): 29, (internal, 1): 29}
        assert (await describe(client, "tx"))["tx"].transaction_state == "Empty"


@pytest.mark.parametrize("version", VERSIONS[ADD_OFFSETS])
async def test_offsets_are_added_by_their_group(version: int) -> None:
    async with transactions() as (_, client):
        answer = await init(client)
        producer = {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch}
        added = await client.send(ADD_OFFSETS, version, transactional_id="tx", group_id="g", **producer)
        assert added.error_code == 0
        (topic,) = (await describe(client, "tx"))["tx"].topics
        assert topic.topic == OFFSETS_TOPIC and len(topic.partitions) == 1
        nameless = await client.send(ADD_OFFSETS, version, transactional_id="tx", group_id="", **producer)
        assert nameless.error_code == 24


@pytest.mark.parametrize("version", VERSIONS[MARKERS])
async def test_an_administrator_ends_a_transaction_that_hangs(version: int) -> None:
    async with transactions() as (world, client):
        answer = await init(client)
        producer = (answer.producer_id, answer.producer_epoch)
        await add(client, 3, producer)
        assert await send(client, producer, "a", 0) == 0

        def made(message: str, **fields: Any) -> Any:
            return schema.request(MARKERS, version).make(message, **fields)

        marker = made(
            "WritableTxnMarker",
            producer_id=producer[0],
            producer_epoch=producer[1],
            transaction_result=False,
            topics=[
                made("WritableTxnMarkerTopic", name="a", partition_indexes=(0, 5)),
                made("WritableTxnMarkerTopic", name=TRANSACTION_TOPIC, partition_indexes=(0, 1)),
            ],
            coordinator_epoch=1,
            transaction_version=0,
        )
        before = [world.log(TRANSACTION_TOPIC, index).log_end_offset for index in (0, 1)]
        written = await client.send(MARKERS, version, markers=[marker])
        (result,) = written.markers
        assert [[one.error_code for one in topic.partitions] for topic in result.topics] == [[0, 3], [17, 17]]
        assert [world.log(TRANSACTION_TOPIC, index).log_end_offset for index in (0, 1)] == before
        assert world.log("a", 0).open_transactions() == []
        assert world.log("a", 0).last_stable_offset == 2


@pytest.mark.parametrize("version", VERSIONS[LIST])
async def test_transactions_are_listed_by_every_filter(version: int) -> None:
    async with transactions() as (_, client):
        for name in ("pay-1", "pay-2", "ship"):
            await init(client, transactional_id=name)
        answer = await init(client)
        await add(client, 3, (answer.producer_id, answer.producer_epoch))

        async def listed(**filters: Any) -> set[str]:
            of = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1} | filters
            found = await client.send(LIST, version, **of)
            assert found.error_code == 0
            return {one.transactional_id for one in found.transaction_states}

        assert await listed() == {"pay-1", "pay-2", "ship", "tx"}
        assert await listed(state_filters=["Ongoing"]) == {"tx"}
        assert await listed(producer_id_filters=[answer.producer_id]) == {"tx"}
        assert await listed(state_filters=["Empty", "Dead"]) == {"pay-1", "pay-2", "ship"}
        if version >= 1:
            assert await listed(duration_filter=3_600_000) == set()
        if version >= 2:
            assert await listed(transactional_id_pattern="pay-.") == {"pay-1", "pay-2"}
            everything = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1}
            refused = await client.send(LIST, version, **everything, transactional_id_pattern="(")
            assert refused.error_code == 128
        odd = await client.send(LIST, version, state_filters=["Odd"], producer_id_filters=[], duration_filter=-1)
        assert (tuple(odd.unknown_state_filters), odd.transaction_states) == (("Odd",), ())


async def test_ids_that_nobody_has_are_not_found() -> None:
    async with transactions() as (_, client):
        assert (await describe(client, "nobody"))["nobody"].error_code == 105
        again = await client.send(DESCRIBE_TRANSACTIONS, 0, transactional_ids=["nobody"] * 50)
        assert len(again.transaction_states) == 1  # what is named several times is described once


@pytest.mark.parametrize("version", VERSIONS[FIND])
async def test_the_coordinator_of_a_transactional_id_is_found(version: int) -> None:
    async with transactions() as (_, client):
        answer = await client.send(FIND, version, key="tx", key_type=1, coordinator_keys=["tx"])
        found = answer.coordinators[0] if version >= 4 else answer
        if version >= 1:
            assert (found.error_code, found.node_id) == (0, 1)


async def test_below_the_feature_level_everything_is_refused_and_nothing_is_written() -> None:
    async with transactions(level=TRANSACTIONS_LEVEL - 1) as (world, client):
        assert (await init(client)).error_code == 35
        (found,) = (await client.send(FIND, 6, key_type=1, coordinator_keys=["tx"])).coordinators
        assert found.error_code == 53 and "`tidelog cluster upgrade`" in found.error_message
        assert set((await add(client, 3, (1, 0))).values()) == {48}
        assert (await end(client, 4, (1, 0))).error_code == 48
        assert world.log(TRANSACTION_TOPIC, 0).log_end_offset == world.log(TRANSACTION_TOPIC, 1).log_end_offset == 0
