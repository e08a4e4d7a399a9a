"""Fetch (1): record batches from memory or the bucket, with long-polling.

- Batches are whole, and the first one contains the requested offset, even if it begins before it. The first partition
  with data returns at least one batch, whatever the limits; later ones obey them.
- The request waits until `min_bytes` are available, `max_wait` is over, or a partition has an error or a diverging
  epoch. As in Kafka, a partition with more than is returned of it counts as its limit, which whole batches rarely fill,
  and more than the limit of the response is not waited for.
- Hot partitions are answered at once; cold ones are read concurrently, each within its share of the response. Hot ones
  wait for cold ones in the same request, but not for long: the bucket may be away.
- A partition that has just moved here from another broker (`JUST_CAME_S`) is answered with any data.
- The wait ends early when the client sends another request on the connection (`RequestContext.wake`).
- A partition that is opening here is waited for a little, as one without data; the others' data is not delayed by it.
- A partition that is being handed over returns no data until its new leader is known, which its reader then gets.
- A response that is sent earlier leaves such partitions out in an incremental session; elsewhere it has to name each
  partition, and these with an error, because their high watermark is not known.
- A consumer that names its rack is told of a follower there, by a response without records (KIP-392); a partition that
  is followed here is read as `tidelog.broker.partitions.read_replicas` says. With read_committed it is told so only
  where a batch comes next that is in no transaction: the others are read here.
- With read_committed nothing counts that is beyond the last stable offset, not for `min_bytes` either.
- Leader epochs are checked (KIP-320). Consumers get a diverging epoch from v12, an unknown topic id from v13, and the
  new leader from v16 (KIP-951).
- In a fetch session (KIP-227, `tidelog.broker.kafka.fetch_sessions`) only the partitions that are due are read,
  and only those with changes are in the response.
- Requests that consumers repeat take short ways, in fewer steps and with the same responses: for one partition without
  a session (`_one_at_once`), and in a session with nothing unusual among the due partitions (`_due_at_once`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from struct import Struct
from typing import TYPE_CHECKING

from tidelog.batch.batch import parse_header
from tidelog.broker.kafka.errors import FENCED_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER, fetch_code
from tidelog.broker.kafka.fetch_sessions import (
    FINAL_EPOCH,
    FetchSession,
    FetchSessions,
    SessionError,
    SessionPartition,
)
from tidelog.broker.kafka.handlers.epochs import check_leader_epoch
from tidelog.broker.kafka.handlers.leaders import current_leader, endpoints
from tidelog.broker.kafka.services import Answer, RequestContext, Services, serve
from tidelog.broker.kafka.wire.fetch import (
    FIRST_WITH_TOPIC_ID,
    MAX_VERSION,
    MIN_VERSION,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    FetchTopicResponse,
    PartitionData,
)
from tidelog.broker.partitions.openings import LeaderNotAvailable, Opening
from tidelog.broker.partitions.read_replicas import is_of_transaction
from tidelog.broker.telemetry.slow_requests import Stages, Timing
from tidelog.broker.telemetry.traced import MAX_BATCHES, TracedBatch
from tidelog.runtime.errors import InvalidInput, NotLeader, TidelogError
from tidelog.runtime.types import Buffer
from tidelog.stream.errors import OffsetOutOfRange

if TYPE_CHECKING:
    from tidelog.broker.partitions.read_replicas import FollowedLog
    from tidelog.stream.partition_log import FetchResult, PartitionLog

_FIRST_WITH_LEADERS = 16
_READ_COMMITTED = 1
MAX_COLD_READS = 16
"""Limit of cold partitions read for one request at a time; the next request reads the others."""
MAX_COLD_ROUNDS = 4
MAX_WAIT_MS = 60_000
"""A long poll holds memory; an empty response once a minute costs the client nothing."""
COLD_READ_TIMEOUT_S = 15.0
"""How long one request waits for the bucket, in all its rounds: a response must be sent before clients time out (30 s
and more). Data read meanwhile stays in the cache."""
HOT_DATA_WAIT_S = 1.0
"""How long a request waits for the bucket if there is enough data in memory for its response."""
_REREAD_PAUSE_S = 0.005
"""Interval between two reads of a partition that grows in small steps towards a large `min_bytes`."""
JUST_CAME_S = 0.1
"""For this long, `min_bytes` does not apply to a partition from another broker: its readers have waited long enough."""
_BASE_OFFSET = Struct(">q")
_LAST_OFFSET_DELTA = Struct(">i")
_LAST_OFFSET_DELTA_AT = 23


class _Repeated(InvalidInput):
    """A partition appears twice in one request. Kafka: INVALID_REQUEST (42)."""


class _Slot:
    """One partition of the request, and its state so far."""

    __slots__ = ("counted", "data", "heard", "log", "member", "opening", "size", "spec", "topic")

    def __init__(self, topic: FetchTopic, spec: FetchPartition, member: SessionPartition | None = None) -> None:
        self.member = member
        """Its state in the session; None without a session."""
        self.topic = topic
        self.spec = spec
        self.data = PartitionData(spec.partition)
        self.log: PartitionLog | FollowedLog | None = None
        self.opening: Opening | None = None
        """Set while the partition is opening here."""
        self.heard: Opening | None = None
        """The opening whose end wakes the request."""
        self.size = 0
        self.counted = 0
        """Bytes that count for `min_bytes`."""

    @property
    def is_leaving(self) -> bool:
        """Whether its log was closed since, or before it was read, and nothing else is told of it."""
        log, data = self.log, self.data
        return log is not None and log.closed and not self.size and not data.error_code

    @property
    def is_between_leaders(self) -> bool:
        """Whether there is nothing to tell of it yet: it is leaving, or opening here."""
        return self.is_leaving or (self.opening is not None and self.opening.remaining_s > 0)


class _Fetch:
    """One Fetch request in progress. `session`: the session of the request, whose due partitions it takes."""

    def __init__(self, context: RequestContext, request: FetchRequest, session: FetchSession | None = None) -> None:
        self._api_version = context.api_version
        self._services = context.services
        self._request = request
        self._committed = request.isolation_level == _READ_COMMITTED
        self._by_id = context.api_version >= FIRST_WITH_TOPIC_ID
        self._session = session
        if session is None:
            self._slots = [_Slot(topic, spec) for topic in request.topics for spec in topic.partitions]
        else:
            self._slots = self._take_due(session)
        self._seen: dict[PartitionLog | FollowedLog, _Slot] = {}
        self._limit = min(request.max_bytes, context.services.kafka.fetch_max_bytes)
        self._least = min(request.min_bytes, self._limit)
        self._size = self._counted = 0
        self._urgent = not (self._slots if session is None else len(session))
        self._cold: list[tuple[_Slot, asyncio.Task[FetchResult], bool]] = []
        """Each with whether it is the first with data, which returns a batch whatever its limit is."""
        self._skipped: list[_Slot] = []
        self._too_large: list[_Slot] = []
        """Those whose first batch is larger than their limit, and that came after a cold one."""
        self._looked = self._memory_only = self._missed = False
        self._wake = asyncio.Event()
        self._hurried = False
        self._is_late = False
        """It has waited for the bucket for as long as it may: what is left is read from memory, or the next time."""
        self._waited_s = self._reading_s = 0.0
        """Seconds that it waited for data to come, and for the bucket."""

    def wake(self) -> None:
        """Answer with the available data as soon as it is read."""
        self._hurried = True
        self._wake.set()

    def at_once(self) -> FetchResponse | None:
        """Return the response if enough data is in memory now. None: call `run`."""
        self._memory_only = True
        for slot in self._slots:
            self._read(slot)
            if self._missed:
                break
        self._memory_only = False
        self._looked = not self._missed
        return self._response() if self._looked and self._enough() else None

    def _enough(self) -> bool:
        return self._urgent or self._counted >= self._least or self._request.max_wait_ms <= 0

    async def run(self) -> FetchResponse:
        """Collect until there is enough data or the time is over."""
        request = self._request
        if not self._looked:
            await self._collect(self._slots)
            if self._enough():
                return self._response()
        clock = self._services.clock
        deadline = clock.monotonic() + min(request.max_wait_ms, MAX_WAIT_MS) / 1000
        changed: dict[_Slot, None] = {}
        wake = self._wake
        removers = self._listen_to(self._slots, changed, wake)
        session = self._session
        if session is not None:
            session.heard = wake.set
        try:
            # During a cold read a watermark may have moved without a notification.
            again = [slot for slot in self._slots if self._may_have_more(slot)]
            if session is not None:
                again += await self._join_due(session, removers, changed, wake)
            while True:
                await self._collect(again)
                removers += [
                    self._listen_to_opening(slot, changed, wake)
                    for slot in again
                    if slot.opening is not None and slot.opening is not slot.heard  # it was open, or followed
                ]
                remaining = deadline - clock.monotonic()
                if self._urgent or self._counted >= self._least or remaining <= 0 or self._hurried:
                    return self._response()
                waits_since = clock.monotonic()
                await _wait(wake, remaining)
                if self._size and not self._urgent:
                    await asyncio.sleep(_REREAD_PAUSE_S)
                self._waited_s += clock.monotonic() - waits_since
                wake.clear()
                again = list(changed)
                changed.clear()
                if session is not None:
                    again += await self._join_due(session, removers, changed, wake)
        finally:
            for remove in removers:
                remove()

    def _take_due(self, session: FetchSession) -> list[_Slot]:
        return [_Slot(member.topic, member.spec, member) for member in session.take()]

    async def _join_due(
        self, session: FetchSession, removers: list[Callable[[], None]], changed: dict[_Slot, None], wake: asyncio.Event
    ) -> list[_Slot]:
        """Add partitions of the session that became due while this request waits."""
        joined = self._take_due(session)
        self._slots += joined
        await self._collect(joined)
        removers += self._listen_to(joined, changed, wake)
        return [slot for slot in joined if not slot.size and self._may_have_more(slot)]

    def _listen_to(
        self, slots: Iterable[_Slot], changed: dict[_Slot, None], wake: asyncio.Event
    ) -> list[Callable[[], None]]:
        return [
            self._listen(slot, changed, wake) if slot.opening is None else self._listen_to_opening(slot, changed, wake)
            for slot in slots
            if slot.log is not None or slot.opening is not None
        ]

    def _listen_to_opening(self, slot: _Slot, changed: dict[_Slot, None], wake: asyncio.Event) -> Callable[[], None]:
        """Answer the request at the end of the opening, or when the time to wait for it is over."""
        assert slot.opening is not None
        slot.heard = slot.opening

        def ended() -> None:
            changed[slot] = None
            self._urgent = True
            wake.set()

        if slot.opening.remaining_s <= 0:
            ended()
            return lambda: None
        timer = asyncio.get_running_loop().call_later(slot.opening.remaining_s, ended)
        remove = slot.opening.listen(ended)

        def stop() -> None:
            timer.cancel()
            remove()

        return stop

    def _listen(self, slot: _Slot, changed: dict[_Slot, None], wake: asyncio.Event) -> Callable[[], None]:
        log = slot.log
        assert log is not None

        def moved() -> None:
            changed[slot] = None
            self._urgent = self._urgent or self._has_just_come(log)
            wake.set()

        return log.add_watermark_listener(moved)

    def _has_just_come(self, log: PartitionLog | FollowedLog) -> bool:
        return self._services.clock.monotonic() < log.came_at + JUST_CAME_S

    def _may_have_more(self, slot: _Slot) -> bool:
        log = slot.log
        if log is None or log.closed:
            return True
        return self._bound(log) > slot.spec.fetch_offset

    def _bound(self, log: PartitionLog | FollowedLog) -> int:
        return log.last_stable_offset if self._committed else log.high_watermark

    # --- collecting ------------------------------------------------------------------------------------------------

    async def _collect(self, slots: Iterable[_Slot]) -> None:
        """Read these partitions (again), in order. Their previous data is dropped from the response.

        Cold reads reserve room that they may not fill; a partition that found no room because of that is read again,
        unless there is enough data already: then it comes first in the client's next request. If no cold read returns
        anything, one whose first batch is larger than its limit is the first with data.
        """
        for _ in range(MAX_COLD_ROUNDS):
            self._skipped, self._too_large = [], []
            for slot in slots:
                self._read(slot)
            if not self._cold:
                return
            await self._finish_cold()
            if not self._size:
                self._skipped += self._too_large
            if (self._size and self._counted >= self._least) or not self._skipped:
                return
            slots = self._skipped

    def _read(self, slot: _Slot) -> None:
        self._size -= slot.size
        self._counted -= slot.counted
        slot.size = slot.counted = 0
        slot.data = PartitionData(slot.spec.partition)
        was_opening, slot.opening = slot.opening is not None, None
        try:
            self._look_at(slot)
        except LeaderNotAvailable as error:
            slot.opening = error.opening
            self._fail(slot, error)
        except TidelogError as error:
            self._fail(slot, error)
        if was_opening and slot.opening is None:
            self._urgent = True  # this request has no listener on its log

    def _look_at(self, slot: _Slot) -> None:
        spec, log = slot.spec, self._find(slot)
        if self._seen.setdefault(log, slot) is not slot:
            raise _Repeated(f"{log.topic}-{log.partition} appears twice in the request")
        if slot.log is not None and slot.log is not log:
            self._urgent = True  # reopened, and this request has no listener on it: the client has to send another
        slot.log = log
        check_leader_epoch(log, spec.current_leader_epoch)
        if log.closed:
            self._fill(slot, log)
            return
        if spec.last_fetched_epoch >= 0 and self._diverges(slot, log):
            return
        if self._request.rack_id and self._names_follower(slot, log):
            return
        room = self._limit - self._size - sum(reserved.size for reserved, *_ in self._cold)
        limit = max(min(spec.partition_max_bytes, room), 0)
        first = self._size == 0 and not self._cold
        if limit == 0 and not first:
            self._fill(slot, log)
            self._skipped.append(slot)
            return
        found = log.read_hot(spec.fetch_offset, limit, committed=self._committed)
        if found is None:
            if self._memory_only:
                self._missed = True
                return
            if len(self._cold) < MAX_COLD_READS and not self._is_late:
                work = log.read(spec.fetch_offset, limit, committed=self._committed, minimum_one=first)
                self._cold.append((slot, asyncio.get_running_loop().create_task(work), first))
                slot.size = limit
            else:
                self._skipped.append(slot)
            self._fill(slot, log)
            return
        self._fill(slot, log)
        if found.size_bytes <= limit or first:
            self._take(slot, found, limit)
        else:
            self._too_large.append(slot)
            slot.counted = limit
            self._counted += limit

    def _names_follower(self, slot: _Slot, log: PartitionLog | FollowedLog) -> bool:
        """Name the follower that this consumer should read from, if there is one and this broker leads."""
        if not log.log_start_offset <= slot.spec.fetch_offset <= log.high_watermark:
            return False
        followers = self._services.read_replicas
        chosen = followers.nearest(log.topic_id, log.partition, self._request.rack_id)
        if chosen < 0 or (self._committed and not _begins_plain(log, slot.spec.fetch_offset)):
            return False
        self._fill(slot, log)
        slot.data.preferred_read_replica = chosen
        self._urgent = True
        return True

    def _find(self, slot: _Slot) -> PartitionLog | FollowedLog:
        """Return the open log, that of a partition that is followed here, or the closed one of a partition that is
        being handed over: its next event is the new leader, known within milliseconds. An error without the leader
        would make the client back off for longer."""
        topic, index = slot.topic, slot.spec.partition
        partitions = self._services.partitions
        try:
            if self._by_id:
                return partitions.get_by_id(topic.topic_id, index)
            return partitions.get(topic.name, index)
        except LeaderNotAvailable:
            found = self._services.controller.image.topic(topic.name) if not self._by_id else None
            leaving = partitions.leaving(found.id if found is not None else topic.topic_id, index)
            if leaving is None:
                raise
            return leaving
        except NotLeader:
            if not self._request.rack_id:
                raise
            found = self._services.controller.image.topic(topic.name) if not self._by_id else None
            return self._services.read_replicas.get(found.id if found is not None else topic.topic_id, index)

    def _diverges(self, slot: _Slot, log: PartitionLog | FollowedLog) -> bool:
        """Return whether the log's history differs from the one this reader has read (KIP-595/320)."""
        spec = slot.spec
        epoch, end_offset = log.end_offset_for_epoch(spec.last_fetched_epoch)
        if epoch < 0:
            raise OffsetOutOfRange(f"leader epoch {spec.last_fetched_epoch} is unknown to this broker")
        if epoch >= spec.last_fetched_epoch and end_offset >= spec.fetch_offset:
            return False
        self._fill(slot, log)
        slot.data.diverging_epoch = (epoch, end_offset)
        self._urgent = True
        return True

    def _fill(self, slot: _Slot, log: PartitionLog | FollowedLog) -> None:
        data = slot.data
        data.high_watermark = log.high_watermark
        data.last_stable_offset = log.last_stable_offset
        data.log_start_offset = log.told_log_start
        if self._committed:
            data.aborted_transactions = ()

    def _take(self, slot: _Slot, found: FetchResult, limit: int) -> None:
        if found.size_bytes:
            slot.data.records = found.records
            slot.size = slot.counted = found.size_bytes
            self._size += found.size_bytes
            is_short = slot.size < limit and self._counted + slot.size < self._least
            if is_short and slot.log is not None and _end(slot.data) < self._bound(slot.log):
                slot.counted = limit
            self._counted += slot.counted
            if slot.log is not None and self._has_just_come(slot.log):
                self._urgent = True
            if self._committed:
                slot.data.aborted_transactions = found.aborted

    def _fail(self, slot: _Slot, error: TidelogError) -> None:
        code = fetch_code(error)
        slot.data = PartitionData(slot.spec.partition, code)
        self._urgent = self._urgent or slot.opening is None
        if code in (NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH) and self._api_version >= _FIRST_WITH_LEADERS:
            topic = slot.topic
            slot.data.current_leader = current_leader(self._services, topic.name, topic.topic_id, slot.spec.partition)

    async def _finish_cold(self) -> None:
        cold, self._cold = self._cold, []
        tasks = [task for _, task, _ in cold]
        began = self._services.clock.monotonic()
        limit_s = HOT_DATA_WAIT_S if self._size and self._counted >= self._least else COLD_READ_TIMEOUT_S
        try:
            await asyncio.wait(tasks, timeout=max(0.0, limit_s - self._reading_s))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._reading_s += self._services.clock.monotonic() - began
        for slot, task, is_first in cold:
            limit, slot.size = slot.size, 0
            if task.cancelled():
                self._urgent = self._is_late = True  # answered without it: the next request finds it in the cache
                continue
            error = task.exception()
            if isinstance(error, TidelogError):
                self._fail(slot, error)
                continue
            found = task.result()
            if slot.log is not None:
                self._fill(slot, slot.log)
            self._take(slot, found, limit)
            if not slot.size and not is_first:
                self._too_large.append(slot)

    def timing(self, started_at: float, handled_at: float, now: float) -> Timing:
        """See `RequestParts`. Of several partitions the first that was read is named."""
        named = next((slot for slot in self._slots if slot.size), self._slots[0] if self._slots else None)
        topic, partition = "", -1
        if named is not None:
            topic = named.log.topic if named.log is not None else named.topic.name
            partition = named.spec.partition
        failed = next((slot.data.error_code for slot in self._slots if slot.data.error_code), 0)
        stages = Stages(read=self._reading_s)
        return Timing(stages, 0.0, self._waited_s, topic, partition, len(self._slots), failed)

    def trace_records(self) -> Sequence[Buffer]:
        """See `tidelog.broker.telemetry.traced.RequestParts`."""
        return ()

    def traced(self) -> list[TracedBatch]:
        """See `tidelog.broker.telemetry.traced.RequestParts`: the partitions with records, or with an error."""
        batches: list[TracedBatch] = []
        for slot in self._slots:
            data = slot.data
            if len(batches) < MAX_BATCHES and (slot.size or data.error_code):
                topic = slot.log.topic if slot.log is not None else slot.topic.name
                batches.append(_traced(topic, data))
        return batches

    # --- answering -------------------------------------------------------------------------------------------------

    def _response(self) -> FetchResponse:
        self._fail_closed()
        session = self._session
        answered: Sequence[_Slot] = self._slots if session is None else self._give_back(session)
        response = FetchResponse(session_id=0 if session is None else session.id)
        topics: dict[str | bytes, FetchTopicResponse] = {}
        leaders = []
        for slot in answered:
            name = slot.topic.topic_id if self._by_id else slot.topic.name
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = FetchTopicResponse(slot.topic.name, slot.topic.topic_id, [])
                response.topics.append(topic)
            topic.partitions.append(slot.data)
            if slot.data.error_code != 0:
                self._services.metrics.partition_error(FetchRequest.API_KEY, slot.data.error_code)
            if slot.size and slot.log is not None:
                self._services.metrics.fetched(slot.log.topic, _count_records(slot.data), slot.size)
                self._services.metrics.load.fetched(slot.log.first_stream, slot.size)
            if slot.data.current_leader is not None:
                leaders.append(slot.data.current_leader.leader_id)
        if leaders:
            response.node_endpoints = endpoints(self._services.controller.image, leaders)
        return response

    def _fail_closed(self) -> None:
        """The outcome of a hand-over is not known here: the next leader may have moved the high watermark on, so the
        one of the closed log is not told. A response of an incremental session leaves such a partition out."""
        if self._session is not None and self._session.incremental:
            return
        for slot in self._slots:
            log = slot.log
            if log is not None and slot.is_leaving:
                self._fail(slot, NotLeader(f"{log.topic}-{log.partition} is being handed over to another broker"))

    def _give_back(self, session: FetchSession) -> list[_Slot]:
        """Return the partitions to the session; return the slots with changes, in the order of the request."""
        answered, served = [], []
        for slot in self._slots:
            member, data = slot.member, slot.data
            assert member is not None
            told = (data.high_watermark, data.last_stable_offset, data.log_start_offset)
            troubled = data.error_code != 0 or data.diverging_epoch is not None or data.preferred_read_replica >= 0
            has_news = slot.size > 0 or troubled or told != member.told or not session.incremental
            if has_news and not (session.incremental and slot.is_between_leaders):
                member.told = told
                answered.append(slot)
            if slot.size:
                served.append(member)
            elif troubled or slot.log is None or self._may_have_more(slot):
                session.due_again(member)
            else:
                session.rest(member, slot.log)
        for member in served:
            session.due_again(member)
        return answered


