"""The hand-written part of Metadata against kio, byte by byte."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import schema
from tidelog.broker.kafka.wire.metadata import PartitionPart, encode_topic, join

METADATA = 3
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
BROKERS = st.lists(st.integers(0, 5), max_size=3).map(tuple)
PARTITIONS = st.lists(
    st.builds(
        PartitionPart,
        error_code=st.sampled_from([0, 5]),
        partition_index=st.integers(0, 20_000),
        leader_id=st.integers(-1, 5),
        leader_epoch=st.integers(-1, 1 << 30),
        replicas=BROKERS,
        in_sync=BROKERS,
        offline=BROKERS,
    ),
    max_size=5,
)
TOPICS = st.lists(
    st.fixed_dictionaries(
        {
            "error_code": st.sampled_from([0, 3, 17]),
            "name": st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=200),
            "topic_id": st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any)),
            "is_internal": st.booleans(),
            "partitions": PARTITIONS,
            "authorized_operations": INT32,
        }
    ),
    max_size=4,
)


def kio_topic(version: int, topic: dict[str, Any]) -> Any:
    make = schema.response(METADATA, version).make
    return make(
        "MetadataResponseTopic",
        error_code=topic["error_code"],
        name=topic["name"],
        topic_id=uuid.UUID(bytes=topic["topic_id"]) if topic["topic_id"] else None,
        is_internal=topic["is_internal"],
        partitions=[
            make(
                "MetadataResponsePartition",
                error_code=part.error_code,
                partition_index=part.partition_index,
                leader_id=part.leader_id,
                leader_epoch=part.leader_epoch,
                replica_nodes=part.replicas,
                isr_nodes=part.in_sync,
                offline_replicas=part.offline,
            )
            for part in topic["partitions"]
        ],
        topic_authorized_operations=topic["authorized_operations"],
    )


@pytest.mark.parametrize("version", range(14))
@settings(deadline=None)
@given(topics=TOPICS, cluster_operations=INT32, brokers=st.integers(0, 3))
def test_a_response_is_what_kio_would_write(
    version: int, topics: list[dict[str, Any]], cluster_operations: int, brokers: int
) -> None:
    make = schema.response(METADATA, version).make

    def response(rows: list[Any]) -> Any:
        return make(
            "MetadataResponse",
            throttle_time=0,
            brokers=[
                make("MetadataResponseBroker", node_id=number, host="h", port=number, rack=None)
                for number in range(brokers)
            ],
            cluster_id="c",
            controller_id=1,
            topics=rows,
            cluster_authorized_operations=cluster_operations,
            error_code=0,
        )

    wanted = schema.body(response([kio_topic(version, topic) for topic in topics]))
    encoded = [encode_topic(version, **topic) for topic in topics]
    assert join(version, schema.body(response([])), encoded) == wanted
