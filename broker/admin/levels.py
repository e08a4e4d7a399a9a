"""The feature level over admin HTTP (docs/design/0013-feature-levels.md).

    GET  /cluster            ?level=N: the level, what every member supports, and what raising it to N would do
    POST /cluster/upgrade    ?level=N: raises it

Without `level` the highest that all members support is meant. Any broker accepts the requests, and forwards them to the
active controller. Entry: `LevelRoutes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from tidelog.broker.admin.answers import json_answer, number
from tidelog.controller.client.client import ControllerClient

MAX_LEVEL = 0x7FFF
"""A Kafka feature's level is an int16."""


class LevelRoutes:
    """The handlers."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [web.get("/cluster", self._get), web.post("/cluster/upgrade", self._upgrade)]

    async def _get(self, request: web.Request) -> web.Response:
        report = await self._client.upgrade(_wanted(request), dry_run=True)
        return json_answer({"cluster_id": self._client.image.cluster_id, **report})

    async def _upgrade(self, request: web.Request) -> web.Response:
        report = await self._client.upgrade(_wanted(request), dry_run=False)
        return json_answer({"cluster_id": self._client.image.cluster_id, **report})


def _wanted(request: web.Request) -> int:
    return number(request, "level", -1, 0, MAX_LEVEL)
