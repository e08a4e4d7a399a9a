"""Brokers over admin HTTP: what they own, and taking them out of use.

    GET  /brokers          each with `state`: alive, dead, draining (gives its partitions away) or drained (done), its
                           partitions, and how many are on their way from it and to it
    GET  /brokers/plan     ?id=ID: `moves`, where a drain would send the partitions
    POST /brokers/drain    ?id=ID&cancel=true
    POST /brokers/remove   ?id=ID: forgets a drained or dead broker that owns nothing, then deletes its WAL's objects.
                           Asked again after a crash in between, it deletes what is left of them

Any broker answers. Entry: `BrokerRoutes.routes`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from broker.http_answers import flag, integer, json_answer
from controller.drain_plan import plan_drain_of
from controller.model import BrokerRecord, DrainMode
from runtime.errors import InvalidInput, NotFound
from storage.object_store import ObjectStore
from storage.wal_s3_format import wal_prefix

if TYPE_CHECKING:
    from controller.client import ControllerClient

log = logging.getLogger(__name__)

MAX_BROKER_ID = 0x7FFF_FFFF
DELETE_AT_ONCE = 1_000
"""Objects named in one request to the bucket."""


class BrokerRoutes:
    """The handlers."""

    def __init__(self, controller: ControllerClient, store: ObjectStore) -> None:
        self._controller = controller
        self._store = store

    def routes(self) -> Sequence[web.RouteDef]:
        """What to add to the admin HTTP."""
        return [
            web.get("/brokers", self._list),
            web.get("/brokers/plan", self._plan),
            web.post("/brokers/drain", self._drain),
            web.post("/brokers/remove", self._remove),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        image = self._controller.image
        leaving = Counter(record.replica_set for record in image.moving())
        coming = Counter(record.target for record in image.moving())
        counts = image.index.partition_counts
        rows = [
            _row(record, counts.get(record.id, 0), leaving[record.id], coming[record.id])
            for _, record in sorted(image.brokers.items())
        ]
        return json_answer({"brokers": rows})

    async def _plan(self, request: web.Request) -> web.Response:
        broker = self._broker(_id(request))
        image = self._controller.image
        moves = [
            {"topic": image.topics[move.topic_id].name, "partition": move.index, "to": move.replica_set}
            for move in plan_drain_of(image, broker.id)
        ]
        return json_answer({"broker": broker.id, "moves": moves})

    async def _drain(self, request: web.Request) -> web.Response:
        broker_id = _id(request)
        mode = DrainMode.NONE if flag(request, "cancel") else DrainMode.OPERATOR
        await self._controller.drain_broker(broker_id, mode)
        return json_answer({"status": mode.name.lower(), "id": broker_id})

    async def _remove(self, request: web.Request) -> web.Response:
        broker_id = _id(request)
        was_known = broker_id in self._controller.image.brokers
        if was_known:
            await self._controller.remove_broker(broker_id)
            log.info("broker removed", extra={"broker": broker_id})
        deleted = await self._delete_wal(broker_id)
        if not was_known and not deleted:
            raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")
        return json_answer({"status": "removed", "id": broker_id, "wal_objects_deleted": deleted})

    async def _delete_wal(self, broker_id: int) -> int:
        """Delete the removed broker's WAL objects, if its WAL was in the bucket; returns how many."""
        deleted = 0
        keys: list[str] = []
        prefix = wal_prefix(self._controller.image.cluster_id, broker_id)
        async for found in self._store.list(prefix):
            keys.append(found.key)
            if len(keys) == DELETE_AT_ONCE:
                deleted += await self._delete(broker_id, keys)
                keys.clear()
        return deleted + (await self._delete(broker_id, keys) if keys else 0)

    async def _delete(self, broker_id: int, keys: Sequence[str]) -> int:
        if broker_id in self._controller.image.brokers:
            raise InvalidInput(f"broker {broker_id} has registered again: the rest of its WAL stays")
        await self._store.delete(keys)
        return len(keys)

    def _broker(self, broker_id: int) -> BrokerRecord:
        record = self._controller.image.brokers.get(broker_id)
        if record is None:
            raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")
        return record


def _id(request: web.Request) -> int:
    text = request.query.get("id")
    if text is None:
        raise InvalidInput("id is missing: which broker?")
    return integer(text, "id", 0, MAX_BROKER_ID)


def _row(record: BrokerRecord, partitions: int, leaving: int, coming: int) -> dict[str, Any]:
    if not record.alive:
        state = "dead"
    elif not record.draining:
        state = "alive"
    else:
        state = "draining" if partitions or coming else "drained"
    return {
        "id": record.id,
        "address": f"{record.host}:{record.port}",
        "rack": record.rack or None,
        "state": state,
        "drain": DrainMode(record.draining).name.lower(),
        "partitions": partitions,
        "leaving": leaving,
        "coming": coming,
        "admin_url": record.admin_url,
    }