def _begins_plain(log: PartitionLog | FollowedLog, offset: int) -> bool:
    """Return whether a batch is in memory at `offset` that is in no transaction, and decided by what is before it.

    A follower gives no others to read_committed consumers: they would be sent to and fro.
    """
    found = log.read_hot(offset, 1, committed=True)
    return found is not None and bool(found.records) and not is_of_transaction(found.records[0])


def _count_records(data: PartitionData) -> int:
    """Count the records in contiguous batches, by the first header and the last."""
    (base,) = _BASE_OFFSET.unpack_from(data.records[0])
    return _end(data) - int(base)


def _end(data: PartitionData) -> int:
    """Return the offset after the last record."""
    last = data.records[-1]
    (base,) = _BASE_OFFSET.unpack_from(last)
    (delta,) = _LAST_OFFSET_DELTA.unpack_from(last, _LAST_OFFSET_DELTA_AT)
    return int(base + delta + 1)


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return


def _one_at_once(context: RequestContext, request: FetchRequest) -> FetchResponse | None:
    """As `_Fetch`, in fewer steps, for a request for one partition with enough data in memory; else None."""
    topic, committed = request.topics[0], request.isolation_level == _READ_COMMITTED
    spec, services = topic.partitions[0], context.services
    limit = min(spec.partition_max_bytes, request.max_bytes, services.kafka.fetch_max_bytes)
    try:
        if context.api_version >= FIRST_WITH_TOPIC_ID:
            log = services.partitions.get_by_id(topic.topic_id, spec.partition)
        else:
            log = services.partitions.get(topic.name, spec.partition)
        if log.closed or spec.last_fetched_epoch >= 0 or spec.fetch_offset >= log.high_watermark:
            return None
        check_leader_epoch(log, spec.current_leader_epoch)
        found = log.read_hot(spec.fetch_offset, max(limit, 0), committed=committed)
    except TidelogError:
        return None  # `_Fetch` raises the same, and reports it to the client
    if found is None or found.size_bytes < max(request.min_bytes, 1):
        return None
    data = PartitionData(spec.partition, 0, log.high_watermark, log.last_stable_offset, log.told_log_start)
    data.records = found.records
    if committed:
        data.aborted_transactions = found.aborted
    services.metrics.fetched(log.topic, _count_records(data), found.size_bytes)
    services.metrics.load.fetched(log.first_stream, found.size_bytes)
    return FetchResponse([FetchTopicResponse(topic.name, topic.topic_id, [data])])


