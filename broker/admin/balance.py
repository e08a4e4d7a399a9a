"""The balance of the cluster over admin HTTP. Every broker forwards requests to the active controller.

    GET  /scale            `wanted`: number of brokers that the load needs, and why; for a Kubernetes HPA or scripts
    GET  /balancer         mode, result of the last check, load of each broker
    GET  /balancer/plan    `moves` that it would make now, each with `why`; no change
    POST /balancer/mode?set=MODE   off, advise, on, or empty for the configured mode; stored in the metadata
    POST /balancer/run     plans and begins in any mode; same response as `/balancer/plan`

Without an active controller the response is 503: scripts should then keep the number of brokers. Entry:
`BalanceRoutes.routes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from tidelog.broker.admin.answers import json_answer
from tidelog.controller.active.balance_schedule import MODE_KEY, MODES
from tidelog.runtime.errors import InvalidInput

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient


class BalanceRoutes:
    """The handlers."""

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/scale", self._scale),
            web.get("/balancer", self._status),
            web.get("/balancer/plan", self._plan),
            web.post("/balancer/run", self._run),
            web.post("/balancer/mode", self._set_mode),
        ]

    async def _scale(self, request: web.Request) -> web.Response:
        return json_answer(await self._controller.scale())

    async def _status(self, request: web.Request) -> web.Response:
        return json_answer(await self._controller.balance_status())

    async def _plan(self, request: web.Request) -> web.Response:
        return json_answer(await self._controller.balance_plan())

    async def _set_mode(self, request: web.Request) -> web.Response:
        mode = request.query.get("set", "")
        if mode and mode not in MODES:
            raise InvalidInput(f"unknown mode {mode[:20]!r}", hint=f"one of {', '.join(MODES)}")
        if mode:
            await self._controller.put_kv(MODE_KEY, mode.encode())
        else:
            await self._controller.delete_kv(MODE_KEY)
        return json_answer(await self._controller.balance_status())

    async def _run(self, request: web.Request) -> web.Response:
        return json_answer(await self._controller.balance_now())
