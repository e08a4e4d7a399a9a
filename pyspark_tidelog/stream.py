"""Streaming reads: what the driver of a query does between micro-batches.

Spark keeps the offsets in the query's checkpoint and asks for each micro-batch: `latestOffset` says where it ends,
`partitions` gives its tasks, which are those of a batch read. A micro-batch that is planned again, after a failure or
from the checkpoint, has the same records: offsets are all that it is made of.

One lease holds the objects of the micro-batch that is being read, and moves on with the next one. A lease that was lost
costs nothing but another lookup.

How far the query is, is committed to a consumer group, so that its lag is seen where lags are. Nothing depends on
that: a query goes on if it cannot be committed, and never reads it.

Invariants: an offset is answered only when it was told by the partition's leader; nothing is left out silently: what
cannot be read any more raises `DataLoss`, or is a warning with `failOnDataLoss = false`.

Entry: `TidelogStreamReader`.
"""

from __future__ import annotations

import logging
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from pyspark_tidelog.cluster import Cluster, Lease, LeaseKeeper, Lookups, retried
from pyspark_tidelog.options import EARLIEST, Partition, ReadOptions
from pyspark_tidelog.planning import TaskPartition, bounds, find_ranges, places, tasks_of, undeleted
from pyspark_tidelog.positions import Position, admit, between, compare, epochs_at
from pyspark_tidelog.reading import DataLoss, read_task
from tidelog.runtime.errors import NotFound, Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

LEASE_S = 60.0
"""Time to live of a query's lease, which is renewed all the time that the query runs.

Spark kills the query's Python process when the query ends, so this is also for how long a lease outlives most queries.
"""
GONE_S = 5.0
"""A topic or partition that no broker knows for so long does not exist."""
LAST_COMMIT_S = 5.0
"""How long the end of a query waits for its last commit to its consumer group."""


class TidelogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Its driver's part lives as long as the query; executors get a copy that only reads."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._query: _Query | None = None

    @property
    def _driver(self) -> _Query:
        if self._query is None:
            self._query = _Query(self._options)
        return self._query

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's names, here and below
        """See `DataSourceStreamReader.initialOffset`."""
        return self._driver.first_position().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """See `DataSourceStreamReader.getDefaultReadLimit`."""
        return ReadMaxRows(self._options.max_offsets) if self._options.max_offsets else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """See `DataSourceStreamReader.latestOffset`."""
        position = Position.from_json(start)
        end = self._driver.end_of_batch(position, limit.max_rows if isinstance(limit, ReadMaxRows) else 0)
        return start if end.topics == position.topics else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """See `DataSourceStreamReader.reportLatestOffset`."""
        return self._driver.seen.to_json() if self._driver.seen is not None else None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """See `SupportsTriggerAvailableNow`."""
        self._driver.stop_at_present_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """See `DataSourceStreamReader.partitions`."""
        return self._driver.tasks(Position.from_json(start), Position.from_json(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task."""
        assert isinstance(partition, TaskPartition), partition
        return read_task(partition.task, partition.context)

    def commit(self, end: dict[str, Any]) -> None:
        """See `DataSourceStreamReader.commit`."""
        self._driver.report(Position.from_json(end))

    def stop(self) -> None:
        """See `DataSourceStreamReader.stop`."""
        if self._query is not None:
            self._query.close()


class _Ends(NamedTuple):
    """Partitions at one moment."""

    log: Position
    """Where they end."""
    readable: dict[Partition, int]
    """Up to where they are read. A query may be behind that: with `tail = skip` it may have begun there, and with
    `read_committed` it may have got there before it was told to read so."""


class _Query:
    """A query on the driver: its cluster, its lease, its consumer group."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._cluster = retried(lambda: Cluster(options))
        self._lease = MovingLease(f"spark stream on {platform.node()}", LEASE_S)
        self._progress = GroupProgress(self._cluster)
        self._new_group = options.kafka.get("group.id") or f"{options.group_prefix}-{secrets.token_hex(6)}"
        self._target: _Ends | None = None
        self._waiting_since_s: float | None = None
        self._gone: frozenset[str] = frozenset()
        """What no broker knew for so long that it is not waited for again."""
        self._has_planned = False
        """Whether this process has planned a micro-batch: else the next may be one of the checkpoint, done again."""
        self._epoch_ends: dict[Partition, tuple[tuple[int, int], int | None]] = {}
        """Where a leader epoch ended, as it was told in a newer one: `(the epoch, the newer one), end`."""
        self.seen: Position | None = None
        """How far the partitions could be read when they were last asked for."""

    def first_position(self) -> Position:
        """Return where a new query begins. Raises `NotFound`, `ConfigError`, `Unavailable`."""

        def found() -> Position:
            self._cluster.refresh()
            wanted = places(self._cluster, self._options)
            ids = self._cluster.topic_ids({topic for topic, _ in wanted})
            first = self._cluster.offsets(dict.fromkeys(wanted, EARLIEST))
            ends = self._cluster.ends(wanted)
            starts = bounds(self._cluster, first, {place: end.offset for place, end in ends.items()}, is_start=True)
            epochs = {place: end.epoch for place, end in ends.items()}
            return Position.of({place: starts[place] for place in wanted}, ids, self._new_group, epochs)

        position = retried(found)
        if self._target is not None:  # Spark asks for the first offsets after that, and the partitions have grown
            self.stop_at_present_end()
        return position

    def stop_at_present_end(self) -> None:
        """Let the query end where the partitions end now (trigger `availableNow`)."""
        self._target = self._ends()

    def end_of_batch(self, position: Position, limit: int) -> Position:
        """Return where the micro-batch that begins at `position` ends: after `limit` offsets at most; 0: no bound.

        Raises `DataLoss`, `Unavailable`.
        """
        self.report(position)
        ends = self._target or self._ends(position)
        cuts = self._cuts(position, ends.log)
        starts, losses = compare(position, ends.log, cuts)
        self._tell(losses)
        self._has_planned = True
        lags = {place: max(0, end - starts[place]) for place, end in ends.readable.items()}
        if self._target is not None and not any(lags.values()):
            self._progress.flush()  # the query ends now, and this process with it
        if self._target is None and self._waits_for_more(sum(lags.values())):
            return position
        if limit:
            lags = admit(lags, limit, sum(starts.values()))
        reached, ids = {place: starts[place] + lags.get(place, 0) for place in starts}, ends.log.ids
        epochs = epochs_at(Position.of(reached, ids), position, ends.log.epochs, cuts)
        return Position.of(reached, ids, position.group or self._new_group, epochs)

    def _cuts(self, before: Position, now: Position) -> dict[Partition, int]:
        """Return up to where partitions still have what they had at `before`, of those that have lost some of it.

        Only a new leader can have less. Raises `Unavailable`.
        """
        offsets, then, since = before.offsets, before.epochs, now.epochs
        asked = {
            place: (epoch, since[place])
            for place, epoch in then.items()
            if epoch < since.get(place, -1) and before.is_same_topic(place[0], now.ids[place[0]])
        }
        new = {place: epochs[0] for place, epochs in asked.items() if self._epoch_ends.get(place, (None,))[0] != epochs}
        if new:
            found = self._ask_epoch_ends(new)
            self._epoch_ends.update({place: (asked[place], found.get(place)) for place in new})
        known = {place: self._epoch_ends[place][1] for place in asked}
        return {place: end for place, end in known.items() if end is not None and end < offsets[place]}

    def _ask_epoch_ends(self, epochs: Mapping[Partition, int]) -> dict[Partition, int]:
        def found() -> dict[Partition, int]:
            self._cluster.refresh()
            return self._cluster.epoch_ends(epochs)

        return retried(found)

    def _waits_for_more(self, lag: int) -> bool:
        """Whether there are too few new offsets for a micro-batch, and it can wait (`minOffsetsPerTrigger`)."""
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if lag < self._options.min_offsets and now_s < self._waiting_since_s + self._options.max_delay_s:
            return True
        self._waiting_since_s = None
        return False

    def _tell(self, losses: list[str]) -> None:
        if losses and self._options.fail_on_data_loss:
            raise DataLoss(
                "; ".join(losses[:5]),
                hint="begin anew with another checkpoint, or with failOnDataLoss = false go on with what there is",
            )
        for each in losses:
            logger.warning("%s", each)

    def _ends(self, position: Position | None = None) -> _Ends:
        """Return the ends of all partitions. What `position` has is given some time to be known again."""
        gone_s = time.monotonic() + GONE_S

        def found() -> _Ends:
            self._cluster.refresh()
            known = self._known(position or Position(), gone_s)
            ids = self._cluster.topic_ids({topic for topic, _ in known})
            told = self._cluster.ends(place for place in known if place[0] in ids)
            ends = {place: end.offset for place, end in told.items()}
            epochs = {place: end.epoch for place, end in told.items()}
            readable = ends if self._options.reads_tail else self._uploaded(ends)
            self.seen = Position.of(readable, ids)
            return _Ends(Position.of(self._cluster.log_ends(ends), ids, epochs=epochs), readable)

        return retried(found)

    def _known(self, before: Position, gone_s: float) -> list[Partition]:
        """Return the partitions that are subscribed to, without those that are gone for good.

        Raises `Unavailable` up to `gone_s`: the broker that was asked may be behind. Raises `NotFound` for what is not
        in `before` either, unless data may be lost: an earlier micro-batch has told it then.
        """
        options, cluster = self._options, self._cluster
        missing = self._missing(before)
        if missing.keys() - self._gone and time.monotonic() < gone_s:
            raise Unavailable(f"no broker knows {', '.join(missing)}")
        never = [each for each, was_there in missing.items() if not was_there]
        if never and options.fail_on_data_loss:
            raise NotFound(f"there is no {', '.join(never)}")
        for each in never:
            if each not in self._gone:
                logger.warning("there is no %s: it is read from its start when it is there", each)
        self._gone = frozenset(missing)
        if options.assigned:
            return [place for place in options.assigned if cluster.has_partition(place)]
        if options.pattern:
            return places(cluster, options)
        return cluster.partitions(topic for topic in options.topics if cluster.has_topic(topic))

    def _missing(self, before: Position) -> dict[str, bool]:
        """Return what no broker knows of what was read or is subscribed to, and whether it is in `before`."""
        options, cluster = self._options, self._cluster
        topics = {*before.topics, *options.topics, *(topic for topic, _ in options.assigned)}
        found = {f"topic {each}": each in before.topics for each in sorted(topics) if not cluster.has_topic(each)}
        for topic, index in options.assigned:
            if cluster.has_topic(topic) and not cluster.has_partition((topic, index)):
                found[f"partition {topic}-{index}"] = (topic, index) in before.offsets
        return found

    def _uploaded(self, ends: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return how far partitions are in the bucket."""
        asked = [(topic, index, end - 1, end) for (topic, index), end in ends.items() if end > 0]
        found = dict.fromkeys(ends, 0)
        if asked:
            for one in self._cluster.lookups().slices(asked, 0).ranges:
                found[one.topic, one.partition] = min(one.committed_end, ends[one.topic, one.partition])
        return found

    def tasks(self, start: Position, end: Position) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch. Raises `DataLoss`, `Unavailable`."""
        ranges = between(start, end, self._cuts(start, end))
        if not self._has_planned and end.epochs:
            ranges = self._without_others(ranges, end)
        if not ranges:
            return []
        try:
            return retried(lambda: self._plan(ranges, end))
        except NotFound as error:
            if isinstance(error, DataLoss) or self._options.fail_on_data_loss:
                raise
            raise Unavailable(f"a topic was deleted while it was planned: {error.message}") from error

    def _without_others(
        self, ranges: Mapping[Partition, tuple[int, int]], end: Position
    ) -> dict[Partition, tuple[int, int]]:
        """Return the ranges of a micro-batch that is done again without offsets that have other records since.

        The next micro-batch begins with those. Raises `DataLoss`, `Unavailable`.
        """
        self._has_planned = True
        epochs = {place: epoch for place, epoch in end.epochs.items() if place in ranges}
        cuts = self._ask_epoch_ends(epochs)
        self._tell(compare(end, end, cuts).losses)
        clipped = {place: (first, min(last, cuts.get(place, last))) for place, (first, last) in ranges.items()}
        return {place: asked for place, asked in clipped.items() if asked[0] < asked[1]}

    def _plan(self, ranges: Mapping[Partition, tuple[int, int]], end: Position) -> Sequence[InputPartition]:
        self._cluster.refresh()
        ids = self._cluster.topic_ids({topic for topic, _ in ranges})
        self._tell([f"topic {each} was deleted" for each in {topic for topic, _ in ranges} - set(ids)])
        left = {place: asked for place, asked in ranges.items() if place[0] in ids}
        self._tell(
            [
                f"topic {each} was deleted and created again"
                for each in {topic for topic, _ in left}
                if not end.is_same_topic(each, ids[each])
            ]
        )
        left = {place: asked for place, asked in left.items() if end.is_same_topic(place[0], ids[place[0]])}
        left = undeleted(self._cluster, left, self._options)
        if not left:
            return []
        try:
            lookups = self._cluster.lookups()
            lease = self._lease.moved_on(lookups)
            found = find_ranges(self._cluster, lookups, [(*place, *asked) for place, asked in left.items()], lease)
            others = sorted({each.topic for each in found.ranges if not end.is_same_topic(each.topic, each.topic_id)})
            if others:  # the next attempt tells it, unless a broker that is asked for ids is behind still
                raise Unavailable(f"topic {', '.join(others)} was deleted and created again while it was planned")
        except Unavailable:
            self._cluster.forget_brokers()
            raise
        self._lease.saw(found.version)
        return tasks_of(found, left, self._cluster, lookups, lease)

    def report(self, position: Position) -> None:
        """Commit to the consumer group that everything before `position` was processed."""
        if position.group:
            self._progress.report(position.group, position.offsets)

    def close(self) -> None:
        """Give back the lease, and let the last commit to the group come through."""
        self._lease.end()
        self._progress.flush()


class MovingLease:
    """The lease of a query, which holds the objects of one micro-batch after the other."""

    def __init__(self, holder: str, ttl_s: float) -> None:
        self._holder = holder
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._keeper: LeaseKeeper | None = None
        self._lookups: Lookups | None = None
        self._version = 0

    def saw(self, version: int) -> None:
        """Say that a broker has told metadata of this version: the lease moves on to it with the next micro-batch."""
        self._version = max(self._version, version)

    def moved_on(self, lookups: Lookups) -> Lease:
        """Return the lease for the next micro-batch: another one if it has ended. Raises `Unavailable`."""
        self._lookups = lookups
        if self._lease is not None and self._keeper is not None:
            try:
                self._lease = lookups.renew_lease(self._lease, self._version)
            except NotFound:
                self._stop()
            else:
                self._keeper.follow(lookups, self._lease)
                return self._lease
        self._lease = lookups.take_lease(self._holder, self._ttl_s)
        self._keeper = LeaseKeeper(lookups, self._lease)
        self._keeper.__enter__()
        return self._lease

    def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.__exit__()
        self._lease = self._keeper = None

    def end(self) -> None:
        """End the lease. If no broker answers it ends by itself."""
        lease, lookups = self._lease, self._lookups
        self._stop()
        if lease is not None and lookups is not None:
            try:
                lookups.end_lease(lease)
            except Unavailable as error:
                logger.warning("lease %d is left to expire: %s", lease.id, error.message)


class GroupProgress:
    """Commits how far a query is to its consumer group, one commit at a time, without waiting for it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._under_way: Future[Any] | None = None
        self._sent: tuple[str, dict[Partition, int]] | None = None
        self._next: tuple[str, dict[Partition, int]] | None = None

    def report(self, group: str, offsets: dict[Partition, int]) -> None:
        """Commit these offsets as soon as the commit before them is answered."""
        if (group, offsets) != self._sent:
            self._next = (group, offsets)
        if self._under_way is None or self._under_way.done():
            self._settle(0.0)
            self._send()

    def _send(self) -> None:
        if self._next is not None and self._next[1]:
            self._under_way, self._sent, self._next = self._cluster.commit(*self._next), self._next, None

    def _settle(self, timeout_s: float) -> None:
        """See how the last commit went, if it is answered in time."""
        from confluent_kafka import KafkaException

        if self._under_way is None:
            return
        try:
            self._under_way.result(timeout_s)
        except (KafkaException, TimeoutError) as error:
            group, self._sent = self._sent[0] if self._sent is not None else "", None  # sent again with the next report
            logger.warning("consumer group %s does not show how far the query is: %s", group, error or "no answer")
        self._under_way = None

    def flush(self) -> None:
        """Wait for the last commit for a short time."""
        self._settle(LAST_COMMIT_S)
        self._send()
        self._settle(LAST_COMMIT_S)
