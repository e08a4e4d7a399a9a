"""What one task does: reads its offsets, from the bucket or from the brokers, as Arrow batches.

A task whose lease has ended may find an object missing that compaction has replaced meanwhile. It looks its offsets up
again and goes on where it is: the records of an offset are the same in any object.

Entry: `read_task`, `TaskContext`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark_tidelog.cluster import Lease, LeaseKeeper, Lookups
from pyspark_tidelog.fetch import Fetch, StoredStream
from pyspark_tidelog.manifests import read_parts
from pyspark_tidelog.options import ReadOptions
from pyspark_tidelog.plan import Task
from tidelog.runtime.errors import NotFound, Unavailable
from tidelog.runtime.memory import keep_freed_memory, set_imports_aside
from tidelog.storage.bucket.store import ObjectNotFound

if TYPE_CHECKING:
    import pyarrow as pa

LOOKUPS = 5
"""How often a task looks its objects up again without having read anything between."""
TAIL_IDLE_S = 60.0
"""A broker that tells nothing new for so long ends the task with an error."""


class DataLoss(NotFound):
    """Offsets that were to be read do not exist any more."""


@dataclass(frozen=True)
class TaskContext:
    """What every task of a read needs. Pickled to the executors."""

    options: ReadOptions
    cluster_id: str
    bucket: Mapping[str, str]
    lookups: Lookups
    lease: Lease


def read_task(task: Task, context: TaskContext) -> Iterator[pa.RecordBatch]:
    """Read a task. Raises `DataLoss`, `CorruptData`, `Unavailable`.

    From now on this process keeps the memory that it frees for the next batch: new pages cost more than decoding does.
    Nor does it collect what the first task has imported: Spark has a worker begin a full collection after each task,
    which takes 50 ms with Numba.
    """
    keep_freed_memory()
    try:
        if task.is_tail:
            yield from _read_tail(task, context)
        else:
            with LeaseKeeper(context.lookups, context.lease):
                yield from _read_bucket(task, context)
    finally:
        set_imports_aside(f"tasks of the {'tail' if task.is_tail else 'bucket'}")


def _read_bucket(task: Task, context: TaskContext) -> Iterator[pa.RecordBatch]:
    from pyspark_tidelog.committed import CommittedRows
    from pyspark_tidelog.decode import RecordDecoder

    plain = RecordDecoder(task.topic, task.partition, context.options.columns)
    is_committed_only = context.options.is_committed_only
    decoder = CommittedRows(plain, partial(_is_committed, task, context)) if is_committed_only else plain
    at, slices, parts, lookups = task.start, task.slices, task.parts, 0
    source = StoredStream(context.cluster_id, task.stream, task.shared)
    while True:
        try:
            if parts:
                slices = read_parts(context.bucket, context.cluster_id, parts)
                parts = ()
            with Fetch(context.bucket, source, slices, at, task.end) as fetched:
                for payload in fetched:
                    at, lookups = decoder.add(payload, at, task.end), 0
                    yield from decoder.full()
            break
        except ObjectNotFound:
            lookups += 1
            if lookups > LOOKUPS:
                raise
        (found,) = context.lookups.slices([(task.topic, task.partition, at, task.end)], context.lease.version).ranges
        _check_same(task, found.stream)
        if found.start > at:
            told = lost(task.topic, task.partition, at, found.start)
            if context.options.fail_on_data_loss:
                raise told
            at = min(found.start, task.end)
        slices, parts = found.slices, ()
    yield from decoder.rest()


def _is_committed(task: Task, context: TaskContext, batches: Sequence[range]) -> bool:
    """Ask the partition's leader whether a transaction is committed, of which the task has read these offsets.

    Some of its records may have been deleted meanwhile, by log compaction for example. Raises `Unavailable`.
    """
    from confluent_kafka import KafkaError, TopicPartition

    consumer = _consumer(context.options)
    problem, ends_s = "it tells nothing", time.monotonic() + TAIL_IDLE_S
    try:
        consumer.assign([TopicPartition(task.topic, task.partition, batches[0].start)])
        while time.monotonic() < ends_s:
            message: Any
            for message in consumer.consume(100, 1.0):
                error, offset = message.error(), message.offset()
                if error is None or error.code() == KafkaError._PARTITION_EOF:  # its public name
                    is_found = error is None and any(offset in each for each in batches)
                    if is_found or offset >= batches[-1].stop:
                        _check_same_topic(task, context)  # the leader was asked by the topic's name
                        return is_found
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    _first_left(consumer, task, batches[0].start, fails=context.options.fail_on_data_loss)
                else:
                    problem = str(error)
    finally:
        consumer.close()
    raise Unavailable(
        f"{task.topic}-{task.partition}: no broker tells within {TAIL_IDLE_S:g} s whether the transaction at offset"
        f" {batches[0].start} is committed: {problem}"
    )


def _check_same(task: Task, stream: int) -> None:
    if stream != task.stream:
        raise DataLoss(f"topic {task.topic} was deleted, and created again, while it was read")


def _check_same_topic(task: Task, context: TaskContext) -> None:
    (found,) = context.lookups.slices(
        [(task.topic, task.partition, task.start, task.start + 1)], context.lease.version
    ).ranges
    _check_same(task, found.stream)


def lost(topic: str, partition: int, start: int, first: int) -> DataLoss:
    """Return the error for offsets `[start, first)` that are gone."""
    return DataLoss(
        f"{topic}-{partition}: offsets {start} to {first - 1} do not exist any more: retention or DeleteRecords removed"
        " them",
        hint="with failOnDataLoss = false, of `tidelog spark table` --accept-data-loss, reading goes on with the first"
        " offset that exists",
    )


def _first_left(consumer: Any, task: Task, at: int, *, fails: bool) -> int:
    """Go on with the first offset that exists, which is returned. Raises `DataLoss` if it is to fail."""
    from confluent_kafka import TopicPartition

    first, _ = consumer.get_watermark_offsets(TopicPartition(task.topic, task.partition), timeout=TAIL_IDLE_S)
    if fails or first <= at:
        raise lost(task.topic, task.partition, at, max(first, at + 1))
    consumer.assign([TopicPartition(task.topic, task.partition, first)])  # after such an error there is no seek
    return int(first)


def _consumer(options: ReadOptions) -> Any:
    from confluent_kafka import Consumer

    return Consumer(
        {
            "log_level": 0,
            **options.kafka,
            "bootstrap.servers": options.bootstrap,
            "group.id": "tidelog-spark-tail",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "isolation.level": "read_committed" if options.is_committed_only else "read_uncommitted",
        }
    )


def _read_tail(task: Task, context: TaskContext) -> Iterator[pa.RecordBatch]:
    """Read what is not in the bucket yet from the partition's leader."""
    from confluent_kafka import KafkaError, TopicPartition

    from pyspark_tidelog.rows import AT_ONCE, RowCollector

    options = context.options
    consumer = _consumer(options)
    rows = RowCollector(options.columns)
    at, problem, heard_s = task.start, "it tells nothing", time.monotonic()
    try:
        consumer.assign([TopicPartition(task.topic, task.partition, task.start)])
        while at < task.end:
            before = at
            for message in consumer.consume(AT_ONCE, 1.0):
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:  # its public name
                        (here,) = consumer.position([TopicPartition(task.topic, task.partition)])
                        at = max(at, here.offset)
                    elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                        at = _first_left(consumer, task, at, fails=options.fail_on_data_loss)
                    else:
                        problem = str(error)  # a broker may be away for a while: time decides
                    continue
                offset = message.offset()
                assert offset is not None, "a message without an error has an offset"
                at = offset + 1
                if offset < task.end:
                    rows.add(message)
                if rows.is_full:
                    yield rows.take()
            if at > before:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > TAIL_IDLE_S:
                raise Unavailable(
                    f"{task.topic}-{task.partition}: no broker gives offset {at} within {TAIL_IDLE_S:g} s: {problem}"
                )
    finally:
        consumer.close()
    _check_same_topic(task, context)  # the leader was asked by the topic's name
    if rows.rows:
        yield rows.take()
