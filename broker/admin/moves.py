"""Moves over admin HTTP, for the command line: Kafka's own APIs report neither progress nor figures.

    GET  /moves        `moves`: moves away from this broker, running or ended; `opened`: the last partitions that it
                       opened; `estimate`: what a move from here would cost now
    POST /moves        JSON `{"moves": [{"topic", "partition", "to"}]}`, `to` null to cancel, at most 1,024: commits the
                       placements; `results` has an `error` or null for each, in order
    GET  /partitions   ?topic=NAME…: leader, leader epoch and move of each partition; without names, of all that move

Any broker accepts the requests. Entry: `MoveRoutes.routes`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tidelog.broker.admin.answers import json_answer, parsed
from tidelog.broker.partitions.move_table import MovePhase
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND, PartitionMove
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionRecord
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient

RECENT = 20
"""Number of moves used for an estimate."""
COMMANDS_MS = 30.0
"""Assumed time of the controller in a move before any was measured: four commands of a few ms each."""


class _WantedMove(msgspec.Struct):
    topic: str
    partition: int
    to: int | None


class _MoveBody(msgspec.Struct):
    moves: list[_WantedMove]


_bodies = msgspec.json.Decoder(_MoveBody)


class MoveRoutes:
    """The handlers. `bucket` returns the object store's figures by operation."""

    def __init__(
        self,
        *,
        controller: ControllerClient,
        partitions: PartitionManager,
        bucket: Callable[[], Mapping[str, Mapping[str, Any]]],
    ) -> None:
        self._controller = controller
        self._partitions = partitions
        self._bucket = bucket

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/moves", self._moves),
            web.post("/moves", self._place),
            web.get("/partitions", self._list),
        ]

    async def _moves(self, request: web.Request) -> web.Response:
        return json_answer({**self._partitions.moves_report(), "estimate": self._estimate()})

    def _estimate(self) -> dict[str, Any]:
        """Bytes that must be uploaded first (everybody's: a WAL is uploaded in its order), and the stall after it."""
        finished = self._partitions.moves.table.finished
        done = [move.stall_ms for move in finished if move.phase is MovePhase.DONE][-RECENT:]
        if done:
            stall_ms, basis = statistics.median(done), f"the last {len(done)} moves from here"
        else:
            stall_ms = COMMANDS_MS + self._mean_ms("put") + self._mean_ms("get_ranges", "get")
            basis = "the bucket's latencies so far"
        return {
            "upload_bytes": self._partitions.storages.not_uploaded_bytes,
            "stall_ms": round(stall_ms, 1),
            "basis": basis,
        }

    def _mean_ms(self, *operations: str) -> float:
        figures = [each for name, each in self._bucket().items() if name in operations and each["count"]]
        return max((each["latency_sum_s"] / each["count"] * 1000 for each in figures), default=0.0)

    async def _place(self, request: web.Request) -> web.Response:
        wanted = parsed(_bodies, await request.read(), "is not a list of moves").moves
        if not 0 < len(wanted) <= MAX_MOVES_PER_COMMAND:
            raise InvalidInput(f"1 to {MAX_MOVES_PER_COMMAND} moves are accepted per request, not {len(wanted)}")
        errors: list[TidelogError | None] = [None] * len(wanted)
        moves: dict[int, PartitionMove] = {}
        for at, one in enumerate(wanted):
            try:
                record = self._find(one.topic, one.partition)
                target = NO_REPLICA_SET if one.to is None else one.to
                if one.to is not None and one.to < 0:
                    raise InvalidInput(f"{one.to} is not a broker")
                moves[at] = PartitionMove(record.topic_id, one.partition, target)
            except TidelogError as error:
                errors[at] = error
        if moves:
            for at, refused in zip(moves, await self._controller.move_partitions(list(moves.values())), strict=True):
                errors[at] = refused
        results = [
            {
                "topic": one.topic,
                "partition": one.partition,
                "to": one.to,
                "error": None if error is None else str(error),
            }
            for one, error in zip(wanted, errors, strict=True)
        ]
        return json_answer({"results": results})

    def _find(self, topic: str, index: int) -> PartitionRecord:
        image = self._controller.image
        record = image.topic(topic)
        partition = image.partition(record.id, index) if record is not None else None
        if partition is None:
            raise NotFound(f"partition {topic}:{index} does not exist", hint="`tidelog topic list` shows the topics")
        return partition

    async def _list(self, request: web.Request) -> web.Response:
        image = self._controller.image
        names = request.query.getall("topic", [])
        records: list[PartitionRecord] = [] if names else image.moving()
        for name in dict.fromkeys(names):
            topic = image.topic(name)
            if topic is None:
                raise NotFound(f"topic {name!r} does not exist", hint="`tidelog topic list` shows the topics")
            records += image.partitions(topic.id)
        return json_answer({"partitions": [self._row(record) for record in records]})

    def _row(self, record: PartitionRecord) -> dict[str, Any]:
        image = self._controller.image
        leader, epoch = image.leader(record)
        moves = record.target != NO_REPLICA_SET
        return {
            "topic": image.topics[record.topic_id].name,
            "partition": record.index,
            "broker": record.replica_set,
            "leader": leader if leader >= 0 else None,
            "leader_epoch": epoch,
            "to": record.target if moves else None,
            "since_ms": record.moving_since_ms if moves else None,
        }
