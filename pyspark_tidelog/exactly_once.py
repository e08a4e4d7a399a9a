"""The sink of streaming queries that writes each micro-batch once (docs/design/0026-spark-exactly-once.md).

A task writes its rows in a transaction of its own, prepares it, and tells the driver the pair that ends it. The driver
decides and commits (`pyspark_tidelog.committing`). Spark makes the writer anew in each process: what commit and abort
know is in the messages.

Docs: docs/spark.md. Entry: `stream_writer`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_tidelog.committing import Prepared, abort_batch, commit_batch, settle_attempt
from pyspark_tidelog.decision_topic import DecisionTopic
from pyspark_tidelog.decisions import Attempt, Pair, Query
from pyspark_tidelog.sink import TaskProducer, TidelogStreamWriter, checked
from pyspark_tidelog.sink_options import WriteOptions
from pyspark_tidelog.transactions import TransactionCalls
from tidelog.runtime.errors import InvalidInput, TidelogError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Properties that Spark gives the jobs of a micro-batch."""


def stream_writer(given: Mapping[str, str], schema: StructType) -> TidelogStreamWriter | ExactlyOnceWriter:
    """Return the writer of `df.writeStream`. Raises `ConfigError`.

    Output mode complete appends all rows of the result with each micro-batch, as with Spark's Kafka sink.
    """
    options = checked(given, schema)
    return ExactlyOnceWriter(options) if options.transactional_id_prefix else TidelogStreamWriter(options)


@dataclass(frozen=True)
class PreparedRows(WriterCommitMessage):
    """What one attempt of a task wrote."""

    attempt: Attempt
    pair: Pair | None
    """None: there is no transaction that could be committed."""
    rows: int


class ExactlyOnceWriter(DataSourceStreamArrowWriter):
    """A streaming write. Pickled to the executors, once for each run of a micro-batch."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._writer = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PreparedRows:
        """See `write_attempt`."""
        context = TaskContext.get()
        query, batch = (context.getLocalProperty(each) if context else None for each in (_QUERY_ID, _BATCH_ID))
        if context is None or query is None or batch is None:
            raise InvalidInput(
                "this task tells no query and no micro-batch", hint="exactlyOnce is of streaming queries"
            )
        named = Query(self._options.transactional_id_prefix, query)
        return write_attempt(iterator, self._options, Attempt(named, int(batch), self._writer, context.taskAttemptId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """See `commit_batch`."""
        found = _attempts(messages, batchId)
        if not found:
            return
        first = found[0].attempt
        with closing(self._calls()) as calls:
            is_mine = commit_batch(first.query, batchId, first.writer, _prepared(found), self._log(first.query), calls)
        rows = sum(each.rows for each in found)
        told = "committed" if is_mine else "had been committed before, and is not written again"
        logger.info("micro-batch %d of %d rows %s", batchId, rows, told)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """See `abort_batch`. What cannot be done now the next commit of the query does."""
        found = _attempts(messages, batchId)
        if not found:
            return
        first = found[0].attempt
        try:
            with closing(self._calls()) as calls:
                abort_batch(batchId, first.writer, _prepared(found), self._log(first.query), calls)
        except TidelogError as error:
            logger.warning("micro-batch %d is not aborted yet, its transactions stay open: %s", batchId, error)

    def _calls(self) -> TransactionCalls:
        return TransactionCalls(self._options.kafka["bootstrap.servers"])

    def _log(self, query: Query) -> DecisionTopic:
        return DecisionTopic(query, self._options.connection)


def _attempts(messages: Iterable[WriterCommitMessage | None], batch: int) -> list[PreparedRows]:
    found = [each for each in messages if isinstance(each, PreparedRows)]
    runs = {(each.attempt.query, each.attempt.batch, each.attempt.writer) for each in found}
    if len(runs) > 1 or any(each.attempt.batch != batch for each in found):
        raise InvalidInput(f"the tasks of micro-batch {batch} are of other runs: {runs}")
    return found


def _prepared(found: Iterable[PreparedRows]) -> list[Prepared]:
    return [Prepared(each.attempt, each.pair) for each in found if each.pair is not None]


def write_attempt(batches: Iterable[pa.RecordBatch], options: WriteOptions, attempt: Attempt) -> PreparedRows:
    """Write the rows of a task in a transaction, and prepare that.

    Raises as `write_rows`; then nothing of it is open for longer than the transaction's time-out.
    """
    task: TaskProducer | None = None
    try:
        for batch in batches:
            if batch.num_rows:
                task = task or TaskProducer(options, attempt.transactional_id)
                task.send(batch)
        if task is None:
            return PreparedRows(attempt, None, 0)
        rows = task.finish()
        return PreparedRows(attempt, _prepare(options, attempt), rows)
    except BaseException:
        if task:
            task.abort()
        raise
    finally:
        if task:
            task.close()


def _prepare(options: WriteOptions, attempt: Attempt) -> Pair | None:
    with closing(TransactionCalls(options.kafka["bootstrap.servers"])) as calls:
        pair = calls.prepare(attempt)
        try:
            is_open = settle_attempt(attempt, DecisionTopic(attempt.query, options.connection), calls)
        except BaseException:
            logger.warning("aborting %s: whether its micro-batch was decided is not known", attempt.transactional_id)
            calls.abort(attempt)
            raise
        return pair if is_open else None