def _due_at_once(context: RequestContext, request: FetchRequest, session: FetchSession) -> FetchResponse | None:
    """As `_Fetch`, in fewer steps, for an incremental request whose due partitions are all usual, with enough data in
    memory; else None, and nothing has happened.

    Usual are open logs led here, that the reader may read from its offset, here.
    """
    services, rack = context.services, request.rack_id
    committed, by_id = request.isolation_level == _READ_COMMITTED, session.by_id
    partitions, nearest = services.partitions, services.read_replicas.nearest
    limit = min(request.max_bytes, services.kafka.fetch_max_bytes)
    size, now = 0, services.clock.monotonic()
    urgent = not len(session)
    looked: list[tuple[SessionPartition, PartitionLog, FetchResult | None]] = []
    try:
        for member in session.due:
            topic, spec = member.topic, member.spec
            if by_id:
                log = partitions.get_by_id(topic.topic_id, spec.partition)
            else:
                log = partitions.get(topic.name, spec.partition)
            if log.closed or spec.last_fetched_epoch >= 0:
                return None
            check_leader_epoch(log, spec.current_leader_epoch)
            if rack and nearest(log.topic_id, log.partition, rack) >= 0:
                return None
            room = max(min(spec.partition_max_bytes, limit - size), 0)
            found = None
            if room or not size:
                found = log.read_hot(spec.fetch_offset, room, committed=committed)
                if found is None:
                    return None
                if not found.size_bytes or (found.size_bytes > room and size):
                    found = None
                else:
                    size += found.size_bytes
                    urgent = urgent or now < log.came_at + JUST_CAME_S
            looked.append((member, log, found))
    except TidelogError:
        return None  # `_Fetch` raises the same, and reports it to the client
    if not urgent and size < request.min_bytes and request.max_wait_ms > 0:
        return None
    return _told_of(context, session, looked, committed=committed)


