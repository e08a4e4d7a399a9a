"""Writes a frame's rows to topics, as Spark's Kafka sink does: `df.write` and `df.writeStream` with format `tidelog`.

Columns by name: `value` (needed), `key` (both string or binary), `headers` array<struct<key string, value binary>>,
`topic` (string; the option `topic` overrides it), `partition` (int), and with the option `keepTimestamps` `timestamp`
(timestamp). Other columns are ignored, so what was read can be written.

When a task ends without an error each of its rows is acknowledged. Writes are at least once: Spark runs a failed task
or micro-batch again, and what it had written stays in the topics. Commit and abort change nothing, so every order of
their calls is right. A task's producer does not outlive it: what a failed task still has in its queue is dropped
before the error is raised, or it would come into the topic beside the rows of the next attempt. Writes that are exactly
once (`pyspark_tidelog.exactly_once`) have the same tasks.

Memory: a task holds one Arrow batch of Spark's, the rows of one piece of it as Python objects (`PIECE_BYTES`), and
librdkafka's queue, which is bounded (`pyspark_tidelog.sink_options`); where it is full the task waits.

Docs: docs/spark.md. Entry: `batch_writer`, `write_rows`, `TaskProducer`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructType, TimestampType

from pyspark_tidelog.sink_options import WriteOptions, write_options
from tidelog.runtime.errors import ConfigError, InvalidInput, TidelogError, Unavailable
from tidelog.runtime.memory import set_imports_aside

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import KafkaError, Message

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
PIECE_ROWS = 1_000
"""About so many bytes, and at most so many rows, are Python objects at a time."""
SHOWN = 5
"""So many failed rows are told; the others are counted."""
BEGIN_S = 120.0
"""How long a transaction waits for brokers that are away before it begins, as in a failover (rule 11)."""
DRAIN_S = 5.0
"""After a failure: the time for what is in the queue to be written or to fail as well, and to be told."""
REFUSED: Mapping[int, tuple[str, str]] = {
    32: ("timestamp", "message.timestamp.after.max.ms and message.timestamp.before.max.ms of the topic bound it"),
    87: ("record", "a topic with cleanup.policy=compact takes no record without a key"),
}
"""What brokers refuse in a batch, by Kafka's code (INVALID_TIMESTAMP, INVALID_RECORD), and what to do."""
_UNSET = -1
"""librdkafka's RD_KAFKA_PARTITION_UA: the partitioner chooses."""


