"""Requests with thousands of items let others run between them, and while the answer is encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.support.kafka_world import KafkaWorld
from tidelog.broker.kafka.handlers import (
    configs,
    describe_producers,
    describe_topics,
    find_coordinator,
    groups,
    leader_epoch,
    list_offsets,
    offsets,
    transactions,
)
from tidelog.broker.kafka.services import ApiHandler, RequestContext, serve
from tidelog.broker.kafka.wire.codec import LONG_ELEMENTS, EncodedBody, encode_body, is_long
from tidelog.broker.kafka.wire.messages import configs as config_messages
from tidelog.broker.kafka.wire.messages import groups as group_messages
from tidelog.broker.kafka.wire.messages import logs, topics
from tidelog.broker.kafka.wire.messages import offsets as offset_messages
from tidelog.broker.kafka.wire.messages import transactions as transaction_messages
from tidelog.runtime.steps import ITEMS_A_TURN, paced

ITEMS = 8 * ITEMS_A_TURN
NAMES = tuple(f"n{index}" for index in range(ITEMS))
TURNS = 7


async def turns_of(work: Awaitable[object]) -> int:
    """How often another task ran while `work` did."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await asyncio.sleep(0)
    before = turns
    await work
    counting.cancel()
    return turns - before


async def test_paced_items_come_in_order_and_let_others_run() -> None:
    seen: list[int] = []

    async def work() -> None:
        seen.extend([item async for item in paced(range(10), 3)])

    assert await turns_of(work()) == 3
    assert seen == list(range(10))


def _config_resources() -> tuple[config_messages.DescribeConfigsResource, ...]:
    make = config_messages.DescribeConfigsResource
    return tuple(make(resource_type=32, resource_name=name, configuration_keys=None) for name in NAMES)


def _list_offsets() -> logs.ListOffsetsRequest:
    partitions = tuple(logs.ListOffsetsPartition(partition_index=index, timestamp=-2) for index in range(ITEMS))
    return logs.ListOffsetsRequest(topics=(logs.ListOffsetsTopic(name="t", partitions=partitions),))


def _leader_epochs() -> logs.OffsetForLeaderEpochRequest:
    one = logs.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=0)
    return logs.OffsetForLeaderEpochRequest(topics=(logs.OffsetForLeaderTopic(topic="t", partitions=(one,) * ITEMS),))


def _commit() -> offset_messages.OffsetCommitRequest:
    make = offset_messages.OffsetCommitRequestPartition
    partitions = tuple(make(partition_index=at, committed_offset=5, committed_metadata="") for at in range(ITEMS))
    topic = offset_messages.OffsetCommitRequestTopic(name="t", partitions=partitions)
    return offset_messages.OffsetCommitRequest(
        group_id="g", generation_id_or_member_epoch=-1, member_id="", topics=(topic,)
    )


def _offset_fetch() -> offset_messages.OffsetFetchRequest:
    make = offset_messages.OffsetFetchRequestGroup
    return offset_messages.OffsetFetchRequest(groups=tuple(make(group_id=name, topics=None) for name in NAMES))


def _producers() -> logs.DescribeProducersRequest:
    topic = logs.DescribeProducersTopic(name="t", partition_indexes=tuple(range(ITEMS)))
    return logs.DescribeProducersRequest(topics=(topic,))


def _topic_partitions() -> topics.DescribeTopicPartitionsRequest:
    wanted = tuple(topics.DescribeTopicPartitionsTopic(name=name) for name in NAMES)
    return topics.DescribeTopicPartitionsRequest(topics=wanted, response_partition_limit=2000, cursor=None)


REQUESTS: dict[str, tuple[list[ApiHandler], int, Any]] = {
    "FindCoordinator": (find_coordinator.APIS, 4, group_messages.FindCoordinatorRequest(coordinator_keys=NAMES)),
    "DescribeGroups": (groups.APIS, 5, group_messages.DescribeGroupsRequest(groups=NAMES)),
    "DescribeConfigs": (
        configs.APIS,
        4,
        config_messages.DescribeConfigsRequest(resources=_config_resources(), include_synonyms=False),
    ),
    "DescribeProducers": (describe_producers.APIS, 0, _producers()),
    "DescribeTopicPartitions": (describe_topics.APIS, 0, _topic_partitions()),
    "DescribeTransactions": (
        transactions.APIS,
        0,
        transaction_messages.DescribeTransactionsRequest(transactional_ids=NAMES),
    ),
    "ListOffsets": (list_offsets.APIS, 7, _list_offsets()),
    "OffsetForLeaderEpoch": (leader_epoch.APIS, 4, _leader_epochs()),
    "OffsetFetch": (offsets.APIS, 8, _offset_fetch()),
    "OffsetCommit": (offsets.APIS, 8, _commit()),
}


@pytest.mark.parametrize("api", REQUESTS)
async def test_others_run_while_a_request_with_thousands_of_items_is_handled(api: str) -> None:
    apis, version, request = REQUESTS[api]
    (handler,) = [each for each in apis if each.api_key == request.API_KEY]
    async with KafkaWorld(groups=True) as world:
        await world.topic("t")
        for topic in ("__consumer_offsets", "__transaction_state"):
            await world.topic(topic, 2)
        async with asyncio.timeout(30):
            for group in NAMES[:16]:
                await world.services.groups.arrival(group)
        context = RequestContext(world.services, handler.api_key, version, 1, "test", "127.0.0.1")
        assert await turns_of(handler.handle(context, request)) >= TURNS


@pytest.mark.parametrize(("coordinators", "is_encoded"), [(LONG_ELEMENTS + 1, True), (LONG_ELEMENTS, False)])
async def test_a_long_response_is_encoded_beside_the_event_loop(coordinators: int, is_encoded: bool) -> None:
    found = group_messages.FoundCoordinator(key="g", node_id=1, host="h", port=9)
    response = group_messages.FindCoordinatorResponse(coordinators=(found,) * coordinators)

    async def answer(
        context: RequestContext, request: group_messages.FindCoordinatorRequest
    ) -> group_messages.FindCoordinatorResponse:
        return response

    handler = serve(group_messages.FindCoordinatorRequest, 0, 6, answer)
    async with KafkaWorld(apis=[handler]) as world, world.client() as client:
        context = RequestContext(world.services, handler.api_key, 4, 1, "test", "127.0.0.1")
        told: object = await handler.handle(context, group_messages.FindCoordinatorRequest())
        assert told == (EncodedBody(encode_body(handler.api_key, 4, response)) if is_encoded else response)
        received = await client.send(handler.api_key, 4, key_type=0, coordinator_keys=("g",))
        assert [each.port for each in received.coordinators] == [9] * coordinators


def test_elements_of_all_levels_make_a_response_long() -> None:
    def response(topics: int, partitions: int) -> logs.ListOffsetsResponse:
        partition = logs.ListOffsetsPartitionResponse(partition_index=0, error_code=0, timestamp=0, offset=0)
        topic = logs.ListOffsetsTopicResponse(name="t", partitions=(partition,) * partitions)
        return logs.ListOffsetsResponse(topics=(topic,) * topics)

    assert is_long(response(1, LONG_ELEMENTS)) and is_long(response(LONG_ELEMENTS // 2, 2))
    assert not is_long(response(1, LONG_ELEMENTS - 1)) and not is_long(response(2, 10))
