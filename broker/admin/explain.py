"""Where a record went and when, and the slowest requests, over admin HTTP (docs/design/0029-explain.md).

    GET  /explain          ?topic=NAME&partition=N&offset=N: what the leader knows of a record; others say who leads
    GET  /explain/groups   ?topic=NAME&partition=N: committed offsets of the groups that this broker coordinates
    GET  /requests/slow    ?limit=N&api=NAME&topic=NAME: the slowest requests of the last hour here, `limit` of
                           each API, and those that are running for more than a second, of whatever topic

None of them changes anything, or shows keys, values or headers. `/explain` may read one batch and the index of one
object from the bucket.

Entry: `ExplainRoutes.routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from tidelog.batch.batch import BatchHeader, Compression, ControlType, Record, control_type, iter_records, parse_header
from tidelog.broker.admin.answers import json_answer, number
from tidelog.broker.admin.record_story import CleaningFacts, HoldingObject, LogMarks, RecordFacts, summary, tell
from tidelog.broker.telemetry.metrics import API_NAMES, api_name
from tidelog.broker.telemetry.slow_requests import STAGES, SlowRequest, SlowRequests
from tidelog.runtime.errors import InvalidInput, NotFound, NotLeader, TidelogError, Unavailable
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import load_index
from tidelog.storage.objects.report import KINDS
from tidelog.stream.errors import OffsetOutOfRange

if TYPE_CHECKING:
    from tidelog.broker.groups.coordinator import GroupCoordinator
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.image.image import Image
    from tidelog.runtime.clock import Clock
    from tidelog.stream.partition_log import PartitionLog

MAX_OFFSET = (1 << 63) - 1
MAX_PARTITION = (1 << 31) - 1
MAX_GROUPS = 1_000
"""Groups in one answer."""
MAX_SLOW = 100
RUNNING_S = 1.0
"""Requests that run for longer are told of before they end."""
_GROUPS_AT_ONCE = 10_000
"""Groups that are looked at between two iterations of the event loop."""


class _FoundBatch(NamedTuple):
    """The batch at an offset, and the record, if it has it."""

    header: BatchHeader | None = None
    size_bytes: int = 0
    record: Record | None = None
    is_removed: bool = False


class ExplainParts(NamedTuple):
    """What the routes look at."""

    node_id: int
    clock: Clock
    image: Callable[[], Image]
    store: ObjectStore
    partitions: PartitionManager
    groups: GroupCoordinator
    slow: SlowRequests | None
    """None: slow requests are not recorded."""


def _nothing_runs(_limit: int) -> list[tuple[float, int, str]]:
    """There is no listener yet."""
    return []


class ExplainRoutes:
    """The handlers."""

    def __init__(self, parts: ExplainParts) -> None:
        self._parts = parts
        self._since_ms = parts.clock.time_ms()
        self.running: Callable[[int], list[tuple[float, int, str]]] = _nothing_runs
        """`KafkaServer.running`, once there is a listener."""

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/explain", self._explain),
            web.get("/explain/groups", self._groups),
            web.get("/requests/slow", self._slow),
        ]

    # --- a record ------------------------------------------------------------------------------------------------

    async def _explain(self, request: web.Request) -> web.Response:
        topic, partition = self._asked(request)
        offset = number(request, "offset", 0, 0, MAX_OFFSET)
        log = self._leader(topic, partition)
        found = await _find(log, offset)
        facts = await self._facts(log, offset, found)
        marks = facts.marks
        document = {
            "topic": log.topic,
            "partition": log.partition,
            "offset": offset,
            "broker": self._parts.node_id,
            "leader_epoch": log.leader_epoch,
            "now_ms": facts.now_ms,
            "remembers_since_ms": log.history.since_ms,
            "summary": summary(facts),
            "log": marks._asdict(),
            "batch": _batch(log, found, facts),
            "record": _record(offset, found),
            "object": _held(facts.object),
            "stages": tell(facts),
        }
        return json_answer(document)

    def _asked(self, request: web.Request) -> tuple[str, int]:
        topic = request.query.get("topic", "")
        if not topic:
            raise InvalidInput("topic is missing", hint="?topic=NAME&partition=N&offset=N")
        return topic, number(request, "partition", 0, 0, MAX_PARTITION)

    def _leader(self, topic: str, partition: int) -> PartitionLog:
        """Return the log, if it is open here. Raises `NotFound`, `NotLeader` with who leads, `Unavailable`."""
        try:
            return self._parts.partitions.get(topic, partition)
        except NotLeader as error:
            raise NotLeader(error.message, hint=self._who_leads(topic, partition)) from error

    def _who_leads(self, topic: str, partition: int) -> str:
        image = self._parts.image()
        record = image.topic(topic)
        place = image.partition(record.id, partition) if record is not None else None
        leader = image.leader(place)[0] if place is not None else -1
        known = image.brokers.get(leader)
        if known is None:
            return "no living broker leads it: see `tidelog status`"
        return f"ask broker {leader}, whose admin HTTP is {known.admin_url or 'not known'}"

    async def _facts(self, log: PartitionLog, offset: int, found: _FoundBatch) -> RecordFacts:
        parts, image, header = self._parts, self._parts.image(), found.header
        data = log.state.data
        stream = image.streams.get(data.stream_id)
        held = await self._object(data.stream_id, offset)
        cleaning = log.cleaning.last()
        transaction = await _transaction(log, offset, header) if header is not None else ""
        here = log.whereabouts()
        if here is None:
            raise NotLeader(
                f"{log.topic}-{log.partition} was closed meanwhile", hint=self._who_leads(log.topic, log.partition)
            )
        return RecordFacts(
            offset=offset,
            marks=LogMarks(log.log_start_offset, log.last_stable_offset, log.high_watermark, log.log_end_offset),
            base_offset=header.base_offset if header is not None else offset,
            is_present=found.record is not None,
            is_removed=found.is_removed,
            stream_id=data.stream_id,
            first_stream=log.first_stream,
            history=log.history,
            opened_ms=log.opened_ms,
            inherited_end=log.inherited_end,
            uploaded_end=stream.end_offset if stream is not None else 0,
            cached_from=here.cache_start,
            wal_start=here.wal_start,
            now_ms=parts.clock.time_ms(),
            timestamp_ms=found.record.timestamp if found.record is not None else -1,
            is_append_time=header is not None and header.is_log_append_time,
            transaction=transaction,
            object=held,
            cleaning=CleaningFacts(log.config.compacts, cleaning.first_dirty, cleaning.cleaned_ms),
        )

    async def _object(self, stream_id: int, offset: int) -> HoldingObject | None:
        """Return the object that holds the offset now, with its block if the bucket answers."""
        image = self._parts.image()
        slices = image.find_objects(stream_id, offset, offset + 1, 1)
        if not slices or not slices[0].start_offset <= offset < slices[0].end_offset:
            return None
        stored_as, _ = image.resolve(stream_id, offset, offset + 1)
        record = image.objects[slices[0].object_id]
        key, block, problem = object_key(image.cluster_id, record.id), None, ""
        try:
            index = await load_index(
                self._parts.store, key, record.size, object_id=record.id, cluster_id=image.cluster_id
            )
        except TidelogError as error:
            problem = f"its index cannot be read: {error.message}"
        else:
            for each in index:
                if each.stream_id == stored_as and each.start_offset <= offset < each.end_offset:
                    block = {
                        "position": each.position,
                        "length_bytes": each.length,
                        "start_offset": each.start_offset,
                        "end_offset": each.end_offset,
                    }
        return HoldingObject(
            record.id, key, KINDS.get(record.kind, str(record.kind)), record.size, record.since_ms, block, problem
        )

    # --- groups --------------------------------------------------------------------------------------------------

    async def _groups(self, request: web.Request) -> web.Response:
        topic, partition = self._asked(request)
        if self._parts.image().topic(topic) is None:
            raise NotFound(f"topic {topic!r} does not exist", hint="`tidelog topic list` shows the topics")
        rows: list[dict[str, Any]] = []
        more = 0
        for count, (group, value) in enumerate(self._parts.groups.offsets_of(topic, partition)):
            if count % _GROUPS_AT_ONCE == _GROUPS_AT_ONCE - 1:
                await asyncio.sleep(0)
            if len(rows) < MAX_GROUPS:
                rows.append({"group": group, "committed": value.offset, "commit_ms": value.commit_ms})
            else:
                more += 1
        loading = self._parts.groups.loading()
        return json_answer({"broker": self._parts.node_id, "groups": rows, "more": more, "loading": loading})

    # --- slow requests -------------------------------------------------------------------------------------------

    async def _slow(self, request: web.Request) -> web.Response:
        limit = number(request, "limit", 10, 1, MAX_SLOW)
        api_key = _api_key(request.query.get("api"))
        parts = self._parts
        if parts.slow is None:
            raise Unavailable(
                f"broker {parts.node_id} records no slow requests",
                hint="its setting kafka.slow_requests is 0: set it to 8, for example, and restart the broker",
            )
        requests = parts.slow.slowest(parts.clock.monotonic(), limit, api_key, request.query.get("topic"))
        running = [
            {"api": api_name(key), "age_ms": round(age_s * 1000, 3), "client_id": client_id}
            for age_s, key, client_id in self.running(MAX_SLOW)
            if age_s > RUNNING_S and api_key in (None, key)
        ]
        return json_answer(
            {
                "broker": parts.node_id,
                "now_ms": parts.clock.time_ms(),
                "since_ms": self._since_ms,
                "recorded": parts.slow.recorded,
                "kept": len(parts.slow),
                "stages": list(STAGES),
                "requests": [_slow_row(one) for one in requests],
                "running": running,
            }
        )


def _api_key(name: str | None) -> int | None:
    """Return the key of an API. Raises `InvalidInput` for an unknown name."""
    if name is None:
        return None
    keys = {each.lower(): key for key, each in API_NAMES.items()}
    if name.lower() not in keys:
        raise InvalidInput(f"api is {name!r}: no API has that name", hint="for example Produce, Fetch, OffsetCommit")
    return keys[name.lower()]


def _slow_row(one: SlowRequest) -> dict[str, Any]:
    return {
        "api": api_name(one.api_key),
        "ended_ms": one.ended_ms,
        "duration_ms": round(one.duration_s * 1000, 3),
        "stages_ms": {
            name: round(seconds * 1000, 3) for name, seconds in zip(STAGES, one.stages, strict=True) if seconds > 0
        },
        "waited_ms": round(one.waited_s * 1000, 3),
        "client_id": one.client_id,
        "client_host": one.client_host,
        "topic": one.topic or None,
        "partition": one.partition if one.partition >= 0 else None,
        "partitions": one.partitions,
        "bytes_in": one.bytes_in,
        "bytes_out": one.bytes_out,
        "error_code": one.error_code,
    }


# --- the batch -----------------------------------------------------------------------------------------------------


async def _find(log: PartitionLog, offset: int) -> _FoundBatch:
    """Return the batch that holds an offset of the log; nothing for one outside it. Raises as `PartitionLog.read`."""
    if not log.log_start_offset <= offset < log.log_end_offset:
        return _FoundBatch()
    if offset < log.high_watermark:
        try:
            records = (await log.read(offset, 1, committed=False)).records
        except OffsetOutOfRange:  # deleted meanwhile
            return _FoundBatch()
        if not records:
            return _FoundBatch(is_removed=offset < log.high_watermark)
        batch = records[0]
    else:
        unconfirmed = log.state.data.read_hot(offset, log.log_end_offset, 1)
        if not unconfirmed:
            return _FoundBatch()
        batch = unconfirmed[0].payload
    header = parse_header(batch)
    if header.base_offset > offset:
        return _FoundBatch(is_removed=True)
    record = await asyncio.to_thread(_record_at, batch, header, offset)
    return _FoundBatch(header, len(batch), record, is_removed=record is None)


def _record_at(batch: bytes | memoryview, header: BatchHeader, offset: int) -> Record | None:
    return next((one for one in iter_records(batch, header=header) if one.offset == offset), None)


async def _transaction(log: PartitionLog, offset: int, header: BatchHeader) -> str:
    """Return the outcome of the transaction that a batch is in; empty: it is in none."""
    if not header.is_transactional or header.is_control:
        return ""
    producer = header.producer_id
    aborted = await log.state.txn.lookup(offset, offset + 1)
    if any(one.producer_id == producer and one.first_offset <= offset <= one.last_offset for one in aborted):
        return "aborted"
    is_open = any(one.producer_id == producer and one.first_offset <= offset for one in log.open_transactions())
    return "open" if is_open else "committed"


def _batch(log: PartitionLog, found: _FoundBatch, facts: RecordFacts) -> dict[str, Any] | None:
    """Return the header of the batch as JSON."""
    header = found.header
    if header is None:
        return None
    try:
        codec = Compression(header.compression).name.lower()
    except ValueError:
        codec = f"codec {header.compression}"
    sequence = header.base_sequence
    return {
        "base_offset": header.base_offset,
        "last_offset": header.base_offset + header.last_offset_delta,
        "records": header.count,
        "size_bytes": found.size_bytes,
        "compression": codec,
        "base_timestamp_ms": header.base_timestamp,
        "max_timestamp_ms": header.max_timestamp,
        "leader_epoch": log.epoch_at(header.base_offset),
        "producer_id": header.producer_id if header.producer_id >= 0 else None,
        "producer_epoch": header.producer_epoch if header.producer_id >= 0 else None,
        "sequence": (sequence + facts.offset - header.base_offset) % (1 << 31) if sequence >= 0 else None,
        "transactional": header.is_transactional,
        "transaction": facts.transaction or None,
        "control": header.is_control,
    }


def _held(held: HoldingObject | None) -> dict[str, Any] | None:
    """Return the object as JSON."""
    if held is None:
        return None
    return {
        "id": held.object_id,
        "key": held.key,
        "kind": held.kind,
        "size_bytes": held.size,
        "since_ms": held.since_ms,
        "block": held.block,
        "problem": held.problem or None,
    }


def _record(offset: int, found: _FoundBatch) -> dict[str, Any] | None:
    """Return what may be told of the record: its sizes, not its contents."""
    record, header = found.record, found.header
    if record is None or header is None:
        return None
    marker = None
    if header.is_control:
        try:
            marker = ControlType(control_type(record)).name.lower()
        except ValueError:
            marker = "unknown"
    return {
        "offset": offset,
        "timestamp_ms": record.timestamp,
        "key_bytes": len(record.key) if record.key is not None else None,
        "value_bytes": len(record.value) if record.value is not None else None,
        "headers": len(record.headers),
        "marker": marker,
    }