def batch_writer(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> TidelogBatchWriter:
    """Return the writer of `df.write`. Raises `ConfigError`."""
    if overwrite:
        raise ConfigError("a topic cannot be overwritten", hint='.mode("append"), or delete and create the topic first')
    options = checked(given, schema)
    if options.transactional_id_prefix:
        raise ConfigError(
            "option exactlyOnce is one of streaming queries: nothing tells that a batch write runs again",
            hint="leave it out",
        )
    return TidelogBatchWriter(options)


@dataclass(frozen=True)
class WrittenRows(WriterCommitMessage):
    """What one task wrote."""

    rows: int


class TidelogBatchWriter(DataSourceArrowWriter):
    """A batch write. Pickled to the executors."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """See `write_rows`."""
        return write_rows(iterator, self._options)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing is left to do: see the module docstring."""
        logger.debug("written: %d rows", _rows(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what was written."""
        _tell_left(messages, "the write")


class TidelogStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write. Pickled to the executors."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """See `write_rows`."""
        return write_rows(iterator, self._options)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Nothing is left to do: see the module docstring."""
        logger.debug("written: %d rows of micro-batch %d", _rows(messages), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Leave what was written."""
        _tell_left(messages, f"micro-batch {batchId}")


def _rows(messages: Iterable[WriterCommitMessage | None]) -> int:
    return sum(each.rows for each in messages if isinstance(each, WrittenRows))


def _tell_left(messages: Iterable[WriterCommitMessage | None], what: str) -> None:
    rows = _rows(messages)
    if rows:
        logger.warning("%s has failed; %d rows of tasks that ended stay in the topics", what, rows)


def write_rows(batches: Iterable[pa.RecordBatch], options: WriteOptions) -> WrittenRows:
    """Write the rows of one task; return when all are acknowledged.

    Rows of a task have numbers from 0. Raises `InvalidInput` for a row that cannot be written, `Unavailable` where no
    broker took it in time; the message has the first rows and the number of all that failed.
    """
    task: TaskProducer | None = None
    try:
        for batch in batches:
            if batch.num_rows:
                task = task or TaskProducer(options)
                task.send(batch)
        return WrittenRows(task.finish() if task else 0)
    finally:
        if task:
            task.close()


class TaskProducer:
    """The producer of one task. Errors of rows are collected, and raised by the next call."""

    def __init__(self, options: WriteOptions, transactional_id: str = "") -> None:
        """With `transactional_id` all is in one transaction, which `finish` leaves open. Raises `Unavailable`."""
        set_imports_aside(__name__)  # a callback of each row in the queue lives a while, and collections follow
        self._topic = options.topic
        self._keeps_timestamps = options.keeps_timestamps
        more = {"transactional.id": transactional_id} if transactional_id else {}
        self._producer = _producer({**options.kafka, **more, "error_cb": self._hear})
        self._row = 0
        """The number of the next row."""
        self._failures: list[str] = []
        self._failed = 0
        self._may_help_later = True
        self._hint: str | None = None
        self._heard = ""
        self._fatal = ""
        """What has ended the producer for good."""
        if transactional_id:
            self._begin(transactional_id)

    def _begin(self, transactional_id: str) -> None:
        from confluent_kafka import KafkaException

        try:
            self._producer.init_transactions(BEGIN_S)
            self._producer.begin_transaction()
        except KafkaException as error:
            told = f"; last heard: {self._heard}" if self._heard else ""
            self.close()
            raise Unavailable(
                f"the transaction {transactional_id} cannot begin: {error.args[0].str()}{told}",
                hint="see group.transaction_max_timeout_ms of the brokers and kafka.transaction.timeout.ms",
            ) from error

    def abort(self) -> None:
        """Abort the transaction, as far as that is possible in a moment; otherwise its time-out does it."""
        from confluent_kafka import KafkaException

        self._drop()
        try:
            self._producer.abort_transaction(DRAIN_S)
        except KafkaException as error:
            logger.warning("the transaction of a task that has failed is left to its time-out: %s", error)

    def send(self, batch: pa.RecordBatch) -> None:
        """Put rows into the queue; wait while it is full. Raises as `write_rows`."""
        step = max(1, min(PIECE_ROWS, PIECE_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for first in range(0, batch.num_rows, step):
            self._send_piece(batch.slice(first, step))
            self._poll(0.0)
            if self._is_over:
                self._fail()

    @property
    def _is_over(self) -> bool:
        return bool(self._failed or self._fatal)

    def _poll(self, timeout_s: float) -> None:
        """Serve callbacks. Not by `flush`: where an error is fatal that one fails with what is no exception."""
        from confluent_kafka import KafkaException

        try:
            self._producer.poll(timeout_s)
        except KafkaException as error:
            self._fatal = self._fatal or error.args[0].str()

    def _drain(self, timeout_s: float) -> None:
        """Wait until nothing is in the queue."""
        deadline = time.monotonic() + timeout_s
        while len(self._producer) and (left_s := deadline - time.monotonic()) > 0:
            self._poll(left_s)

    def _send_piece(self, piece: pa.RecordBatch) -> None:
        from confluent_kafka import KafkaException

        columns = Columns(piece, self._topic, keeps_timestamps=self._keeps_timestamps)
        if columns.problem is not None:
            row, what, hint = columns.problem
            self._add(self._row + row, "", what, hint)
            return
        produce, report = self._producer.produce, self._report
        for (topic, key, value, partition, headers), stamp in zip(columns.rows(), columns.timestamps, strict=False):
            more = {"on_delivery": partial(report, self._row), "headers": headers, "timestamp": stamp}
            try:
                produce(topic, value, key, partition, **more)
            except BufferError:
                self._produce_when_there_is_room(topic, value, key, partition, more)
            except KafkaException as error:
                self._add_error(self._row, _place(topic, partition), error.args[0])
            if self._is_over:
                return
            self._row += 1

    def _produce_when_there_is_room(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int, more: Mapping[str, Any]
    ) -> None:
        """Wait for room in the queue. Every record in it leaves it: acknowledged, or timed out."""
        from confluent_kafka import KafkaException

        while not self._is_over:
            is_empty = not len(self._producer)
            try:
                self._producer.produce(topic, value, key, partition, **more)
                return
            except BufferError:
                if is_empty:
                    hint = "raise kafka.queue.buffering.max.kbytes"
                    self._add(self._row, _place(topic, partition), "it does not fit into the queue", hint)
                self._poll(1.0)
            except KafkaException as error:
                self._add_error(self._row, _place(topic, partition), error.args[0])

    def finish(self) -> int:
        """Return the number of rows when all are acknowledged. Raises as `write_rows`."""
        while len(self._producer) and not self._is_over:
            self._poll(1.0)
        if self._is_over:
            self._fail()
        return self._row

    def close(self) -> None:
        """End the producer and its threads; what is not written yet is dropped."""
        self._drop()
        del self._producer  # it has a callback of this object: only without that circle it ends now

    def _drop(self) -> None:
        if len(self._producer):
            self._producer.purge(in_queue=True, in_flight=True)
            self._drain(DRAIN_S)

    def _hear(self, error: KafkaError) -> None:
        """Keep what the client says of its connections: it is the reason why rows time out."""
        self._heard = error.str()

    def _report(self, row: int, error: KafkaError | None, message: Message) -> None:
        from confluent_kafka import KafkaError

        if error is None or error.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            return
        place = _place(message.topic(), message.partition())
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:  # librdkafka refuses a record, a broker a batch of them
            hint = "set kafka.batch.size below that; a record that is larger alone cannot be written"
            self._add(row, place, "the batch it is in is larger than the topic's max.message.bytes", hint)
        else:
            self._add_error(row, place, error)

    def _add_error(self, row: int, place: str, error: KafkaError) -> None:
        what, hint, is_rows = explained(error)
        self._add(row, place, what, hint, may_help_later=not is_rows)

    def _add(self, row: int, place: str, what: str, hint: str | None, *, may_help_later: bool = False) -> None:
        self._failed += 1
        self._may_help_later = self._may_help_later and may_help_later
        self._hint = self._hint or hint
        if len(self._failures) < SHOWN:
            self._failures.append(f"row {row}{f' ({place})' if place else ''}: {what}")

    def _fail(self) -> NoReturn:
        self._drain(DRAIN_S)
        self._drop()
        if not self._failed:
            raise Unavailable(f"the producer of this task has failed: {self._fatal}")
        more = self._failed - len(self._failures)
        message = f"{self._failed} row{'s' if self._failed > 1 else ''} of this task cannot be written: "
        message += "; ".join(self._failures)
        if more:
            message += f"; and {more} more"
        if self._heard and self._may_help_later:
            message += f"; last heard: {self._heard}"
        kind: type[TidelogError] = Unavailable if self._may_help_later else InvalidInput
        raise kind(message, hint=self._hint)


Row = tuple[str, bytes | None, bytes | None, int, "list[tuple[str, bytes | None]] | None"]
Problem = tuple[int, str, str | None]
"""A row of the piece, what is wrong with it, and what to do."""


class Columns:
    """The columns of some rows, as what `Producer.produce` takes."""

    problem: Problem | None = None
    """The first row that cannot be written; `rows` is not to be called then."""

    def __init__(self, piece: pa.RecordBatch, topic: str, *, keeps_timestamps: bool = False) -> None:
        self._names = set(piece.schema.names)
        self.timestamps: Iterable[int] = repeat(0)
        """Milliseconds since the epoch of each row; 0: the time at which it is written, for librdkafka."""
        self._piece = piece
        self._headers: Iterable[list[tuple[str, bytes | None]] | None] = repeat(None)
        self._topics: Iterable[str] = repeat(topic)
        self._partitions: Iterable[int] = repeat(_UNSET)
        if not topic:
            self._read_topics()
        if "partition" in self._names:
            self._read_partitions()
        if "headers" in self._names:
            self._read_headers()
        if keeps_timestamps:
            self._read_timestamps()

    def rows(self) -> Iterator[Row]:
        """Return topic, key, value, partition and headers of each row."""
        keys = self._bytes("key") if "key" in self._names else repeat(None)
        return zip(self._topics, keys, self._bytes("value"), self._partitions, self._headers)  # noqa: B905  # endless

    def _bytes(self, name: str) -> Sequence[bytes | None]:
        import pyarrow as pa

        found: list[bytes | None] = self._piece.column(name).cast(pa.large_binary()).to_pylist()
        return found

    def _found(self, row: int, what: str, hint: str | None = None) -> None:
        if self.problem is None or row < self.problem[0]:
            self.problem = (row, what, hint)

    def _read_topics(self) -> None:
        column = self._piece.column("topic")
        if column.null_count:
            self._found(_first_true(column.is_null()), "its topic is null", "option topic names one for all rows")
            return
        try:
            self._topics = column.to_pylist()
        except UnicodeDecodeError:
            self._found(_first_undecodable(column), "its topic is no UTF-8")

    def _read_partitions(self) -> None:
        import pyarrow.compute as pc

        column = pc.fill_null(self._piece.column("partition"), _UNSET)
        is_negative = pc.and_(pc.less(column, 0), self._piece.column("partition").is_valid())
        if pc.any(is_negative).as_py():
            row = _first_true(is_negative)
            self._found(row, f"its partition is {column[row]}", "null lets the key decide")
        self._partitions = column.to_pylist()

    def _read_timestamps(self) -> None:
        import pyarrow as pa

        column = self._piece.column("timestamp")
        microseconds = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist()
        self.timestamps = [0 if each is None else each // 1_000 for each in microseconds]

    def _read_headers(self) -> None:
        import pyarrow.compute as pc

        column = self._piece.column("headers")
        lengths = pc.list_value_length(column).to_pylist()
        names, values = column.flatten().flatten()
        if names.null_count:
            self._found(_row_at(lengths, _first_true(names.is_null())), "it has a header without a key")
            return
        try:
            pairs = list(zip(names.to_pylist(), values.to_pylist(), strict=True))
        except UnicodeDecodeError:
            self._found(_row_at(lengths, _first_undecodable(names)), "it has a header whose key is no UTF-8")
            return
        found: list[list[tuple[str, bytes | None]] | None] = []
        at = 0
        for length in lengths:
            found.append(pairs[at : at + length] if length else None)
            at += length or 0
        self._headers = found


def _first_true(column: Any) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    return int(pc.index(column, pa.scalar(True)).as_py())


def _first_undecodable(column: Any) -> int:
    import pyarrow as pa

    for row, value in enumerate(column.cast(pa.large_binary()).to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return row
    raise AssertionError("all are UTF-8")


def _row_at(lengths: Sequence[int | None], at: int) -> int:
    """Return the row that has the value `at` of all lists' values."""
    for row, length in enumerate(lengths):
        at -= length or 0
        if at < 0:
            return row
    raise AssertionError("more values than lists have")


def _place(topic: str | None, partition: int | None) -> str:
    return f"topic {topic}" if partition is None or partition < 0 else f"topic {topic}, partition {partition}"


def explained(error: KafkaError) -> tuple[str, str | None, bool]:
    """Return what is wrong, what to do, and whether it is the row, which another attempt would not help."""
    from confluent_kafka import KafkaError

    code, text = error.code(), error.str()
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return (
            "it is too large",
            "kafka.message.max.bytes bounds a record, and so does the topic's max.message.bytes",
            True,
        )
    if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
        return "there is no such topic", "create it: tidelog topic create NAME", True
    if code == KafkaError._UNKNOWN_PARTITION:
        return "there is no such partition", "tidelog topic describe NAME shows those there are", True
    if code in REFUSED:
        return f"the batch it is in has a {REFUSED[code][0]} that the topic refuses ({text})", REFUSED[code][1], True
    if code in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED):
        return f"not authorized ({text})", None, True
    if code == KafkaError.TOPIC_EXCEPTION:
        return "the topic's name is not valid, or is that of an internal topic", None, True
    if code == KafkaError._MSG_TIMED_OUT:
        return f"no broker acknowledged it in time ({text})", "is the cluster running?", False
    return text, None, False


def checked(given: Mapping[str, str], schema: StructType) -> WriteOptions:
    """Check options and columns, on the driver, before the first task. Raises `ConfigError`."""
    options = write_options(given)
    _check_columns(schema, needs_topic=not options.topic)
    if options.keeps_timestamps:
        _check_timestamps(schema)
    _producer(options.kafka)  # librdkafka refuses what it does not know
    return options


def _check_columns(schema: StructType, *, needs_topic: bool) -> None:
    pair = StructType().add("key", StringType()).add("value", BinaryType())
    wanted: dict[str, tuple[type[DataType], ...]] = {
        "value": (StringType, BinaryType),
        "key": (StringType, BinaryType),
        "partition": (IntegerType,),
        "headers": (ArrayType,),
    }
    if needs_topic:
        wanted["topic"] = (StringType,)
    names = schema.fieldNames()
    if "value" not in names:
        raise ConfigError(f"the frame has no column value: {schema.simpleString()}", hint="to_json(struct(…)) as value")
    if needs_topic and "topic" not in names:
        raise ConfigError("neither option topic nor a column topic is given", hint='.option("topic", NAME)')
    for name, types in wanted.items():
        mine = [each.dataType for each in schema.fields if each.name == name]
        if len(mine) > 1:
            raise ConfigError(f"the frame has {len(mine)} columns {name}")
        if mine and not isinstance(mine[0], types):
            told = " or ".join(each.typeName() for each in types)
            raise ConfigError(f"column {name} is {mine[0].simpleString()}; it must be {told}", hint="cast it")
        if mine and isinstance(mine[0], ArrayType) and mine[0].elementType.simpleString() != pair.simpleString():
            raise ConfigError(f"column headers is {mine[0].simpleString()}; it must be array<{pair.simpleString()}>")


def _check_timestamps(schema: StructType) -> None:
    mine = [each.dataType for each in schema.fields if each.name == "timestamp"]
    if len(mine) != 1 or not isinstance(mine[0], TimestampType):
        told = f"column timestamp is {mine[0].simpleString()}" if mine else "the frame has no column timestamp"
        raise ConfigError(
            f"with keepTimestamps, {told}; it must be timestamp", hint="cast(… as timestamp) as timestamp"
        )


def _producer(settings: Mapping[str, Any]) -> Any:
    """Return a producer; it connects later, in a thread of its own. Raises `ConfigError`."""
    from confluent_kafka import KafkaException, Producer

    try:
        return Producer({**settings, "delivery.report.only.error": True})
    except (KafkaException, TypeError, ValueError) as error:
        told = error.args[0].str() if isinstance(error, KafkaException) else error
        raise ConfigError(f"an option kafka.… is refused by librdkafka: {told}", hint="see docs/spark.md") from error
