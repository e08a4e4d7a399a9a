"""Topics and the anatomy of a partition over admin HTTP, for the console.

    GET /topics      ?after=NAME&limit=1–1000&name=NAME: topics by name, with their partitions and configurations
    GET /partition   ?topic=NAME&partition=N&after=OFFSET: offsets, replicas, WAL, memory and objects of one partition

Both answer from this broker's memory. Any broker knows placement and objects. `log`, `stored` and `wal` are known on
the leader only, and null elsewhere.

Entry: `AnatomyRoutes.routes`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import json_answer, number
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionRecord, TopicRecord
from tidelog.runtime.errors import NotFound, TidelogError
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.objects.report import KINDS

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient
    from tidelog.stream.partition_log import PartitionLog

MAX_TOPICS_SHOWN = 1_000
MAX_SLICES_SHOWN = 200
PARTITIONS_PER_STEP = 2_000
"""Partitions looked at between two yields to the event loop: about a millisecond."""
_MAX_INT64 = (1 << 63) - 1


class AnatomyRoutes:
    """The handlers."""

    def __init__(self, controller: ControllerClient, partitions: PartitionManager) -> None:
        self._controller = controller
        self._partitions = partitions

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [web.get("/topics", self._topics), web.get("/partition", self._partition)]

    async def _topics(self, request: web.Request) -> web.Response:
        limit = number(request, "limit", 200, 1, MAX_TOPICS_SHOWN)
        after = request.query.get("after", "")
        image = self._controller.image
        if "name" in request.query:
            names = [request.query["name"]]
            if names[0] not in image.topic_ids:
                raise NotFound(f"topic {names[0]!r} does not exist", hint="`tidelog topic list` shows the topics")
        else:
            names = heapq.nsmallest(limit, (name for name in image.topic_ids if name > after))
        rows, looked_at = [], 0
        for name in names:
            topic = image.topic(name)
            if topic is None:
                continue  # deleted while this handler waited
            rows.append(self._topic_row(topic))
            looked_at += topic.partitions
            if looked_at >= PARTITIONS_PER_STEP:
                looked_at = 0
                await asyncio.sleep(0)
        next_after = names[-1] if "name" not in request.query and len(names) == limit else None
        return json_answer({"topics": rows, "total": len(image.topic_ids), "next_after": next_after})

    def _topic_row(self, topic: TopicRecord) -> dict[str, Any]:
        image = self._controller.image
        records = image.partitions(topic.id)
        leaders = [image.leader(record)[0] for record in records]
        return {
            "name": topic.name,
            "id": topic.id.hex(),
            "partitions": topic.partitions,
            "internal": topic.internal,
            "created_ms": topic.created_ms,
            "configs": dict(sorted(topic.configs.items())),
            "leaderless": sum(leader < 0 for leader in leaders),
            "moving": sum(record.target != NO_REPLICA_SET for record in records),
            "brokers": sorted({leader for leader in leaders if leader >= 0}),
        }

    async def _partition(self, request: web.Request) -> web.Response:
        name = request.query.get("topic", "")
        index = number(request, "partition", 0, 0, (1 << 31) - 1)
        after = number(request, "after", 0, 0, _MAX_INT64)
        image = self._controller.image
        topic = image.topic(name)
        record = image.partition(topic.id, index) if topic is not None else None
        if topic is None or record is None:
            raise NotFound(f"partition {name}:{index} does not exist", hint="`tidelog topic list` shows the topics")
        leader, epoch = image.leader(record)
        replicas = image.replica_sets.get(record.replica_set)
        log = self._open_log(record)
        return json_answer(
            {
                "topic": topic.name,
                "partition": index,
                "replica_set": record.replica_set,
                "leader": leader if leader >= 0 else None,
                "leader_epoch": epoch,
                "to": record.target if record.target != NO_REPLICA_SET else None,
                "since_ms": record.moving_since_ms if record.target != NO_REPLICA_SET else None,
                "members": list(replicas.members) if replicas is not None else [],
                "in_sync": list(replicas.sync_state_set) if replicas is not None else [],
                "log": _log_report(log) if log is not None else None,
                **_stored(log),
                "bucket": self._bucket(record, after),
            }
        )

    def _open_log(self, record: PartitionRecord) -> PartitionLog | None:
        try:
            return self._partitions.get_by_id(record.topic_id, record.index)
        except TidelogError:
            return None  # another broker has it, or it opens just now: `log` is null, which the page says

    def _bucket(self, record: PartitionRecord, after: int) -> dict[str, Any]:
        """The objects that hold the partition's records, those of its data stream, by offset from `after` on."""
        image = self._controller.image
        stream = image.stream(record.first_stream + 1)
        if stream is None or stream.epoch < 0:
            return {"start_offset": 0, "committed_end": 0, "objects": [], "next_after": None}
        slices: list[ObjectSlice] = []
        at = max(after, stream.start_offset)
        while len(slices) < MAX_SLICES_SHOWN:  # a branch's are found by extent
            found = image.find_objects(stream.id, at, stream.end_offset, MAX_SLICES_SHOWN - len(slices))
            if not found:
                break
            slices += found
            at = found[-1].end_offset
        rows = [
            {
                "id": one.object_id,
                "kind": KINDS.get(one.kind),
                "size_bytes": one.size,
                "start_offset": one.start_offset,
                "end_offset": one.end_offset,
            }
            for one in slices
        ]
        more = len(slices) == MAX_SLICES_SHOWN and slices[-1].end_offset < stream.end_offset
        return {
            "start_offset": stream.start_offset,
            "committed_end": stream.end_offset,
            "objects": rows,
            "next_after": slices[-1].end_offset if more else None,
        }


def _stored(log: PartitionLog | None) -> dict[str, Any]:
    found = log.whereabouts() if log is not None else None
    if found is None:
        return {"stored": None, "wal": None}
    return {
        "stored": {
            "start_offset": found.start_offset,
            "committed_end": found.committed_end,
            "cache_start": found.cache_start,
            "cached_batches": found.cached_records,
            "end_offset": found.end_offset,
            "quarantined": found.is_quarantined,
        },
        "wal": {
            "start_offset": found.wal_start,
            "committed_offset": found.wal_committed,
            "confirm_offset": found.wal_confirmed,
            "durable_offset": found.wal_durable,
            "end_offset": found.wal_end,
            "master_epoch": found.master_epoch,
        },
    }


def _log_report(log: PartitionLog) -> dict[str, Any]:
    return {
        "log_start_offset": log.log_start_offset,
        "last_stable_offset": log.last_stable_offset,
        "high_watermark": log.high_watermark,
        "log_end_offset": log.log_end_offset,
        "size_bytes": log.size_bytes(),
        "open_transactions": len(log.open_transactions()),
        "producers": len(log.producers()),
        "leader_epoch": log.leader_epoch,
    }
