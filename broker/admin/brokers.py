"""Brokers over admin HTTP: list, drain and remove.

    GET  /brokers          each with `state`: alive, dead, draining (its partitions are moved) or drained (done), its
                           partitions, and the numbers moving from it and to it; `refusal`: why its removal would be
                           refused now, `problem` and `hint`, or null
    GET  /brokers/plan     ?id=ID: `moves`, the targets of a drain
    POST /brokers/drain    ?id=ID&cancel=true
    POST /brokers/remove   ?id=ID: removes a drained or dead broker that owns nothing, then ends its WAL in the bucket:
                           all objects but the fences are deleted. A repetition after a crash in between deletes the
                           remaining objects

Any broker accepts the requests. Entry: `BrokerRoutes.routes`; `BrokerRoutes.remove` for Kafka's UnregisterBroker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import flag, integer, json_answer
from tidelog.controller.active.drain_plan import is_drained, plan_drain_of
from tidelog.controller.image.leading import led_sets, partitions_led
from tidelog.controller.model.records import BUCKET_WAL, BrokerRecord, DrainMode
from tidelog.controller.model.removal import removal_refusal
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound
from tidelog.storage.wal.s3.removed import RemovedWal

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient

logger = logging.getLogger(__name__)

MAX_BROKER_ID = 0x7FFF_FFFF

OpenRemovedWal = Callable[[int], RemovedWal]
"""`(replica set id)`: the WAL that a broker has or had in the bucket."""


async def fence_abandoned(wal: RemovedWal, broker_id: int, master_epoch: int) -> None:
    """Shut out a process whose partitions were given to others. A damaged WAL cannot be fenced, which is logged."""
    try:
        await wal.fence(master_epoch)
    except CorruptData as error:
        logger.error("a damaged WAL cannot be fenced", extra={"broker": broker_id, "error": str(error)})


class BrokerRoutes:
    """The handlers."""

    def __init__(
        self, controller: ControllerClient, removed_wal: OpenRemovedWal, prepare: Callable[[int], Awaitable[None]]
    ) -> None:
        """`prepare` is called with a replica set that another broker is about to lead, and never fails."""
        self._controller = controller
        self._removed_wal = removed_wal
        self._prepare = prepare

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
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
        rows = []
        for _, record in sorted(image.brokers.items()):
            led = [each.id for each in led_sets(image, record.id)]
            moves = sum(leaving[each] for each in led), sum(coming[each] for each in led)
            counts = {"partitions": partitions_led(image, record.id), "leaving": moves[0], "coming": moves[1]}
            counts["replicas"] = sum(
                row.id != record.id and (row.replica(record.id) is not None or record.id in row.assigned)
                for row in image.replication.values()
            )
            refusal = self._refusal(record, coming[record.id])
            rows.append({**_row(record, counts, is_drained(image, record.id)), "refusal": refusal})
        return json_answer({"brokers": rows})

    def _refusal(self, record: BrokerRecord, incoming: int) -> dict[str, Any] | None:
        """Return why the controllers would not remove a broker. It may be stopped for its removal, for good."""
        image = self._controller.image
        owned, is_led = image.index.partition_counts.get(record.id, 0), image.master_of(record.id) is not None
        found = removal_refusal(record, owned, incoming, is_led=is_led, replication=image.replication.values())
        return None if found is None else {"problem": found.message, "hint": found.hint}

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
        if mode is DrainMode.OPERATOR:  # the partitions of its home set move, one by one
            led = (each.id for each in led_sets(self._controller.image, broker_id) if each.id != broker_id)
            await asyncio.gather(*map(self._prepare, led))
        await self._controller.drain_broker(broker_id, mode)
        return json_answer({"status": mode.name.lower(), "id": broker_id})

    async def _remove(self, request: web.Request) -> web.Response:
        broker_id = _id(request)
        deleted = await self.remove(broker_id)
        return json_answer({"status": "removed", "id": broker_id, "wal_objects_deleted": deleted})

    async def remove(self, broker_id: int) -> int:
        """Remove a broker that is drained, or dead and owns nothing; return the number of deleted objects of its WAL.

        Raises `NotFound`, `BrokerNotDrained`, `CorruptData`, `Unavailable`.
        """
        broker = self._controller.image.brokers.get(broker_id)
        if broker is not None:
            return await self._remove_known(broker)
        deleted = await self._removed_wal(broker_id).sweep()
        if not deleted:
            raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")
        return deleted

    async def _remove_known(self, broker: BrokerRecord) -> int:
        """Remove the broker, and return the number of deleted objects of its WAL. Its process may still write.

        An abandoned WAL is fenced before the removal: later nobody would know under which epoch.
        """
        image, wal = self._controller.image, self._removed_wal(broker.id)
        last = image.replica_sets[broker.id]
        owns_nothing = not image.index.partition_counts.get(broker.id, 0)
        if owns_nothing and not broker.alive and broker.wal_kind == BUCKET_WAL:
            await fence_abandoned(wal, broker.id, last.master_epoch)
        await self._controller.remove_broker(broker.id)
        logger.info("broker removed", extra={"broker": broker.id})
        try:
            return await wal.clear(last.master_epoch, last.committed_wal_offset)
        except CorruptData as error:
            raise CorruptData(
                f"broker {broker.id} has been removed, but its WAL in the bucket is kept: {error.message}",
                hint="it cannot be fenced as it is: make sure that no process of this broker runs",
            ) from error

    def _broker(self, broker_id: int) -> BrokerRecord:
        record = self._controller.image.brokers.get(broker_id)
        if record is None:
            raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")
        return record


def _id(request: web.Request) -> int:
    text = request.query.get("id")
    if text is None:
        raise InvalidInput("id is missing")
    return integer(text, "id", 0, MAX_BROKER_ID)


def _row(record: BrokerRecord, counts: dict[str, int], drained: bool) -> dict[str, Any]:
    if not record.alive:
        state = "dead"
    elif not record.draining:
        state = "alive"
    else:
        state = "drained" if drained else "draining"
    return {
        "id": record.id,
        "address": f"{record.host}:{record.port}",
        "rack": record.rack or None,
        "state": state,
        "drain": DrainMode(record.draining).name.lower(),
        **counts,
        "admin_url": record.admin_url,
    }
