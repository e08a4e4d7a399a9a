"""Named snapshots of topics, and branches, over admin HTTP (docs/design/0031-snapshots-and-branches.md).

    GET  /snapshots          all, each with what it holds, and what only it keeps in the bucket
    GET  /snapshots/describe ?name=NAME: one, with its partitions and their offsets
    POST /snapshots          ?name=NAME&topic=TOPIC&topic=…: takes one; without topics, of all that are not internal
    POST /snapshots/delete   ?name=NAME
    GET  /branches           topics that are branches: what they share, and what only they keep in the bucket
    POST /branches           ?snapshot=NAME&source=TOPIC&name=NEW&config=KEY=VALUE&config=KEY: creates one, with the
                             configs that the topic had, but for these; without `=` the default

Any broker accepts the requests. Entry: `SnapshotRoutes.routes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import json_answer
from tidelog.broker.objects.held import describe_branches, describe_snapshot, describe_snapshots
from tidelog.broker.partitions.topic_config import INTERNAL_TOPICS, TOPIC_CONFIGS, unknown_key, validate
from tidelog.controller.model.errors import InvalidTopic
from tidelog.controller.model.snapshots import MAX_SNAPSHOTS, SnapshotRecord, UnknownSnapshot

if TYPE_CHECKING:
    from tidelog.broker.partitions.snapshot_taker import SnapshotTaker
    from tidelog.controller.client.client import ControllerClient


class SnapshotRoutes:
    """The handlers."""

    def __init__(self, controller: ControllerClient, taker: SnapshotTaker) -> None:
        self._controller = controller
        self._taker = taker

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/snapshots", self._list),
            web.get("/snapshots/describe", self._describe),
            web.post("/snapshots", self._create),
            web.post("/snapshots/delete", self._delete),
            web.get("/branches", self._branches),
            web.post("/branches", self._branch),
        ]

    def status(self) -> dict[str, Any]:
        """For `/status`: how many snapshots there are, and how many there may be."""
        snapshots = self._controller.image.snapshots
        oldest = min(snapshots.values(), key=lambda each: (each.created_ms, each.name), default=None)
        return {
            "count": len(snapshots),
            "limit": MAX_SNAPSHOTS,
            "partitions": sum(each.partition_count for each in snapshots.values()),
            "branched_partitions": len(self._controller.image.branches),
            "oldest": None if oldest is None else {"name": oldest.name, "created_ms": oldest.created_ms},
        }

    def _named(self, request: web.Request) -> SnapshotRecord:
        name = request.query.get("name", "")
        record = self._controller.image.snapshots.get(name)
        if record is None:
            raise UnknownSnapshot(f"there is no snapshot {name!r}", hint="`tidelog snapshot list` shows all")
        return record

    async def _list(self, request: web.Request) -> web.Response:
        image = self._controller.image
        return json_answer({"version": image.version, "snapshots": await describe_snapshots(image)})

    async def _describe(self, request: web.Request) -> web.Response:
        record = self._named(request)
        return json_answer(await describe_snapshot(self._controller.image, record))

    async def _create(self, request: web.Request) -> web.Response:
        record = await self._taker.take(request.query.get("name", ""), request.query.getall("topic", []))
        return json_answer(await describe_snapshot(self._controller.image, record))

    async def _delete(self, request: web.Request) -> web.Response:
        record = self._named(request)
        row = await describe_snapshot(self._controller.image, record)
        await self._controller.snapshots.delete(record.name)
        return json_answer(row)

    async def _branches(self, request: web.Request) -> web.Response:
        image = self._controller.image
        return json_answer({"version": image.version, "branches": await describe_branches(image)})

    async def _branch(self, request: web.Request) -> web.Response:
        query = request.query
        name = query.get("name", "")
        if name in INTERNAL_TOPICS:
            raise InvalidTopic(f"topic {name!r} is internal", hint="choose another name for the branch")
        changes: dict[str, str | None] = {}
        for text in query.getall("config", []):
            key, equals, value = text.partition("=")
            changes[key] = value if equals else None
        snapshot = self._controller.image.snapshots.get(query.get("snapshot", ""))
        held = [each for each in snapshot.topics if each.name == query.get("source")] if snapshot is not None else []
        merged = {**(held[0].configs if held else {}), **changes}
        unknown = next((key for key in changes if key not in TOPIC_CONFIGS), None)
        if unknown is not None:
            raise unknown_key(unknown, TOPIC_CONFIGS)
        validate({key: value for key, value in merged.items() if value is not None})
        topic = await self._controller.snapshots.branch(
            query.get("snapshot", ""), query.get("source", ""), name, changes
        )
        rows = await describe_branches(self._controller.image)
        mine = next((row for row in rows if row["topic"] == topic.name), {})
        return json_answer({"topic": topic.name, "id": topic.id.hex(), "configs": topic.configs, **mine})
