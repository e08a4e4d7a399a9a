"""Sends the markers of ended transactions to the leaders of their partitions, until each partition has its own.

A decision comes as a `MarkerJob`. Its partitions are sorted by their present leaders; each broker has one queue and one
task, which sends what waits in one call. What fails is routed anew after a pause: the leader may have changed. A
partition whose topic no longer exists needs no marker; the coordinator has known the topic of every partition that it
added, so a topic that its image does not have was deleted. So was one whose name another topic has by now: that one may
have the producer's next transaction, which such a marker would end. Nor do partitions of `__transaction_state` need
one, which have no records of transactions and take no markers.

A partition that answers INVALID_PRODUCER_EPOCH has a newer epoch of the producer, and with it nothing of this
transaction that is open: it counts as marked. One that answers TRANSACTION_COORDINATOR_FENCED has a marker of a newer
coordinator: the job ends, for the newer one sends these markers, too. All other errors are retried for ever, those that
nobody expects as well: a marker that is not sent holds its partition's readers, one that is sent twice changes nothing.

Invariants: each partition of a job is told to the job's owner at most once; nothing is told after `drop`; a broker gets
one call at a time, of at most `MAX_PARTITIONS_A_CALL` partitions; what one job's owner raises concerns no other job.

Entry: `MarkerSender.send`.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tidelog.broker.coordinators.topic import TRANSACTION_TOPIC
from tidelog.broker.txn.calls import MARKERS, MarkerParams, MarkersParams, TopicPartition, read_codes_of_markers
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.state import Markers
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.task_errors import ERRORS, as_unavailable
from tidelog.runtime.tasks import TaskSet

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

logger = logging.getLogger(__name__)

MAX_PARTITIONS_A_CALL = 1_000
CALL_S = 10.0
"""Time of a call; a marker that was written after it is written again, which changes nothing."""
RETRY_BASE_S, RETRY_CAP_S = 0.02, 1.0
"""Pauses before what failed is routed again."""
_NOBODY = -1
_PLACE = "txn-markers"
"""For exceptions that nobody expects."""

WriteHere = Callable[[list[MarkerParams]], Awaitable[list[list[int]]]]
"""Writes markers to partitions that this broker leads; returns an error code for each, in order."""


class CallsToPeers(Protocol):
    """What is needed of `tidelog.broker.partitions.peer_calls.PeerCalls`."""

    async def call(self, broker_id: int, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        """Call a method of another broker. Raises `TidelogError`."""
        ...


@dataclass(slots=True, eq=False)
class MarkerJob:
    """The markers of one decision."""

    owner: Hashable
    """The shard whose decision it is; `MarkerSender.drop` ends its jobs."""
    coordinator_epoch: int
    markers: Markers
    marked: Callable[[Markers, Iterable[TopicPartition]], None]
    """Told of partitions that have their markers, as they do."""
    dropped: bool = False
    topic_ids: dict[str, bytes] = field(default_factory=dict)
    """The ids of their topics, by name, when the job began."""


_Entry = tuple[MarkerJob, TopicPartition]


class MarkerSender:
    """The markers that one broker's coordinator has to send."""

    def __init__(
        self,
        *,
        node_id: int,
        image: Callable[[], Image],
        calls: CallsToPeers,
        write_here: WriteHere,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._calls = calls
        self._write_here = write_here
        self._clock = clock
        self._rng = rng
        self._queues: dict[int, deque[_Entry]] = {}
        """What waits for each broker with a running task."""
        self._again: list[_Entry] = []
        self._backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, rng)
        self._retrying = False
        self._jobs: dict[Hashable, dict[MarkerJob, None]] = {}
        self._left: dict[MarkerJob, int] = {}
        self._tasks = TaskSet(_PLACE)
        self._limiter = LogLimiter(logger, clock, burst=5, period_s=10.0)
        self.counts = {"written": 0, "retried": 0, "fenced": 0}
        """Partitions that have got their marker; that are asked again; jobs that a newer coordinator has ended."""

    def waiting(self) -> int:
        """The number of partitions whose marker is not confirmed."""
        return sum(self._left.values())

    def send(self, job: MarkerJob) -> None:
        """Send the markers of a job until all its partitions have theirs, or its owner's jobs are dropped."""
        self._jobs.setdefault(job.owner, {})[job] = None
        self._left[job] = len(job.markers.partitions)
        image = self._image()
        records = {topic: image.topic(topic) for topic, _ in job.markers.partitions}
        job.topic_ids = {topic: record.id for topic, record in records.items() if record is not None}
        self._route([(job, each) for each in sorted(job.markers.partitions)])

    def drop(self, owner: Hashable) -> None:
        """Send nothing more of an owner's jobs, and tell it nothing more."""
        for job in self._jobs.pop(owner, {}):
            job.dropped = True
            self._left.pop(job, None)

    async def close(self) -> None:
        """Stop sending."""
        for owner in list(self._jobs):
            self.drop(owner)
        await self._tasks.close()

    # --- routing -------------------------------------------------------------------------------------------------

    def _route(self, entries: Iterable[_Entry]) -> None:
        gone: list[_Entry] = []
        for entry in entries:
            if entry[0].dropped:
                continue
            leader = self._leader(*entry)
            if leader is None:
                gone.append(entry)
            elif leader == _NOBODY:
                self._later(entry)
            else:
                self._queue(leader).append(entry)
        self._done(gone)

    def _leader(self, job: MarkerJob, partition: TopicPartition) -> int | None:
        """The broker that leads a partition; `_NOBODY`: none now; None: it needs no marker."""
        image, (name, index) = self._image(), partition
        topic = image.topic(name) if name != TRANSACTION_TOPIC else None
        is_same = topic is not None and topic.id == job.topic_ids.get(name)
        record = image.partition(topic.id, index) if topic is not None and is_same else None
        if record is None:
            return None
        broker_id, _ = image.leader(record)
        return broker_id if broker_id in image.brokers else _NOBODY

    def _queue(self, broker_id: int) -> deque[_Entry]:
        queue = self._queues.get(broker_id)
        if queue is None:
            queue = self._queues[broker_id] = deque()
            self._tasks.spawn(self._work(broker_id, queue), f"broker-{broker_id}")
        return queue

    def _later(self, entry: _Entry) -> None:
        self.counts["retried"] += 1
        self._again.append(entry)
        if not self._retrying:
            self._retrying = True
            self._tasks.spawn(self._retry(), "retry")

    async def _retry(self) -> None:
        while self._again:
            await self._clock.sleep(self._backoff.next_delay_s())
            entries, self._again = self._again, []
            self._route(entries)
        self._backoff.reset()
        self._retrying = False

    # --- sending -------------------------------------------------------------------------------------------------

    async def _work(self, broker_id: int, queue: deque[_Entry]) -> None:
        try:
            while queue:
                count = min(len(queue), MAX_PARTITIONS_A_CALL)
                taken = [entry for entry in (queue.popleft() for _ in range(count)) if not entry[0].dropped]
                if taken:
                    await self._send(broker_id, taken)
        finally:
            del self._queues[broker_id]

    async def _send(self, broker_id: int, entries: list[_Entry]) -> None:
        by_job: dict[MarkerJob, list[TopicPartition]] = {}
        for job, partition in entries:
            by_job.setdefault(job, []).append(partition)
        params = [_params(job, partitions) for job, partitions in by_job.items()]
        try:
            if broker_id == self._node_id:
                codes = await self._write_here(params)
            else:
                raw = await self._calls.call(broker_id, MARKERS, MarkersParams(params), CALL_S)
                codes = read_codes_of_markers(raw, params)
        except Exception as failure:  # noqa: BLE001  # whatever it is, also a failed assertion: others wait behind it
            error = failure if isinstance(failure, TidelogError) else as_unavailable(_PLACE, failure)
            self._limiter.line(
                f"call-{broker_id}",
                logging.WARNING,
                "markers of transactions are not delivered; will try again",
                {"broker": broker_id, "partitions": len(entries), "error": str(error)},
            )
            for entry in entries:
                self._later(entry)
            return
        for (job, partitions), found in zip(by_job.items(), codes, strict=True):
            self._answered(job, partitions, found)

    def _answered(self, job: MarkerJob, partitions: list[TopicPartition], codes: list[int]) -> None:
        done: list[_Entry] = []
        for partition, code in zip(partitions, codes, strict=True):
            if job.dropped:
                return
            if code in (TxnError.NONE, TxnError.INVALID_PRODUCER_EPOCH):
                done.append((job, partition))
            elif code == TxnError.TRANSACTION_COORDINATOR_FENCED:
                self._fenced(job, partition)
                return
            else:
                self._limiter.line(
                    f"code-{code}",
                    logging.INFO,
                    "a partition does not take the marker of a transaction; will try again",
                    {"topic": partition[0], "partition": partition[1], "kafka_code": code},
                )
                self._later((job, partition))
        self._done(done)

    def _fenced(self, job: MarkerJob, partition: TopicPartition) -> None:
        self.counts["fenced"] += 1
        logger.warning(
            "a newer coordinator has written the marker of a transaction; this one stops",
            extra={"topic": partition[0], "partition": partition[1], "coordinator_epoch": job.coordinator_epoch},
        )
        self._end(job)

    def _end(self, job: MarkerJob) -> None:
        job.dropped = True
        self._left.pop(job, None)
        jobs = self._jobs.get(job.owner, {})
        jobs.pop(job, None)
        if not jobs:
            self._jobs.pop(job.owner, None)

    def _done(self, entries: Iterable[_Entry]) -> None:
        by_job: dict[MarkerJob, list[TopicPartition]] = {}
        for job, partition in entries:
            by_job.setdefault(job, []).append(partition)
        for job, partitions in by_job.items():
            self.counts["written"] += len(partitions)
            self._left[job] -= len(partitions)
            if self._left[job] == 0:
                self._end(job)
            try:
                job.marked(job.markers, partitions)
            except Exception as error:  # noqa: BLE001  # the other jobs, and what is still to be routed, go on
                ERRORS.note(_PLACE, error, ended=False)


def _params(job: MarkerJob, partitions: list[TopicPartition]) -> MarkerParams:
    markers = job.markers
    return MarkerParams(
        markers.producer_id,
        markers.epoch,
        markers.commit,
        job.coordinator_epoch,
        markers.version,
        partitions,
        {topic: job.topic_ids[topic] for topic, _ in partitions},
    )
