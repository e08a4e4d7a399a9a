"""The short memory of a broker over admin HTTP: figures of the last hour, and the last events of the cluster.

    GET /history            the broker's own figures, every 10 s
    GET /history/offsets    ?topic=NAME…&group=NAME: high watermarks of the partitions that this broker leads, and the
                            offsets of the group if it is coordinated here, every 30 s
    GET /timeline           the last 100 events as this broker's copy of the metadata showed them

Entry: `HistoryRoutes.routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from tidelog.broker.admin.answers import json_answer
from tidelog.broker.telemetry.history import HistoryRecorder
from tidelog.runtime.errors import InvalidInput

MAX_TOPICS_ASKED = 100


class HistoryRoutes:
    """The handlers. `timeline` is `Timeline.report` at this moment."""

    def __init__(self, node_id: int, history: HistoryRecorder, timeline: Callable[[], dict[str, Any]]) -> None:
        self._node_id = node_id
        self._history = history
        self._timeline = timeline

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/history", self._figures),
            web.get("/history/offsets", self._offsets),
            web.get("/timeline", self._events),
        ]

    async def _figures(self, request: web.Request) -> web.Response:
        return json_answer({"node_id": self._node_id, **self._history.figures()})

    async def _offsets(self, request: web.Request) -> web.Response:
        topics = set(request.query.getall("topic", []))
        if not 0 < len(topics) <= MAX_TOPICS_ASKED:
            raise InvalidInput(f"1 to {MAX_TOPICS_ASKED} topics are named by `topic=`, not {len(topics)}")
        found = self._history.offsets(topics, request.query.get("group"))
        return json_answer({"node_id": self._node_id, **found})

    async def _events(self, request: web.Request) -> web.Response:
        return json_answer({"node_id": self._node_id, **self._timeline()})
