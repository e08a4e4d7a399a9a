"""Moves over admin HTTP: what the command line asks for, as Kafka's own APIs have neither progress nor figures.

    GET  /moves        `moves`: those away from this broker, going on or ended; `opened`: the last partitions that it
                       opened; `estimate`: what a move from here would cost now
    POST /moves        JSON `{"moves": [{"topic", "partition", "to"}]}`, `to` null to cancel, at most 1,024: commits the
                       placements; `results` has an `error` or null for each, in order
    GET  /partitions   ?topic=NAME…: leader, leader epoch and move of each partition; without names, of all that move

Any broker takes them. Entry: `MoveRoutes.routes`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from broker.http_answers import json_answer
from broker.moves import Phase
from controller.commands import MAX_MOVES_PER_COMMAND, PartitionMove
from controller.model import NO_REPLICA_SET, PartitionRecord
from runtime.errors import InvalidInput, NotFound, TidelogError

if TYPE_CHECKING:
    from broker.partitions import PartitionManager
    from controller.client import ControllerClient

RECENT = 20
"""Moves that an estimate is made of."""
COMMANDS_MS = 30.0
"""What the controller's part of a move may take, as long as none was measured: four commands of a few ms each."""


class _Wanted(msgspec.Struct):
    topic: str
    partition: int
    to: int | None


class _Body(msgspec.Struct):
    moves: list[_Wanted]


class MoveRoutes:
    """The handlers. `bucket` gives the object store's figures by operation."""

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
        """What to add to the admin HTTP."""
        return [
            web.get("/moves", self._moves),
            web.post("/moves", self._place),
            web.get("/partitions", self._list),
        ]

    async def _moves(self, request: web.Request) -> web.Response:
        return json_answer({**self._partitions.moves_report(), "estimate": self._estimate()})

    def _estimate(self) -> dict[str, Any]:
        """Bytes that must be uploaded first (everybody's: a WAL is uploaded in its order), and the stall after it."""
        storage = self._partitions.storage
        done = [move.stall_ms for move in self._partitions.moves.finished if move.phase is Phase.DONE][-RECENT:]
        if done:
            stall_ms, basis = statistics.median(done), f"the last {len(done)} moves from here"
        else:
            stall_ms = COMMANDS_MS + self._mean_ms("put") + self._mean_ms("get_ranges", "get")
            basis = "the bucket's latencies so far"
        return {
            "upload_bytes": storage.confirm.value - storage.committed_offset,
            "stall_ms": round(stall_ms, 1),
            "basis": basis,
        }

    def _mean_ms(self, *operations: str) -> float:
        figures = [each for name, each in self._bucket().items() if name in operations and each["count"]]
        return max((each["latency_sum_s"] / each["count"] * 1000 for each in figures), default=0.0)

    async def _place(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=_Body).moves
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"the body is not a list of moves: {error}") from None
        if not 0 < len(wanted) <= MAX_MOVES_PER_COMMAND:
            raise InvalidInput(f"1 to {MAX_MOVES_PER_COMMAND} moves are taken at once, not {len(wanted)}")
        errors: list[TidelogError | None] = [None] * len(wanted)
        moves: dict[int, PartitionMove] = {}
        for at, one in enumerate(wanted):
            try:
                record = self._find(one.topic, one.partition)
                target = NO_REPLICA_SET if one.to is None else one.to
                if one.to is not None and one.to < 0:
                    raise InvalidInput(f"{one.to} is no broker")
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
