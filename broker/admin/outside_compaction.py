"""Compaction by a job outside of the brokers, over admin HTTP (docs/design/0021): plan, facts, ids, commit.

    POST /compaction/tasks    ?topic=NAME…&target_bytes=&max_objects=, {"excluded": [ID, …]}: what this broker would
                              compact now: kind, ids of the inputs and their bytes, of up to 256 tasks; and how objects
                              are laid out
    POST /compaction/task     ?current=true, {"inputs": [ID, …]}: size and stream ranges of each input, and the start
                              offsets of their streams; or which input is not committed any more, in `gone`.
                              `current`: by metadata that the controllers have proven current after the request
    POST /compaction/prepare  ?count=&ttl_ms=: ids for outputs, which expire unless they are committed
    POST /compaction/commit   {"cluster_id": …, "inputs": [ID, …], "outputs": [{"id", "kind", "size", "ranges"}, …]}:
                              replaces inputs by outputs, or says why the metadata `refused` it

All need the token of administrators: who may commit a compaction may destroy what it names. Any broker takes ids and
commits, also of objects that another one planned. Nothing is kept between requests.

Entry: `OutsideCompactionRoutes.routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from tidelog.broker.admin.answers import flag, json_answer, number, parsed
from tidelog.broker.objects.compaction_view import facts_of, wanted_tasks
from tidelog.runtime.errors import InvalidInput, Unavailable
from tidelog.storage.commits import CompactionRefused, NewObject, pack_ranges
from tidelog.storage.compaction.compactor import MAX_TTL_MS, Compactor
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.outside import OutsideCompaction

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

MAX_COMMIT_BYTES = 8 << 20
"""A task has at most 50,000 stream ranges, each of some 60 bytes in JSON, and its outputs have no more."""
MAX_IDS = 1_024
"""Objects of one command of the controller."""
BODY_S = 25.0
"""A body that takes longer to come is not waited for. Less than `OUTSIDE_S`, at which the connection ends untold."""
MIN_TARGET_BYTES = 4_096
MAX_TARGET_BYTES = 1 << 30
_Int64 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _PlanQuestion(msgspec.Struct, forbid_unknown_fields=True):
    excluded: list[_Int64] = []
    """Objects to leave alone."""


class _TaskQuestion(msgspec.Struct, forbid_unknown_fields=True):
    inputs: Annotated[list[_Int64], Meta(min_length=1, max_length=MAX_IDS)]


class _ToldOutput(msgspec.Struct, forbid_unknown_fields=True):
    id: _Int64
    kind: int
    size: _Int64
    ranges: list[tuple[_Int64, _Int64, _Int64]]


class _CommitRequest(msgspec.Struct, forbid_unknown_fields=True):
    cluster_id: str
    inputs: Annotated[list[_Int64], Meta(min_length=1, max_length=MAX_IDS)]
    outputs: Annotated[list[_ToldOutput], Meta(min_length=1, max_length=MAX_IDS)]


class _TaskFacts(msgspec.Struct):
    cluster_id: str
    inputs: list[ObjectFacts]
    starts: list[tuple[int, int]]
    """Stream id and start offset of each stream that exists."""


_plan_questions = msgspec.json.Decoder(_PlanQuestion)
_task_questions = msgspec.json.Decoder(_TaskQuestion)
_commit_requests = msgspec.json.Decoder(_CommitRequest)


class OutsideCompactionRoutes:
    """The handlers."""

    def __init__(self, *, compactor: Compactor, outside: OutsideCompaction, image: Callable[[], Image]) -> None:
        self._compactor = compactor
        self._outside = outside
        self._image = image
        self._planning = asyncio.Lock()

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.post("/compaction/tasks", self._tasks),
            web.post("/compaction/task", self._task),
            web.post("/compaction/prepare", self._prepare),
            web.post("/compaction/commit", self._commit),
        ]

    async def _tasks(self, request: web.Request) -> web.Response:
        own = self._compactor.settings
        settings = msgspec.structs.replace(
            own,
            target_bytes=number(request, "target_bytes", own.target_bytes, MIN_TARGET_BYTES, MAX_TARGET_BYTES),
            max_objects=number(request, "max_objects", own.max_objects, 2, MAX_IDS),
        )
        asked = parsed(_plan_questions, await _body(request) or b"{}", "is no question about tasks")
        wanted = wanted_tasks(self._image(), request.query.getall("topic", []))
        async with self._planning:
            tasks = await self._compactor.plan(eager=True, wanted=wanted, settings=settings, excluded=asked.excluded)
        return json_answer(
            {
                "cluster_id": self._image().cluster_id,
                "target_bytes": settings.target_bytes,
                "stream_bytes": settings.stream_bytes,
                "block_bytes": self._compactor.block_bytes,
                "tasks": [
                    {
                        "kind": task.kind,
                        "inputs": [one.object_id for one in task.inputs],
                        "bytes": task.size,
                        "estimated_bytes": task.estimated_bytes,
                        "reason": task.reason,
                    }
                    for task in tasks
                ],
            }
        )

    async def _task(self, request: web.Request) -> web.Response:
        question = parsed(_task_questions, await request.read(), "names no inputs of a task")
        if flag(request, "current"):
            await self._outside.catch_up()
        image = self._image()
        found: list[ObjectFacts] = []
        for object_id in question.inputs:
            facts = facts_of(image, object_id)
            if facts is None:
                return json_answer({"gone": object_id})
            found.append(facts)
            await asyncio.sleep(0)  # an object may have thousands of ranges
        streams = sorted({piece.stream_id for one in found for piece in one.ranges})
        starts = [(each, image.streams[each].start_offset) for each in streams if each in image.streams]
        answer = _TaskFacts(image.cluster_id, found, starts)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _prepare(self, request: web.Request) -> web.Response:
        count = number(request, "count", 1, 1, MAX_IDS)
        ttl_ms = number(request, "ttl_ms", MAX_TTL_MS, 1, MAX_TTL_MS)
        return json_answer({"first": await self._outside.prepare(count, ttl_ms), "count": count})

    async def _commit(self, request: web.Request) -> web.Response:
        told = parsed(_commit_requests, await _body(request), "is no compaction")
        outputs = [NewObject(one.id, one.kind, one.size, pack_ranges(one.ranges)) for one in told.outputs]
        try:
            await self._outside.commit(told.cluster_id, told.inputs, outputs)
        except CompactionRefused as error:
            return json_answer({"committed": False, "refused": error.message})
        return json_answer({"committed": True})


async def _body(request: web.Request) -> bytes:
    """Read a body that is larger than other requests may have. Raises `InvalidInput`, `Unavailable`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_COMMIT_BYTES:
                    raise InvalidInput(f"the body has more than {MAX_COMMIT_BYTES} bytes")
    except TimeoutError:
        raise Unavailable(f"the body did not come within {BODY_S:g} s", hint="send the request again") from None
    return bytes(body)
