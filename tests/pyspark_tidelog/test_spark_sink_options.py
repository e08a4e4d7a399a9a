"""The options and columns of the Spark sink: what is taken from them, and what a wrong one says."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_tidelog.exactly_once import stream_writer
from pyspark_tidelog.sink import batch_writer
from pyspark_tidelog.sink_options import write_options
from tidelog.runtime.errors import ConfigError

HERE = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
TOPIC = {**HERE, "topic": "t"}


BINARY, TEXT, INT = BinaryType(), StringType(), IntegerType()
Columns = list[tuple[str, DataType]]


def frame(columns: Columns) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns])


def headers(value: DataType) -> ArrayType:
    return ArrayType(frame([("key", TEXT), ("value", value)]))


VALUE: Columns = [("value", BINARY)]
READ: Columns = [
    ("key", BINARY),
    ("value", BINARY),
    ("topic", TEXT),
    ("partition", INT),
    ("offset", LongType()),
    ("timestamp", TimestampType()),
    ("timestampType", INT),
]


def test_a_write_is_idempotent_acknowledged_by_all_and_bounded_without_further_options() -> None:
    found = write_options(TOPIC)
    assert found.topic == "t"
    assert found.kafka["bootstrap.servers"] == "127.0.0.1:9092"
    assert (found.kafka["enable.idempotence"], found.kafka["acks"]) == ("true", "all")
    assert int(found.kafka["queue.buffering.max.kbytes"]) == 64 << 10
    assert found.kafka["partitioner"] == "murmur2_random"
    assert pickle.loads(pickle.dumps(found)) == found


def test_names_are_those_of_sparks_kafka_sink_in_any_case() -> None:
    found = write_options(
        {
            "KAFKA.BOOTSTRAP.SERVERS": " a:1 ",
            "Topic": " t ",
            "includeHeaders": "TRUE",
            "checkpointLocation": "/c",
            "kafka.Compression.type": "zstd",
            "kafka.message.max.bytes": "5000",
            "kafka.acks": "-1",
            "kafka.enable.idempotence": "True",
        }
    )
    assert found.topic == "t"
    expected = {"compression.type": "zstd", "message.max.bytes": "5000", "acks": "all", "bootstrap.servers": "a:1"}
    assert expected.items() <= found.kafka.items()
    assert write_options(HERE).topic == ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"topic": "t"}, "kafka.bootstrap.servers is missing"),
        ({**HERE, "topic": " "}, "option topic is empty"),
        ({**TOPIC, "topics": "u"}, "did you mean topic?"),
        ({**TOPIC, "startingOffsets": "earliest"}, "startingOffsets is one of reads"),
        ({**TOPIC, "path": "/t"}, "a topic has no path"),
        ({**TOPIC, "includeHeaders": "yes"}, "true or false is expected"),
        ({**TOPIC, "kafka.acks": "1"}, "kafka.acks is '1'; it must be all or -1, or a record that is acknowledged"),
        ({**TOPIC, "kafka.request.required.acks": "0"}, "could be lost"),
        ({**TOPIC, "kafka.enable.idempotence": "false"}, "a retry could write a record twice"),
        ({**TOPIC, "kafka.max.in.flight.requests.per.connection": "6"}, "in another order"),
        ({**TOPIC, "kafka.retries": "0"}, "would fail the task"),
        ({**TOPIC, "kafka.transactional.id": "x"}, "would fence each other; see exactlyOnce"),
        ({**TOPIC, "transactionalIdPrefix": "x"}, "no use without exactlyOnce"),
        ({**TOPIC, "exactlyOnce": "true", "transactionalIdPrefix": "a.b"}, "of letters, digits, - and _"),
        ({**TOPIC, "exactlyOnce": "true", "kafka.security.protocol": "ssl"}, "with exactlyOnce it must be plaintext"),
        ({**TOPIC, "kafka.value.serializer": "x"}, "cast them in the frame"),
        ({**TOPIC, "kafka.metadata.broker.list": "b:1"}, "kafka.bootstrap.servers names the brokers"),
        ({**TOPIC, "kafka.max.request.size": "5"}, "librdkafka has kafka.message.max.bytes"),
        ({**TOPIC, "kafka.message.max.bytes": "90000000"}, "raise kafka.queue.buffering.max.kbytes"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_do(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        write_options(given)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("kafka.compresion.type", "zstd", 'No such configuration property: "compresion.type"'),
        ("kafka.compression.type", "best", 'Invalid value "best"'),
        ("kafka.queue.buffering.max.kbytes", "many", "queue.buffering.max.kbytes"),
        ("kafka.error_cb", "print", "librdkafka"),
    ],
)
def test_what_librdkafka_does_not_know_is_refused_before_the_first_task(name: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        batch_writer({**TOPIC, name: value}, frame(VALUE), overwrite=False)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "columns",
    [
        [("value", TEXT)],
        [("value", BINARY), ("key", TEXT), ("partition", INT), ("headers", headers(BINARY))],
        [("value", BINARY), ("topic", INT)],
        READ,
    ],
)
def test_columns_of_sparks_kafka_sink_are_written_and_others_ignored(columns: Columns) -> None:
    assert pickle.loads(pickle.dumps(batch_writer(TOPIC, frame(columns), overwrite=False)))
    assert pickle.loads(pickle.dumps(stream_writer(TOPIC, frame(columns))))


@pytest.mark.parametrize(
    ("given", "columns", "told"),
    [
        (TOPIC, [("key", BINARY)], "the frame has no column value"),
        (TOPIC, [("Value", BINARY)], "the frame has no column value"),
        (TOPIC, [("value", INT)], "column value is int; it must be string or binary"),
        (TOPIC, [*VALUE, ("value", TEXT)], "2 columns value"),
        (TOPIC, [*VALUE, ("key", ArrayType(BINARY))], "column key is array<binary>; it must be string or binary"),
        (TOPIC, [*VALUE, ("partition", LongType())], "column partition is bigint; it must be integer"),
        (TOPIC, [*VALUE, ("headers", MapType(TEXT, BINARY))], "column headers is map<string,binary>; it must be array"),
        (TOPIC, [*VALUE, ("headers", headers(TEXT))], "it must be array<struct<key:string,value:binary>>"),
        ({**TOPIC, "keepTimestamps": "true"}, VALUE, "the frame has no column timestamp; it must be timestamp"),
        ({**TOPIC, "keepTimestamps": "true"}, [*VALUE, ("timestamp", LongType())], "column timestamp is bigint"),
        (HERE, VALUE, "neither option topic nor a column topic"),
        (HERE, [*VALUE, ("topic", BINARY)], "column topic is binary; it must be string"),
    ],
)
def test_a_frame_that_cannot_be_written_is_refused(given: dict[str, str], columns: Columns, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        stream_writer(given, frame(columns))
    assert told in str(raised.value)


def test_a_topic_is_not_overwritten() -> None:
    with pytest.raises(ConfigError, match="append"):
        batch_writer(TOPIC, frame(VALUE), overwrite=True)
