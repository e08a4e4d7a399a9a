"""What needs a person's decision because data may be gone: broker deaths for good, and quarantined streams.

    GET  /losses               ?id=ID: what removing a dead broker with what its WAL alone has would give up: where
                               each of its partitions would go on, and how much was not in the bucket at last word
    POST /losses/accept        ?id=ID&force=true: gives it up. `force`: although the WAL is in the bucket
    GET  /quarantine           quarantined streams: whose they are, why, and what of them lies under `quarantine/`
    POST /quarantine/release   ?stream=ID…: they go on at what is committed; what was set aside stays where it is
    POST /quarantine/records   ?topic=T&partition=N: what was ever set aside of its data, a record a line of JSON

Any broker answers. Entry: `LossRoutes.routes`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from broker.http_answers import flag, integer, json_answer, write_line
from broker.object_report import STREAM_PARTS
from broker.quarantine_records import as_document, set_aside_records
from controller.commands import MAX_MOVES_PER_COMMAND
from controller.lost import LostReplicaSet, Salvaging, lost_replica_sets
from controller.model import PartitionRecord, StreamRecord
from runtime.errors import CorruptData, InvalidInput, NotFound, TidelogError
from storage.object_key import quarantine_prefix
from storage.object_store import ObjectStore

if TYPE_CHECKING:
    from controller.client import ControllerClient

log = logging.getLogger(__name__)

MAX_ID = (1 << 63) - 1
DATA = STREAM_PARTS.index("data")


class LossRoutes:
    """The handlers. `quorum` asks every controller what it knows (`QuorumView.report`)."""

    def __init__(
        self, controller: ControllerClient, store: ObjectStore, quorum: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        self._controller = controller
        self._store = store
        self._quorum = quorum

    def routes(self) -> Sequence[web.RouteDef]:
        """What to add to the admin HTTP."""
        return [
            web.get("/losses", self._losses),
            web.post("/losses/accept", self._accept),
            web.get("/quarantine", self._quarantined),
            web.post("/quarantine/release", self._release),
            web.post("/quarantine/records", self._records),
        ]

    # --- brokers that are dead for good --------------------------------------------------------------------------

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
        return [each for each in self._controller.image.all_partitions() if each.replica_set == replica_set]

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
                "recoverable": lost.state is not Salvaging.WAITING,
                "wal_bytes": told[0] if told is not None else None,
                "told_ms": told[1] if told is not None else None,
                "partitions": sorted(rows, key=lambda row: (row["topic"], row["partition"])),
            }
        )

    async def _told(self, broker_id: int) -> tuple[int, int] | None:
        """Bytes of WAL that were not in the bucket, and when the broker said so: the newest that a controller heard."""
        members = (await self._quorum())["members"]
        heard = [member["unsaved"][str(broker_id)] for member in members if str(broker_id) in member.get("unsaved", {})]
        return max(((size, at_ms) for size, at_ms in heard), key=lambda one: one[1], default=None)

    async def _accept(self, request: web.Request) -> web.Response:
        lost, force = self._lost(request), flag(request, "force")
        epoch, left, placed = lost.master_epoch, lost.partitions, 0
        while left:
            keys = [(each.topic_id, each.index) for each in self._owned(lost.replica_set)][:MAX_MOVES_PER_COMMAND]
            left, epoch = await self._controller.abandon(lost.replica_set, epoch, keys, force=force)
            placed += len(keys)
        log.warning(
            "an operator gave up what a dead broker's WAL alone has",
            extra={"broker": lost.broker, "partitions": placed},
        )
        return json_answer({"broker": lost.broker, "partitions": placed})

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
            raise InvalidInput("stream is missing: which one shall be released?")
        for stream_id in ids:
            if not self._controller.quarantined(stream_id):
                raise NotFound(f"stream {stream_id} is not quarantined", hint="`tidelog object quarantine list`")
        for stream_id in ids:
            await self._controller.release_stream(stream_id)
            log.warning("an operator released a quarantined stream", extra={"stream": stream_id})
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
                request.transport.abort()  # the client went away, or does not read
        return response
