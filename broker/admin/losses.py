"""Decisions of an operator about possible data loss: permanently dead brokers, and quarantined streams.

    GET  /losses               ?id=ID: records that the removal of a dead broker with its WAL would discard: the
                               offset at which each partition would continue, and the last reported bytes not uploaded
    POST /losses/accept        ?id=ID&force=true: discards them. `force`: even if the WAL is in the bucket, which is
                               then fenced, for the broker's process may be alive
    GET  /losses/accepted      every loss that an operator accepted, the oldest first: broker, time, reason, and the
                               partitions with their offsets
    GET  /wals                 what the controllers know of each broker's WAL, and the records that may be in it alone
    GET  /quarantine           quarantined streams: topic, reason, and their records under `quarantine/`
    POST /quarantine/release   ?stream=ID…: reopens them at their committed ends; records set aside stay where they are
    POST /quarantine/records   ?topic=T&partition=N: all records set aside of its data, one JSON per line

Any broker accepts the requests. Entry: `LossRoutes.routes`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tidelog.broker.admin.answers import flag, integer, json_answer, write_line
from tidelog.broker.admin.brokers import OpenRemovedWal, fence_abandoned
from tidelog.broker.objects.quarantine import as_document, set_aside_records
from tidelog.broker.objects.report import STREAM_PARTS
from tidelog.controller.image.lost import LostReplicaSet, TakeoverState, lost_replica_sets
from tidelog.controller.image.stake import wal_rows
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND
from tidelog.controller.model.records import BUCKET_WAL, PartitionRecord, StreamRecord
from tidelog.controller.model.wal_notes import losses_in
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, TidelogError
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.objects.key import quarantine_prefix

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient

logger = logging.getLogger(__name__)

MAX_ID = (1 << 63) - 1
DATA = STREAM_PARTS.index("data")


class LossRoutes:
    """The handlers. `quorum` requests the report of every controller (`QuorumView.report`)."""

    def __init__(
        self,
        controller: ControllerClient,
        store: ObjectStore,
        quorum: Callable[[], Awaitable[dict[str, Any]]],
        removed_wal: OpenRemovedWal,
    ) -> None:
        self._controller = controller
        self._store = store
        self._quorum = quorum
        self._removed_wal = removed_wal

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/losses", self._losses),
            web.post("/losses/accept", self._accept),
            web.get("/losses/accepted", self._accepted),
            web.get("/wals", self._wals),
            web.get("/quarantine", self._quarantined),
            web.post("/quarantine/release", self._release),
            web.post("/quarantine/records", self._records),
        ]

    # --- permanently dead brokers --------------------------------------------------------------------------------

    def _lost(self, request: web.Request) -> LostReplicaSet:
        broker_id = integer(request.query.get("id", ""), "id", 0, MAX_ID)
        image = self._controller.image
        record = image.brokers.get(broker_id)
        if record is None:
            raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")
        if record.alive:
            raise InvalidInput(
                f"broker {broker_id} is alive: nothing of it is lost", hint=f"`tidelog broker drain {broker_id}`"
            )
        for lost in lost_replica_sets(image):
            if lost.replica_set == broker_id:
                return lost
        raise InvalidInput(f"broker {broker_id} owns nothing", hint=f"`tidelog broker remove {broker_id}`")

    def _owned(self, replica_set: int) -> list[PartitionRecord]:
        return [
            each for each in self._controller.image.owned(replica_set) if each.topic_id in self._controller.image.topics
        ]

    async def _losses(self, request: web.Request) -> web.Response:
        lost = self._lost(request)
        image = self._controller.image
        rows = []
        for partition in self._owned(lost.replica_set):
            stream = image.streams[partition.first_stream + DATA]
            name = image.topics[partition.topic_id].name
            rows.append({"topic": name, "partition": partition.index, "end_offset": stream.end_offset})
        told = await self._told(lost.broker)
        return json_answer(
            {
                "broker": lost.broker,
                "wal": lost.wal_kind or None,
                "recoverable": lost.state is not TakeoverState.WAITING,
                "wal_bytes": told[0] if told is not None else None,
                "told_ms": told[1] if told is not None else None,
                "partitions": sorted(rows, key=lambda row: (row["topic"], row["partition"])),
            }
        )

    async def _accepted(self, request: web.Request) -> web.Response:
        losses = losses_in(self._controller.image.kv)
        rows = [
            {**msgspec.structs.asdict(one), "partitions": [msgspec.structs.asdict(each) for each in one.partitions]}
            for one in losses
        ]
        return json_answer({"losses": rows})

    async def _wals(self, request: web.Request) -> web.Response:
        return json_answer({"wals": wal_rows(self._controller.image)})

    async def _told(self, broker_id: int) -> tuple[int, int] | None:
        """Bytes of WAL not in the bucket, and the time of that report: the latest one that a controller has."""
        members = (await self._quorum())["members"]
        heard = [
            member["not_uploaded"][str(broker_id)]
            for member in members
            if str(broker_id) in member.get("not_uploaded", {})
        ]
        return max(((size, at_ms) for size, at_ms in heard), key=lambda one: one[1], default=None)

    async def _accept(self, request: web.Request) -> web.Response:
        lost, force = self._lost(request), flag(request, "force")
        epoch, left, placed = lost.master_epoch, lost.partitions, 0
        # Others have the partitions from the command on, which may take effect without an answer: so the fence comes
        # before it, of the epoch that it gives. Who gets that epoch instead is elected again.
        if force:  # without it a WAL in the bucket is not given up
            await self._fence(lost, epoch + 1)
        while left:
            keys = [(each.topic_id, each.index) for each in self._controller.image.owned(lost.replica_set)][
                :MAX_MOVES_PER_COMMAND
            ]
            left, epoch = await self._controller.abandon(lost.replica_set, epoch, keys, force=force)
            placed += len(keys)
        await self._fence(lost, epoch)
        logger.warning(
            "an operator discarded the records that only a dead broker's WAL has",
            extra={"broker": lost.broker, "partitions": placed},
        )
        return json_answer({"broker": lost.broker, "partitions": placed})

    async def _fence(self, lost: LostReplicaSet, master_epoch: int) -> None:
        """Shut out its process if its WAL is in the bucket: it may be alive, and cut off from the controllers."""
        if lost.wal_kind == BUCKET_WAL:
            await fence_abandoned(self._removed_wal(lost.broker), lost.broker, master_epoch)

    # --- quarantine ----------------------------------------------------------------------------------------------

    async def _quarantined(self, request: web.Request) -> web.Response:
        streams = sorted(
            (each for each in self._controller.image.streams.values() if each.quarantined), key=lambda each: each.id
        )
        return json_answer({"streams": [await self._row(each) for each in streams]})

    async def _row(self, stream: StreamRecord) -> dict[str, Any]:
        image = self._controller.image
        key = image.index.partition_key(stream.id)
        partition = image.partition(*key) if key is not None else None
        found = [each async for each in self._store.list(quarantine_prefix(image.cluster_id, stream.id))]
        return {
            "stream": stream.id,
            "topic": image.topics[partition.topic_id].name if partition is not None else None,
            "partition": partition.index if partition is not None else None,
            "part": STREAM_PARTS[stream.id - partition.first_stream] if partition is not None else None,
            "end_offset": stream.end_offset,
            "reason": stream.quarantined,
            "objects": [each.key for each in found],
            "size_bytes": sum(each.size for each in found),
        }

    async def _release(self, request: web.Request) -> web.Response:
        ids = [integer(text, "stream", 0, MAX_ID) for text in request.query.getall("stream", [])]
        if not ids:
            raise InvalidInput("stream is missing: give the streams to release")
        for stream_id in ids:
            if not self._controller.quarantined(stream_id):
                raise NotFound(f"stream {stream_id} is not quarantined", hint="`tidelog object quarantine list`")
        for stream_id in ids:
            await self._controller.release_stream(stream_id)
            logger.warning("an operator released a quarantined stream", extra={"stream": stream_id})
        return json_answer({"released": ids})

    async def _records(self, request: web.Request) -> web.StreamResponse:
        image = self._controller.image
        name = request.query.get("topic", "")
        index = integer(request.query.get("partition", ""), "partition", 0, MAX_ID)
        topic = image.topic(name)
        partition = image.partition(topic.id, index) if topic is not None else None
        if partition is None:
            raise NotFound(f"there is no partition {name}:{index}", hint="`tidelog topic list` shows the topics")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        count = 0
        try:
            try:
                async for record in set_aside_records(self._store, image.cluster_id, partition.first_stream + DATA):
                    await write_line(response, {"event": "record", "record": as_document(name, index, record)})
                    count += 1
                await write_line(response, {"event": "done", "records": count})
            except TidelogError as error:
                corrupt = isinstance(error, CorruptData)
                body = {"event": "error", "error": error.message, "hint": error.hint, "corrupt": corrupt}
                await write_line(response, body)
            await response.write_eof()
        except (ConnectionResetError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # the client disconnected, or does not read
        return response