def _told_of(
    context: RequestContext,
    session: FetchSession,
    looked: Sequence[tuple[SessionPartition, PartitionLog, FetchResult | None]],
    *,
    committed: bool,
) -> FetchResponse:
    """Take the due partitions of the session, all in `looked`, give them back, and return what is new of them."""
    metrics, by_id = context.services.metrics, session.by_id
    response = FetchResponse(session_id=session.id)
    topics: dict[str | bytes, FetchTopicResponse] = {}
    served = []
    session.take()
    for member, log, found in looked:
        high, stable, start = told = (log.high_watermark, log.last_stable_offset, log.told_log_start)
        spec = member.spec
        if found is not None:
            served.append(member)
        elif (stable if committed else high) > spec.fetch_offset:
            session.due_again(member)
        else:
            session.rest(member, log)
        if found is None and told == member.told:
            continue
        member.told = told
        data = PartitionData(spec.partition, 0, high, stable, start, () if committed else None)
        if found is not None:
            data.records = found.records
            if committed:
                data.aborted_transactions = found.aborted
            metrics.fetched(log.topic, _count_records(data), found.size_bytes)
            metrics.load.fetched(log.first_stream, found.size_bytes)
        name = member.topic.topic_id if by_id else member.topic.name
        topic = topics.get(name)
        if topic is None:
            topic = topics[name] = FetchTopicResponse(member.topic.name, member.topic.topic_id, [])
            response.topics.append(topic)
        topic.partitions.append(data)
    for member in served:
        session.due_again(member)
    return response


