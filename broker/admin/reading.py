"""Readers outside the cluster over admin HTTP: leases, and which objects hold what (docs/design/0018).

    GET  /leases         the leases: who holds which version, and for how long yet
    POST /leases         ?holder=NAME&ttl_ms=: takes one. `version` in the answer is what it holds, and what to look
                         objects up in
    POST /leases/renew   ?id=ID&ttl_ms=&version=V: keeps it; from V on, if that is newer
    POST /leases/end     ?id=ID: ends it
    POST /slices         {"version": V, "ranges": [{"topic": …, "partition": …, "start": …, "end": …}, …], "limit": …}:
                         the slices of objects that hold the ranges, in metadata of version V or newer. An answer that
                         is not complete says in `next` where to go on. ?shared=true: also what a branch shares,
                         which `shared` in the answer says how to read (`tidelog.controller.image.lookup`)
    POST /manifests      ?lease=ID&shared=, with the same body: the slices as an object in the bucket, which is deleted
                         when the lease has ended (`tidelog.storage.objects.manifest`). The answer has its id and size

POST needs the read token or the token of administrators, where the cluster has a secret. Any broker accepts the
requests. Entry: `ReadingRoutes.routes`, `READING_PATHS`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tidelog.broker.admin.answers import flag, integer, json_answer, number, parsed
from tidelog.broker.objects.manifest_writer import MAX_MANIFEST_SLICES, ManifestWriter
from tidelog.controller.image.lookup import MAX_SLICES, OffsetRange, look_up
from tidelog.controller.model.leases import MAX_TTL_MS, MIN_TTL_MS, LeaseRecord
from tidelog.runtime.errors import Unavailable

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient

READING_PATHS = frozenset({"/leases", "/leases/renew", "/leases/end", "/slices", "/manifests"})
"""The paths that the read token opens."""
DEFAULT_TTL_MS = 60_000
MAX_ID = (1 << 63) - 1
WAIT_S = 10.0
"""How long a lookup waits for a version of the metadata that this broker does not have yet."""


class _SlicesQuestion(msgspec.Struct, forbid_unknown_fields=True):
    ranges: list[OffsetRange]
    version: int = 0
    limit: int | None = None
    """None: as many as may be."""


_questions = msgspec.json.Decoder(_SlicesQuestion)


class ReadingRoutes:
    """The handlers."""

    def __init__(self, controller: ControllerClient, manifests: ManifestWriter) -> None:
        self._controller = controller
        self._manifests = manifests

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/leases", self._list),
            web.post("/leases", self._take),
            web.post("/leases/renew", self._renew),
            web.post("/leases/end", self._end),
            web.post("/slices", self._slices),
            web.post("/manifests", self._manifest),
        ]

    def status(self) -> dict[str, Any]:
        """For `/status`: how many leases there are, and the oldest version that they hold."""
        leases = self._controller.image.leases.values()
        oldest = min(leases, key=lambda each: (each.version, each.id), default=None)
        return {"count": len(leases), "oldest": None if oldest is None else self._row(oldest, self._destroyed())}

    def _destroyed(self) -> list[int]:
        """The versions at which objects that are still in the bucket were destroyed, in order."""
        image = self._controller.image
        return sorted(image.objects[each].destroyed_at for each in image.index.destroyed)

    def _row(self, lease: LeaseRecord, destroyed: list[int]) -> dict[str, Any]:
        held = len(destroyed) - bisect_right(destroyed, lease.version)
        return {
            "id": lease.id,
            "holder": lease.holder,
            "version": lease.version,
            "since_ms": lease.since_ms,
            "hold_ms": lease.hold_ms,
            "held_objects": held,
        }

    async def _list(self, request: web.Request) -> web.Response:
        image, destroyed = self._controller.image, self._destroyed()
        rows = [self._row(lease, destroyed) for _, lease in sorted(image.leases.items())]
        return json_answer({"version": image.version, "leases": rows})

    async def _take(self, request: web.Request) -> web.Response:
        ttl_ms = _ttl(request)
        lease = await self._controller.leases.take(request.query.get("holder", ""), ttl_ms)
        return self._told(lease, ttl_ms)

    async def _renew(self, request: web.Request) -> web.Response:
        ttl_ms = _ttl(request)
        version = number(request, "version", 0, 0, MAX_ID)
        lease = await self._controller.leases.renew(_id(request), ttl_ms, version)
        return self._told(lease, ttl_ms)

    def _told(self, lease: LeaseRecord, ttl_ms: int) -> web.Response:
        """Tell the cluster, too: a reader that was led to another one finds other objects under the same ids."""
        told = {
            "id": lease.id,
            "version": lease.version,
            "ttl_ms": ttl_ms,
            "hold_ms": lease.hold_ms,
            "cluster_id": self._controller.image.cluster_id,
        }
        return json_answer(told)

    async def _end(self, request: web.Request) -> web.Response:
        lease_id = _id(request)
        await self._controller.leases.end(lease_id)
        return json_answer({"id": lease_id})

    async def _slices(self, request: web.Request) -> web.Response:
        question = await self._question(request)
        found = look_up(
            self._controller.image,
            question.ranges,
            MAX_SLICES if question.limit is None else question.limit,
            reads_shared=flag(request, "shared"),
        )
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    async def _manifest(self, request: web.Request) -> web.Response:
        lease_id = integer(request.query.get("lease", ""), "lease", 1, MAX_ID)
        question = await self._question(request)
        limit = MAX_MANIFEST_SLICES if question.limit is None else question.limit
        shared = flag(request, "shared")
        written = await self._manifests.write(lease_id, question.ranges, limit, reads_shared=shared)
        return web.Response(body=msgspec.json.encode(written), content_type="application/json")

    async def _question(self, request: web.Request) -> _SlicesQuestion:
        """Read the question, and wait for its version. Raises `InvalidInput`, `Unavailable`."""
        question = parsed(_questions, await request.read(), "is not a question about slices")
        try:
            async with asyncio.timeout(WAIT_S):
                await self._controller.wait_version(question.version)
        except TimeoutError:
            raise Unavailable(
                f"this broker's metadata are of version {self._controller.image.version}; {question.version} was asked"
                f" for, and did not come within {WAIT_S:g} s",
                hint="ask another broker; `tidelog status` shows whether this one reaches the controllers",
            ) from None
        return question


def _ttl(request: web.Request) -> int:
    return number(request, "ttl_ms", DEFAULT_TTL_MS, MIN_TTL_MS, MAX_TTL_MS)


def _id(request: web.Request) -> int:
    return integer(request.query.get("id", ""), "id", 1, MAX_ID)
