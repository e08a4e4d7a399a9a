"""Object maintenance on request over admin HTTP: compaction, and the search for orphans.

    GET  /compaction   state, figures, and the current plan
    POST /compaction   runs plans until nothing is left; JSON lines: `start`, `plan`, `task`,
                       `skipped`, `progress`, and `done` or `error` as the last
    POST /orphans      one search, with or without deletion; JSON lines: `progress`, and `done` or `error` as the last

One run of each kind at a time: a second one is refused with 409. If the client disconnects, its compaction or search
ends; an unfinished task is abandoned and leaves only prepared ids, which expire.

Entry: `ObjectJobs.routes`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import flag, json_answer, number
from tidelog.broker.objects.compaction_view import describe_plan, wanted_tasks
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanReport
from tidelog.storage.compaction.compactor import Compactor
from tidelog.storage.compaction.plan import CompactionTask

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

PROGRESS_INTERVAL_S = 0.5
"""Time between two progress lines, and so until a client's disconnect is noticed."""
MAX_AGE_MS = 10 * 365 * 86_400_000

Wanted = Callable[[CompactionTask], bool]


class ObjectJobs:
    """The handlers. All dependencies are passed in."""

    def __init__(self, *, compactor: Compactor, cleaner: OrphanCleaner, image: Callable[[], Image]) -> None:
        self._compactor = compactor
        self._cleaner = cleaner
        self._image = image
        self._run: asyncio.Task[int] | None = None

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/compaction", self._plan),
            web.post("/compaction", self._compact),
            web.post("/orphans", self._clean),
        ]

    # --- compaction ----------------------------------------------------------------------------------------------

    def _wanted(self, request: web.Request) -> Wanted | None:
        """Return the filter of requested tasks: those with data of the given topics. Raises `NotFound`."""
        return wanted_tasks(self._image(), request.query.getall("topic", []))

    async def _plan(self, request: web.Request) -> web.Response:
        tasks = await self._compactor.plan(eager=flag(request, "eager"), wanted=self._wanted(request))
        plan = describe_plan(self._image(), tasks)
        return json_answer({**self._compactor.status(), "plan": plan})

    def _require_idle(self) -> None:
        compactor = self._compactor
        if compactor.stopped is not None:
            raise Unavailable(
                f"compaction has ended on this broker: {compactor.stopped}", hint="see its log; restart the broker"
            )
        if compactor.closed or not compactor.started:
            raise Unavailable("the broker is starting or stopping: it compacts nothing", hint="see `tidelog status`")

    async def _compact(self, request: web.Request) -> web.StreamResponse:
        wanted, eager, unthrottled = self._wanted(request), flag(request, "eager"), flag(request, "unthrottled")
        self._require_idle()
        if self._compactor.active or self._run is not None:
            body = {
                "error": "a compaction is already running",
                "hint": "`tidelog object compact --dry-run` shows what it does; try again when it has ended",
            }
            return json_answer(body, status=409)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # bounded by the plan: one or two events per task
        run = self._run = self._compactor.launch(
            eager=eager, wanted=wanted, on_event=events.put_nowait, unthrottled=unthrottled
        )
        try:
            return await self._follow(request, run, events)
        finally:
            run.cancel()
            await asyncio.wait([run])
            self._run = None

    async def _follow(
        self, request: web.Request, run: asyncio.Task[int], events: asyncio.Queue[dict[str, Any]]
    ) -> web.StreamResponse:
        """Stream events to the client, until the run ends or the client disconnects."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        stats = self._compactor.stats
        begin = stats.read_bytes, stats.written_bytes

        def figures() -> dict[str, int]:
            return {"read_bytes": stats.read_bytes - begin[0], "written_bytes": stats.written_bytes - begin[1]}

        async def write(line: dict[str, Any]) -> None:
            await response.write(json.dumps(line).encode() + b"\n")

        try:
            await response.prepare(request)
            await write({"event": "start", "busy": self._compactor.status()["busy"]})
            while True:
                await asyncio.wait([run], timeout=PROGRESS_INTERVAL_S)
                while not events.empty():
                    await write(events.get_nowait())
                if run.done():
                    break
                await write({"event": "progress", **figures()})
            await write(self._outcome(run, figures()))
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client disconnected: cancel the compaction
        return response

    def _outcome(self, run: asyncio.Task[int], figures: dict[str, int]) -> dict[str, Any]:
        if run.cancelled():
            return {"event": "error", "error": "the broker is stopping", "hint": "committed results are kept"}
        error = run.exception() or self._compactor.stopped
        if error is not None:
            return {"event": "error", "error": f"compaction ended: {error}", "hint": "see the broker's log"}
        return {"event": "done", "tasks": run.result(), **figures}

    # --- orphans -------------------------------------------------------------------------------------------------

    async def _clean(self, request: web.Request) -> web.StreamResponse:
        dry_run = flag(request, "dry_run")
        min_age_ms = number(request, "min_age_ms", self._cleaner.orphan_age_ms, 0, MAX_AGE_MS)
        if self._cleaner.active:
            body = {"error": "a search for orphans is already running", "hint": "try again when it has ended"}
            return json_answer(body, status=409)
        report = OrphanReport()
        search = asyncio.ensure_future(self._cleaner.clean(dry_run=dry_run, orphan_age_ms=min_age_ms, report=report))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

        async def write(line: dict[str, Any]) -> None:
            await response.write(json.dumps(line).encode() + b"\n")

        try:
            await response.prepare(request)
            while not search.done():
                await asyncio.wait([search], timeout=PROGRESS_INTERVAL_S)
                if not search.done():
                    await write({"event": "progress", "objects": report.objects, "bytes": report.bytes})
            try:
                search.result()
            except TidelogError as error:
                await write({"event": "error", "error": error.message, "hint": error.hint})
            else:
                await write({"event": "done", **_document(report, dry_run, min_age_ms)})
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client disconnected: cancel the search
        finally:
            search.cancel()
            await asyncio.wait([search])
        return response


def _document(report: OrphanReport, dry_run: bool, min_age_ms: int) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "min_age_ms": min_age_ms,
        "objects": report.objects,
        "bytes": report.bytes,
        "orphans": [
            {
                "id": one.object_id,
                "key": one.key,
                "size_bytes": one.size_bytes,
                "modified_ms": one.modified_ms,
                "reason": "no metadata names it: it arrived after its id had been abandoned and removed",
            }
            for one in report.orphans
        ],
        "waiting": [
            {
                "id": one.object_id,
                "key": one.key,
                "size_bytes": one.size_bytes,
                "modified_ms": one.modified_ms,
                "state": one.state,
                "until_ms": one.until_ms,
                "reason": _WHY_WAITING[one.state],
            }
            for one in report.waiting
        ],
        "unfinished": [
            {
                "key": one.key,
                "upload_id": one.upload_id,
                "started_ms": one.started_ms,
                "reason": "a multipart upload that was neither finished nor aborted: its parts are paid for",
            }
            for one in report.unfinished
        ],
        "unfinished_problem": report.unfinished_problem or None,
        "aborted": report.aborted,
        "young": report.young,
        "unknown_future": report.unknown_future,
        "deleted": report.deleted,
    }


_WHY_WAITING = {
    "prepared": "written and not committed: its upload or compaction is running, or died; then its id expires",
    "destroyed": "no metadata names it; kept for readers with older metadata, or as the manifest of a lease;"
    " then deleted by the controller",
}
