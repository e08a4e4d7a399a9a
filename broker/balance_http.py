"""The balance of the cluster over admin HTTP; the active controller answers, whichever broker is asked.

    GET  /scale            `wanted`: how many brokers the load needs, and why; for a Kubernetes HPA or any script
    GET  /balancer         mode, what the last look found, what each broker carries
    GET  /balancer/plan    `moves` that it would make now, each with `why`; nothing is done
    POST /balancer/mode?set=MODE   off, advise, on, or nothing for what is configured; kept with the metadata
    POST /balancer/run     plans and begins, whatever the mode; answers as `/balancer/plan`

Without an active controller the answer is 503: a script should keep the number of brokers as it is then.
Entry: `BalanceRoutes.routes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from broker.http_answers import json_answer
from controller.balancer import MODE_KEY, MODES
from runtime.errors import InvalidInput

if TYPE_CHECKING:
    from controller.client import ControllerClient


class BalanceRoutes:
    """The handlers."""

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller

    def routes(self) -> Sequence[web.RouteDef]:
        """What to add to the admin HTTP."""
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
            raise InvalidInput(f"there is no mode {mode[:20]!r}", hint=f"one of {', '.join(MODES)}")
        if mode:
            await self._controller.put_kv(MODE_KEY, mode.encode())
        else:
            await self._controller.delete_kv(MODE_KEY)
        return json_answer(await self._controller.balance_status())

    async def _run(self, request: web.Request) -> web.Response:
        return json_answer(await self._controller.balance_now())
