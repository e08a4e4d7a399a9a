"""Arrow batches to records, without a cluster: what is made of the columns, and what rows do that cannot be written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError

from pyspark_tidelog.sink import Columns, explained, write_rows
from pyspark_tidelog.sink_options import WriteOptions, write_options
from tidelog.runtime.errors import InvalidInput, Unavailable

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def rows_of(batch: pa.RecordBatch, topic: str = "") -> list[tuple[Any, ...]]:
    columns = Columns(batch, topic)
    assert columns.problem is None, columns.problem
    return list(columns.rows())


def unreachable(**settings: str) -> WriteOptions:
    """Options of a write to a broker that does not answer, and which gives up soon."""
    given = {f"kafka.{name.replace('_', '.')}": value for name, value in settings.items()}
    timeout = {"kafka.delivery.timeout.ms": "700", "kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}
    return write_options({**timeout, **given})


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(columns)


def test_absent_columns_are_nulls_and_the_option_comes_before_the_column() -> None:
    values = pa.array(["a", None, "ü"])
    assert rows_of(batch(value=values), "t") == [("t", None, v, -1, None) for v in (b"a", None, "ü".encode())]
    found = rows_of(batch(value=values, topic=pa.array([None, "u", 5 * "v"])), "t")
    assert [row[0] for row in found] == ["t", "t", "t"]
    found = rows_of(batch(value=values, topic=pa.array(["a", "b", "c"])))
    assert [row[0] for row in found] == ["a", "b", "c"]


def test_nulls_and_empty_values_stay_what_they_are() -> None:
    found = rows_of(
        batch(
            value=pa.array([b"", None, b"x"]),
            key=pa.array(["", None, "k"], pa.large_string()),
            partition=pa.array([0, None, 2], pa.int32()),
        ),
        "t",
    )
    assert found == [("t", b"", b"", 0, None), ("t", None, None, -1, None), ("t", b"k", b"x", 2, None)]


def test_headers_are_those_of_their_rows_also_in_a_part_of_a_batch() -> None:
    lists = [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
        None,
        [],
        [{"key": "", "value": b""}],
    ]
    whole = batch(value=pa.array([b"v"] * 4), headers=pa.array(lists, HEADERS))
    expected = [[("a", b"1"), ("a", None)], None, None, [("", b"")]]
    assert [row[4] for row in rows_of(whole, "t")] == expected
    for first in range(4):
        assert [row[4] for row in rows_of(whole.slice(first), "t")] == expected[first:]


def test_timestamps_are_the_columns_in_milliseconds_where_they_are_wanted() -> None:
    stamps = pa.array([1_700_000_000_123_999, None, -1_001], pa.timestamp("us", "UTC"))
    rows = batch(value=pa.array([b"v"] * 3), timestamp=stamps)
    assert list(Columns(rows, "t", keeps_timestamps=True).timestamps) == [1_700_000_000_123, 0, -2]
    assert [stamp for _, stamp in zip(range(3), Columns(rows, "t").timestamps, strict=False)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("columns", "row", "told"),
    [
        ({"topic": pa.array(["a", "b", None])}, 2, "its topic is null"),
        ({"topic": pa.array([b"a", b"\xff", b"c"]).cast(pa.string(), safe=False)}, 1, "its topic is no UTF-8"),
        ({"partition": pa.array([0, -1, None], pa.int32())}, 1, "its partition is -1"),
        ({"headers": pa.array([[], [{"key": None, "value": b""}], None], HEADERS)}, 1, "a header without a key"),
        ({"headers": pa.array([None, [], [{"key": "a"}, None]], HEADERS)}, 2, "a header without a key"),
    ],
)
def test_a_row_that_cannot_be_a_record_is_told_by_its_number(columns: dict[str, Any], row: int, told: str) -> None:
    fine = pa.array(["t", "t", "t"])
    found = Columns(batch(value=pa.array([b""] * 3), **{"topic": fine, **columns}), "").problem
    assert found is not None and found[0] == row and told in found[1]
    ahead = batch(value=pa.array([b""] * 3), topic=fine)
    bad = batch(value=pa.array([b""] * 3), **{"topic": fine, **columns})
    with pytest.raises(InvalidInput, match=f"row {row}: "):
        write_rows([bad], WriteOptions("", unreachable().kafka))
    with pytest.raises(InvalidInput, match=f"row {3 + row}: "):
        write_rows([ahead, bad], WriteOptions("", unreachable().kafka))


def test_a_record_that_is_too_large_is_told_by_its_number_and_the_rows_behind_it_are_not_taken() -> None:
    taken: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(9):
            taken.append(number)
            sizes = [10, 10, 2_000_000 if number == 2 else 10]
            yield batch(value=pa.array([b"x" * size for size in sizes]))

    with pytest.raises(InvalidInput) as raised:
        write_rows(batches(), unreachable())
    assert "row 8 (topic t): it is too large" in str(raised.value) and "max.message.bytes" in str(raised.value)
    assert taken == [0, 1, 2]


def test_rows_that_no_broker_takes_are_counted_and_the_first_are_told_with_the_reason() -> None:
    with pytest.raises(Unavailable) as raised:
        write_rows([batch(value=pa.array(["v"] * 2_500))], unreachable())
    told = str(raised.value)
    assert told.startswith("2500 rows of this task cannot be written: row 0 (topic t): no broker acknowledged it")
    assert "row 4 (topic t)" in told and "row 5 (" not in told and "and 2495 more" in told
    assert "127.0.0.1:1" in told, "what the client says of its connections"


def test_a_task_waits_while_the_queue_is_full_and_its_bound_is_kept() -> None:
    with pytest.raises(Unavailable) as raised:
        write_rows([batch(value=pa.array(["v"] * 500))], unreachable(queue_buffering_max_messages="20"))
    assert str(raised.value).startswith("20 rows of this task")


def test_a_record_that_never_fits_into_the_queue_is_an_error_and_no_endless_wait() -> None:
    settings = {**unreachable().kafka, "queue.buffering.max.kbytes": "1"}
    with pytest.raises(InvalidInput, match=r"row 0 .*does not fit into the queue"):
        write_rows([batch(value=pa.array(["v" * 5_000]))], WriteOptions("t", settings))


def test_when_reading_fails_what_is_in_the_queue_is_dropped_and_the_error_is_that_of_reading() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield batch(value=pa.array(["v"] * 100))
        raise OSError("lost the shuffle")

    with pytest.raises(OSError, match="lost the shuffle"):
        write_rows(batches(), unreachable(delivery_timeout_ms="600000"))


@pytest.mark.parametrize("fails", [True, False])
def test_a_task_leaves_no_thread_behind(fails: bool) -> None:
    options = unreachable() if fails else unreachable(test_mock_num_brokers="1", delivery_timeout_ms="60000")
    before = len(list(Path("/proc/self/task").iterdir()))
    gc.disable()
    try:
        write_rows([batch(value=pa.array(["v"] * 10))], options)
        assert not fails
    except Unavailable:
        assert fails
    finally:
        gc.enable()
    assert len(list(Path("/proc/self/task").iterdir())) <= before


def test_a_task_without_rows_needs_no_broker() -> None:
    assert write_rows([], unreachable()).rows == 0
    assert write_rows([batch(value=pa.array([], pa.string()))], unreachable()).rows == 0


@pytest.mark.parametrize(
    ("code", "told", "is_rows"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "not authorized", True),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, "not authorized", True),
        (KafkaError.TOPIC_EXCEPTION, "name is not valid", True),
        (KafkaError.MSG_SIZE_TOO_LARGE, "too large", True),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "no such topic", True),
        (KafkaError.NOT_ENOUGH_REPLICAS, "replicas", False),
        (KafkaError.INVALID_TIMESTAMP, "timestamp that the topic refuses", True),
        (KafkaError.INVALID_RECORD, "record that the topic refuses", True),
    ],
)
def test_errors_say_what_was_wrong_and_whether_another_attempt_may_help(code: int, told: str, is_rows: bool) -> None:
    what, _hint, found = explained(KafkaError(code))
    assert told in what and found == is_rows
