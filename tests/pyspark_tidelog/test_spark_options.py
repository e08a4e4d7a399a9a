"""The options of the Spark data source: what is read from them, and what a wrong one says."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from pyspark_tidelog.columns import COLUMNS, columns_of
from pyspark_tidelog.options import EARLIEST, LATEST, Bound, ReadOptions, read_options, stream_options
from tidelog.runtime.errors import ConfigError

HERE = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
TOPIC = {**HERE, "subscribe": "t"}


def test_without_further_options_a_topic_is_read_from_its_start_to_its_present_end() -> None:
    found = read_options(TOPIC)
    assert (found.bootstrap, found.topics) == ("127.0.0.1:9092", ("t",))
    assert (found.starting, found.ending) == (Bound(EARLIEST), Bound(LATEST))
    assert found.fail_on_data_loss and found.reads_tail and found.columns == COLUMNS
    assert pickle.loads(pickle.dumps(found)) == found


def test_names_are_those_of_sparks_kafka_source_in_any_case() -> None:
    found = read_options(
        {
            "KAFKA.BOOTSTRAP.SERVERS": "a:1",
            "subscribe": " t, u ,t",
            "STARTINGOFFSETS": "earliest",
            "endingOffsets": '{"t": {"0": 7, "1": -1}, "u": {"0": 0}}',
            "FailOnDataLoss": "FALSE",
            "includeHeaders": "true",
            "minPartitions": "10",
            "maxRecordsPerPartition": "5",
            "maxBytesPerTask": "1000",
            "tail": "skip",
            "kafka.isolation.level": "read_committed",
            "kafka.client.id": "me",
            "s3.endpoint": "http://s3",
        }
    )
    assert found.topics == ("t", "u")
    assert found.ending.offsets == {("t", 0): 7, ("t", 1): -1, ("u", 0): 0}
    assert (found.min_partitions, found.max_records, found.max_bytes) == (10, 5, 1_000)
    assert not found.fail_on_data_loss and found.columns == (*COLUMNS, "headers") and not found.reads_tail
    assert found.is_committed_only and found.kafka == {"client.id": "me"} and found.s3 == {"endpoint": "http://s3"}


def test_the_ways_to_name_partitions() -> None:
    assert read_options({**HERE, "subscribePattern": "a.*"}).pattern == "a.*"
    found = read_options({**HERE, "assign": '{"t": [1, 0, 1], "u": [3]}'})
    assert found.assigned == (("t", 1), ("t", 0), ("u", 3))


def test_timestamps_come_before_offsets_as_in_sparks_kafka_source() -> None:
    given = {**TOPIC, "startingOffsets": "earliest", "startingOffsetsByTimestamp": '{"t": {"0": 5}}'}
    assert read_options(given).starting == Bound(timestamps={("t", 0): 5})
    assert read_options({**given, "startingTimestamp": "17"}).starting == Bound(timestamp_ms=17)
    assert read_options({**given, "startingOffsetsByTimestampStrategy": "latest"}).latest_after_timestamps


def test_a_token_is_best_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert read_options({**TOPIC, "readTokenFile": str(file)}).token == "secret"
    assert read_options({**TOPIC, "readToken": "x"}).token == "x"
    with pytest.raises(ConfigError, match="both"):
        read_options({**TOPIC, "readTokenFile": str(file), "readToken": "x"})
    with pytest.raises(ConfigError, match="cannot read"):
        read_options({**TOPIC, "readTokenFile": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscribe": "t"}, "kafka.bootstrap.servers is missing"),
        (HERE, "exactly one of the options subscribe, subscribePattern and assign"),
        ({**TOPIC, "assign": "{}"}, "not subscribe and assign"),
        ({**HERE, "subscribe": " , "}, "names no topic"),
        ({**HERE, "subscribePattern": "("}, r"subscribePattern is '\('"),
        ({**HERE, "assign": "t"}, "assign is no JSON"),
        ({**HERE, "assign": '["t"]'}, "option assign"),
        ({**HERE, "assign": '{"t": [-1]}'}, "option assign: partitions of 't'"),
        ({**HERE, "assign": '{"t": []}'}, "names no partition"),
        ({**TOPIC, "startingOffsets": "latest"}, "cannot be 'latest'"),
        ({**TOPIC, "endingOffsets": "earliest"}, "cannot be 'earliest'"),
        ({**TOPIC, "startingOffsets": '{"t": {"0": -1}}'}, "startingOffsets has -1"),
        ({**TOPIC, "endingOffsets": '{"t": {"0": -2}}'}, "endingOffsets has -2"),
        ({**TOPIC, "startingOffsets": '{"t": {"0": -3}}'}, "startingOffsets: 't'"),
        ({**TOPIC, "startingOffsets": '{"t": {"a": 1}}'}, "startingOffsets: 't'"),
        ({**TOPIC, "startingOffsets": '{"t": 1}'}, "startingOffsets: 't'"),
        ({**TOPIC, "startingOffsets": '{"t": {"0": 1.5}}'}, "startingOffsets: 't'"),
        ({**TOPIC, "startingOffsetsByTimestamp": '{"t": {"0": -2}}'}, "startingOffsetsByTimestamp: 't'"),
        ({**TOPIC, "startingOffsets": "{}"}, "option startingOffsets names no partition"),
        ({**TOPIC, "endingOffsets": '{"t": {}}'}, "option endingOffsets names no partition"),
        ({**TOPIC, "endingOffsetsByTimestamp": "{}"}, "option endingOffsetsByTimestamp names no partition"),
        ({**TOPIC, "startingTimestamp": "soon"}, "startingTimestamp is 'soon'"),
        ({**TOPIC, "minPartitions": "0"}, "minPartitions is '0'"),
        ({**TOPIC, "maxBytesPerTask": "1e6"}, "maxBytesPerTask is '1e6'"),
        ({**TOPIC, "failOnDataLoss": "no"}, "failOnDataLoss is 'no'"),
        ({**TOPIC, "tail": "none"}, "tail is 'none': broker or skip"),
        ({**TOPIC, "startingOfsets": "earliest"}, "there is no option 'startingOfsets'"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_options(given)


def test_a_misspelt_option_is_told_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        read_options({**TOPIC, "startingOfsets": "earliest"})
    assert caught.value.hint == "did you mean startingOffsets?"


def test_what_spark_adds_is_no_error() -> None:
    assert isinstance(read_options({**TOPIC, "path": "x"}), ReadOptions)


def test_a_stream_begins_at_the_end_and_has_bounds_of_its_own() -> None:
    found = stream_options(TOPIC)
    assert found.starting == Bound(LATEST) and (found.max_offsets, found.min_offsets) == (0, 0)
    assert stream_options({**TOPIC, "startingOffsets": "earliest"}).starting == Bound(EARLIEST)
    assert stream_options({**TOPIC, "startingOffsets": '{"t": {"0": -1}}'}).starting == Bound(offsets={("t", 0): -1})
    found = stream_options(
        {
            **TOPIC,
            "maxOffsetsPerTrigger": "10",
            "minOffsetsPerTrigger": "5",
            "maxTriggerDelay": "90 min",
            "groupIdPrefix": "mine",
        }
    )
    assert (found.max_offsets, found.min_offsets, found.max_delay_s) == (10, 5, 5_400.0)
    assert found.group_prefix == "mine"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("endingOffsets", "latest", "option endingOffsets is for batch reads: a stream has no end"),
        ("maxTriggerDelay", "soon", "option maxTriggerDelay is 'soon': a time is expected"),
        ("maxOffsetsPerTrigger", "0", "option maxOffsetsPerTrigger is '0'"),
        ("minOffsetsPerTrigger", "101", "option minOffsetsPerTrigger is 101, and maxOffsetsPerTrigger 100"),
    ],
)
def test_a_wrong_option_of_a_stream_is_refused(option: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        stream_options({**TOPIC, "maxOffsetsPerTrigger": "100", option: value})
    assert told in refused.value.message


def test_a_batch_refuses_what_is_for_streams() -> None:
    with pytest.raises(ConfigError, match="option maxOffsetsPerTrigger is for streaming reads"):
        read_options({**TOPIC, "maxOffsetsPerTrigger": "5"})


def test_columns_that_a_read_names_may_have_metadata_but_no_other_type() -> None:
    def named(*fields: StructField) -> tuple[str, ...]:
        return columns_of(StructType([*fields]))

    value = StructField("value", BinaryType(), metadata={"comment": "theirs"})
    assert named(StructField("offset", LongType(), metadata={"from": "a frame"}), value) == ("offset", "value")
    for wrong in ((), (value, value), (StructField("offset", IntegerType()),), (StructField("VALUE", BinaryType()),)):
        with pytest.raises(ConfigError, match="is not of columns of the source"):
            named(*wrong)