class _ShortFetch:
    """A request that was answered by a short way, for traces: all it did is in its response."""

    def __init__(self, services: Services, response: FetchResponse) -> None:
        self._services = services
        self._response = response

    def timing(self, started_at: float, handled_at: float, now: float) -> Timing:
        """See `tidelog.broker.telemetry.traced.RequestParts`. It waited for nothing."""
        found = self.traced()
        named = found[0] if found else None
        count = sum(len(topic.partitions) for topic in self._response.topics)
        topic, partition = (named.topic, named.partition) if named is not None else ("", -1)
        return Timing(Stages(), 0.0, 0.0, topic, partition, count, 0)

    def trace_records(self) -> Sequence[Buffer]:
        """See `tidelog.broker.telemetry.traced.RequestParts`."""
        return ()

    def traced(self) -> list[TracedBatch]:
        """See `tidelog.broker.telemetry.traced.RequestParts`."""
        batches: list[TracedBatch] = []
        for topic in self._response.topics:
            name = topic.name or self._services.topic_name(topic.topic_id)
            for data in topic.partitions:
                if data.records and len(batches) < MAX_BATCHES:
                    batches.append(_traced(name, data))
        return batches


def _traced(topic: str, data: PartitionData) -> TracedBatch:
    offset = parse_header(data.records[0]).base_offset if data.records else -1
    return TracedBatch(topic, data.partition, offset, data.records, data.error_code)


