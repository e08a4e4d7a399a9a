"""The restart of a broker's process over admin HTTP (docs/design/0016-rolling-restart.md).

    GET  /restart   what a rolling restart looks at: `brokers`, each with its registration and what speaks against
                    restarting it now (`hindrances`), `replica_sets`, and `controllers`. ?owner=ID: only `owned`, the
                    partitions of broker ID's own replica set
    POST /restart   ?id=ID&registration_epoch=E: this broker hands over what it leads, as on SIGTERM, and its process
                    ends with `tidelog.process.supervisor.RESTART_EXIT_CODE`: its supervisor is to start it again

Any broker accepts the GET. The POST is for the broker itself: `id` and `registration_epoch` say which process is meant,
so a request that comes late, or to another one's address, restarts nothing. The controllers refuse it while anything
speaks against it; a process that is a controller, too, refuses it while another controller is away. The same request
again is answered as the first one. A request that no controller has answered may be carried out when one does: the
process ends then.

Entry: `RestartRoutes.routes`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import integer, json_answer
from tidelog.broker.admin.quorum import quorum_hindrances
from tidelog.controller.image.leading import led_sets
from tidelog.controller.model.errors import RestartRefused, StaleBrokerEpoch
from tidelog.controller.model.records import NO_BROKER, NO_REPLICA_SET, DrainMode
from tidelog.controller.model.replication import has_several
from tidelog.controller.model.restart import restart_hindrances
from tidelog.runtime.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.image.image import Image
    from tidelog.controller.model.records import TopicRecord

logger = logging.getLogger(__name__)

MAX_ID = 0x7FFF_FFFF
MAX_EPOCH = (1 << 63) - 1


class RestartRoutes:
    """The handlers."""

    def __init__(
        self,
        controller: ControllerClient,
        broker_id: int,
        restart: Callable[[], None],
        *,
        is_controller: bool,
        quorum: Callable[[], Awaitable[Mapping[str, Any]]],
        min_in_sync: Callable[[TopicRecord], int],
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        """`restart` lets the process end, after this returns. `min_in_sync`: a topic's `min.insync.replicas`.

        `prepare` is called before others lead this broker's partitions.
        """
        self._controller = controller
        self._broker_id = broker_id
        self._restart = restart
        self._is_controller = is_controller
        self._quorum = quorum
        self._min_in_sync = min_in_sync
        self._prepare = prepare
        self._unsubscribe: Callable[[], None] | None = None
        """While a request had no answer, and may take effect."""

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [web.get("/restart", self._look), web.post("/restart", self._begin)]

    async def _look(self, request: web.Request) -> web.Response:
        if "owner" in request.query:
            return json_answer({"owned": self._owned(integer(request.query["owner"], "owner", 0, MAX_ID))})
        quorum = await self._quorum()
        image, wanted = self._controller.image, self._wanted()
        away = quorum_hindrances(quorum["members"])
        brokers = [
            {
                "id": each.id,
                "alive": each.alive,
                "drain": DrainMode(each.draining).name.lower(),
                "registration_epoch": each.registration_epoch,
                "admin_url": each.admin_url,
                "partitions": sum(image.index.partition_counts.get(one.id, 0) for one in led_sets(image, each.id)),
                "hindrances": [*restart_hindrances_in(image, each.id), *_short(image, each.id, wanted), *away],
            }
            for _, each in sorted(image.brokers.items())
        ]
        controllers = [{"id": row["id"], "state": row["state"]} for row in quorum["members"]]
        return json_answer({"brokers": brokers, "replica_sets": _sets(image), "controllers": controllers})

    async def _begin(self, request: web.Request) -> web.Response:
        broker_id = integer(request.query.get("id", ""), "id", 0, MAX_ID)
        epoch = integer(request.query.get("registration_epoch", ""), "registration_epoch", 0, MAX_EPOCH)
        if broker_id != self._broker_id:
            raise InvalidInput(
                f"this is broker {self._broker_id}, not {broker_id}", hint="`tidelog broker list` shows the addresses"
            )
        broker = self._controller.image.brokers.get(broker_id)
        if broker is None or broker.registration_epoch != epoch:
            raise StaleBrokerEpoch(f"registration {epoch} of broker {broker_id} is not current")
        away = quorum_hindrances((await self._quorum())["members"]) if self._is_controller else []
        short = _short(self._controller.image, broker_id, self._wanted())
        if (away or short) and not broker.draining:
            raise RestartRefused(
                f"broker {broker_id} cannot be restarted now: {'; '.join([*away, *short])}",
                hint="`tidelog status` shows the cluster; try again when that is over",
            )
        if not broker.draining and not restart_hindrances_in(self._controller.image, broker_id):
            await self._prepare()
        try:
            await self._controller.begin_restart(broker_id, epoch)
        except Unavailable:
            self._await_mark(epoch)
            raise
        logger.info("a restart was asked for", extra={"registration_epoch": epoch})
        self._restart()
        return json_answer({"status": "restarting", "id": broker_id, "registration_epoch": epoch})

    def _await_mark(self, registration_epoch: int) -> None:
        """End also if a request that had no answer takes effect later.

        The broker would be marked as stopping for good otherwise: it would lead nothing, and no other one be restarted.
        """
        if self._unsubscribe is None:
            self._unsubscribe = self._controller.subscribe(lambda _delta: self._end_if_marked(registration_epoch))
        self._end_if_marked(registration_epoch)

    def _end_if_marked(self, registration_epoch: int) -> None:
        broker = self._controller.image.brokers.get(self._broker_id)
        if broker is None or broker.registration_epoch != registration_epoch or self._unsubscribe is None:
            return
        if broker.draining == DrainMode.SHUTDOWN:
            logger.info("a restart that had no answer has begun", extra={"registration_epoch": registration_epoch})
            self._unsubscribe()
            self._unsubscribe = None
            self._restart()

    def _owned(self, replica_set: int) -> list[dict[str, Any]]:
        """Return partitions of a replica set. One that leaves it is not its any more; one that comes is, when it is."""
        topics = self._controller.image.topics
        return [
            {"topic": topics[each.topic_id].name, "partition": each.index}
            for each in self._controller.image.owned(replica_set)
            if each.topic_id in topics and each.target == NO_REPLICA_SET
        ]

    def _wanted(self) -> dict[int, tuple[int, str]]:
        """Return the largest `min.insync.replicas` of the topics of each replica set, and one of these topics."""
        image = self._controller.image
        wants = {topic.id: count for topic in image.topics.values() if (count := self._min_in_sync(topic)) > 1}
        found: dict[int, tuple[int, str]] = defaultdict(lambda: (1, ""))
        for topic_id, count in wants.items():
            for partition in image.partitions(topic_id):
                found[partition.replica_set] = max(found[partition.replica_set], (count, image.topics[topic_id].name))
        return found


def restart_hindrances_in(image: Image, broker_id: int) -> list[str]:
    """Return what the controllers would have against a restart of a broker now."""
    if image.brokers[broker_id].draining == DrainMode.SHUTDOWN:
        return ["it is stopping"]
    sets = [each for _, each in sorted(image.replica_sets.items())]
    brokers = [each for _, each in sorted(image.brokers.items())]
    return restart_hindrances(broker_id, brokers, sets, image.replication.get)


def _short(image: Image, broker_id: int, wanted: Mapping[int, tuple[int, str]]) -> list[str]:
    """Return the topics that take writes now, and would not without the broker."""
    found = []
    for set_id, (count, topic) in sorted(wanted.items()):
        record = image.replica_sets.get(set_id)
        if record is None or not has_several(record) or broker_id not in record.sync_state_set:
            continue
        left = len(record.sync_state_set) - 1
        row = image.replication.get(set_id)
        needed = count if row is None else min(count, row.policy.total_replicas)
        if left < needed <= left + 1:
            found.append(
                f"topic {topic} has min.insync.replicas {count}, and replica set {set_id} would have {left} in sync"
            )
    return found


def _sets(image: Image) -> list[dict[str, Any]]:
    return [
        {
            "id": record.id,
            "master": record.master if image.master_of(record.id) is not None else None,
            "master_epoch": record.master_epoch,
            "electing": image.election(record.id) is not None,
            "members": list(record.members),
            "in_sync": list(record.sync_state_set),
            "elects": has_several(record),
            "partitions": image.index.partition_counts.get(record.id, 0),
        }
        for _, record in sorted(image.replica_sets.items())
        if record.master != NO_BROKER or has_several(record)
    ]