def handle(context: RequestContext, request: FetchRequest) -> Awaitable[FetchResponse]:
    """Answer one Fetch request: from memory without a task or loop iteration, or when there is enough data."""
    return _handle(context, request, short=True)


def handle_without_short_ways(context: RequestContext, request: FetchRequest) -> Awaitable[FetchResponse]:
    """As `handle`, each request by the same way; what its responses are compared with."""
    return _handle(context, request, short=False)


def _handle(context: RequestContext, request: FetchRequest, *, short: bool) -> Awaitable[FetchResponse]:
    sessions, clock = context.services.fetch_sessions, context.services.clock
    answer: Answer[FetchResponse] = Answer()
    topics = request.topics
    if (
        short
        and request.session_epoch == FINAL_EPOCH
        and not request.session_id
        and len(topics) == 1 == len(topics[0].partitions)
        and not request.rack_id
    ):
        response = _one_at_once(context, request)
        if response is not None:
            if context.services.tracing is not None:
                context.timed = _ShortFetch(context.services, response)
            answer.give(response)
            return answer
    try:
        session = sessions.begin(request, clock.monotonic(), by_id=context.api_version >= FIRST_WITH_TOPIC_ID)
    except SessionError as error:
        answer.give(FetchResponse(error_code=error.code))
        return answer
    try:
        response = None
        if short and session is not None and session.incremental:
            response = _due_at_once(context, request, session)
            if response is not None and context.services.tracing is not None:
                context.timed = _ShortFetch(context.services, response)
        if response is None:
            fetch = context.timed = _Fetch(context, request, session)
            response = fetch.at_once()
    except BaseException:
        if session is not None:
            sessions.end(session, answered=False)
        raise
    if response is None:
        context.wake = fetch.wake
        return fetch.run() if session is None else _run_in(sessions, session, fetch)
    if session is not None:
        sessions.end(session, answered=True)
    answer.give(response)
    return answer


async def _run_in(sessions: FetchSessions, session: FetchSession, fetch: _Fetch) -> FetchResponse:
    answered = False
    try:
        response = await fetch.run()
        answered = True
        return response
    finally:
        sessions.end(session, answered=answered)


APIS = [serve(FetchRequest, MIN_VERSION, MAX_VERSION, handle, sequential=True)]
